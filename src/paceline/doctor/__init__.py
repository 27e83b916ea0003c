"""Check a job's hosts before it starts: report what will stop it or slow it down, each with its fix."""
