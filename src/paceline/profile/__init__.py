"""Run a job's step once on fake tensors and record what it allocates, sends and computes."""
