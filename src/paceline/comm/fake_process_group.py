"""Make process groups of any size in one process, whose collectives leave tensors as they are.

For trying a step out on fake tensors: what is allocated and what is entered in the ledger is as it would
be. The one file that imports torch's fake process group, which is not public.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from paceline.nouns.patching import patched


@contextmanager
def fake_world(rank: int, size: int) -> Iterator[None]:
    """Be `rank` of `size`, alone. A mesh can be made where tensors are fake: its own bookkeeping reads values."""
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
