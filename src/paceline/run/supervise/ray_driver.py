"""Ask Ray for a placement group, and run a rank in an actor of each bundle.

Started as `python -m paceline.run.supervise.ray_driver`.

It reads a `launch.ray.RayJob` as JSON from its standard input, and writes what the ranks write, each line after its
rank. Ray carries calls and results by its own means; a rank's tensors go over torch's sockets, as everywhere.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable, Sequence
from typing import Any

from paceline.launch.local import rank_environment
from paceline.launch.process_exit import die_with_parent
from paceline.rendezvous.interfaces import address_towards, open_listener

POLL_S = 0.1  # seconds between two questions to the actors
FAILED = 1  # the exit code of a rank whose actor has gone


class HostActor:
    """An actor that runs one rank's process and keeps its output."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[bytes] | None = None
        self.lines: list[str] = []
        self.lock = threading.Lock()
        self.listener: socket.socket | None = None

    def node_address(self) -> str:
        """Return the address of the node on which the actor runs."""
        import ray.util

        find: Any = ray.util.get_node_ip_address
        return str(find())

    def listen(self, nodes: Sequence[str]) -> str:
        """Open the socket of the ranks' store, at an address that other nodes reach, and return HOST:PORT."""
        node = self.node_address()
        remote_nodes = [address for address in nodes if address != node]
        address = address_towards(remote_nodes[0]) if remote_nodes else "127.0.0.1"
        self.listener = open_listener(address, 0)
        return f"{address}:{self.listener.getsockname()[1]}"

    def start(self, program: Sequence[str], folder: str, environment: dict[str, str], local_size: int) -> None:
        """Start the rank."""
        full_environment = {**rank_environment(local_size), **environment}
        passed = []
        if self.listener is not None:
            passed = [self.listener.fileno()]
            full_environment["PACELINE_LISTENER"] = str(passed[0])
        self.process = subprocess.Popen(
            list(program),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env=full_environment,
            pass_fds=passed,
            cwd=folder if os.path.isdir(folder) else None,
            preexec_fn=die_with_parent,
        )
        if self.listener is not None:
            self.listener.close()
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self) -> None:
        assert self.process is not None
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self.lock:
                self.lines.append(line.decode(errors="replace").rstrip("\n"))

    def poll(self) -> tuple[list[str], int | None]:
        """Return the lines since the last call, and the exit code; None: the rank still runs."""
        assert self.process is not None
        status = self.process.poll()
        if status is not None:
            self.reader.join(1.0)  # its last lines
        with self.lock:
            lines = self.lines
            self.lines = []
        return lines, status


def main() -> int:
    """Run the job, and return the first exit code that is not 0."""
    die_with_parent()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what is below is cleared up
    job = json.loads(sys.stdin.read())
    try:
        import ray
    except ModuleNotFoundError:
        print("to run on Ray, the package ray is needed, but it is not installed: pip install 'paceline[ray]'")
        return 2
    options: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False}
    if job["address"] == "local":
        # A cluster only for this job: on loopback, with as many CPUs as its ranks take, and no dashboard.
        num_cpus = sum(bundle.get("CPU", 0) for bundle in job["bundles"])
        # A folder of its own: a socket's path has 107 characters at most.
        folder = tempfile.mkdtemp(prefix="paceline-ray-", dir="/tmp" if os.path.isdir("/tmp") else None)
        options["_temp_dir"] = folder
        ray.init(num_cpus=max(1, int(num_cpus)), include_dashboard=False, _node_ip_address="127.0.0.1", **options)
    else:
        ray.init(address=job["address"], **options)
    try:
        return _run(ray, job)
    finally:
        ray.shutdown()
        if "_temp_dir" in options:
            shutil.rmtree(options["_temp_dir"], ignore_errors=True)


def _run(ray: Any, job: dict[str, Any]) -> int:
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    group = ray.util.placement_group(job["bundles"], strategy=job["strategy"])
    if not group.wait(job["wait_s"]):
        have = ray.cluster_resources()
        print(
            f"Ray has not placed {len(job['bundles'])} ranks of {job['bundles'][0]} within {job['wait_s']:g} s: {have}"
        )
        return 2
    kind = ray.remote(HostActor)
    actors = []
    for number, bundle in enumerate(job["bundles"]):
        configured = kind.options(
            num_cpus=bundle.get("CPU", 0),
            num_gpus=bundle.get("GPU", 0),
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=number),
        )
        actors.append(configured.remote())
    _start(ray, actors, job)
    return _watch(ray, actors)


def _start(ray: Any, actors: Sequence[Any], job: dict[str, Any]) -> None:
    """Start every rank with its place: ranks of one node follow each other, in the order in which nodes come."""
    node_of_actor = ray.get([actor.node_address.remote() for actor in actors])
    nodes = list(dict.fromkeys(node_of_actor))  # in the order in which they come first
    order = sorted(range(len(actors)), key=lambda number: (nodes.index(node_of_actor[number]), number))
    master = ray.get(actors[order[0]].listen.remote(nodes))
    calls = []
    for rank, number in enumerate(order):
        on_node = [at for at in order if node_of_actor[at] == node_of_actor[number]]
        place = {
            "PACELINE_RANK": str(rank),
            "PACELINE_WORLD_SIZE": str(len(actors)),
            "PACELINE_LOCAL_RANK": str(on_node.index(number)),
            "PACELINE_LOCAL_SIZE": str(len(on_node)),
            "PACELINE_CROSS_RANK": str(nodes.index(node_of_actor[number])),
            "PACELINE_CROSS_SIZE": str(len(nodes)),
            "PACELINE_MASTER": master,
        }
        environment = {**job["environment"], **place}
        start = actors[number].start
        calls.append(start.remote(job["program"], job["working_folder"], environment, len(on_node)))
    ray.get(calls)
    # From here on a list index is a rank: `_watch` prefixes output with it.
    actors[:] = [actors[number] for number in order]  # type: ignore[index]


def _watch(ray: Any, actors: Sequence[Any]) -> int:
    """Print the ranks' output until all have ended; when one fails, the others get a moment for their own errors."""
    import time

    statuses: dict[int, int] = {}
    failed_at: float | None = None
    while len(statuses) < len(actors):
        time.sleep(POLL_S)
        for rank, seat in enumerate(actors):
            if rank in statuses:
                continue
            try:
                lines, status = ray.get(seat.poll.remote())
            except ray.exceptions.RayError as error:
                lines = [f"its actor has gone: {str(error).splitlines()[0]}"]
                status = FAILED
            for line in lines:
                print(f"[{rank}] {line}", flush=True)
            if status is not None:
                statuses[rank] = status
        if failed_at is None and any(statuses.values()):
            failed_at = time.monotonic()
        # Two seconds for the other ranks to write down what they saw; then whoever still waits for the dead is ended.
        if failed_at is not None and time.monotonic() - failed_at > 2.0:
            for seat in actors:
                ray.kill(seat)
            break
    return _exit_code(statuses.values())


def _exit_code(statuses: Iterable[int]) -> int:
    """Return the first exit code that is not 0; of a signal, as shells number it."""
    for status in statuses:
        if status:
            return status if status > 0 else 128 - status
    return 0


if __name__ == "__main__":
    sys.exit(main())
