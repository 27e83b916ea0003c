"""`paceline bench jobs`: whole small jobs through each library's own launcher, on a quiet machine and on a busy one.

A step of a small model takes some 15 ms, so what a launcher and a library cost beside it is large. Beside busy
processes it also counts how the system shares the cores: Linux shares them between sessions first (autogroup), and
launchers differ in whether their ranks have a session each.

Every contestant trains the same GPT (`small_gpt.py`) on two ranks, in turn, first alone and then beside the busy
processes. A ratio is Paceline's throughput over the other's: the median over the rounds of that round's ratio.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from paceline.bench.startup import median_ratio
from paceline.bench.step import machine, version
from paceline.nouns import module_names
from paceline.nouns.errors import UsageError

_FILE = Path(__file__).with_name("small_gpt.py")
LIBRARIES = ("paceline", "ddp", "accelerate", "lightning")
SETTINGS = ("quiet", "busy")
_SPIN = "import os, sys\nwhile os.getppid() == int(sys.argv[1]):\n    for _ in range(10**6): pass\n"

RANKS, BATCH = 2, 32  # samples of a step, over all ranks: see small_gpt.py

Measured = dict[str, dict[str, list[float]]]  # by setting, then by library: a number for each round


def run_jobs(folder: Path, rounds: int, steps: int, busy: int, tell: Callable[[str], None]) -> dict[str, Any]:
    """Run the comparison in `folder`.

    Args:
        folder: an empty folder.
        rounds: jobs of each library in each setting.
        steps: of a job.
        busy: processes that do nothing but compute, in the busy setting.
        tell: called with progress lines.

    Returns:
        `rows` (setting, library, samples_per_s by round and median, whole_s), `ratios`, the machine and versions.

    Raises:
        UsageError: a number is too small, or a library is missing or failed.
    """
    for name, value, least in (("--rounds", rounds, 1), ("--steps", steps, 2), ("--busy", busy, 1)):
        if value < least:
            raise UsageError("can't measure whole jobs", f"{name} is {value}", f"write {name} {least} or more")
    for library in ("accelerate", "lightning"):
        if not version(library):
            raise UsageError(f"can't measure {library}", "it is not installed", "pip install 'paceline[bench]'")
    load_before = os.getloadavg()[0]
    rates: Measured = {setting: {library: [] for library in LIBRARIES} for setting in SETTINGS}
    wholes: Measured = {setting: {library: [] for library in LIBRARIES} for setting in SETTINGS}
    began_s, done = time.monotonic(), 0
    for number in range(rounds):
        for setting in SETTINGS:
            with busy_processes(busy if setting == "busy" else 0):
                # Forwards and backwards, so that nobody always follows the same neighbour.
                for library in LIBRARIES[:: 1 if number % 2 == 0 else -1]:
                    rate, whole_s = _run_job(folder, library, steps)
                    rates[setting][library].append(rate)
                    wholes[setting][library].append(whole_s)
                    done += 1
                    tell(progress(done, rounds * len(SETTINGS) * len(LIBRARIES), time.monotonic() - began_s))
    return {
        "rows": [_row(setting, library, rates, wholes) for setting in SETTINGS for library in LIBRARIES],
        "ratios": ratios(rates),
        "rounds": rounds,
        "steps": steps,
        "busy": busy,
        "machine": machine(load_before),
        "versions": {name: version(name) for name in ("paceline", "torch", "accelerate", "lightning")},
    }


def ratios(rates: Measured) -> dict[str, float]:
    """Paceline's samples per second over each other library's, by setting."""
    return {
        f"{setting}_over_{library}": round(median_ratio(of["paceline"], of[library]), 4)
        for setting, of in rates.items()
        for library in LIBRARIES
        if library != "paceline"
    }


def progress(done: int, jobs: int, elapsed_s: float) -> str:
    """How far the comparison is, and how long the rest takes if it goes on so."""
    left_s = elapsed_s / done * (jobs - done)
    return f"jobs, {done} of {jobs}: {left_s:.0f} s left"


def table(result: dict[str, Any]) -> str:
    """The result as aligned lines."""
    lines = [f"{'':<8}{'':<12}{'samples/s':>12}{'min':>10}{'max':>10}{'whole job s':>14}"]
    for row in result["rows"]:
        numbers = "".join(f"{row[key]:>{width}.1f}" for key, width in (("samples_per_s", 12), ("min", 10), ("max", 10)))
        lines.append(f"{row['setting']:<8}{row['library']:<12}{numbers}{row['whole_s']:>14.1f}")
    lines.append("")
    lines += [f"{name:<32}{value:>8.3f}" for name, value in result["ratios"].items()]
    where = result["machine"]
    lines += [
        "",
        f"throughput over throughput: above 1 Paceline is faster; busy: beside {result['busy']} other processes",
        f"{where['cores']} cores, load {where['load_before']:.1f} before, {where['load_after']:.1f} after",
    ]
    return "\n".join(lines)


@contextmanager
def busy_processes(count: int) -> Iterator[None]:
    """Keep `count` processes computing, each in a session of its own as another program would be.

    They end by themselves when this process is killed.
    """
    command = [sys.executable, "-c", _SPIN, str(os.getpid())]
    processes = [subprocess.Popen(command, start_new_session=True) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.wait()


def command_of(folder: Path, library: str, steps: int) -> list[str]:
    """How a user of the library starts the job."""
    job = [str(_FILE), library, str(steps), str(folder / "mark")]
    if library == "paceline":
        run = ["-m", module_names.COMMAND, "run", "-n", str(RANKS), "--runs", str(folder / "runs")]
        return [sys.executable, *run, "--checkpoint-every", "0", *job]
    if library == "lightning":
        return [sys.executable, *job]
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS), *job]


def _run_job(folder: Path, library: str, steps: int) -> tuple[float, float]:
    """Samples per second of its steps but the first, and the seconds of the whole command."""
    mark = folder / "mark"
    mark.unlink(missing_ok=True)
    command = command_of(folder, library, steps)
    foreign = ("PACELINE_", "TORCHELASTIC")
    environment = {key: value for key, value in os.environ.items() if not key.startswith(foreign)}
    environment["OMP_NUM_THREADS"] = "1"  # as torchrun and Paceline set it for several ranks of a host
    began_s = time.monotonic()
    ended = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=folder)
    whole_s = time.monotonic() - began_s
    written = json.loads(mark.read_text()) if mark.exists() else None
    if ended.returncode or written is None or written["steps"] != steps:
        last = (ended.stderr.strip().splitlines() or ["it printed nothing"])[-1]
        raise UsageError(
            f"{library} should train {steps} steps on {RANKS} ranks",
            f"it did not: {last}",
            "run it alone: " + " ".join(command),
        )
    return (steps - 1) * BATCH / written["seconds"], whole_s


def _row(setting: str, library: str, rates: Measured, wholes: Measured) -> dict[str, Any]:
    taken = rates[setting][library]
    return {
        "setting": setting,
        "library": library,
        "ranks": RANKS,
        "samples_per_s": round(statistics.median(taken), 2),
        "min": round(min(taken), 2),
        "max": round(max(taken), 2),
        "rounds": [round(rate, 2) for rate in taken],
        "whole_s": round(statistics.median(wholes[setting][library]), 3),
        "whole_rounds_s": [round(value, 3) for value in wholes[setting][library]],
    }
