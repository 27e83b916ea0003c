"""Implement the `tensor` axis: which weights are split, and how, at least cost over the whole graph."""
