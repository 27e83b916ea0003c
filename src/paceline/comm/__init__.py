"""Move data between ranks during a step, and nothing else; each call is counted in the ledger."""
