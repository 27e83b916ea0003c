"""Measure what a CPU kernel allocates and frees inside itself, by running it once for each shape.

oneDNN's convolutions copy images and weights into layouts of their own, two or three times their size at once;
attention and matrix products in half precision copy what they read too.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from paceline.torch_private.operations import unset_fake_temporarily
from paceline.torch_private.tensors import tree_flatten, tree_iter, tree_unflatten

aten = torch.ops.aten
TRIED = (
    aten.convolution.default,
    aten.convolution_backward.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
)
IN_HALF = (aten.mm.default, aten.addmm.default, aten.bmm.default)  # tried in half precision only
# Of all inputs: a larger kernel would take long to try, and its scratch weighs less.
MOST_BYTES = 2**27
MOST_BYTES_IN_HALF = 2**25
_peaks: dict[Any, int] = {}  # by kernel, shapes, strides and dtypes


def scratch_bytes(func: Any, args: Any, kwargs: Any) -> int:
    """Return the most bytes that the kernel holds besides what it returns; 0 for kernels that are not tried."""
    if str(func.namespace) == "c10d":
        return _gloo_bytes(func, args)
    if func not in TRIED and func not in IN_HALF:
        return 0
    leaves, form = tree_flatten((args, kwargs))
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    if func in IN_HALF and any(tensor.dtype not in (torch.bfloat16, torch.float16) for tensor in tensors):
        return 0
    most_bytes = MOST_BYTES if func in TRIED else MOST_BYTES_IN_HALF
    if sum(tensor.nbytes for tensor in tensors) > most_bytes:
        return 0
    key = (func, *(_form(leaf) for leaf in leaves))
    if key not in _peaks:
        with unset_fake_temporarily(), torch.no_grad():
            real_args, real_kwargs = tree_unflatten([_zeros(leaf) for leaf in leaves], form)
            func(*real_args, **real_kwargs)  # the first call also allocates what later ones find
            _peaks[key] = _peak(func, real_args, real_kwargs)
    return _peaks[key]


def _gloo_bytes(func: Any, args: Any) -> int:
    """Return the bytes of the flat tensor of its own into which Gloo gathers first; 0 for other collectives."""
    if func.__name__ not in ("_allgather_base_.default", "allgather_.default"):
        return 0
    return sum(output.nbytes for output in tree_iter(args[0]) if isinstance(output, torch.Tensor))


def _peak(func: Any, args: Any, kwargs: Any) -> int:
    """Run a kernel and return the most bytes that it held, its results apart."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        result = func(*args, **kwargs)
    assert profiler.profiler is not None
    # Kineto's "[memory]" events have signed sizes, in bytes: a free is negative.
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]  # type: ignore[union-attr]
    live = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    result_bytes = sum(output.nbytes for output in tree_iter(result) if isinstance(output, torch.Tensor))
    return max(0, peak - result_bytes)


def _form(leaf: Any) -> Any:
    """Return the part of an argument that decides a kernel's memory."""
    if not isinstance(leaf, torch.Tensor):
        return str(leaf)
    return tuple(leaf.shape), leaf.stride(), leaf.dtype


def _zeros(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    return torch.zeros(0, dtype=leaf.dtype).new_empty_strided(leaf.shape, leaf.stride()).zero_()
