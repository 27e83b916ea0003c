"""Operations that treat every sample by itself, beyond those that `tensor` can split.

A rule here need only say along which dimensions an operation mixes; nothing is run on pieces. `samples_after` gives
the dimension of each result along which the samples lie, or None where they mix or where that is not known.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from paceline.graph.labels import tensor_inputs
from paceline.graph.placement import Split
from paceline.graph.reshape_rules import shape_of

aten = torch.ops.aten
Found = Split | tuple[Split | None, ...] | None
_PROBED_AT_MOST = 10_000_000  # elements

# Mix along the dimensions that their argument `dim` or `dims` names, and keep the others where they are.
_ALONG = frozenset((
    "argsort", "cummax", "cummin", "cumprod", "cumsum", "diff", "fft_fft", "fft_fft2", "fft_fftn", "fft_ifft",
    "fft_ifft2", "fft_ifftn", "fft_irfft", "fft_rfft", "flip", "glu", "index_select", "logcumsumexp", "msort",
    "roll", "sort", "topk", "kthvalue", "max", "min", "median", "mode", "argmax", "argmin", "amax", "amin", "prod",
    "any", "all", "var", "std", "var_mean", "std_mean", "logsumexp", "norm", "linalg_vector_norm", "mean",
    "nanmean", "nansum", "count_nonzero",
))  # fmt: skip
# Work on each row of the first dimension, with the same weights.
_BY_ROW = frozenset((
    "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "upsample_nearest1d",
    "upsample_nearest2d", "upsample_nearest3d", "upsample_linear1d", "upsample_bilinear2d", "upsample_bicubic2d",
    "upsample_trilinear3d", "max_pool3d", "avg_pool3d", "adaptive_avg_pool3d", "adaptive_max_pool1d",
    "adaptive_max_pool2d", "max_pool1d_with_indices", "max_pool2d_with_indices", "adaptive_max_pool3d",
    "instance_norm", "im2col", "grid_sampler", "grid_sampler_2d",
))  # fmt: skip
# Move elements and compute nothing.
_MOVES = frozenset((
    "movedim", "moveaxis", "swapaxes", "swapdims", "atleast_1d", "atleast_2d", "atleast_3d", "repeat", "tile",
    "unfold", "diagonal", "pad", "constant_pad_nd", "pixel_shuffle", "pixel_unshuffle", "channel_shuffle", "tril",
    "triu", "rot90", "repeat_interleave", "narrow", "expand_as", "unsqueeze",
))  # fmt: skip
_RECURRENT = (aten.lstm.input, aten.gru.input, aten.rnn_tanh.input, aten.rnn_relu.input)


def samples_after(node: fx.Node, now: Sequence[Any], samples: int) -> Found:
    """Where the samples lie in what `node` returns.

    Args:
        node: an operation.
        now: of each tensor input where its samples lie; None for what has none.
        samples: their number.
    """
    if not isinstance(node.target, torch._ops.OpOverload) or not now:
        return None
    name = node.target._schema.name.removeprefix("aten::")
    if node.target in _RULES:
        return _RULES[node.target](node, now, samples)
    first = now[0]
    if not isinstance(first, Split) or any(placement is not None for placement in now[1:]):
        return _both_along(node, now, name)
    if name in _ALONG:
        return _along(node, first)
    if name in _BY_ROW and first.dim == 0 and not _is_one_image(node):
        return _everywhere(node, first)
    if name in _MOVES:
        return _probed(node, first, samples)
    return None


def _argument(node: fx.Node, name: str) -> Any:
    """An argument by its name, or its default."""
    for place, argument in enumerate(node.target._schema.arguments):  # type: ignore[union-attr]
        if argument.name == name:
            if place < len(node.args):
                return node.args[place]
            return node.kwargs.get(name, argument.default_value if argument.has_default_value() else None)
    return None


def _values(node: fx.Node) -> list[Any]:
    value = node.meta["val"]
    return list(value) if isinstance(value, list | tuple) else [value]


def _everywhere(node: fx.Node, placement: Split) -> Found:
    several = isinstance(node.meta["val"], list | tuple)
    return tuple(placement for _ in node.meta["val"]) if several else placement


def _along(node: fx.Node, placement: Split) -> Found:
    rank = len(shape_of(tensor_inputs(node)[0]))
    asked = _argument(node, "dim")
    asked = _argument(node, "dims") if asked is None else asked
    if asked is None or asked == []:
        return None
    mixed = {dim % rank for dim in ([asked] if isinstance(asked, int) else asked)}
    if placement.dim in mixed:
        return None
    ranks = {value.dim() for value in _values(node)}
    if ranks == {rank}:
        return _everywhere(node, placement)
    if ranks == {rank - len(mixed)}:
        return _everywhere(node, Split(placement.dim - sum(dim < placement.dim for dim in mixed), placement.blocks))
    return None


def _both_along(node: fx.Node, now: Sequence[Any], name: str) -> Found:
    """Scatters and similarities: all of equal shape lie alike, and the operation mixes along another dimension."""
    names = (
        "diff",
        "scatter",
        "scatter_add",
        "scatter_reduce",
        "cosine_similarity",
        "take_along_dim",
        "pairwise_distance",
    )
    if name not in names or not all(placement == now[0] for placement in now) or not isinstance(now[0], Split):
        return None
    ranks = {len(shape_of(source)) for source in tensor_inputs(node)}
    sizes = {shape_of(source)[now[0].dim] for source in tensor_inputs(node)}
    return _along(node, now[0]) if len(ranks) == len(sizes) == 1 else None


def _is_one_image(node: fx.Node) -> bool:
    """Whether the first dimension is that of channels."""
    weight = node.args[1] if len(node.args) > 1 else None
    is_convolution = "conv" in str(node.target) and isinstance(weight, fx.Node)
    rank = len(shape_of(tensor_inputs(node)[0]))
    if is_convolution:
        return rank != len(shape_of(weight))  # type: ignore[arg-type]
    spatial = next((int(digit) for digit in "123" if f"{digit}d" in str(node.target)), None)
    return spatial is not None and rank != spatial + 2


def _probed(node: fx.Node, placement: Split, samples: int) -> Found:
    """Move the samples' numbers as the operation moves elements, and look where they are."""
    source = tensor_inputs(node)[0]
    shape, out = shape_of(source), _values(node)
    if (
        len(out) != 1
        or out[0].numel() > _PROBED_AT_MOST
        or node.args[0] is not source
        or shape[placement.dim] % samples
    ):
        return None
    if any(isinstance(value, fx.Node) for value in [*node.args[1:], *node.kwargs.values()]):
        return None
    base = 2**20  # far from what an operation fills up with
    numbers = base + torch.arange(samples, dtype=torch.float64).repeat_interleave(shape[placement.dim] // samples)
    wide = numbers.view([-1 if dim == placement.dim else 1 for dim in range(len(shape))]).expand(shape)
    moved = node.target(wide, *node.args[1:], **node.kwargs)  # type: ignore[operator]
    is_number = (moved >= base) & (moved < base + samples)
    for dim, size in enumerate(moved.shape):
        if size % samples or not size:
            continue
        each = is_number.movedim(dim, 0).unflatten(0, (samples, size // samples))
        if not bool((each == each[:1]).all()):
            continue  # what is filled up depends on a sample's place
        wanted = base + torch.arange(samples, dtype=torch.float64).repeat_interleave(size // samples)
        if bool(((moved == wanted.view([-1 if d == dim else 1 for d in range(moved.dim())])) | ~is_number).all()):
            return Split(dim, (size,))
    return None


def _recurrent(node: fx.Node, now: Sequence[Any], samples: int) -> Found:
    """(input, first states, weights, ..., batch_first): states are (layers, samples, size)."""
    is_first = bool(_argument(node, "batch_first"))
    if len(shape_of(tensor_inputs(node)[0])) != 3 or now[0] != Split(0 if is_first else 1, (samples,)):
        return None
    states = _argument(node, "hx")
    count = len(states) if isinstance(states, list | tuple) else 1
    for source, placement in zip(tensor_inputs(node)[1 : 1 + count], now[1 : 1 + count], strict=True):
        if placement != Split(1, (samples,)) and not (placement is None and _is_filled(source)):
            return None
    if any(placement is not None for placement in now[1 + count :]):
        return None
    return (now[0], *[Split(1, (samples,))] * (len(node.meta["val"]) - 1))


def _is_filled(node: fx.Node) -> bool:
    """Whether every row is alike: zeros, or a row that was expanded."""
    return node.target in (aten.zeros.default, aten.new_zeros.default, aten.full.default, aten.zeros_like.default)


def _index(node: fx.Node, now: Sequence[Any], samples: int) -> Found:
    """Rows of a table that each sample picks, or the same places of every sample."""
    indices: Any = node.args[1]
    places = [dim for dim, index in enumerate(indices) if index is not None]
    picked, given = now[0], [placement for placement in now[1:] if placement is not None]
    wide = max(len(shape_of(indices[dim])) for dim in places)
    is_together = places == list(range(places[0], places[-1] + 1))
    start = places[0] if is_together else 0  # where the dimensions of the indices come to lie
    if picked is None:
        found = {
            placement.dim + wide - len(shape_of(indices[dim]))
            for dim, placement in zip(places, now[1:], strict=True)
            if placement
        }
        sizes = {
            shape_of(indices[dim])[placement.dim] for dim, placement in zip(places, now[1:], strict=True) if placement
        }
        is_one = len(found) == len(sizes) == 1 and len({placement.blocks for placement in given}) == 1
        return Split(start + found.pop(), given[0].blocks) if is_one else None
    if given or picked.dim in places or any(indices[dim].meta["val"].dtype == torch.bool for dim in places):
        return None
    before = sum(dim < picked.dim for dim in places)
    after_indices = picked.dim > places[0] or not is_together
    return Split(picked.dim - before + (wide if after_indices else 0), picked.blocks)


def _cdist(node: fx.Node, now: Sequence[Any], samples: int) -> Found:
    left, right = now[:2]
    rank = len(shape_of(tensor_inputs(node)[0]))
    if isinstance(left, Split) and right is None and left.dim == rank - 2:
        return Split(len(shape_of(node)) - 2, left.blocks)
    if isinstance(left, Split) and left.dim < rank - 2 and (right is None or right == left):
        return left if len(shape_of(node)) == rank else None
    return None


def _element_by_element(node: fx.Node, now: Sequence[Any], samples: int) -> Found:
    return now[0] if all(placement is None for placement in now[1:]) else None


def _one_hot(node: fx.Node, now: Sequence[Any], samples: int) -> Found:
    return now[0]  # type: ignore[no-any-return]


def _expanded(node: fx.Node, now: Sequence[Any], samples: int) -> Found:
    """Inputs that are broadcast against each other, each by itself."""
    inputs = tensor_inputs(node)
    several = isinstance(node.meta["val"], list | tuple)
    results = _values(node)
    aligned = {
        placement.dim + results[0].dim() - len(shape_of(one))
        for one, placement in zip(inputs, now, strict=True)
        if placement
    }
    blocks = {placement.blocks for placement in now if placement}
    if len(aligned) != 1 or len(blocks) != 1:
        return None
    dim = aligned.pop()
    for source, placement in zip(inputs, now, strict=True):
        place = dim - (results[0].dim() - len(shape_of(source)))
        if placement is None and place >= 0 and shape_of(source)[place] != 1:
            return None  # rows of its own, of which it is not known whose they are
    found = Split(dim, blocks.pop())
    return tuple(found for _ in results) if several else found


_RULES: dict[Any, Callable[[fx.Node, Sequence[Any], int], Found]] = {
    **dict.fromkeys(_RECURRENT, _recurrent),
    aten.index.Tensor: _index,
    aten.cdist.default: _cdist,
    aten.one_hot.default: _one_hot,
    aten.bucketize.Tensor: _element_by_element,
    aten.expand_as.default: _expanded,
    aten.broadcast_tensors.default: _expanded,
}
