"""Compute batch norm over the samples of all ranks, so that splitting a batch does not change its statistics.

torch's SyncBatchNorm needs GPUs; this is the same computation on any device, and takes its place. Each rank gives its
count, mean and sum of squared differences; they are merged as Chan, Golub and LeVeque (1983) merge them, so nothing is
lost to cancellation. Backward, two sums per channel are added up over the ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist

from paceline.comm.collectives import AxisComm
from paceline.nouns.errors import WorkloadError
from paceline.torch_private.modules import BatchNorm, check_images
from paceline.torch_private.operations import FakeTensor

_NORM = BatchNorm


@dataclass(slots=True)
class SharedStatistics:
    """Batch norm over an axis.

    Attributes:
        comm: the ranks that see different samples of the same batch.
        counts: False while this rank only keeps step with the others: its samples are not counted.
    """

    comm: AxisComm
    counts: bool = True

    def batch_norm(  # noqa: PLR0913 (aten.batch_norm's own arguments)
        self,
        images: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        mean: torch.Tensor | None,
        variance: torch.Tensor | None,
        is_training: bool,
        momentum: float,
        eps: float,
        cudnn: bool = False,
    ) -> torch.Tensor:
        """Return the normed images, (n, channels, ...) as given, and update running statistics in place.

        Arguments are those of aten.batch_norm.
        """
        if not is_training:
            return torch.batch_norm(images, weight, bias, mean, variance, False, momentum, eps, cudnn)
        channels = images.shape[1]
        weight = images.new_ones(channels) if weight is None else weight
        bias = images.new_zeros(channels) if bias is None else bias
        result, statistics = _BatchNorm.apply(images, weight, bias, eps, self)  # type: ignore[no-untyped-call]
        if mean is not None and variance is not None:
            count, batch_mean, batch_variance = statistics.unbind()
            # Past the counter of writes, as torch's own kernel does: the model may have been called in evaluation too.
            mean.data.lerp_(batch_mean.to(mean.dtype), momentum)
            # Bessel's correction by the count of all ranks, as torch's running variance of the whole batch has it.
            unbiased = batch_variance * count / (count - 1).clamp(min=1)
            variance.data.lerp_(unbiased.to(variance.dtype), momentum)
        return result  # type: ignore[no-any-return]


class _BatchNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, images: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float, shared: SharedStatistics
    ) -> tuple[torch.Tensor, torch.Tensor]:
        dims = [dim for dim in range(images.dim()) if dim != 1]
        # Half precision is widened: sums over a batch lose bits in it.
        wide = images.to(torch.promote_types(images.dtype, torch.float32))
        # elements per channel on this rank
        count = float(wide.numel() // wide.shape[1]) if shared.counts else 0.0
        local_mean = wide.mean(dims)
        # Around this rank's own mean, not zero: a difference of large sums of squares would cancel.
        squares = (wide - _along(local_mean, wide)).square().sum(dims)
        # (3, channels): count, mean, sum of squared differences
        local_statistics = torch.stack([torch.full_like(local_mean, count), local_mean, squares * (count > 0)])
        statistics = _merged(local_statistics, shared.comm)
        total, mean, variance = statistics.unbind()
        scale = (variance + eps).rsqrt()
        normed = (wide - _along(mean, wide)) * _along(scale, wide)
        ctx.save_for_backward(normed, weight, scale, total)
        ctx.shared = shared
        ctx.dims = dims
        ctx.counts = shared.counts
        result = normed * _along(weight.to(wide.dtype), wide) + _along(bias.to(wide.dtype), wide)
        ctx.mark_non_differentiable(statistics)
        return result.to(images.dtype), statistics

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        if torch.is_grad_enabled():  # create_graph=True
            raise WorkloadError(
                "can't take the gradient of a gradient",
                "the model has batch norm, whose statistics over all ranks can be differentiated once only",
                "write group norm or layer norm; or set micro_batch_size: then each micro-batch has its own statistics",
            )
        normed, weight, scale, total = ctx.saved_tensors
        gradient = gradients[0].to(normed.dtype)
        # (2, channels): what the batch's mean and variance pass back to every sample of every rank
        sums = torch.stack([gradient.sum(ctx.dims), (gradient * normed).sum(ctx.dims)])
        global_sums = sums.clone()
        _all_reduce(global_sums, ctx.shared.comm)
        mean_gradient, mean_product = (global_sums / total).unbind()
        inner = gradient - _along(mean_gradient, normed) - normed * _along(mean_product, normed)
        if not ctx.counts:  # samples that are not of the batch: the statistics don't depend on them
            inner = torch.zeros_like(inner)
        images = inner * _along(scale * weight.to(normed.dtype), normed)
        # This rank's own sums: gradients of weight and bias are added up with all others, after the backward pass.
        return images.to(gradients[0].dtype), sums[1].to(weight.dtype), sums[0].to(weight.dtype), None, None


def _merged(local: torch.Tensor, comm: AxisComm) -> torch.Tensor:
    """Return count, mean and variance over all ranks, (3, channels), from this rank's count, mean and squares."""
    # In a trial without values nothing is sent, but the traffic is entered.
    if isinstance(local, FakeTensor):
        comm.ledger.add("all_gather", comm.axis, local.nbytes)
        return local.clone()
    gathered = [local]
    if comm.size > 1:
        gathered = comm.all_gather_along(local, [local.shape[0]] * comm.size, 0)
    count, mean, squares = gathered[0].unbind()
    for statistics in gathered[1:]:
        other_count, other_mean, other_squares = statistics.unbind()
        # 1 where both counts are 0: a rank that only keeps step must not make NaN of the mean.
        total = (count + other_count).clamp(min=1)
        difference = other_mean - mean
        squares = squares + other_squares + difference.square() * count * other_count / total
        mean = mean + difference * other_count / total
        count = count + other_count
    return torch.stack([count, mean, squares / count.clamp(min=1)])


def _all_reduce(tensor: torch.Tensor, comm: AxisComm) -> None:
    if isinstance(tensor, FakeTensor):
        comm.ledger.add("all_reduce", comm.axis, tensor.nbytes)
    else:
        comm.all_reduce(tensor)


def _along(values: torch.Tensor, images: torch.Tensor) -> torch.Tensor:
    return values.view(1, -1, *([1] * (images.dim() - 2)))


def share_statistics(model: torch.nn.Module, comm: AxisComm) -> SharedStatistics | None:
    """Make every batch norm of `model` take its statistics over `comm`; None where there is nothing to do."""
    shared = statistics_to_share(model, comm)
    if shared is not None:
        share_by(model, shared)
    return shared


def share_by(model: torch.nn.Module, shared: SharedStatistics) -> None:
    """Make every batch norm of `model` take its statistics by `shared`."""
    for module in _norms(model):
        module.forward = SharedForward(module, shared)  # type: ignore[assignment, method-assign]


def statistics_to_share(model: torch.nn.Module, comm: AxisComm) -> SharedStatistics | None:
    """Return the statistics that a model's batch norms would share over `comm`; None if there is nothing to share."""
    return SharedStatistics(comm) if comm.size > 1 and _norms(model) else None


def takes_batch(model: torch.nn.Module) -> torch.nn.Module | None:
    """Return a batch norm of `model` that takes statistics of a batch, as the model is now; None if there is none."""
    for module in _norms(model):
        if module.training or module.running_mean is None:
            return module
    return None


def without_sync(model: torch.nn.Module) -> None:
    """Have each SyncBatchNorm of `model` compute as a batch norm, whose statistics are shared only by `share_by`.

    By itself it takes those of all ranks, which may see the same samples or none, and only on a GPU.

    Raises:
        WorkloadError: one is to share with a part of the ranks.
    """
    for name, module in model.named_modules():
        if not isinstance(module, torch.nn.SyncBatchNorm):
            continue
        group: Any = module.process_group
        if group is not None and dist.is_initialized() and dist.get_world_size(group) != dist.get_world_size():
            raise WorkloadError(
                "batch norm takes the statistics of the whole batch, whatever the number of ranks",
                f"{name or 'the model'} is a SyncBatchNorm with a process_group of {dist.get_world_size(group)} of "
                f"{dist.get_world_size()} ranks",
                "make it without process_group; for statistics of fewer samples declare a Workload with "
                "micro_batch_size",
            )
        if type(module).forward is torch.nn.SyncBatchNorm.forward:
            # A method, so that a copy of the model calls it with the copy.
            module.forward = MethodType(_NORM.forward, module)  # type: ignore[assignment, method-assign]


def _norms(model: torch.nn.Module) -> list[BatchNorm]:
    return [module for module in model.modules() if isinstance(module, _NORM)]


@dataclass(frozen=True, slots=True)
class SharedForward:
    """The replacement of a batch norm's `forward`."""

    module: Any
    shared: SharedStatistics

    def __call__(self, images: torch.Tensor) -> torch.Tensor:
        """Run the module's forward, with statistics of all ranks where it takes those of the batch."""
        module = self.module
        keeps = module.training and module.track_running_stats
        takes_batch = module.training or module.running_mean is None
        if not takes_batch:
            result: torch.Tensor = type(module).forward(module, images)
            return result
        check_images(module, images)
        momentum = 0.0 if module.momentum is None else module.momentum
        if keeps and module.num_batches_tracked is not None:
            module.num_batches_tracked.add_(1)
            if module.momentum is None:  # a cumulative mean
                momentum = 1.0 / float(module.num_batches_tracked)
        mean, variance = (module.running_mean, module.running_var) if keeps else (None, None)
        return self.shared.batch_norm(images, module.weight, module.bias, mean, variance, True, momentum, module.eps)
