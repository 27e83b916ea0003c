"""A process's rank and where the ranks meet, read from the variables of whichever launcher started it. No torch."""
