"""Run a job: the supervisor, and the ranks' processes."""
