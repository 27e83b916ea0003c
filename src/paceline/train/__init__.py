"""Train on one rank: batch, step, record, repeat; the `Job` that the user's loop calls."""
