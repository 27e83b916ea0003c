"""Check that a verification fits this host: it holds float64 copies in one process and on every rank at once."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import psutil

from paceline.nouns.errors import WorkloadError
from paceline.nouns.mesh import SPREADING_AXES, Mesh

_FLOAT64_BYTES = 8  # the float64 run is the largest
_TRAINED = 4  # copies while training: parameter, gradient, Adam's two moments
_RECORDED = 9  # copies kept to compare: the first parameters; parameters, gradients and moments of two steps


def needed_bytes(model: Mapping[str, Any], mesh: Mesh) -> int:
    """Return about how many bytes the processes of a verification hold at their largest, activations apart."""
    numel = sum(tensor["numel"] for tensor in [*model["parameters"], *model["frozen"]])
    shards = 1
    for axis in SPREADING_AXES:
        shards *= mesh.size(axis)
    # Each rank holds its shard of everything; under `replicate` the shard is the whole model on each.
    # The reference keeps the records of two runs at once: its own, and that of the variation it is compared with.
    reference = _TRAINED + 2 * _RECORDED
    ranks = (_TRAINED + _RECORDED) * mesh.world_size / shards
    return int(numel * _FLOAT64_BYTES * (reference + ranks))


def available_bytes() -> int | None:
    """Return how much memory can be used without swapping; None where the system does not say."""
    with contextlib.suppress(OSError, KeyError):  # a container may hide it
        return int(psutil.virtual_memory().available)
    return None


def check_fits(model: Mapping[str, Any], mesh: Mesh, available: int | None = None) -> None:
    """Raise WorkloadError when the model is too large for this host."""
    if available is None:
        available = available_bytes()
    needed = needed_bytes(model, mesh)
    if available is not None and needed > available:
        raise WorkloadError(
            f"can't verify on {mesh.world_size} ranks of this host, in float64, beside one process",
            f"that takes about {needed / 2**30:.1f} GiB and {available / 2**30:.1f} GiB are free",
            "verify a shallower model of the same config (num_hidden_layers=2): every layer is split alike",
        )
