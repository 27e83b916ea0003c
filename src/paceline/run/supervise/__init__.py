"""Supervise the ranks: start them on hosts, monitor them, decide what follows a failure. No torch."""
