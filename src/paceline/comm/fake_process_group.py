"""Make process groups of any size in one process, whose collectives leave tensors as they are.

For trying a step out on fake tensors: what is allocated and what is entered in the ledger is as it would
be.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from paceline.nouns.patching import patched
from paceline.torch_private.operations import unset_fake_temporarily
from paceline.torch_private.process_groups import FakeStore


@contextmanager
def fake_world(rank: int, size: int) -> Iterator[None]:
    """Act as `rank` of `size` in one process.

    A mesh can be made where tensors are fake: its own bookkeeping reads values.
    """
    if size == 1:
        yield
        return
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    make = DeviceMesh.from_group

    def from_group(*arguments: object, **named: object) -> DeviceMesh:
        # DeviceMesh keeps its ranks in a tensor and reads them, which a fake tensor has not.
        with unset_fake_temporarily():
            return make(*arguments, **named)  # type: ignore[arg-type]

    try:
        with patched(DeviceMesh, from_group=from_group):
            yield
    finally:
        dist.destroy_process_group()
