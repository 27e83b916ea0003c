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
from paceline.torch_private.operations import OpOverload, schema_of

aten = torch.ops.aten
Samples = Split | tuple[Split | None, ...] | None  # where they lie in a result, or in each of several
_PROBED_AT_MOST = 10_000_000  # elements
_PROBE_BASE = 2**20  # far from what an operation fills up with

# Mix along the dimensions that their argument `dim` or `dims` names, and keep the others where they are.
_ALONG = frozenset((
    "argsort", "cummax", "cummin", "cumprod", "cumsum", "diff", "fft_fft", "fft_fft2", "fft_fftn", "fft_ifft",
    "fft_fftshift", "fft_hfft", "fft_ifft2", "fft_ifftn", "fft_ifftshift", "fft_ihfft", "fft_irfft", "fft_irfft2",
    "fft_irfftn", "fft_rfft", "fft_rfft2", "fft_rfftn", "flip", "glu", "index_select", "logcumsumexp", "msort",
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
# Compute each complex number by itself, or of one of its parts.
_OF_EACH_NUMBER = (
    aten.real.default, aten.imag.default, aten.conj.default, aten._conj.default, aten.conj_physical.default,
    aten._conj_physical.default, aten.resolve_conj.default, aten.resolve_neg.default, aten.angle.default,
)  # fmt: skip
# Move elements and compute nothing.
_MOVES = frozenset((
    "movedim", "moveaxis", "swapaxes", "swapdims", "atleast_1d", "atleast_2d", "atleast_3d", "repeat", "tile",
    "unfold", "diagonal", "pad", "constant_pad_nd", "pixel_shuffle", "pixel_unshuffle", "channel_shuffle", "tril",
    "triu", "rot90", "repeat_interleave", "narrow", "expand_as", "unsqueeze",
))  # fmt: skip
# Take inputs of equal shape that lie alike, and mix along their argument `dim`.
_BOTH_ALONG = frozenset((
    "diff", "scatter", "scatter_add", "scatter_reduce", "cosine_similarity", "take_along_dim", "pairwise_distance",
))  # fmt: skip
_RECURRENT = (aten.lstm.input, aten.gru.input, aten.rnn_tanh.input, aten.rnn_relu.input)


def samples_after(node: fx.Node, now: Sequence[Any], samples: int) -> Samples:
    """Return the split of the samples in the result of `node`; None where they mix.

    Args:
        node: an operation of the graph.
        now: for each tensor input, the split of its samples; None for an input without samples.
        samples: the number of samples.
    """
    if not isinstance(node.target, OpOverload) or not now:
        return None
    name = schema_of(node.target).name.removeprefix("aten::")
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
    """Return an argument by its name, or its default."""
    for place, argument in enumerate(schema_of(node.target).arguments):  # type: ignore[arg-type]
        if argument.name == name:
            if place < len(node.args):
                return node.args[place]
            default = argument.default_value if argument.has_default_value() else None
            return node.kwargs.get(name, default)
    return None


def _values(node: fx.Node) -> list[Any]:
    value = node.meta["val"]
    return list(value) if isinstance(value, list | tuple) else [value]


def _everywhere(node: fx.Node, placement: Split) -> Samples:
    """Return the same placement for each of the node's results."""
    results = node.meta["val"]
    if isinstance(results, list | tuple):
        return (placement,) * len(results)
    return placement


def _along(node: fx.Node, placement: Split) -> Samples:
    """Return the samples' placement after an operation that mixes along its argument `dim` or `dims`."""
    rank = len(shape_of(tensor_inputs(node)[0]))
    dims = _argument(node, "dim")
    if dims is None:
        dims = _argument(node, "dims")
    if dims is None or dims == []:
        return None
    if isinstance(dims, int):
        dims = [dims]
    mixed = {dim % rank for dim in dims}
    if placement.dim in mixed:
        return None
    ranks = {value.dim() for value in _values(node)}
    if ranks == {rank}:
        return _everywhere(node, placement)
    if ranks == {rank - len(mixed)}:
        mixed_before = sum(dim < placement.dim for dim in mixed)
        return _everywhere(node, Split(placement.dim - mixed_before, placement.blocks))
    return None


def _both_along(node: fx.Node, now: Sequence[Any], name: str) -> Samples:
    """Return the samples' placement after scatters and similarities of inputs that lie alike."""
    first = now[0]
    if name not in _BOTH_ALONG or not isinstance(first, Split):
        return None
    if any(placement != first for placement in now):
        return None
    shapes = [shape_of(source) for source in tensor_inputs(node)]
    ranks = {len(shape) for shape in shapes}
    sizes = {shape[first.dim] for shape in shapes}
    return _along(node, first) if len(ranks) == len(sizes) == 1 else None


def _is_one_image(node: fx.Node) -> bool:
    """True if the first dimension is that of channels: an input without samples."""
    name = str(node.target)
    rank = len(shape_of(tensor_inputs(node)[0]))
    weight = node.args[1] if len(node.args) > 1 else None
    if "conv" in name and isinstance(weight, fx.Node):
        return rank != len(shape_of(weight))
    for spatial_dims in (1, 2, 3):
        if f"{spatial_dims}d" in name:
            return rank != spatial_dims + 2
    return False


def _probed(node: fx.Node, placement: Split, samples: int) -> Samples:
    """Move the samples' numbers as the operation moves elements, and look where they are."""
    source = tensor_inputs(node)[0]
    shape = shape_of(source)
    results = _values(node)
    if len(results) != 1 or results[0].numel() > _PROBED_AT_MOST:
        return None
    if node.args[0] is not source or shape[placement.dim] % samples:
        return None
    if any(isinstance(value, fx.Node) for value in [*node.args[1:], *node.kwargs.values()]):
        return None
    # Real numbers, outside of the fake mode. float64 holds them exactly.
    numbers = _sample_numbers(len(shape), placement.dim, shape[placement.dim], samples).expand(shape)
    moved = node.target(numbers, *node.args[1:], **node.kwargs)  # type: ignore[operator]
    is_number = (moved >= _PROBE_BASE) & (moved < _PROBE_BASE + samples)  # the rest was filled up
    for dim, size in enumerate(moved.shape):
        if size % samples or not size:
            continue
        # (samples, the rest of the dimension, the other dimensions)
        by_sample = is_number.movedim(dim, 0).unflatten(0, (samples, size // samples))
        if not bool((by_sample == by_sample[:1]).all()):
            continue  # what is filled up depends on a sample's place
        expected = _sample_numbers(moved.dim(), dim, size, samples)
        if bool(((moved == expected) | ~is_number).all()):
            return Split(dim, (size,))
    return None


def _sample_numbers(rank: int, dim: int, size: int, samples: int) -> torch.Tensor:
    """Return the samples' numbers along one of `rank` dimensions; the others have size 1."""
    numbers = _PROBE_BASE + torch.arange(samples, dtype=torch.float64)
    shape = [1] * rank
    shape[dim] = -1
    return numbers.repeat_interleave(size // samples).view(shape)


def _recurrent(node: fx.Node, now: Sequence[Any], samples: int) -> Samples:
    """Place the samples of (input, first states, weights, ..., batch_first): states are (layers, samples, size)."""
    inputs = tensor_inputs(node)
    dim = 0 if _argument(node, "batch_first") else 1
    if len(shape_of(inputs[0])) != 3 or now[0] != Split(dim, (samples,)):
        return None
    states = _argument(node, "hx")
    count = len(states) if isinstance(states, list | tuple) else 1
    of_states = Split(1, (samples,))
    for source, placement in zip(inputs[1 : 1 + count], now[1 : 1 + count], strict=True):
        is_alike = placement is None and _is_filled(source)
        if placement != of_states and not is_alike:
            return None
    if any(placement is not None for placement in now[1 + count :]):
        return None
    num_states = len(node.meta["val"]) - 1
    return (now[0], *[of_states] * num_states)


def _is_filled(node: fx.Node) -> bool:
    """True if every row is alike, as in a tensor of zeros."""
    return node.target in (aten.zeros.default, aten.new_zeros.default, aten.full.default, aten.zeros_like.default)


def _index(node: fx.Node, now: Sequence[Any], samples: int) -> Samples:
    """Place the samples of `x[indices]`: rows of a table that each picks, or the same places of every sample."""
    indices: Any = node.args[1]
    dims = [dim for dim, index in enumerate(indices) if index is not None]
    index_rank = max(len(shape_of(indices[dim])) for dim in dims)
    is_together = dims == list(range(dims[0], dims[-1] + 1))
    # As numpy: dimensions of separated indices move to the front.
    start = dims[0] if is_together else 0  # where the dimensions of the indices come to lie
    table = now[0]
    if table is None:
        return _picked_by_samples([indices[dim] for dim in dims], now[1:], start, index_rank)
    if any(placement is not None for placement in now[1:]) or table.dim in dims:
        return None
    if any(indices[dim].meta["val"].dtype == torch.bool for dim in dims):
        return None  # how many rows a mask picks depends on its values
    indexed_before = sum(dim < table.dim for dim in dims)
    is_after_indices = table.dim > dims[0] or not is_together
    added_before = index_rank if is_after_indices else 0
    return Split(table.dim - indexed_before + added_before, table.blocks)


def _picked_by_samples(indices: list[fx.Node], placements: Sequence[Any], start: int, index_rank: int) -> Samples:
    """Place samples that lie in the indices, which are broadcast against each other.

    Args:
        indices: into a table that has no samples.
        placements: where the samples lie in each; None where it has none.
        start: the result's first dimension of the indices.
        index_rank: how many dimensions they have, broadcast.
    """
    dims = set()
    sizes = set()
    blocks = set()
    for index, placement in zip(indices, placements, strict=True):
        if placement is None:
            continue
        shape = shape_of(index)
        dims.add(placement.dim + index_rank - len(shape))
        sizes.add(shape[placement.dim])
        blocks.add(placement.blocks)
    if len(dims) == len(sizes) == len(blocks) == 1:
        return Split(start + dims.pop(), blocks.pop())
    return None


def _cdist(node: fx.Node, now: Sequence[Any], samples: int) -> Samples:
    """Place the samples of distances between two sets of rows, the last but one dimension of each."""
    first, second = now[:2]
    rank = len(shape_of(tensor_inputs(node)[0]))
    if not isinstance(first, Split):
        return None
    if first.dim == rank - 2 and second is None:
        return Split(len(shape_of(node)) - 2, first.blocks)
    if first.dim < rank - 2 and second in (None, first):
        return first if len(shape_of(node)) == rank else None
    return None


def _element_by_element(node: fx.Node, now: Sequence[Any], samples: int) -> Samples:
    return now[0] if all(placement is None for placement in now[1:]) else None


def _one_hot(node: fx.Node, now: Sequence[Any], samples: int) -> Samples:
    return now[0]  # type: ignore[no-any-return]


def _expanded(node: fx.Node, now: Sequence[Any], samples: int) -> Samples:
    """Place the samples of inputs that are broadcast against each other, each by itself."""
    rank = _values(node)[0].dim()
    inputs = list(zip(tensor_inputs(node), now, strict=True))
    dims = set()
    blocks = set()
    for source, placement in inputs:
        if placement:
            dims.add(placement.dim + rank - len(shape_of(source)))
            blocks.add(placement.blocks)
    if len(dims) != 1 or len(blocks) != 1:
        return None
    dim = dims.pop()
    for source, placement in inputs:
        shape = shape_of(source)
        place = dim - (rank - len(shape))
        if placement is None and place >= 0 and shape[place] != 1:
            return None  # rows of its own, of which it is not known whose they are
    return _everywhere(node, Split(dim, blocks.pop()))


def _of_pairs(node: fx.Node, now: Sequence[Any], samples: int) -> Samples:
    """Place the samples of complex numbers that are pairs along the last dimension, or are made such pairs."""
    is_last = now[0] is not None and now[0].dim == len(shape_of(tensor_inputs(node)[0])) - 1
    return None if is_last and node.target is aten.view_as_complex.default else now[0]


def _windows(node: fx.Node, now: Sequence[Any], samples: int) -> Samples:
    """Place the samples of spectra of windows, (samples, time): each row is cut by itself."""
    is_batch = now[0] == Split(0, (samples,)) and len(shape_of(tensor_inputs(node)[0])) > 1
    return now[0] if is_batch and all(placement is None for placement in now[1:]) else None


def _einsum(node: fx.Node, now: Sequence[Any], samples: int) -> Samples:
    """Place the samples of `einsum`: one letter of all inputs that have them, and of the result."""
    inputs = tensor_inputs(node)
    terms, result = _letters_of(str(node.args[0]), [len(shape_of(source)) for source in inputs])
    letters = set()
    blocks = set()
    for term, placement in zip(terms, now, strict=True):
        if placement is not None:
            letters.add(term[placement.dim])
            blocks.add(placement.blocks)
    if len(letters) != 1 or len(blocks) != 1:
        return None
    letter = letters.pop()
    for term, placement, source in zip(terms, now, inputs, strict=True):
        sizes = [size for name, size in zip(term, shape_of(source), strict=True) if name == letter]
        # Twice in one input is a diagonal; elsewhere they are rows of which it is not known whose they are.
        if len(sizes) > 1 or (placement is None and sizes not in ([], [1])):
            return None
    return Split(result.index(letter), blocks.pop()) if letter in result else None


def _letters_of(equation: str, ranks: list[int]) -> tuple[list[list[str]], list[str]]:
    """Return the letters of each input's dimensions, and of the result's; an ellipsis gives numbers, from the right."""
    terms_text, arrow, right = equation.replace(" ", "").partition("->")
    counts = []
    terms = []
    for term, rank in zip(terms_text.split(","), ranks, strict=True):
        before, dots, after = term.partition("...")
        count = rank - len(before) - len(after) if dots else 0
        counts.append(count)
        terms.append([*before, *map(str, range(count - 1, -1, -1)), *after])
    outer = list(map(str, range(max(counts) - 1, -1, -1)))
    if not arrow:  # every letter that is there once, in the order of the alphabet
        every = list(terms_text.replace("...", "").replace(",", ""))
        return terms, [*outer, *sorted(letter for letter in set(every) if every.count(letter) == 1)]
    before, dots, after = right.partition("...")
    return terms, [*before, *(outer if dots else []), *after]


_RULES: dict[Any, Callable[[fx.Node, Sequence[Any], int], Samples]] = {
    **dict.fromkeys(_RECURRENT, _recurrent),
    aten.index.Tensor: _index,
    aten.cdist.default: _cdist,
    aten.one_hot.default: _one_hot,
    aten.bucketize.Tensor: _element_by_element,
    aten.expand_as.default: _expanded,
    aten.broadcast_tensors.default: _expanded,
    aten.polar.default: _expanded,
    aten.complex.default: _expanded,
    **dict.fromkeys(_OF_EACH_NUMBER, _element_by_element),
    aten.view_as_complex.default: _of_pairs,
    aten.view_as_real.default: _of_pairs,
    aten.stft.default: _windows,
    aten.stft.center: _windows,
    aten.istft.default: _windows,
    aten.einsum.default: _einsum,
}
