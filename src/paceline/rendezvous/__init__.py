"""Find a process's rank, whoever started it: launcher variables, host lists, store address. No torch."""
