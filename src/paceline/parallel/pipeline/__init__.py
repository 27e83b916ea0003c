"""The `pipeline` axis: stages of the captured graph, micro-batches, and weights that two stages share."""
