"""Everything that crosses between ranks during a step, and nothing else. Each call is in the ledger."""
