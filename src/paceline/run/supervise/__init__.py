"""The process above the ranks: starts them on hosts, follows them, and decides what follows a failure. No torch."""
