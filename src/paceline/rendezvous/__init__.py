"""Where a process stands in its job, whoever started it: launcher variables, host lists, store address. No torch."""
