"""Measure Paceline against other frameworks, in one run."""
