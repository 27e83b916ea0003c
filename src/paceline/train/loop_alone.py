"""Run the first step of a user's own loop in one process, which is forked from rank 0 as the loop gets its first batch.

The loop goes on in the process as it does on the rank, but for this: its loader gives whole batches, `job.backward` is
`loss.backward`, and nothing is summed. Before each update the process compares its gradients with those that the ranks
have summed, and goes on with these. It ends where the rank's step ends.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch.nn.modules.module import register_module_forward_pre_hook

from paceline.parallel.effects import OWNERS, is_own_hook
from paceline.parallel.optimizer_parts import groups_of, parts_of, settings_of
from paceline.torch_private.autograd import step_post_hooks, step_pre_hooks
from paceline.torch_private.operations import disable_current_modes
from paceline.train.forked_process import ForkedProcess
from paceline.train.loader import Place, moved
from paceline.train.loop_loader import CutLoader, load_pass
from paceline.train.loop_objects import updated_by
from paceline.train.one_process import (
    TOLERANCES,
    Found,
    Limits,
    RanksStep,
    answer_of,
    first_gradient_difference,
    first_value_difference,
    load_whole_state,
    other_generators,
    own_batch_norms,
    set_gradients,
)
from paceline.train.plain_step import clip_gradients
from paceline.train.rank_draws import RankDraws

if TYPE_CHECKING:
    from paceline.train.loop_job import LoopJob

UPDATE, END = "u", "e"  # what the rank has handed over: gradients before an update; all else at the step's end
_WIDER = 5  # times the tolerance: the loop can't be run again in float64, to see what rounding does
_ENDS = ("evaluate", "save", "save_best", "close", "load", "generate", "log", "log_text", "log_picture")


class LoopAlone:
    """The process that takes a loop's first step by itself; made in it.

    Args:
        job: the job of the rank.
        process: this process, which was forked from the rank.
        ranks: the memory in which the ranks hand over their step.
        states: the states of the ranks' generators, by part of the batch.

    Attributes:
        in_place: the attributes that the job has in this process in place of its own.
    """

    def __init__(self, job: LoopJob, process: ForkedProcess, ranks: RanksStep, states: list[torch.Tensor]) -> None:
        self.job = job
        self.process = process
        self.ranks = ranks
        self.parts = len(states)
        self.draws = RankDraws(states)
        self.named = dict(job.model.named_parameters())
        self.before = {name: self.named[name].detach().clone() for name in ranks.names if name in self.named}
        self.generators_before = other_generators()
        self.has_begun = False
        self.has_backward = False  # of the newest batch
        self.has_autocast = False
        self.has_empty_part = False  # a rank has no samples in a batch, and computes one that does not count
        self.updated: set[int] = set()
        self.found: Found | None = None
        self.in_place = self._take_over()

    def _take_over(self) -> dict[str, Any]:
        """Have the loop's objects compute by themselves; return the attributes that the job has in place of its own."""
        job = self.job
        own_batch_norms(job.model)
        if job.parallel.placement == OWNERS and job.checkpoints.loaded_folder is not None:
            self._load_whole_state(job.checkpoints.loaded_folder)
        job.parallel.gradient_hooks.give_back()
        for number, optimizer in enumerate(job.objects.optimizers, 1):
            self._watch(number, optimizer)
        register_module_forward_pre_hook(self._watch_autocast)
        return {
            "parallel": None,  # whatever asks it for something, ends this process
            "rank": 0,
            "size": 1,
            "data_part": 0,
            "data_rank": 0,
            "backward": self._backward,
            "clip": self._clip,
            "gradients": self._gradients,
            "all_reduce": _copied,
            "all_gather": _copied,
            "gathered": nullcontext,
            "accumulate": lambda when=True: nullcontext(),
            "copy_weights": lambda source, target: target.load_state_dict(source.state_dict()),
            **dict.fromkeys(("end_step", "settle", "notice"), _ignored),
            **dict.fromkeys(_ENDS, self._leave),
        }

    def _load_whole_state(self, folder: Path) -> None:
        optimizer = self.job.optimizer
        settings = [settings_of(group) for group in groups_of(optimizer)]
        load_whole_state(folder, self.job.model, optimizer)
        for group, values in zip(groups_of(optimizer), settings, strict=True):
            group.update(values)  # the loop may have changed them since

    def _watch(self, number: int, optimizer: torch.optim.Optimizer) -> None:
        for part in parts_of(optimizer):
            for hooks in (step_pre_hooks(part), step_post_hooks(part)):
                for key in [key for key, hook in hooks.items() if is_own_hook(hook)]:
                    del hooks[key]

        def before(optimizer: torch.optim.Optimizer, arguments: Any, named: Any) -> None:
            self._compare_gradients(updated_by(optimizer, self.named))

        def after(optimizer: torch.optim.Optimizer, arguments: Any, named: Any) -> None:
            self.job.step_number += not self.updated
            self.updated.add(number)

        user_hooks = dict(step_pre_hooks(optimizer))
        step_pre_hooks(optimizer).clear()
        optimizer.register_step_pre_hook(before)
        step_pre_hooks(optimizer).update(user_hooks)
        optimizer.register_step_post_hook(after)

    def batches(self, cut: CutLoader) -> Iterator[Any]:
        """Yield whole batches of a pass."""
        cut.loader.num_workers = 0
        with disable_current_modes():
            if self.has_begun:
                cut.end_pass()
            else:
                cut.go_to(cut.number, cut.batch)
            if not cut.begin_pass():
                return
            parts = load_pass(cut.loader, Place(0, 1, cut.seed, cut.number), cut.batch, cut.limit)
        while True:
            with disable_current_modes():
                part = next(parts, None)
            if part is None or self.updated:
                break
            if self.has_begun and not self.has_backward:  # where a step ends is another question then
                self.process.reply({"reason": "the loop takes batches ahead of its updates"})
            self.has_backward = False
            cut.count_batch()
            self.draws.samples = [len(Place(rank, self.parts, 0, 0).own_samples(part.of)) for rank in range(self.parts)]
            self.has_empty_part |= not all(self.draws.samples)
            if not self.has_begun:
                self.has_begun = True
                self.draws.__enter__()  # type: ignore[no-untyped-call]
            batch = moved(part.batch, self.job.device, self.job.to_float64)
            self.job.taken_batches.take(part, (cut.number, cut.batch - 1), batch)
            yield batch
        self.job.taken_batches.end_pass()
        if self.updated:
            self._finish()
        cut.end_pass()

    def _backward(self, loss: torch.Tensor, weight: Any = None, retain_graph: bool = False, share: float = 1.0) -> None:
        self.has_backward = True
        loss.backward(retain_graph=retain_graph)  # type: ignore[no-untyped-call]

    def _clip(self, max_norm: float, optimizer: torch.optim.Optimizer | None = None) -> float:
        return clip_gradients(self._gradients(optimizer).values(), max_norm)

    def _gradients(self, optimizer: torch.optim.Optimizer | None = None) -> dict[str, torch.Tensor]:
        found = {}
        for name, parameter in self._parameters(optimizer).items():
            if parameter.grad is not None:
                found[name] = parameter.grad
        return found

    def _parameters(self, optimizer: torch.optim.Optimizer | None) -> Mapping[str, torch.nn.Parameter]:
        optimizers = self.job.objects.optimizers if optimizer is None else [optimizer]
        found: dict[str, torch.nn.Parameter] = {}
        for updating in optimizers:
            found |= updated_by(updating, self.named)
        return found

    def _watch_autocast(self, module: torch.nn.Module, inputs: Any) -> None:
        self.has_autocast |= torch.is_autocast_enabled("cpu")

    def _compare_gradients(self, parameters: Mapping[str, torch.nn.Parameter]) -> None:
        if self.process.wait() != UPDATE:
            self.process.reply({"reason": "the ranks updated less often in this step"})
        ranks = self.ranks.gradients()
        gradients: dict[str, torch.Tensor | None] = {}
        for name, parameter in parameters.items():
            gradients[name] = None if parameter.grad is None else parameter.grad.detach()
        self.found = self.found or first_gradient_difference(gradients, ranks, self._tolerance())
        set_gradients(parameters, ranks)

    def _tolerance(self) -> float:
        dtypes = {parameter.dtype for parameter in self.named.values()}
        if dtypes <= {torch.float64, torch.complex128} and not self.has_autocast:
            return TOLERANCES["float64"]
        is_narrow = self.has_autocast or bool(dtypes & {torch.bfloat16, torch.float16})
        return _WIDER * TOLERANCES["bf16" if is_narrow else "float32"]

    def _leave(self, *arguments: Any, **named: Any) -> NoReturn:
        """The loop asks the job for something that takes other ranks: here its step ends."""
        if not self.updated:
            self.process.reply({"reason": "the loop's first batches made no update"})
        self._finish()

    def _finish(self) -> NoReturn:
        """Compare what the step has left, and end."""
        if self.process.wait() != END:
            self.process.reply({"reason": "the ranks updated more often in this step"})
        self.process.reply(self._compared())

    def _compared(self) -> dict[str, Any]:
        if self.generators_before != other_generators():
            return {"reason": "the loop draws by numpy or Python, on each rank other numbers"}
        if not self.ranks.drew_as(self.draws.states):
            if self.has_empty_part:
                return {"reason": "a rank without samples in the batch draws random numbers too"}
            return {"reason": "the loop draws random numbers that do not belong to samples, on each rank others"}
        limits = Limits(self._tolerance())
        found = self.found or first_value_difference(self.job.model, self.before, self.ranks.values(), limits)
        return answer_of(found, self.draws)


def _copied(tensor: torch.Tensor, *arguments: Any, **named: Any) -> torch.Tensor:
    """Return the tensor as a collective of one rank does."""
    return tensor.clone()


def _ignored(*arguments: Any, **named: Any) -> None:
    """Do nothing, in place of a call of the rank."""
