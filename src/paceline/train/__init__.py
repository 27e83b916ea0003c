"""One rank trains: batch, step, record, repeat; the `Job` that a person's own loop drives."""
