"""The `replicate` axis: buckets of gradients, the sums of a step, and the user's own buffers."""
