"""Measures Paceline against what else there is, side by side in one run."""
