"""Sums of gradients that begin in a backward pass of which nobody knows yet whether it is the last of the step.

A plain loop doesn't say which backward pass an update follows. Loops repeat themselves, so it is foreseen from the
steps before, and sums begin while gradients come. The gradients themselves stay where they are. Where the loop does
something else than was foreseen, the sums are thrown away: nothing is lost but the messages.

Needs: the same pieces on every rank, in the same order.
Promises: after `install`, gradients are what `Replicate.reduce_gradients` would have made of them.
Traffic: that of `Replicate`.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from torch.utils.hooks import RemovableHandle

from paceline.comm.host_copy import HostCopy
from paceline.nouns.errors import UsageError
from paceline.parallel.replicate.bucket import Bucket
from paceline.parallel.replicate.buffers import sums_of
from paceline.parallel.replicate.strategy import Replicate

_CUTTING = ("topk", "powersgd")  # what they leave out is added to the next sum: a sum can't be thrown away
_PAUSE = 8  # steps in which nothing is foreseen after an error, twice as many after each
_LONGEST_PAUSE = 1024
_LONGEST_PERIOD = 4  # steps after which a loop repeats itself
_LONGEST_STEP = 1000  # pieces: a loop without updates has no end of a step
_COMPARED_SUMS = 3  # the first ones: a loop that rewrites gradients does so from the beginning
_SAMPLES = 4  # short gradients of a bucket that are compared in every step
_SHORT = 4096  # numbers


class Foresight:
    """What the loop will do, if it goes on as in the steps before; the same on every rank, as its pieces are."""

    def __init__(self) -> None:
        self.steps: list[list[tuple[bool, int]]] = []  # of each the pieces: whether a sum, and of which optimizer
        self.pieces: list[tuple[bool, int]] = []  # of this step
        self.pause = 0  # steps
        self.next_pause = _PAUSE

    def note(self, is_sum: bool, target: int) -> None:
        """Note a piece of the step."""
        if len(self.pieces) < _LONGEST_STEP:
            self.pieces.append((is_sum, target))

    def end_step(self) -> None:
        """Begin the next step."""
        self.steps = [*self.steps[-_LONGEST_PERIOD:], self.pieces]
        self.pieces = []
        self.pause = max(self.pause - 1, 0)

    def next_sums(self) -> set[int]:
        """Return the numbers of the optimizers whose gradients are summed before the next backward pass."""
        step = self._step_like_this()
        done = len(self.pieces)
        if self.pause or done >= _LONGEST_STEP or step[:done] != self.pieces:
            return set()
        targets = set()
        for is_sum, target in step[done:]:
            if not is_sum:
                break
            targets.add(target)
        return targets

    def _step_like_this(self) -> list[tuple[bool, int]]:
        """Return the step as many steps before this one as lie between the last step and one that was the same."""
        for period in range(1, len(self.steps)):  # a loop without a loader has a step for each update, of several
            if self.steps[-1] == self.steps[-1 - period]:
                return self.steps[-period]
        return []

    def was_wrong(self) -> None:
        """Foresee nothing for some steps."""
        self.pause = self.next_pause
        self.next_pause = min(2 * self.next_pause, _LONGEST_PAUSE)


class _Sent(NamedTuple):
    """The gradients of a bucket's parameters as they were copied to it; None where there was none."""

    gradients: list[torch.Tensor | None]
    versions: list[int]
    prints: dict[int, torch.Tensor]  # of the values of those that are compared


class _Late(NamedTuple):
    """Values of a GPU's gradients that are compared while the host goes on.

    Attributes:
        copy: for each of the parameters, above 0 where its gradient is not the one that was sent.
        parameters: whose gradients are compared.
    """

    copy: HostCopy
    parameters: list[torch.nn.Parameter]


class EarlySums:
    """The sums of one optimizer's gradients.

    Attributes:
        replicate: sums them otherwise.
        is_begun: the sums are on their way, and not the gradients yet.
        is_kept: gradients were those of the last sum, which the loop has kept.
    """

    def __init__(self, replicate: Replicate) -> None:
        self.replicate = replicate
        self.buckets: list[Bucket] = []
        self.waiting: list[int] = []  # by bucket
        self.sent: list[_Sent] = []
        self.is_begun = False
        self.is_arrived = False
        self.is_kept = False
        self.compared = 0
        self.is_reporting = False  # a backward pass runs in which sums begin
        self.late: _Late | None = None  # of the newest sums
        self.hooks: list[RemovableHandle] = []

    @property
    def is_possible(self) -> bool:
        """True if sums may be thrown away, and there are any."""
        return self.replicate.comm.size > 1 and self.replicate.plan.compression not in _CUTTING

    def begin(self) -> None:
        """Begin a backward pass; `replicate.begin_step` was called, and what it trains needs gradients."""
        if self.buckets is not self.replicate.buckets:
            self.buckets = self.replicate.buckets
            self._watch()
        self.is_begun = True
        self.is_arrived = False
        self.is_kept = False
        self.sent = []
        self.waiting = [len(bucket.parameters) for bucket in self.buckets]
        for bucket in self.buckets:
            self.is_kept |= _free_outbox(bucket)
        self.is_reporting = True

    def _watch(self) -> None:
        """Hear of the gradients of each bucket, but for the last, which is complete when the backward pass ends."""
        self.close()
        for number, bucket in enumerate(self.buckets[:-1]):
            gradient_is_here = partial(self._gradient_is_here, number)
            for parameter in bucket.parameters:
                self.hooks.append(parameter.register_post_accumulate_grad_hook(gradient_is_here))

    def close(self) -> None:
        """Hear of no gradients any more."""
        for hook in self.hooks:
            hook.remove()
        self.hooks = []

    def _gradient_is_here(self, number: int, parameter: torch.nn.Parameter) -> None:
        """Start the sum of a bucket that has all its gradients, and of those after it."""
        if not self.is_reporting:
            return
        # By re-entrant checkpointing a gradient comes twice: then a sum begins too early, and is found to be another's.
        self.waiting[number] -= 1
        while len(self.sent) < len(self.buckets) and self.waiting[len(self.sent)] <= 0:
            self._send()

    def end_backward(self) -> None:
        """Start the remaining sums."""
        self.is_reporting = False
        while len(self.sent) < len(self.buckets):
            self._send()

    def finish(self) -> None:
        """Wait for the sums."""
        if self.is_arrived:
            return
        self.is_arrived = True
        for bucket in self.buckets:
            bucket.reducer.finish(self.replicate.scale())

    def is_current(self) -> bool:
        """True if gradients are still those of which the sums are.

        The host does not wait for the values of a GPU's, after the first sums: `check_late` has what is found.
        """
        self.late = None
        compared: list[torch.nn.Parameter] = []
        differ: list[torch.Tensor] = []
        for bucket, sent in zip(self.buckets, self.sent, strict=True):
            gradients = bucket.gradients()
            for gradient, then, version in zip(gradients, sent.gradients, sent.versions, strict=True):
                if gradient is not then or (then is not None and then._version != version):
                    return False
            # Writes through `.data` pass the version.
            for index, values in sent.prints.items():
                gradient = gradients[index]
                if gradient is None:
                    continue
                if self.compared >= _COMPARED_SUMS and _is_waited_for(gradient):
                    compared.append(bucket.parameters[index])
                    differ.append((_print_of(gradient) != values).any())
                elif not torch.equal(_print_of(gradient), values):
                    return False
        if differ:
            numbers = torch.stack(differ).float()
            copy = HostCopy(len(differ), numbers.dtype, numbers.device)
            copy.begin(lambda: numbers)
            self.late = _Late(copy, compared)
        self.compared += 1
        return True

    def check_late(self) -> None:
        """Read what was compared while the host went on; the device has done it, as the host is a step further.

        Raises:
            UsageError: the newest update was made of sums without a change of this rank's gradients.
        """
        late, self.late = self.late, None
        if late is None:
            return
        for parameter, differs in zip(late.parameters, late.copy.read(), strict=True):
            if differs:
                names = [name for name, other in self.replicate.parameters.items() if other is parameter]
                raise UsageError(
                    "gradients should be changed in place, once they are sums over the ranks",
                    f"the loop wrote that of {names[0]} through .data, between job.backward and the newest update, "
                    "which was made without the change",
                    "call job.gradients() or job.clip(max_norm) before changes, and leave out .data; go on from the "
                    "last checkpoint",
                )

    def install(self) -> None:
        """Make the sums the gradients. Collective, where there are sparse ones."""
        late = self.late
        self.forget()
        self.late = late
        for bucket in self.buckets:
            bucket.install()
        self.replicate.gather_sparse()

    def forget(self) -> None:
        """Let go of the gradients."""
        self.is_begun = False
        self.sent = []
        self.late = None  # what has changed is in the sums that are made anew

    def _send(self) -> None:
        """Copy the gradients of the next bucket, and start its sum."""
        bucket = self.buckets[len(self.sent)]
        gradients = bucket.gradients()
        # What is there and can't be summed is found as one that the sum is not of.
        summed = [None if gradient is None or gradient.is_sparse else gradient for gradient in gradients]
        bucket.fill_all(summed, self.replicate.scale() if bucket.reducer.is_scaled_first else None)
        versions = [0 if gradient is None else gradient._version for gradient in summed]
        self.sent.append(_Sent(summed, versions, self._prints(summed)))
        bucket.send()

    def _prints(self, gradients: list[torch.Tensor | None]) -> dict[int, torch.Tensor]:
        prints: dict[int, torch.Tensor] = {}
        most = len(gradients) if self.compared < _COMPARED_SUMS else _SAMPLES
        for index, gradient in enumerate(gradients):
            if len(prints) == most:
                break
            is_short = gradient is not None and gradient.numel() <= _SHORT
            if gradient is not None and (is_short or most > _SAMPLES):
                prints[index] = _print_of(gradient).clone()
        return prints


def _is_waited_for(tensor: torch.Tensor) -> bool:
    """Return True if the host waits for a device where it reads the tensor."""
    return tensor.device.type != "cpu"


def _print_of(gradient: torch.Tensor) -> torch.Tensor:
    """Return numbers that change when a gradient does; of a short one the gradient."""
    return gradient.detach() if gradient.numel() <= _SHORT else sums_of(gradient)


def _free_outbox(bucket: Bucket) -> bool:
    """Give gradients that the loop keeps from the last sum a place of their own: the next sum comes where they are.

    Returns:
        Whether there were any.
    """
    is_kept = False
    for parameter in bucket.parameters:
        if parameter.grad is None:
            continue
        gradient = parameter.grad
        if not gradient.is_sparse and _is_in(gradient, bucket.reducer.outbox):
            parameter.grad = gradient.clone()
            is_kept = True
    return is_kept


def _is_in(gradient: torch.Tensor, flat: torch.Tensor) -> bool:
    return gradient.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr()
