"""Pipeline parallelism: the model cut into stages, micro-batches passing through them.

Stages are cut from the captured graph where the slowest becomes fastest and little crosses (`graph/stages.py`);
the order of work is a schedule proved free of deadlock before use (`nouns/schedule.py`). A parameter of two stages
(a tied embedding) is held by both; its gradients are exchanged and added in stage order, so the copies stay equal.

Needs: a model whose path depends only on shapes, and a loss that is a sum over samples.
Promises: losses, gradients and parameters are those of one rank that accumulates the same micro-batches.
Traffic per micro-batch: `send` of what crosses each cut and of its gradient; per step one `send` of each shared
parameter's gradient per other holder.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from paceline.comm.collectives import AxisComm, Pending
from paceline.comm.pytree import signature, tensors_in
from paceline.comm.step_times import BACKWARD as BACKWARD_TIME
from paceline.comm.step_times import FORWARD as FORWARD_TIME
from paceline.comm.step_times import Timed
from paceline.nouns.plan import Plan
from paceline.nouns.schedule import BACKWARD, FORWARD, WEIGHTS, Action, Schedule, make_schedule
from paceline.parallel.graph_model import Function, Program, SplitModel, StageProgram
from paceline.parallel.micro_batches import StepHooks, checked_loss
from paceline.parallel.pipeline.split_backward import backward_of_inputs, backward_of_weights

Autocast = Callable[[], AbstractContextManager[Any]]
_NO_STEP = StepHooks(lambda total, weight: None, lambda is_last, is_padding: None, lambda: None)  # of an evaluation


@dataclass(slots=True)
class _Flight:
    """A micro-batch between its forward and its backward pass through one stage."""

    received: list[torch.Tensor]
    sent: list[torch.Tensor]
    halves: Any = None


@dataclass(slots=True)
class Pipeline:
    """The strategy on this rank."""

    split: SplitModel
    comm: AxisComm
    plan: Plan
    autocast: Autocast
    schedules: dict[int, Schedule] = field(default_factory=dict)
    sending: list[Pending] = field(default_factory=list)

    def schedule(self, micro_batches: int) -> Schedule:
        """Return the order of work for so many micro-batches, made and proved once."""
        if micro_batches not in self.schedules:
            self.schedules[micro_batches] = make_schedule(self.plan.schedule, self.comm.size, micro_batches)
        return self.schedules[micro_batches]

    def forward_backward(self, loss: Function, microbatches: Sequence[Any], hooks: StepHooks) -> None:
        """Add up the gradients of the losses of `microbatches`, each cut alike (see `same_shapes`)."""
        for run in same_shapes(microbatches):
            program = self.split.program("loss", loss, run[0])
            _StageRun(self, program, run, hooks).play(self.schedule(len(run)))
        if not microbatches or not hooks.divisor.is_known:
            # Forward and backward passes alternate: all forwards are done only when the schedule is.
            hooks.after_forwards()

    def evaluate(self, key: str, function: Function, batch: Any) -> Any:
        """Run a function of the model forwards; return its result on every rank of the pipeline."""
        program = self.split.program(key, function, batch, is_training=False)
        run = _StageRun(self, program, [batch], _NO_STEP)
        flat: list[Any] | None = None
        with torch.no_grad():
            # In the order of stages: no rank waits for a message of a later stage.
            for stage in range(program.total_stages):
                if stage in self.split.own_stages:
                    flat = run.forward(stage, 0)
            self.drain()
            last_rank = (program.total_stages - 1) % self.comm.size
            # The last stage's rank hands the results to the others: numbers in one message, tensors in float64 too.
            results = [_zeros_like(value, self.split.device) for value in tensors_of(program)]
            if self.comm.rank == last_rank and flat is not None:
                results = [torch.as_tensor(value).to(like) for value, like in zip(flat, results, strict=True)]
            sent = torch.cat([result.reshape(-1) for result in results])
            self.comm.broadcast(sent, last_rank)
        sizes = [result.numel() for result in results]
        received = [part.view(like.shape) for part, like in zip(sent.split(sizes), results, strict=True)]
        return program.captured.rebuild(received)

    def drain(self) -> None:
        """Wait until everything sent has left."""
        for pending in self.sending:
            pending.wait()
        self.sending.clear()


def _zeros_like(value: Any, device: torch.device) -> torch.Tensor:
    """Return zeros of the shape that an output of a program has: a node's, or a number's."""
    shape = value.meta["val"].shape if isinstance(value, fx.Node) else ()
    return torch.zeros(tuple(shape), dtype=torch.float64, device=device)


def tensors_of(program: Program) -> list[Any]:
    """Return the flat outputs of a program."""
    return program.captured.output


def same_shapes(microbatches: Sequence[Any]) -> list[list[Any]]:
    """Return runs of micro-batches of equal shapes: one schedule serves each."""
    runs: list[list[Any]] = []
    before = None
    for batch in microbatches:
        now = signature(batch)
        # Only neighbours are joined: the order of micro-batches, and so of sums and draws, stays.
        if now != before:
            runs.append([])
        runs[-1].append(batch)
        before = now
    return runs


@dataclass(slots=True)
class _StageRun:
    """One pass of a schedule over micro-batches of equal shapes."""

    pipeline: Pipeline
    program: Program
    microbatches: Sequence[Any]
    hooks: StepHooks
    flights: dict[tuple[int, int], _Flight] = field(default_factory=dict)
    coming: dict[Action, list[tuple[torch.Tensor, Pending]]] = field(default_factory=dict)
    has_halves: bool = False
    by_index: dict[int, StageProgram] = field(init=False)

    def __post_init__(self) -> None:
        self.by_index = {stage.index: stage for stage in self.program.stages}

    def play(self, schedule: Schedule) -> None:
        """Do this rank's actions in order.

        On CPUs each action's messages are asked for before the one before it computes: Gloo sends to who waits, so a
        message that is asked for late comes late, by the time its sender's busy cores take to notice. NCCL takes
        calls in order, and one that waits would keep the sends after it from leaving.
        """
        act = {FORWARD: self._forward, BACKWARD: self._backward, WEIGHTS: self._weights}
        work = {FORWARD: FORWARD_TIME, BACKWARD: BACKWARD_TIME, WEIGHTS: BACKWARD_TIME}
        actions = schedule.actions[self.pipeline.comm.rank]
        forwards_left = sum(action.kind == FORWARD for action in actions)
        self.has_halves = any(action.kind == WEIGHTS for action in actions)
        ahead = 1 if self.pipeline.split.device.type == "cpu" else 0
        for number, action in enumerate(actions):
            for due in actions[number : number + 1 + ahead]:
                self._ask(due)
            with Timed(work[action.kind], f"micro-batch {action.micro_batch}, stage {action.stage}"):
                act[action.kind](action)
            forwards_left -= action.kind == FORWARD
            # One micro-batch: every rank is done with its forward passes before the last stage's backward pass.
            if action.kind == FORWARD and not forwards_left and self.hooks.divisor.is_known:
                self.hooks.after_forwards()
        self.pipeline.drain()

    def forward(self, stage: int, micro: int) -> list[Any]:
        """Run one forward pass; return what was sent, or the last stage's flat result."""
        program = self.by_index[stage]
        received = self._received(Action(FORWARD, stage, micro))
        if torch.is_grad_enabled():
            # Received tensors are leaves here: the stage before is sent their `grad`.
            for tensor, has_gradient in zip(received, program.first.has_gradient, strict=True):
                tensor.requires_grad_(has_gradient)
        with self.pipeline.autocast():
            sent = list(program(tensors_in(self.microbatches[micro]), received))
        if stage < self.program.total_stages - 1:
            for number, value in enumerate(sent):
                self._send(value.detach(), stage + 1, micro, number, forwards=True)
        # Until the backward pass, which needs the stage's graph of autograd.
        self.flights[stage, micro] = _Flight(received, sent)
        return sent

    def _forward(self, action: Action) -> None:
        sent = self.forward(action.stage, action.micro_batch)
        if action.stage == self.program.total_stages - 1:
            total, weight = checked_loss(self.program.captured.rebuild(sent))
            self.hooks.add(total.detach(), weight)
            # The backward pass begins at the loss, not at the function's other results.
            self.flights[action.stage, action.micro_batch].sent = [total]

    def _backward(self, action: Action) -> None:
        # Taken out, so that the activations are freed with this pass: the schedule bounds how many are in flight.
        flight = self.flights.pop((action.stage, action.micro_batch))
        program = self.by_index[action.stage]
        if action.stage == self.program.total_stages - 1:
            root = self.hooks.divisor.root(flight.sent[0])
            roots = [root]
            gradients = [torch.ones_like(root)]
        else:
            roots = _where_flowing(flight.sent, program.last.sends_gradient)
            gradients = self._received(action)
        # Zero-bubble: only the inputs' gradients now, for which the stage before waits.
        if self.has_halves:
            inputs = _where_flowing(flight.received, program.first.has_gradient)
            flight.halves = backward_of_inputs(roots, gradients, inputs, program.states)
            self.flights[action.stage, action.micro_batch] = flight
        elif roots:
            torch.autograd.backward(roots, gradients)
        # The dual of what was received: one message for each value through which a gradient flows.
        for number, (tensor, flows) in enumerate(zip(flight.received, program.first.has_gradient, strict=True)):
            if flows:  # zeros where the loss does not depend on it: the stage before waits for a message
                gradient = tensor.grad if tensor.grad is not None else torch.zeros_like(tensor)
                self._send(gradient, action.stage - 1, action.micro_batch, number, forwards=False)

    def _weights(self, action: Action) -> None:
        flight = self.flights.pop((action.stage, action.micro_batch))
        backward_of_weights(flight.halves)

    def _peer(self, stage: int) -> int:
        return stage % self.pipeline.comm.size

    def _send(self, value: torch.Tensor, stage: int, micro: int, number: int, forwards: bool) -> None:
        tag = _tag(stage, micro, number, forwards, self.program.total_stages)
        self.pipeline.sending.append(self.pipeline.comm.begin_send(value.contiguous(), self._peer(stage), tag))

    def _ask(self, action: Action) -> None:
        """Begin to receive what `action` computes from, once."""
        # The weights' half computes from what this rank has.
        if action in self.coming or action.kind == WEIGHTS:
            return
        program = self.by_index[action.stage]
        forwards = action.kind == FORWARD
        if forwards:
            values = program.first.received
            is_sent = [True] * len(values)
            peer = self._peer(action.stage - 1)
        else:
            values = program.last.sent
            is_sent = program.last.sends_gradient
            peer = self._peer(action.stage + 1)
        self.coming[action] = []
        for number, (meta, is_due) in enumerate(zip(values, is_sent, strict=True)):
            if is_due:
                buffer = torch.empty(tuple(meta.shape), dtype=meta.dtype, device=self.pipeline.split.device)
                tag = _tag(action.stage, action.micro_batch, number, forwards, self.program.total_stages)
                self.coming[action].append((buffer, self.pipeline.comm.begin_receive(buffer, peer, tag)))

    def _received(self, action: Action) -> list[torch.Tensor]:
        """Wait for what `action` computes from."""
        self._ask(action)
        coming = self.coming.pop(action)
        for _, pending in coming:
            pending.wait()
        return [tensor for tensor, _ in coming]


def _where_flowing(tensors: Sequence[torch.Tensor], has_gradient: Sequence[bool]) -> list[torch.Tensor]:
    """Return the tensors through which a gradient flows."""
    return [tensor for tensor, flows in zip(tensors, has_gradient, strict=True) if flows]


def _tag(stage: int, micro: int, number: int, forwards: bool, stages: int) -> int:
    """Return a number of its own for every message under way: to which stage, of which micro-batch, which value.

    64 values may cross a cut before two messages share a number.
    """
    return ((micro * stages + stage) * 64 + number) * 2 + forwards
