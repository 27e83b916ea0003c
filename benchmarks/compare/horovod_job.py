"""A rank of `scripts/bench horovod`: sums the tensors of a ResNet-50 by each contestant in turn."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

import paceline.horovod.torch as hvd

TENSORS = 100
_STAGES = ((3, 64), (4, 128), (6, 256), (3, 512))  # blocks and width


def resnet50_shapes() -> list[tuple[int, ...]]:
    """Return the shapes of the parameters of a ResNet-50 (He et al., 2016), in their order."""
    shapes: list[tuple[int, ...]] = [(64, 3, 7, 7), (64,), (64,)]
    channels = 64
    for blocks, width in _STAGES:
        for block in range(blocks):
            for shape in ((width, channels, 1, 1), (width, width, 3, 3), (4 * width, width, 1, 1)):
                shapes += [shape, (shape[0],), (shape[0],)]
            if block == 0:
                shapes += [(4 * width, channels, 1, 1), (4 * width,), (4 * width,)]
            channels = 4 * width
    return [*shapes, (1000, channels), (1000,)]


def sizes() -> list[int]:
    """Return the numbers of the 100 largest tensors, in the order of the model."""
    counts = [torch.Size(shape).numel() for shape in resnet50_shapes()]
    smallest = sorted(counts)[-TENSORS]
    return [count for count in counts if count >= smallest][-TENSORS:]


def by_names(tensors: list[torch.Tensor]) -> None:
    """Sum by Horovod's names, a call for each tensor."""
    handles = [hvd.allreduce_async_(tensor, name=str(index), op=hvd.Sum) for index, tensor in enumerate(tensors)]
    for handle in handles:
        hvd.synchronize(handle)


def by_group(tensors: list[torch.Tensor]) -> None:
    """Sum by Horovod's names, as one group."""
    hvd.grouped_allreduce_(tensors, name="group", op=hvd.Sum)


def by_raw_calls(tensors: list[torch.Tensor]) -> None:
    """Sum by torch.distributed, a call for each tensor of the list."""
    for work in [dist.all_reduce(tensor, async_op=True) for tensor in tensors]:
        work.wait()


def by_raw_flat(tensors: list[torch.Tensor]) -> None:
    """Sum by torch.distributed, in one flat copy."""
    flat = torch.cat([tensor.view(-1) for tensor in tensors])
    dist.all_reduce(flat)
    for tensor, part in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(part.view_as(tensor))


CONTESTANTS: dict[str, Callable[[list[torch.Tensor]], None]] = {
    "names": by_names,
    "group": by_group,
    "raw_calls": by_raw_calls,
    "raw_flat": by_raw_flat,
}


def main(rounds: int, output: Path) -> None:
    """Measure on this rank; rank 0 writes the seconds of each contestant as JSON."""
    hvd.init()
    own = [torch.full((count,), 1.0 + hvd.rank()) for count in sizes()]
    seconds: dict[str, list[float]] = {name: [] for name in CONTESTANTS}
    wanted = sum(1.0 + rank for rank in range(hvd.size()))
    for turn in range(rounds + 1):
        for name, sum_all in CONTESTANTS.items():
            tensors = [tensor.clone() for tensor in own]
            hvd.barrier()
            began_s = time.perf_counter()
            sum_all(tensors)
            taken_s = time.perf_counter() - began_s
            if any(not bool((tensor == wanted).all()) for tensor in tensors):
                raise RuntimeError(f"{name} has not summed to {wanted}")
            if turn > 0:  # connections and memory are made by the first
                seconds[name].append(taken_s)
    if hvd.rank() == 0:
        output.write_text(json.dumps(seconds))


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
