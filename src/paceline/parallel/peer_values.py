"""Read the numbers on which a step's path depends and which come from other ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from paceline.comm.host_copy import HostCopy
    from paceline.parallel.shard.grad_usage import GradUsage
    from paceline.parallel.step_stats import StepStats, StepStatsReducer


class PeerValues:
    """Reads what the ranks have exchanged.

    In a simulated step the other ranks are not there and tensors have no values: a subclass answers in their place.

    Attributes:
        sums_on_cpu: whether tensors on the CPU are summed as process groups for CPUs do it; False: as on a GPU.
        are_there: whether the other ranks add their numbers to sums.
    """

    sums_on_cpu = True
    are_there = True

    def step_stats(self, stats: StepStatsReducer, changed: Sequence[bool]) -> StepStats:
        """Return the step's numbers, which all ranks have summed.

        Args:
            stats: the reducer that holds the sum.
            changed: for each buffer, whether this rank's forward passes changed it.
        """
        return stats.read()

    def message(self, sums: torch.Tensor, ranks: slice, own_range: slice) -> torch.Tensor:
        """Return the sums of the messages in which the ranks of a loop announce their calls.

        Args:
            sums: the sums as the ranks have them.
            ranks: the range of the numbers of all ranks, one rank after another. Behind it is for each buffer the
                number of ranks that have changed it.
            own_range: the range of this rank's numbers.
        """
        return sums

    def has_overflown(self, flag: torch.Tensor) -> bool:
        """Return whether gradients have overflown under fp16.

        Args:
            flag: a number that is above 0 where they have, on any rank.
        """
        return bool(flag > 0)

    def norm(self, copy: HostCopy) -> float:
        """Return the gradient's norm, which is being copied from the device."""
        (norm,) = copy.read()
        return norm

    def unused(self, usage: GradUsage) -> list[str]:
        """Return the names of the parameters that no rank used in this step. Collective.

        Raises:
            WorkloadError: see `GradUsage.find_unused`.
        """
        return usage.find_unused()
