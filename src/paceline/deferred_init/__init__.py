"""Build a model without allocating it: record the factory's operations, replay those of one tensor at a time."""
