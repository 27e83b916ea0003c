"""Hands made-up and damaged inputs to every reader of Paceline, in one process.

Each input is accepted, or refused with one of Paceline's errors, within limits of processor time and memory. Anything
else is wrong: another exception, an input that takes too long, or one that fills the memory.

    python benchmarks/trials/fuzz_readers.py --count 20000 --seed 0 --json result.json

The same seed gives the same inputs; `--only NAME --number N` repeats one.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from console import Progress, table
from fuzz_inputs import changed
from fuzz_targets import Target, all_targets

from paceline.nouns.errors import PacelineError

SECONDS = 2.0  # of processor time, for one input
MEMORY_MIB = 512  # more than the process has before
LONGEST_ERROR = 6500  # characters: an error is for people


class TooSlow(BaseException):
    """An input took longer than the limit. No Exception: no reader may take it for one of its own."""


@dataclass
class Count:
    """What became of one reader's inputs."""

    accepted: int = 0
    refused: int = 0
    slowest_s: float = 0.0
    wrong: list[dict[str, Any]] = field(default_factory=list)


@contextlib.contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raise TooSlow in the block after so much processor time."""

    def late(number: int, frame: FrameType | None) -> None:
        raise TooSlow(f"it took more than {seconds:g} s")

    before = signal.signal(signal.SIGVTALRM, late)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def try_input(target: Target, content: bytes, folder: Path, seconds: float = SECONDS) -> tuple[str, str, float]:
    """Hand one input to a reader.

    Returns:
        "accepted", "refused" or "wrong"; what was raised, in a line; the processor time that it took.
    """
    folder.mkdir()
    began_s = time.process_time()
    try:
        with limited(seconds), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            target.read(content, folder)
        outcome, said = "accepted", ""
    except (PacelineError, *target.allowed) as error:
        outcome, said = "refused", str(error)
        if len(said) > LONGEST_ERROR:
            outcome, said = "wrong", f"an error of {len(said)} characters: {said[:200]}"
    except (Exception, TooSlow) as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        outcome, said = "wrong", f"{type(error).__name__}: {str(error)[:200]} ({where.filename}:{where.lineno})"
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return outcome, said, time.process_time() - began_s


def input_of(target: Target, seed: int, number: int) -> bytes:
    """The input of this number."""
    dice = random.Random(f"{seed} {target.name} {number}")
    return changed(dice.choice(list(target.seeds)), dice)


def limit_memory(mebibytes: int) -> None:
    """Let allocations fail that go so far beyond what the process has."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * os.sysconf("SC_PAGE_SIZE") + mebibytes * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.getrlimit(resource.RLIMIT_AS)[1]))


def run_trial(targets: Sequence[Target], arguments: argparse.Namespace, folder: Path) -> dict[str, Count]:
    """Hand every reader its inputs, in turn; what became of them."""
    counts = {target.name: Count() for target in targets}
    progress = Progress("inputs", arguments.count)
    wrong = 0
    for number in range(arguments.count):
        target = targets[number % len(targets)]
        content = input_of(target, arguments.seed, number)
        outcome, said, took_s = try_input(target, content, folder / "input", arguments.seconds)
        count = counts[target.name]
        count.slowest_s = max(count.slowest_s, took_s)
        if outcome == "wrong":
            wrong += 1
            count.wrong.append({"number": number, "said": said, "input": repr(content[:300])})
        elif outcome == "accepted":
            count.accepted += 1
        else:
            count.refused += 1
        progress.show(number + 1, wrong)
    return counts


def check_seeds(targets: Sequence[Target], folder: Path) -> list[str]:
    """The first inputs that a reader does not accept: the trial would then only see refusals."""
    faults = []
    for target in targets:
        outcomes = [try_input(target, content, folder / "input", 60.0) for content in target.seeds]
        if "accepted" not in [outcome for outcome, _, _ in outcomes]:
            faults.append(f"{target.name}: {outcomes[0][1]}")
    return faults


def shown(targets: Sequence[Target], counts: dict[str, Count]) -> str:
    """The table, and under it what was wrong."""
    rows = []
    for target in targets:
        count = counts[target.name]
        slowest = f"{1000 * count.slowest_s:.0f}"
        rows.append([target.name, target.source, count.accepted, count.refused, len(count.wrong), slowest])
    lines = [table(["reader", "source", "accepted", "refused", "wrong", "slowest ms"], rows)]
    for name, count in counts.items():
        for one in count.wrong[:3]:
            lines.append(f"wrong: {name}, number {one['number']}: {one['said']}\n  {one['input']}")
    return "\n".join(lines)


def parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    """The arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=20_000, metavar="N", help="inputs over all readers (20000)")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="of the inputs (0)")
    parser.add_argument("--seconds", type=float, default=SECONDS, help=f"of processor time for an input ({SECONDS:g})")
    parser.add_argument("--memory", type=int, default=MEMORY_MIB, help=f"MiB more than at the start ({MEMORY_MIB})")
    parser.add_argument("--only", metavar="NAME", help="one reader alone")
    parser.add_argument("--number", type=int, metavar="N", help="with --only: this input alone, with its traceback")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what became of the inputs")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the trial. 0: nothing was wrong."""
    arguments = parsed(argv)
    with tempfile.TemporaryDirectory(prefix="fuzz-readers-") as name:
        folder = Path(name)
        targets = [one for one in all_targets(folder) if arguments.only in (None, one.name)]
        if not targets:
            print(f"there is no reader {arguments.only!r}", file=sys.stderr)
            return 2
        if arguments.number is not None:
            (folder / "input").mkdir()
            targets[0].read(input_of(targets[0], arguments.seed, arguments.number), folder / "input")
            return 0
        faults = check_seeds(targets, folder)
        if faults:
            print("\n".join(["inputs that should be accepted are not:", *faults]), file=sys.stderr)
            return 1
        limit_memory(arguments.memory)
        counts = run_trial(targets, arguments, folder)
    print(shown(targets, counts))
    wrong = sum(len(count.wrong) for count in counts.values())
    print(f"{arguments.count} inputs to {len(targets)} readers, seed {arguments.seed}: {wrong} wrong")
    if arguments.json:
        facts = {target.name: {"source": target.source, **vars(counts[target.name])} for target in targets}
        result = {"count": arguments.count, "seed": arguments.seed, "wrong": wrong, "readers": facts}
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
