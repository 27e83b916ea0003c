"""Keeps a job going: the supervisor outside, the fork server and the ranks' processes inside."""
