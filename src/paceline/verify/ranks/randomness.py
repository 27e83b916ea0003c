"""Dropout that depends on values instead of on a stream of random numbers, so that no layout can change it.

An element is kept or dropped by a hash of its own value, in 32 steps per octave. Whole or in pieces, on one rank or
on eight, in a micro-batch of two or of sixty-four, computed once or again, the same value meets the same fate. Two
values that differ by float64's rounding fall into different steps about once in 1e11 elements.

It takes the place of torch's dropout functions and of attention's, in the reference and in the ranks alike. What draws
by `torch.rand` and the like in a forward pass draws by place: see `placed_draws.py`. Other random numbers (numpy's)
can't be made equal; see `watched`.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch.nn import functional as F

from paceline.nouns.data_order import mix
from paceline.nouns.errors import WorkloadError
from paceline.nouns.patching import patched
from paceline.torch_private.modules import FUNCTIONS
from paceline.verify.ranks.keep_float64 import kept_wide
from paceline.verify.ranks.placed_draws import drawn_by_place

Drop = Callable[[torch.Tensor, float], torch.Tensor]  # with the share that is dropped
_RECURRENT = ("lstm", "gru", "rnn_tanh", "rnn_relu")  # of `torch._VF`, where torch's modules look them up
_STEPS_PER_OCTAVE = 32.0
_TINY = 1e-10  # what is rounding instead of a value falls into one step with zero
_NAMES = (
    "dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout",
    "scaled_dot_product_attention",
)  # fmt: skip


class Drops:
    """Whether anything has been dropped by value in this process."""

    has_dropped = False


DROPS = Drops()


def keep(values: torch.Tensor, share: float) -> torch.Tensor:
    """Return True where an element stays; of all different values the part `share` does not."""
    DROPS.has_dropped = True
    values = values.detach()
    # 0.37 moves the steps' boundaries away from powers of two, where log2 is whole: models have many values such as
    # 1 and 0.5, and rounding would decide their step.
    step = torch.floor(torch.log2(values.abs() + _TINY) * _STEPS_PER_OCTAVE + 0.37)
    # A sine's digits as a hash of the step and the sign, as shaders make noise.
    mixed = torch.sin(step * 12.9898 + (values > _TINY) * 78.233 + 0.5) * 43758.5453
    return (mixed - torch.floor(mixed)) >= share


def drop(values: torch.Tensor, share: float, is_training: bool, is_off: bool) -> torch.Tensor:
    """Return `values` with dropout by value, or without any where `is_off`."""
    if not is_training or share == 0 or is_off:
        return values
    if share >= 1:
        return values * 0
    return torch.where(keep(values, share), values / (1 - share), 0.0)


def attention(  # noqa: PLR0913  torch's own arguments
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Compute attention by the reference code of torch's documentation, with dropout by value."""
    if enable_gqa:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
        value = value.repeat_interleave(query.shape[-3] // value.shape[-3], -3)
    if scale is None:
        scale = query.shape[-1] ** -0.5
    scores = query @ key.transpose(-2, -1) * scale
    if is_causal:
        is_visible = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device).tril()
        scores = scores.masked_fill(~is_visible, float("-inf"))
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attn_mask, float("-inf"))
    elif attn_mask is not None:
        scores = scores + attn_mask
    return drop(torch.softmax(scores, -1), dropout_p, True, False) @ value


@contextmanager
def controlled(is_off: bool = False, is_compiled: bool = False) -> Iterator[None]:
    """Put dropout by value in the place of torch's, draws by place in that of others, and let nothing narrow float64.

    Args:
        is_off: True for narrow precisions, in which values differ by rounding: no dropout, and dtypes as asked.
        is_compiled: True if the model is compiled: it calls no hook that tells the place, so nothing is drawn by place.
    """
    # Replaced in the module `torch.nn.functional`, where torch's own layers look them up at each call.
    original_attention = F.scaled_dot_product_attention

    def dropout_by_value(
        input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> torch.Tensor:
        return drop(input, p, training, is_off)

    def dropout_of_channels(
        input: torch.Tensor, p: float = 0.5, training: bool = False, inplace: bool = False
    ) -> torch.Tensor:
        if not training or p == 0 or is_off:
            return input
        return torch.where(_kept_channels(input, p), input / (1 - p), 0.0)

    def attention_by_value(*arguments: Any, **named: Any) -> torch.Tensor:
        share = arguments[4] if len(arguments) > 4 else named.get("dropout_p", 0.0)
        if share and not is_off:
            return attention(*arguments, **named)
        if share and len(arguments) > 4:
            arguments = (*arguments[:4], 0.0, *arguments[5:])
        elif share:
            named = {**named, "dropout_p": 0.0}
        result: torch.Tensor = original_attention(*arguments, **named)
        return result

    channel_names = ("dropout1d", "dropout2d", "dropout3d", "feature_alpha_dropout")
    replacements: dict[str, Callable[..., Any]] = dict.fromkeys(("dropout", "alpha_dropout"), dropout_by_value)
    replacements |= dict.fromkeys(channel_names, dropout_of_channels)
    replacements["scaled_dot_product_attention"] = attention_by_value

    def dropped(input: torch.Tensor, p: float, train: bool) -> torch.Tensor:  # torch's own names: some call by keyword
        return drop(input, p, train, is_off)

    recurrent = {}
    for name in _RECURRENT:
        recurrent[name] = layered(getattr(FUNCTIONS, name), lambda x, p: drop(x, p, True, is_off))
    placed = nullcontext() if is_compiled else drawn_by_place()
    with (
        patched(F, **replacements),
        patched(torch, dropout=dropped),
        patched(FUNCTIONS, **recurrent),
        kept_wide(not is_off),
        placed,
    ):
        yield


def _kept_channels(input: torch.Tensor, share: float) -> torch.Tensor:
    """Return True for each channel that stays, by its largest value: (n, channels, ...) to (n, channels, 1, ...)."""
    values = input.detach()
    largest = values.flatten(2).amax(-1) if values.dim() > 2 else values
    trailing = [1] * (values.dim() - largest.dim())
    return keep(largest, share).reshape(*largest.shape, *trailing)


def drawn_state() -> tuple[Any, ...]:
    """Return the state of torch's, Python's and numpy's random numbers, which every draw changes."""
    numpy: Any = sys.modules.get("numpy")
    _, numpy_key, numpy_position, *_ = numpy.random.get_state() if numpy else (None, b"", 0)
    return torch.get_rng_state().numpy().tobytes(), random.getstate(), bytes(numpy_key), numpy_position


def hash_of_draws() -> int:
    """Return a hash of the state of torch's random numbers, from its first 256 bytes."""
    torch_state, *_ = drawn_state()
    return mix(*torch_state[:256])


@contextmanager
def watched(model: torch.nn.Module) -> Iterator[None]:
    """Raise WorkloadError when a forward pass draws random numbers that nobody can control, and say where."""
    names = {module: name or type(module).__name__ for name, module in model.named_modules()}
    drawing: list[str] = []  # modules that draw, by name
    states: list[Any] = []  # at the begin of each module that runs, the innermost last

    def enter(module: torch.nn.Module, arguments: Any) -> None:
        states.append(drawn_state())

    def leave(module: torch.nn.Module, arguments: Any, result: Any) -> None:
        if states.pop() != drawn_state():
            drawing.append(names.get(module, type(module).__name__))

    handles = [
        torch.nn.modules.module.register_module_forward_pre_hook(enter),
        torch.nn.modules.module.register_module_forward_hook(leave),
    ]
    before = drawn_state()
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
    if drawn_state() != before:
        drawer = drawing[0] if drawing else "the loss"  # the innermost module ends first
        raise WorkloadError(
            "the model's random numbers can't be made the same under every plan",
            f"{drawer} draws some that are neither dropout nor torch.rand's (RReLU, randperm, numpy)",
            "switch that part off for verifying, or draw it in the data set's []",
        )


def layered(original: Callable[..., Any], drop: Drop) -> Callable[..., Any]:
    """Return a function of torch's recurrent layers with `drop(values, share)` in the place of its dropout.

    `nn.LSTM(..., num_layers=3, dropout=0.5)` is one call of torch, which draws inside. By its documentation it drops
    the output of each layer but the last, so the layers are called one after another.
    """

    def run(values: torch.Tensor, *arguments: Any) -> Any:
        # (state, parameters, has_biases, ...), or (batch sizes, state, parameters, ...) of packed sequences.
        is_packed = isinstance(arguments[2], list | tuple)
        sizes, after_sizes = arguments[:is_packed], arguments[is_packed:]
        state, parameters, has_biases, layers, share, is_training, is_bidirectional, *options = after_sizes
        if not is_training or not share or layers == 1:
            return original(values, *arguments)
        has_cells = isinstance(state, list | tuple)  # an LSTM's second state
        states = [part.chunk(layers) for part in (state if has_cells else (state,))]
        weights = len(parameters) // layers  # of one layer
        finals = []
        for layer in range(layers):
            begin = tuple(part[layer] for part in states)
            of_layer = parameters[layer * weights : (layer + 1) * weights]
            settings = (has_biases, 1, 0.0, is_training, is_bidirectional, *options)
            values, *final = original(values, *sizes, begin if has_cells else begin[0], of_layer, *settings)
            finals.append(final)
            if layer < layers - 1:
                values = drop(values, share)
        return (values, *[torch.cat(parts) for parts in zip(*finals, strict=True)])

    return run
