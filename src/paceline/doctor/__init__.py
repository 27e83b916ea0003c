"""Look at a job's hosts before it starts, and say what will stop it or slow it down, each with its fix."""
