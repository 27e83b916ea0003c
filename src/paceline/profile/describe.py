"""Print a model's sizes as JSON, for commands that start without torch: `python -m paceline.profile.describe FILE ...`.

It runs in a child process: the user's file is loaded, its loop is not, and the model is made on the meta
device, so that no weights are held.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch

from paceline.comm.dtypes import widen
from paceline.launch.process_exit import exit_process
from paceline.nouns.errors import PacelineError
from paceline.nouns.mesh import GRAPH_AXES, Mesh
from paceline.nouns.plan import Plan
from paceline.nouns.user_program import UserProgram
from paceline.nouns.workload import Workload
from paceline.parallel.replicate.strategy import sparse_names
from paceline.profile.describe_servers import describe_servers
from paceline.train.data import no_data
from paceline.train.find_workload import find_workload


def main() -> int:
    """Print one JSON object: the description, or the error. `--plan TEXT` before the file also splits the model."""
    plan = Plan()
    sys.argv = sys.argv[1:]  # as the user's file expects it
    if sys.argv[0] == "--plan":
        plan = Plan.parse(sys.argv[1])
        sys.argv = sys.argv[2:]
    program = UserProgram.of_this_process(sys.argv[0])
    program.enter(sys.argv[1:])
    try:
        answer = {"model": describe(find_workload(program), plan)}
    except PacelineError as error:
        answer = {"error": {"asked": error.asked, "found": error.found, "fix": error.fix}}
    print(json.dumps(answer))
    return 0


def describe(workload: Workload, plan: Plan | None = None, place: int = 0, data_part: int = 0) -> dict[str, Any]:
    """Return names, shapes and dtypes of everything the model holds; under a plan, also what its axes make of it.

    Args:
        workload: whose model it is.
        plan: with `shard`, `tensor`, `pipeline` or `server`; only its split is described, nothing is computed.
        place: whose pieces are described: which rank of `context` times `tensor`.
        data_part: whose part of the batch.

    Raises:
        WorkloadError: its data is None, so that nothing is known of its batches.
    """
    if workload.data is None:
        raise no_data()
    mesh = Mesh.parse(plan.mesh) if plan is not None else Mesh.parse("replicate=1")
    model = made_without_values(workload)
    if workload.precision == "float64":
        model = widen(model)
    # Frozen parameters get no gradients, so nothing of them is summed; `shard` and `tensor` still hold and gather them.
    sparse = sparse_names(model)
    parameters, frozen = [], []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            parameters.append({**_sizes(name, parameter), "is_sparse": name in sparse})
        else:
            frozen.append(_sizes(name, parameter))
    batch_norms = {}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.modules.batchnorm._BatchNorm):
            batch_norms[name] = module.num_features
    description: dict[str, Any] = {
        "parameters": parameters,
        "frozen": frozen,
        "buffers": [_sizes(name, buffer) for name, buffer in model.named_buffers()],
        "batch_size": workload.batch_size,
        "micro_batch_size": workload.micro_batch_size,
        "clips": workload.clip_norm is not None,
        "scales": workload.precision == "fp16",
        "batch_norms": batch_norms,
    }
    description |= describe_servers(workload, model, plan)
    if plan is not None and mesh.used(GRAPH_AXES):
        from paceline.profile.describe_split import describe_split

        description["split"], description["whole"] = describe_split(workload, plan, place, data_part)
    elif plan is not None and mesh.size("shard") > 1:
        from paceline.profile.describe_split import describe_shards

        description["shards"], description["whole"] = describe_shards(workload, plan)
    return description


def made_without_values(workload: Workload) -> torch.nn.Module:
    """Make the model on the meta device; with its values if its factory reads them (transformers' from_pretrained)."""
    try:
        with torch.device("meta"):
            return workload.model()  # type: ignore[no-any-return]
    except RuntimeError:  # a meta tensor has no values to read
        return workload.model()  # type: ignore[no-any-return]


def _sizes(name: str, tensor: torch.Tensor) -> dict[str, Any]:
    return {
        "name": name,
        "shape": list(tensor.shape),
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "numel": tensor.numel(),
        "item_bytes": tensor.dtype.itemsize,
    }


if __name__ == "__main__":
    exit_process(main())
