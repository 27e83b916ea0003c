"""Batch norm over the samples of all ranks, on any device."""

from __future__ import annotations

from typing import Any

import torch

from paceline.comm.batch_norm import SharedForward, SharedStatistics
from paceline.horovod.common.process_sets import ProcessSet, global_process_set
from paceline.horovod.torch.mpi_ops import size
from paceline.torch_private.modules import BatchNorm


class SyncBatchNorm(BatchNorm):
    """A batch norm whose statistics in training are those of all ranks' samples; (n, channels, ...).

    Args:
        num_features: the number of channels.
        eps: added to the variance.
        momentum: of the running statistics; None: they are cumulative means.
        affine: learn a weight and a bias.
        track_running_stats: keep running statistics, for evaluation.
        process_set: the global one.

    Raises:
        ValueError: the input has fewer than two dimensions, or `process_set` is a part of the ranks.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_set: ProcessSet = global_process_set,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats)
        if process_set is not global_process_set:
            raise ValueError("SyncBatchNorm takes the statistics of all ranks: process_set can't be a part of them")

    def _check_input_dim(self, images: torch.Tensor) -> None:
        if images.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {images.dim()}D input)")

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return the normed images."""
        self._check_input_dim(images)
        takes_batch = self.training or self.running_mean is None
        if size() == 1 or not takes_batch:
            result: torch.Tensor = super().forward(images)
            return result
        return SharedForward(self, SharedStatistics(_own_axis()))(images)


def _own_axis() -> Any:
    """Return the ranks as an axis for calls of the thread of the model: these come in the same order everywhere."""
    from paceline.horovod.collective_engine import engine

    return engine().world.comm.aside()
