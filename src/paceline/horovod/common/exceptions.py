"""Horovod's exceptions, under its names."""

from __future__ import annotations


class HorovodInternalError(RuntimeError):
    """A collective has failed, because ranks disagreed, a rank has gone, or Horovod was shut down.

    `elastic.run` restores the committed state and goes on.
    """


class HostsUpdatedInterrupt(RuntimeError):
    """Hosts have come or gone; the state is the current one.

    Args:
        skip_sync: the ranks' states are equal, as hosts have only gone.
    """

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__("hosts have been added or removed")
        self.skip_sync = skip_sync


class HorovodVersionMismatchError(ImportError):
    """A part of Horovod was built for another version of a framework; not raised here, for `except` clauses."""
