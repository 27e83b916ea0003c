"""The model's sizes as JSON, for commands that start without torch. `python -m paceline.profile.describe FILE ...`.

It runs in a child process: the person's file is loaded, its loop is not, and the model is made on the meta
device, so that no weights are held.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from paceline.nouns.errors import PacelineError
from paceline.nouns.mesh import Mesh
from paceline.nouns.plan import Plan
from paceline.nouns.workload import Workload
from paceline.parallel.replicate.strategy import sparse_names
from paceline.train.data import no_data
from paceline.train.find_workload import find_workload


def main() -> int:
    """Print one JSON object: the description, or the error. `--plan TEXT` before the file also splits the model."""
    words = sys.argv[1:]
    plan = Plan.parse(words[1]) if words[0] == "--plan" else Plan()
    sys.argv = words[2:] if words[0] == "--plan" else words
    script = sys.argv[0]
    sys.path.insert(0, str(Path(script).parent))
    try:
        answer = {"model": describe(find_workload(script), plan)}
    except PacelineError as error:
        answer = {"error": {"asked": error.asked, "found": error.found, "fix": error.fix}}
    print(json.dumps(answer))
    return 0


def describe(workload: Workload, plan: Plan | None = None, tensor_rank: int = 0, data_part: int = 0) -> dict[str, Any]:
    """Names, shapes and dtypes of everything the model holds; under a plan, also what its axes make of it.

    Args:
        workload: whose model it is.
        plan: with `shard`, `tensor`, `pipeline` or `server`; only its split is described, nothing is computed.
        tensor_rank: whose pieces are described.
        data_part: whose part of the batch.

    Raises:
        WorkloadError: its data is None, so that nothing is known of its batches.
    """
    if workload.data is None:
        raise no_data()
    mesh = Mesh.parse(plan.mesh) if plan is not None else Mesh.parse("replicate=1")
    model = made_without_values(workload)
    if workload.precision == "float64":
        model = model.double()
    sparse = sparse_names(model)
    facts: dict[str, Any] = {
        "parameters": [
            {**_sizes(name, tensor), "is_sparse": name in sparse}
            for name, tensor in model.named_parameters()
            if tensor.requires_grad
        ],
        "frozen": [_sizes(name, p) for name, p in model.named_parameters() if not p.requires_grad],
        "buffers": [_sizes(name, tensor) for name, tensor in model.named_buffers()],
        "batch_size": workload.batch_size,
        "micro_batch_size": workload.micro_batch_size,
        "clips": workload.clip_norm is not None,
        "batch_norms": {
            name: m.num_features
            for name, m in model.named_modules()
            if isinstance(m, torch.nn.modules.batchnorm._BatchNorm)
        },
    }
    if plan is not None and plan.server:
        from paceline.server.handle import laid_out

        layout = laid_out(model, workload.optimizer(model), 0)[1]
        facts["ranges"] = [[segment.nbytes for segment in own] for own in layout.ranges(plan.server)]
    if plan is not None and mesh.size("tensor") * mesh.size("pipeline") > 1:
        from paceline.profile.describe_split import describe_split

        facts["split"] = describe_split(workload, plan, tensor_rank, data_part)
    elif plan is not None and mesh.size("shard") > 1:
        from paceline.profile.describe_split import describe_shards

        facts["shards"] = describe_shards(workload, plan)
    return facts


def made_without_values(workload: Workload) -> torch.nn.Module:
    """The model on the meta device; with its values where its factory reads them (transformers' from_pretrained)."""
    try:
        with torch.device("meta"):
            return workload.model()  # type: ignore[no-any-return]
    except RuntimeError:
        return workload.model()  # type: ignore[no-any-return]


def _sizes(name: str, tensor: torch.Tensor) -> dict[str, Any]:
    return {
        "name": name,
        "shape": list(tensor.shape),
        "dtype": str(tensor.dtype)[6:],
        "numel": tensor.numel(),
        "item_bytes": tensor.dtype.itemsize,
    }


if __name__ == "__main__":
    sys.exit(main())
