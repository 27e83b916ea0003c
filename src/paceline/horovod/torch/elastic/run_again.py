"""Call a function again after a failure, from the last commit.

A collective that fails within living processes is answered here. After a process has died, or where hosts have come or
gone, Paceline starts all ranks again, and the first `sync` goes on from the last commit, which is on the disk.
"""

from __future__ import annotations

import functools
import signal
import threading
from collections.abc import Callable
from typing import Any

from paceline.horovod.common.exceptions import HorovodInternalError, HostsUpdatedInterrupt
from paceline.horovod.torch.elastic.state import JobStopsInterrupt, State
from paceline.horovod.torch.mpi_ops import init, shutdown
from paceline.train.base_job import Stopped


def run(func: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a function of a state, so that it is called again after a failure, from the last commit.

    Args:
        func: a function whose first argument is the state.

    Returns:
        A function that begins with `state.sync()`. After HorovodInternalError the state is restored; after
        HostsUpdatedInterrupt it stays as it is. Then `init` is called anew, and the state's reset callbacks.

    Examples:
        >>> @hvd.elastic.run
        ... def train(state):
        ...     for state.epoch in range(state.epoch, epochs):
        ...         train_one_epoch(state)
        ...         state.commit()
    """

    @functools.wraps(func)
    def call_until_done(state: State, *args: Any, **kwargs: Any) -> Any:
        if state.is_kept and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, lambda *_: state.ask_to_stop())
        skips_sync = False
        while True:
            try:
                if not skips_sync:
                    state.sync()
                return func(state, *args, **kwargs)
            except JobStopsInterrupt:
                state.save()
                state.keep()
                state.write_stopped()
                raise Stopped(0) from None
            except HorovodInternalError:
                state.restore()
                skips_sync = False
            except HostsUpdatedInterrupt as interrupt:
                skips_sync = interrupt.skip_sync
            shutdown()
            init()
            state.on_reset()

    return call_until_done
