"""Find parameters that no rank used in a step, and check that all ranks sent the same messages in the same order.

A gradient of zeros and no gradient are two things to an optimizer: AdamW shrinks the parameter in the
first case. FSDP2 fills in zeros where a rank has none, so each rank notes what its backward passes
reached, and one small all_reduce at the end of the step says what nobody did.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
from torch import nn

from paceline.comm.collectives import AxisComm
from paceline.comm.fully_shard import CollectiveOrder
from paceline.nouns.errors import WorkloadError


class GradUsage:
    """A record of the parameters that this rank's backward passes reached.

    Args:
        names: the names of the trained parameters, in the same order on every rank; `clear` may change them.
        replicated: the names of the parameters that every rank holds.
        comm: the axis whose ranks add up their records.
        collective_order: the checksum of the messages sent so far.
    """

    def __init__(
        self, names: list[str], replicated: set[str], comm: AxisComm, collective_order: CollectiveOrder
    ) -> None:
        self.used = dict.fromkeys(names, False)
        self.replicated = replicated
        self.comm = comm
        self.collective_order = collective_order
        self.is_counting = True  # not in a micro-batch that is there only to keep step with other ranks
        self.watched: dict[str, nn.Parameter] = {}

    def clear(self, names: list[str]) -> None:
        """Begin a step, in which these parameters are trained."""
        self.used = dict.fromkeys(names, False)
        self.is_counting = True

    def watch(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Note from now on when a backward pass reaches these: gathered parameters, by name."""
        for name, parameter in parameters.items():
            if self.watched.get(name) is not parameter and parameter.requires_grad:
                self.watched[name] = parameter
                parameter.register_post_accumulate_grad_hook(partial(self._reached, name))

    def find_unused(self) -> list[str]:
        """Return the parameters that no rank used. Collective.

        Raises:
            WorkloadError: the ranks did not gather and reduce the same groups in the same order, or a gradient
                came after its group's were summed.
        """
        # One message: uses (one number per parameter), a late gradient (one), checksums (one per rank, each in its own
        # place).
        flags = torch.zeros(len(self.used) + 1 + self.comm.size, dtype=torch.int64)
        flags[: len(self.used)] = torch.tensor(list(self.used.values()))
        # FSDP2 has taken the gradients of gathered parameters; one that is still there came after its group's sum.
        gathered = [parameter for name, parameter in self.watched.items() if name not in self.replicated]
        flags[len(self.used)] = any(parameter.grad is not None for parameter in gathered)
        flags[len(self.used) + 1 + self.comm.rank] = self.collective_order.crc
        # On the host: it is known there, and a device's answer would have to be waited for.
        self.comm.all_reduce(flags)
        ranks, late, orders = flags.split([len(self.used), 1, self.comm.size])
        if len(set(orders.tolist())) > 1:
            raise WorkloadError(
                "every rank of the axis shard should call the model's blocks in the same order",
                "some rank skipped a block or called it once more, so ranks took each other's parameters",
                "let no block depend on a random number or on a rank's data, or write replicate in place of shard",
            )
        if int(late):
            raise WorkloadError(
                "a block's gradients should be complete when its backward pass is",
                "a parameter of some block was also used before the block ran: that part of its gradient came later",
                "use it in the block's own forward or after it, or write zero=1",
            )
        return [name for name, count in zip(self.used, ranks.tolist(), strict=True) if not count]

    def _reached(self, name: str, parameter: torch.Tensor) -> None:
        if name in self.used:  # or it is of a backward pass between steps
            self.used[name] |= self.is_counting
