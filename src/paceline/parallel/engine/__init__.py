"""The step: what the ranks agree on, how gradients become sums, and the order of a step's parts."""
