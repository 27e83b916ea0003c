"""Measure what the comparison of the first step adds to a job, from its command to its end, beside --no-check.

    python benchmarks/first_step.py                 # the demo, README's file, the loops, the examples, the Trainers
    python benchmarks/first_step.py gpt gan         # some
    python benchmarks/first_step.py --rounds 5

Each file trains with two processes, with the comparison and without in turn. Printed is the median of each, and of the
differences of each round, in seconds, and what the job said of its first step.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
COMMAND = Path(sys.executable).with_name("paceline")
SAID = "paceline: first step "

FILES: dict[str, tuple[str, ...]] = {
    "demo": ("src/paceline/demo/demo_workload.py", "DEMO_TEXT", "--steps", "40"),
    "README": ("examples/train.py",),
    "contracts": ("examples/contracts/workload.py", "--fold", "0", "--steps", "20"),
    "distil": ("examples/distil/workload.py", "--teacher-steps", "20", "--steps", "20", "--no-baseline"),
    "embed": ("examples/embed/workload.py", "--steps", "20"),
    "forecast": ("examples/forecast/workload.py", "--steps", "20", "--windows", "20"),
    "gpt": ("examples/gpt/workload.py", "--steps", "20", "--tokens", "0"),
    "logs": ("examples/logs/workload.py", "--steps", "20"),
    "racer": ("examples/racer/workload.py", "--steps", "64"),
    "typographic": ("examples/typographic/workload.py", "--steps", "20"),
    "zero": ("examples/zero/workload.py", "--warm-up", "5", "--steps", "5"),
    **{path.stem: (f"examples/loops/{path.name}",) for path in sorted((EXAMPLES / "loops").glob("*.py"))},
    "Lightning": ("examples/lightning/lightning_module.py",),
    "transformers": ("examples/finetune.py",),
    "peft": ("examples/lora.py",),
}


def run(name: str, runs: Path, options: Sequence[str]) -> tuple[float, str]:
    """Train a file; return the seconds from the command to its end, and what was said of the first step.

    Raises:
        SystemExit: the job failed.
    """
    file, *arguments = (str(runs / "demo-text") if word == "DEMO_TEXT" else word for word in FILES[name])
    began_s = time.monotonic()
    ended = subprocess.run(
        [COMMAND, "run", "-n", "2", "--runs", runs, *options, ROOT / file, *arguments],
        cwd=runs,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    took_s = time.monotonic() - began_s
    if ended.returncode:
        raise SystemExit(f"{name} {' '.join(options)}: exit code {ended.returncode}\n{ended.stdout}{ended.stderr}")
    said = [line.split(SAID)[1] for line in (ended.stdout + ended.stderr).splitlines() if SAID in line]
    return took_s, ", ".join(said)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(FILES)} (default all)")
    parser.add_argument("--rounds", type=int, default=3, help="of which the median is taken (default 3)")
    given = parser.parse_args()
    if given.rounds < 1:
        parser.error(f"--rounds {given.rounds}: write 1 or more")
    unknown = [name for name in given.names if name not in FILES]
    if unknown:
        parser.error(f"no such file: {', '.join(unknown)}; there are {', '.join(FILES)}")
    names = given.names or list(FILES)
    print(f"{'':14}{'--no-check':>12}{'checked':>12}{'difference':>12}  said")
    with tempfile.TemporaryDirectory() as folder:
        runs = Path(folder)
        if "demo" in names:
            demo = [COMMAND, "demo", "--steps", "1", "--runs", runs]
            subprocess.run(demo, cwd=runs, check=True, capture_output=True)
        for name in names:
            rounds = []
            said = ""
            for _ in range(given.rounds):
                plain_s, _nothing = run(name, runs, ["--no-check"])
                checked_s, said = run(name, runs, [])
                rounds.append((plain_s, checked_s, checked_s - plain_s))
            plain_s, checked_s, more_s = map(statistics.median, zip(*rounds, strict=True))
            print(f"{name:14}{plain_s:10.2f} s{checked_s:10.2f} s{more_s:10.2f} s  {said}", flush=True)


if __name__ == "__main__":
    main()
