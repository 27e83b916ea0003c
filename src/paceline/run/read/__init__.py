"""Read what a run directory has of a job: its events, times, results and checkpoints, and where its ranks stand."""
