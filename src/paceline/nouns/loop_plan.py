"""Say which plans can train a loop of the user's own (`paceline.prepare`)."""

from __future__ import annotations

from paceline.nouns.errors import PlanError
from paceline.nouns.mesh import Mesh
from paceline.nouns.plan import Plan


def check_plan_of_loop(plan: Plan) -> None:
    """Raise PlanError unless a loop of one's own can run under the plan."""
    mesh = Mesh.parse(plan.mesh)
    others = [axis for axis in mesh.used() if axis not in ("replicate", "shard")]
    asked = f"the plan is {plan.mesh}"
    if plan.strategy == "servers":
        others = ["server"]
        asked = f"the plan has server={plan.server}"
    if others:
        raise PlanError(
            f"paceline.prepare trains the models of a plain loop, and {asked}",
            f"{others[0]} needs the loss as a function of the model and a batch",
            "write -n N without --plan, or shard=N,zero=1; or declare the model, the loss and the data in a "
            "paceline.Workload, which every plan trains",
        )
    if mesh.size("shard") > 1 and plan.zero > 1:
        raise PlanError(
            f"paceline.prepare trains the models of a plain loop, and the plan is {plan.mesh} with zero={plan.zero}",
            "the loop uses whole parameters and gradients; shard can share out the optimizer's state and the update "
            "(zero=1)",
            f"write {plan.mesh},zero=1; or declare the model, the loss and the data in a paceline.Workload",
        )
    if plan.offload == "on":
        raise PlanError(
            "optimizer state in host memory (offload=on)",
            "the optimizers of a plain loop keep their state where the parameters are",
            "leave offload out",
        )
    for name, value in (("checkpointing", "none"), ("compile", "off")):
        if getattr(plan, name) != value:
            raise PlanError(
                f"the plan has {name}={getattr(plan, name)}",
                "the models of a plain loop are used as they are",
                f"leave {name} out, and call torch.utils.checkpoint or torch.compile on the model before "
                "paceline.prepare",
            )
