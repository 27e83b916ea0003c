"""Capture the user's loss once as a graph of tensor operations, split it for `tensor`, cut it into pipeline stages."""
