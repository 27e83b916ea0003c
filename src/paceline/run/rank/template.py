"""The process that imports torch once, and forks others: `python -m paceline.run.rank.template FD MODULE...`.

See `launch/process_template.py`. It ends when the socket FD closes.
"""

from __future__ import annotations

import fcntl
import json
import os
import runpy
import signal
import socket
import sys
import time
import traceback
import warnings
from typing import Any

import torch

from paceline.launch.process_exit import die_with_parent
from paceline.launch.process_template import LENGTH, MOST_DESCRIPTORS
from paceline.run.rank.forkserver import preload

_ABOVE = 256  # the least number of a descriptor's copy: received ones are moved there, so that no target is one of them


def main() -> None:
    """Fork a process for each message."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with_parent()
    control = socket.socket(fileno=int(sys.argv[1]))
    preload(sys.argv[2:])
    while True:
        head, descriptors, _, _ = socket.recv_fds(control, LENGTH.size, MOST_DESCRIPTORS)
        if len(head) < LENGTH.size:
            return
        (length,) = LENGTH.unpack(head)
        message = json.loads(control.recv(length, socket.MSG_WAITALL))  # trusted: it is our parent's
        reading, writing = os.pipe()
        first = os.fork()
        if not first:
            os.close(reading)
            _fork_again(control, writing, message, descriptors)
        os.waitpid(first, 0)  # the other has been adopted by then
        control.sendall(os.read(reading, LENGTH.size))
        for descriptor in [*descriptors, reading, writing]:
            os.close(descriptor)


def _fork_again(control: socket.socket, writing: int, message: dict[str, Any], descriptors: list[int]) -> None:
    """Leave an orphan, which its ancestor adopts, and end."""
    between = os.getpid()
    try:
        pid = os.fork()
        if pid:
            os.write(writing, LENGTH.pack(pid))
            os._exit(0)
        os.close(writing)
        while os.getppid() == between:  # else it would die with this parent
            time.sleep(0.001)
        _become(control, message, descriptors)
    finally:
        os._exit(1)


def _become(control: socket.socket, message: dict[str, Any], descriptors: list[int]) -> None:
    """Run the module as `python -m` does."""
    code: Any = 1
    try:
        if os.getppid() != message["parent"]:  # it has ended meanwhile
            return
        os.setsid()
        control.close()
        above = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, _ABOVE) for descriptor in descriptors]
        for descriptor in descriptors:
            os.close(descriptor)
        for descriptor, target in zip(above, message["targets"], strict=True):
            os.dup2(descriptor, target)
            os.close(descriptor)
        os.environ.clear()
        os.environ.update(message["env"])
        torch.set_num_threads(int(message["env"]["OMP_NUM_THREADS"]))  # torch has read the template's
        sys.argv = ["", *message["arguments"]]
        warnings.filterwarnings("ignore", category=RuntimeWarning, module="runpy")  # the module is imported already
        runpy.run_module(message["module"], run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as ended:
        code = ended.code or 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else 1)


if __name__ == "__main__":
    main()
