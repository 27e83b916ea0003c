"""Run the verifier's processes: the plain reference, and the plan's ranks with their outputs recorded."""
