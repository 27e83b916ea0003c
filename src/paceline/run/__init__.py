"""Keep a job going: supervisors above the ranks, and the ranks' own processes."""
