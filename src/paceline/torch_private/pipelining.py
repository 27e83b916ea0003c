"""The backward pass in two halves, as torch.distributed.pipelining takes the graph of autograd apart for its schedules.

Public are only its schedules, which run stages of their own.
"""

from torch.distributed.pipelining._backward import (
    construct_reverse_graph,
    get_param_groups,
    stage_backward_input,
    stage_backward_weight,
)

__all__ = ["construct_reverse_graph", "get_param_groups", "stage_backward_input", "stage_backward_weight"]
