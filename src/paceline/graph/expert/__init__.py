"""Implement the `expert` axis: layers of experts, where each rank has some, and the rows that are sent to them."""
