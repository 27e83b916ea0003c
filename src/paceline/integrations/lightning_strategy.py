"""What a LightningModule asks its trainer's strategy and precision for, answered by the job."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from paceline.comm import api
from paceline.nouns.errors import UsageError
from paceline.nouns.parts import shown
from paceline.parallel.optimizer_parts import groups_of

if TYPE_CHECKING:
    from paceline.integrations.lightning import Trainer

_AUTOCAST = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}


def plain(optimizer: Any) -> torch.optim.Optimizer:
    """Return the optimizer that configure_optimizers returned, in place of Lightning's wrapper."""
    found: torch.optim.Optimizer = vars(optimizer).get("_optimizer", optimizer)
    return found


class Precision:
    """The trainer's precision.

    Args:
        trainer: of the module.
        name: "32-true", "64-true", "bf16-mixed" or "16-mixed".
    """

    def __init__(self, trainer: Trainer, name: str) -> None:
        self.trainer = trainer
        self.precision = name
        self.scaler: torch.amp.GradScaler | None = None

    def make_scaler(self) -> list[torch.amp.GradScaler]:
        """Return the scaler that float16 needs, if it does."""
        if self.precision == "16-mixed":
            self.scaler = torch.amp.GradScaler("cuda" if torch.cuda.is_available() else "cpu")
        return [] if self.scaler is None else [self.scaler]

    @contextmanager
    def forward_context(self) -> Iterator[None]:
        """Compute in this precision inside."""
        dtype = _AUTOCAST.get(self.precision)
        if dtype is not None:
            with torch.autocast(self.trainer.job.device.type, dtype):
                yield
            return
        before = torch.get_default_dtype()
        if self.precision == "64-true":
            torch.set_default_dtype(torch.float64)
        try:
            yield
        finally:
            torch.set_default_dtype(before)

    def clip_gradients(self, optimizer: Any, clip_val: float = 0.0, gradient_clip_algorithm: Any = "norm") -> None:
        """Clip the gradients of the whole batch: by their norm, or each by its value."""
        if clip_val <= 0:
            return
        job = self.trainer.job
        own = plain(optimizer)
        if str(getattr(gradient_clip_algorithm, "value", gradient_clip_algorithm)) != "value":
            job.clip(float(clip_val), own)
            return
        number = job.number_of(own)
        assert number is not None
        job.sum_gradients(number)
        for group in groups_of(own):
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.clamp_(-clip_val, clip_val)


class Strategy:
    """What modules, callbacks and Lightning's optimizers ask of a strategy.

    Args:
        trainer: of the module.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self._lightning_optimizers: list[Any] = []

    @property
    def lightning_module(self) -> Any:
        """Return the module."""
        return self.trainer.lightning_module

    @property
    def root_device(self) -> torch.device:
        """Return where this rank computes."""
        return self.trainer.job.device

    @property
    def is_global_zero(self) -> bool:
        """True on rank 0."""
        return self.trainer.is_global_zero

    @property
    def global_rank(self) -> int:
        """Return the rank."""
        return self.trainer.global_rank

    @property
    def local_rank(self) -> int:
        """Return the rank among those of this host."""
        return self.trainer.local_rank

    @property
    def world_size(self) -> int:
        """Return the number of ranks."""
        return self.trainer.world_size

    def backward(self, loss: torch.Tensor, optimizer: Any = None, *arguments: Any, **named: Any) -> None:
        """Add the gradients of a loss over all ranks to those of the parameters.

        Raises:
            UsageError: it is handed what `job.backward` does not take.
        """
        retain_graph = bool(named.pop("retain_graph", False))
        weight = named.pop("weight", None)
        if arguments or named:
            raise UsageError(
                "self.manual_backward takes the loss, and retain_graph",
                f"it is handed {shown(next(iter([*named, *arguments])))} too",
                "leave it out",
            )
        scaler = self.trainer.precision_plugin.scaler
        scaled = loss if scaler is None else scaler.scale(loss)
        self.trainer.call("on_before_backward", scaled)
        self.trainer.job.backward(scaled, weight, retain_graph)
        if self.trainer.looks_at_gradients("on_after_backward"):
            for number in range(1, len(self.trainer.optimizers) + 1):
                self.trainer.job.sum_gradients(number)
        self.trainer.call("on_after_backward")

    def optimizer_step(self, optimizer: torch.optim.Optimizer, closure: Any = None, **named: Any) -> Any:
        """Update once, as `LightningOptimizer.step()` asks for it.

        Raises:
            UsageError: there is a closure.
        """
        if closure is not None and getattr(closure, "__name__", "") != "do_nothing_closure":
            raise UsageError(
                "an optimizer should update once per call of step()",
                "step was handed a closure",
                "call self.manual_backward(loss) before optimizer.step(), without a closure",
            )
        self.trainer.update(optimizer, **named)

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Return a tensor's mean over the ranks with other samples, or another reduction."""
        if not isinstance(tensor, torch.Tensor):
            return tensor
        name = str(reduce_op if isinstance(reduce_op, str) else getattr(reduce_op, "name", reduce_op))
        name = name.rpartition(".")[2].lower().replace("avg", "mean")
        if name == "mean" and not tensor.is_floating_point():
            tensor = tensor.to(torch.get_default_dtype())
        return self.trainer.job.all_reduce(tensor, name)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Return whether all ranks, or any, decide so."""
        vote = torch.tensor([int(bool(decision))], device=self.root_device)
        return bool(int(self.trainer.job.all_reduce(vote, "min" if all else "max")))

    def all_gather(self, tensor: torch.Tensor, group: Any = None, sync_grads: bool = False) -> torch.Tensor:
        """Return the tensors of the ranks with other samples, (ranks, ...); of one rank its own."""
        if self.trainer.job.data_size == 1:
            return tensor
        return self.trainer.job.all_gather(tensor[None], grad=sync_grads)

    def barrier(self, name: str | None = None) -> None:
        """Wait for all ranks."""
        api.barrier()

    def broadcast(self, value: Any, src: int = 0) -> Any:
        """Return a tensor of one rank.

        Raises:
            UsageError: it is something else, which would have to be pickled.
        """
        if not isinstance(value, torch.Tensor):
            raise UsageError(
                "a strategy sends tensors", f"it is {shown(value)}", "send a tensor, or read it on every rank"
            )
        return api.broadcast(value, src)
