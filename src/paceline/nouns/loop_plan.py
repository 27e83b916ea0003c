"""Check whether a plan can train a loop of the user's own (`paceline.prepare`)."""

from __future__ import annotations

from paceline.nouns.errors import PlanError
from paceline.nouns.mesh import PLACE_AXES, Mesh
from paceline.nouns.plan import Plan


def check_plan_of_loop(plan: Plan) -> None:
    """Raise PlanError unless a loop of one's own can run under the plan."""
    mesh = Mesh.parse(plan.mesh)
    refused_axes = [axis for axis in mesh.used() if axis not in ("replicate", "shard", *PLACE_AXES)]
    asked = f"the plan is {plan.mesh}"
    if plan.strategy == "servers":
        refused_axes = ["server"]
        asked = f"the plan has server={plan.server}"
    if refused_axes:
        raise PlanError(
            f"paceline.prepare trains the models of a plain loop, and {asked}",
            f"{refused_axes[0]} needs the loss as a function of the model and a batch",
            "write -n N without --plan, shard=N, tensor=N, context=N or expert=N; or declare the model, the loss and "
            "the data in a paceline.Workload, which every plan trains",
        )
    is_cut = mesh.size("shard") > 1 and plan.zero > 1
    if is_cut and plan.compression not in ("none", "bf16"):
        raise PlanError(
            f"the plan's compression is {plan.compression}",
            f"the axis shard with zero={plan.zero} has none and bf16",
            "write compression=bf16, or zero=1",
        )
    places = mesh.used(PLACE_AXES)
    if len(places) > 1:
        raise PlanError(
            f"paceline.prepare trains the models of a plain loop, and the plan is {plan.mesh}",
            f"one axis at a time splits what a loop calls, and these are {' and '.join(places)}",
            "write one of them, and replicate; or declare the model, the loss and the data in a paceline.Workload",
        )
    if mesh.size("shard") > 1 and places:
        pieces = "positions of every sequence" if places[0] == "context" else "pieces of parameters"
        raise PlanError(
            f"paceline.prepare trains the models of a plain loop, and the plan is {plan.mesh}",
            f"{places[0]} gives each rank {pieces}, and shard shares out the update of whole ones",
            "write replicate in place of shard; or declare the model, the loss and the data in a paceline.Workload",
        )
    if plan.offload == "on":
        raise PlanError(
            "optimizer state in host memory (offload=on)",
            "the optimizers of a plain loop keep their state where the parameters are",
            "leave offload out",
        )
    calls = {
        "checkpointing": ("none", "torch.utils.checkpoint"),
        "compile": ("off", "torch.compile"),
        "float8": ("off", "torchao's convert_to_float8_training"),
    }
    for name, (value, call) in calls.items():
        if getattr(plan, name) != value:
            raise PlanError(
                f"the plan has {name}={getattr(plan, name)}",
                "the models of a plain loop are used as they are",
                f"leave {name} out, and call {call} on the model before paceline.prepare",
            )
