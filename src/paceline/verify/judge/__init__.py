"""Compare what the ranks wrote with the reference, and name the first difference. No torch."""
