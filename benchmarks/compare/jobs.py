"""`scripts/bench jobs`: whole small jobs through each library's own launcher, on a quiet machine and on a busy one.

A step of a small model takes some 15 ms, so what a launcher and a library cost beside it is large. Beside busy
processes it also counts how the system shares the cores: Linux shares them between sessions first (autogroup), and
launchers differ in whether their ranks have a session each.

Every contestant trains the same GPT (`small_gpt.py`) on two ranks, in turn, first alone and then beside the busy
processes. A ratio is Paceline's throughput over the other's: the median over the rounds of that round's ratio.
"""

from __future__ import annotations

import json
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from compare.startup import alone, median_ratio, progress
from compare.step import INSTALL, machine, version
from paceline.nouns import module_names
from paceline.nouns.errors import UsageError
from paceline.nouns.table import aligned

_FILE = Path(__file__).with_name("small_gpt.py")
LIBRARIES = ("paceline", "ddp", "accelerate", "lightning")
SETTINGS = ("quiet", "busy")
# Computes until its parent is another process than the one whose number it got: then the benchmark was killed.
_SPIN = "import os, sys\nwhile os.getppid() == int(sys.argv[1]):\n    for _ in range(10**6): pass\n"

RANKS = 2
_LAST_LINES = 12  # of what a job that failed printed
BATCH = 32  # samples of a step, over all ranks: see small_gpt.py

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
    _check_request(rounds, steps, busy)
    load_before = os.getloadavg()[0]
    rates = _no_measurements()
    durations = _no_measurements()
    began_s = time.monotonic()
    num_jobs = rounds * len(SETTINGS) * len(LIBRARIES)
    num_done = 0
    for number in range(rounds):
        # Forwards and backwards, so that nobody always follows the same neighbour.
        libraries = LIBRARIES if number % 2 == 0 else LIBRARIES[::-1]
        for setting in SETTINGS:
            with busy_processes(busy if setting == "busy" else 0):
                for library in libraries:
                    rate, duration_s = _run_job(folder, library, steps)
                    rates[setting][library].append(rate)
                    durations[setting][library].append(duration_s)
                    num_done += 1
                    tell(progress("jobs", num_done, num_jobs, time.monotonic() - began_s))
    rows = []
    for setting in SETTINGS:
        rows += [_row(setting, library, rates, durations) for library in LIBRARIES]
    return {
        "rows": rows,
        "ratios": ratios(rates),
        "rounds": rounds,
        "steps": steps,
        "busy": busy,
        "machine": machine(load_before),
        "versions": {name: version(name) for name in ("paceline", "torch", "accelerate", "lightning")},
    }


def _check_request(rounds: int, steps: int, busy: int) -> None:
    # Two steps at least: the first is not timed.
    for name, value, least in (("--rounds", rounds, 1), ("--steps", steps, 2), ("--busy", busy, 1)):
        if value < least:
            raise UsageError("can't measure whole jobs", f"{name} is {value}", f"write {name} {least} or more")
    for library in ("accelerate", "lightning"):
        if not version(library):
            raise UsageError(f"can't measure {library}", "it is not installed", INSTALL)


def _no_measurements() -> Measured:
    measured: Measured = {}
    for setting in SETTINGS:
        measured[setting] = {library: [] for library in LIBRARIES}
    return measured


def ratios(rates: Measured) -> dict[str, float]:
    """Return Paceline's samples per second over each other library's, by setting."""
    result = {}
    for setting, by_library in rates.items():
        for library in LIBRARIES:
            if library != "paceline":
                ratio = median_ratio(by_library["paceline"], by_library[library])
                result[f"{setting}_over_{library}"] = round(ratio, 4)
    return result


def table(result: dict[str, Any]) -> str:
    """Return the result as aligned lines."""
    rows = [("", "", "samples/s", "min", "max", "whole job s")]
    for row in result["rows"]:
        numbers = [f"{row[name]:.1f}" for name in ("samples_per_s", "min", "max", "whole_s")]
        rows.append((row["setting"], row["library"], *numbers))
    ratios = [(name, f"{value:.3f}") for name, value in result["ratios"].items()]
    where = result["machine"]
    lines = [
        *aligned(rows, "{:<8}{:<12}{:>12}{:>10}{:>10}{:>14}"),
        "",
        *aligned(ratios, "{:<32}{:>8}"),
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
    """Return the command by which a user of the library starts the job."""
    job = [str(_FILE), library, str(steps), str(folder / "mark")]
    if library == "paceline":
        run = ["-m", module_names.COMMAND, "run", "-n", str(RANKS), "--runs", str(folder / "runs")]
        return [sys.executable, *run, "--checkpoint-every", "0", *job]
    if library == "lightning":  # Fabric starts the second process itself
        return [sys.executable, *job]
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS), *job]


def _run_job(folder: Path, library: str, steps: int) -> tuple[float, float]:
    """Run a job, and return samples per second of its steps but the first, and the seconds of the whole command."""
    mark = folder / "mark"
    mark.unlink(missing_ok=True)
    command = command_of(folder, library, steps)
    # A benchmark that a launcher started must not make its jobs ranks of that launcher.
    launchers = ("PACELINE_", "TORCHELASTIC")
    environment = {key: value for key, value in os.environ.items() if not key.startswith(launchers)}
    environment["OMP_NUM_THREADS"] = "1"  # as torchrun and Paceline set it for several ranks of a host
    began_s = time.monotonic()
    ended = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=folder)
    duration_s = time.monotonic() - began_s
    result = json.loads(mark.read_text()) if mark.exists() else None
    if ended.returncode or result is None or result["steps"] != steps:
        raise UsageError(
            f"{library} should train {steps} steps on {RANKS} ranks",
            f"it did not: {last_lines_of(ended.stderr)}",
            alone(command),
        )
    return (steps - 1) * BATCH / result["seconds"], duration_s


def last_lines_of(stderr: str) -> str:
    """Return the last lines of `stderr` that have a word in them: what failed need not be the very last."""
    lines = [line.rstrip() for line in stderr.splitlines() if re.search(r"\w", line)]
    return "\n".join(lines[-_LAST_LINES:]) or "it printed nothing"


def _row(setting: str, library: str, rates: Measured, durations: Measured) -> dict[str, Any]:
    samples_per_s = rates[setting][library]
    seconds = durations[setting][library]
    return {
        "setting": setting,
        "library": library,
        "ranks": RANKS,
        "samples_per_s": round(statistics.median(samples_per_s), 2),
        "min": round(min(samples_per_s), 2),
        "max": round(max(samples_per_s), 2),
        "rounds": [round(rate, 2) for rate in samples_per_s],
        "whole_s": round(statistics.median(seconds), 3),
        "whole_rounds_s": [round(value, 3) for value in seconds],
    }
