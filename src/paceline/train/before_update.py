"""The user's own function between the backward pass and the update: `Workload(before_update=...)`.

It is handed the gradients of the whole batch, whole, by name, as `job.gradients()` of a loop of one's own has them. So
it runs where every rank has them: under `replicate`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from paceline.nouns.errors import PlanError, WorkloadError
from paceline.nouns.mesh import Mesh
from paceline.nouns.parts import shown
from paceline.nouns.plan import Plan
from paceline.parallel.engine.declared import strategy_of
from paceline.train.seed import kept_random_state, seed_everything

_DRAWN = 0x0BDA7E  # keeps these random numbers apart from others of the seed
_ASKED = "before_update should change the gradients in place"


def check_gradients_are_whole(function: Any, plan: Plan, mesh: Mesh) -> None:
    """Raise PlanError where a workload has a `before_update`, and the plan leaves no rank with whole gradients."""
    if function is None:
        return
    axes = [axis for axis in mesh.used() if axis != "replicate"]
    if not strategy_of(plan).has_gradients:
        axes.append("server")
    if axes:
        raise PlanError(
            "the workload's before_update is handed the gradients of the whole batch, whole and on every rank",
            f"under {axes[0]} no rank has them so",
            "write replicate in place of it, or leave before_update out; to clip by the norm, set clip_norm, which "
            "every plan takes",
        )


class BeforeUpdate:
    """Calls the user's function with the same gradients and the same random numbers on every rank.

    Args:
        function: the user's function `before_update(gradients)`.
        seed: the seed of the job. What the function draws depends only on it and the step.
        device: the device of the rank.
    """

    def __init__(self, function: Callable[[dict[str, torch.Tensor]], Any], seed: int, device: torch.device) -> None:
        self.function = function
        self.seed = seed
        self.device = device
        self.step = 0  # updates done before the next

    def begin_step(self, step: int) -> None:
        """Set the number of updates that are done: what the function draws depends on it."""
        self.step = step

    def __call__(self, parameters: Mapping[str, torch.nn.Parameter]) -> None:
        """Let the function change the gradients.

        Raises:
            WorkloadError: it puts other tensors in their place, or returns something.
        """
        gradients = {}
        for name, parameter in parameters.items():
            if parameter.grad is not None:
                gradients[name] = parameter.grad
        handed = dict(gradients)
        devices = [self.device] if self.device.type == "cuda" else []
        with kept_random_state(), torch.random.fork_rng(devices), torch.no_grad():
            seed_everything(self.seed, _DRAWN, self.step)
            returned = self.function(gradients)
        _check_in_place(returned, handed, gradients, parameters)


def _check_in_place(
    returned: Any,
    handed: Mapping[str, torch.Tensor],
    gradients: Mapping[str, Any],
    parameters: Mapping[str, torch.nn.Parameter],
) -> None:
    """Raise WorkloadError unless the gradients are the tensors that were handed out."""
    fix = "write gradients[name].copy_(...), .mul_(...) or .zero_(), and return nothing"
    if returned is not None:
        raise WorkloadError(_ASKED, f"it returned {shown(returned)}", fix)
    for name in sorted(handed.keys() | gradients.keys()):
        if gradients.get(name) is not handed.get(name):
            change = "put another tensor in the place of"
            if name not in gradients:
                change = "removed"
            elif name not in handed:
                change = "added"
            raise WorkloadError(_ASKED, f"it {change} {name}", fix)
    for name, gradient in handed.items():
        if parameters[name].grad is not gradient:
            raise WorkloadError(_ASKED, f"it gave {name} another .grad", fix)
