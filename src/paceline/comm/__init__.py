"""Move data between ranks during a step; count each call in the ledger."""
