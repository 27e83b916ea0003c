"""Turns a plan into processes on hosts; this version knows the host it stands on."""
