"""Implement the `replicate` axis: gradient buckets and the user's buffers."""
