"""Whether a verification fits this host: float64 copies in one process and on every rank at once."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.nouns.errors import WorkloadError
from paceline.nouns.mesh import Mesh

_DOUBLE = 8
_TRAINED = 4  # parameter, gradient, Adam's two moments
_NOTED = 9  # what the reference keeps of two steps besides: two sets of parameters, gradients and moments, the first
_SPLITTING = ("shard", "tensor", "pipeline")


def needed_bytes(model: Mapping[str, Any], mesh: Mesh) -> int:
    """About what the processes of a verification hold at their largest, activations apart."""
    numel = sum(tensor["numel"] for tensor in [*model["parameters"], *model["frozen"]])
    pieces = 1
    for axis in _SPLITTING:
        pieces *= mesh.size(axis)
    copies = _TRAINED + 2 * _NOTED + (_TRAINED + _NOTED) * mesh.world_size / pieces
    return int(numel * _DOUBLE * copies)


def available_bytes() -> int | None:
    """Memory that can be used without swapping; None where the system does not say."""
    path = Path("/proc/meminfo")
    lines = path.read_text().splitlines() if path.exists() else []
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable")), None)


def check_fits(model: Mapping[str, Any], mesh: Mesh, available: int | None = None) -> None:
    """Raise WorkloadError when the model is too large for this host."""
    available = available_bytes() if available is None else available
    needed = needed_bytes(model, mesh)
    if available is not None and needed > available:
        raise WorkloadError(
            f"can't verify on {mesh.world_size} ranks of this host, in float64, beside one process",
            f"that takes about {needed / 2**30:.1f} GiB and {available / 2**30:.1f} GiB are free",
            "verify a shallower model of the same config (num_hidden_layers=2): every layer is split alike",
        )
