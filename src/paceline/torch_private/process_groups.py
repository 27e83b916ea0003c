"""torch's process group without other ranks, whose collectives leave tensors as they are: torch's own tests use it.

Nothing public makes a group of several ranks in one process.
"""

from torch.testing._internal.distributed.fake_pg import FakeStore

__all__ = ["FakeStore"]
