"""Implement the `replicate` axis: gradient buckets, step statistics, and the user's buffers."""
