"""Measure Paceline beside what else there is, in one run."""
