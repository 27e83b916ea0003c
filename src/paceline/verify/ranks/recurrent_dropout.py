"""Recurrent layers of torch that drop between their layers, one layer after another, so that others may drop.

`nn.LSTM(..., num_layers=3, dropout=0.5)` is one call of torch, which draws inside. By its documentation it drops the
output of each layer but the last.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

NAMES = ("lstm", "gru", "rnn_tanh", "rnn_relu")  # of `torch._VF`, where torch's modules look them up
Drop = Callable[[torch.Tensor, float], torch.Tensor]


def layered(original: Callable[..., Any], drop: Drop) -> Callable[..., Any]:
    """Return a function of torch's recurrent layers with `drop(values, share)` in the place of its dropout."""

    def run(values: torch.Tensor, *arguments: Any) -> Any:
        # (state, parameters, has_biases, ...), or (batch sizes, state, parameters, ...) of packed sequences.
        is_packed = isinstance(arguments[2], list | tuple)
        sizes, (state, parameters, has_biases, layers, share, is_training, is_bidirectional, *rest) = (
            arguments[:is_packed],
            arguments[is_packed:],
        )
        if not is_training or not share or layers == 1:
            return original(values, *arguments)
        has_cells = isinstance(state, list | tuple)  # an LSTM's second state
        states = [part.chunk(layers) for part in (state if has_cells else (state,))]
        each = len(parameters) // layers
        finals = []
        for layer in range(layers):
            begin = tuple(part[layer] for part in states)
            own = parameters[layer * each : (layer + 1) * each]
            settings = (has_biases, 1, 0.0, is_training, is_bidirectional, *rest)
            values, *final = original(values, *sizes, begin if has_cells else begin[0], own, *settings)
            finals.append(final)
            if layer < layers - 1:
                values = drop(values, share)
        return (values, *[torch.cat(parts) for parts in zip(*finals, strict=True)])

    return run
