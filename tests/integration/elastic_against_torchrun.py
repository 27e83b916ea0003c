"""How long a job of two hosts stands still after a loss: our membership against torch's elastic agent.

    sudo -E PYTHONPATH=tests python tests/integration/elastic_against_torchrun.py [ROUNDS]

Two hosts are network namespaces with a real sshd. A process is killed with SIGKILL, or a host's link is cut; the time
from there to the next step anywhere is printed, in turn for both.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from paceline.nouns.module_names import FORKSERVER

from support.namespaces import hosts

LIMIT_S = 150.0
STEPS = """
import sys, time
import torch
{begin}
log = open(sys.argv[1], "a", buffering=1)
while True:
    {reduce}
    time.sleep(0.1)
    log.write(f"{{time.monotonic()}}\\n")
"""
OURS = STEPS.format(begin="import paceline\npaceline.init()", reduce="paceline.all_reduce(torch.ones(1000))")
THEIRS = STEPS.format(
    begin='import torch.distributed as dist\ndist.init_process_group("gloo")',
    reduce="dist.all_reduce(torch.ones(1000))",
)


def start_ours(made, folder: Path, log: Path) -> list[subprocess.Popen]:
    (folder / "discover").write_text("#!/bin/sh\necho h1:1\necho h2:1\n")
    (folder / "discover").chmod(0o755)
    words = [
        "run",
        "--on",
        "ssh",
        "--host-discovery-script",
        folder / "discover",
        "--min-hosts",
        "1",
        "--max-hosts",
        "2",
    ]
    words += ["--cluster", made.cluster_file(), "--runs", folder / "runs", folder / "ours.py", log]
    return [start(made, "from", folder, "-m", "paceline.cli.main", *words)]


def start_torchrun(made, folder: Path, log: Path) -> list[subprocess.Popen]:
    words = ["-m", "torch.distributed.run", "--nnodes=1:2", "--nproc-per-node=1", "--max-restarts=5"]
    words += ["--rdzv-backend=c10d", f"--rdzv-endpoint={made.address('h1')}:29400"]
    # Namespaces of one machine share its name, by which torchrun would look for its store and its workers.
    started = []
    for name in made.names:
        own = [f"--local-addr={made.address(name)}", f"--rdzv-conf=is_host={int(name == 'h1')}"]
        started.append(start(made, name, folder, *words, *own, folder / "theirs.py", log))
    return started


def start(made, name: str, folder: Path, *words: object) -> subprocess.Popen:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth0"}
    out = (folder / f"{name}.out").open("a")
    line = made.inside(name, sys.executable, *map(str, words))
    return subprocess.Popen(line, cwd=folder, env=environment, stdout=out, stderr=out)


def ranks(made, name: str) -> list[int]:
    listed = subprocess.run(["ip", "netns", "pids", f"{made.prefix}-{name}"], capture_output=True, text=True).stdout
    found = []
    for pid in map(int, listed.split()):
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(pid)
            own, parent = (" ".join(one.cmdline()) if one else "" for one in (process, process.parent()))
            is_forked = FORKSERVER in own and FORKSERVER in parent
            if is_forked or ("theirs.py" in own and "distributed.run" not in own):
                found.append(pid)
    return found


def standstill(begin, is_cut: bool) -> float | None:
    """Seconds without a step after a loss; None where none came within the limit."""
    folder = Path(tempfile.mkdtemp(prefix="elastic-"))
    (folder / "ours.py").write_text(OURS)
    (folder / "theirs.py").write_text(THEIRS)
    log = folder / "log"
    with hosts(folder / "net") as made:
        started = begin(made, folder, log)
        try:
            wait(lambda: log.exists() and len(log.read_text().split()) > 20, 90)
            if is_cut:
                made.cut("h2")
            else:
                os.kill(ranks(made, "h2")[0], 9)
            lost_at = time.monotonic()
            # What was under way still counts as before: the first step after a pause of half a second.
            came = wait(lambda: after(log, lost_at), LIMIT_S)
            return came - lost_at if came else None
        finally:
            for process in started:
                process.kill()
                process.wait()


def after(log: Path, lost_at: float) -> float | None:
    times = [float(word) for word in log.read_text().split()]
    return next((late for early, late in itertools.pairwise(times) if late > lost_at and late - early > 0.5), None)


def wait(true, seconds: float):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if found := true():
            return found
        time.sleep(0.1)
    return None


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 3
    for is_cut in (False, True):
        seen: dict[str, list[float | None]] = {"ours": [], "torchrun": []}
        for _ in range(rounds):
            seen["ours"].append(standstill(start_ours, is_cut))
            seen["torchrun"].append(standstill(start_torchrun, is_cut))
        for name, times in seen.items():
            known = [one for one in times if one is not None]
            middle = f"{statistics.median(known):.1f} s" if known else "none"
            lost = "a host is cut off" if is_cut else "a process is killed"
            told = ", ".join("-" if one is None else f"{one:.1f}" for one in times)
            print(f"{lost}: {name}: {middle} (rounds: {told}; -: none in {LIMIT_S:g} s)", flush=True)


if __name__ == "__main__":
    main()
