"""The user's loss as a graph of tensor operations: captured once, split by tensor, cut into stages."""
