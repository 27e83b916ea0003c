"""Implement the `replicate` axis: gradient buckets, the sums of a step, and the user's buffers."""
