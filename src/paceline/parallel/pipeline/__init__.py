"""Implement the `pipeline` axis: stages of the captured graph, micro-batches, weights that two stages share."""
