"""Flips one bit of one file of a run directory, then resumes the run or exports its model.

Either the flip is without effect and the numbers are those of an undisturbed run, bit for bit; or it is noticed: the
checkpoint before is used and the numbers are the same, or the command refuses in one error. Anything else is wrong:
other numbers, a Python traceback, a flipped checkpoint that is used without a word.

    python benchmarks/trials/bit_flips.py --count 60 --seed 0 --json result.json
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy

sys.path.insert(0, str(Path(__file__).parent))

from console import Progress, table

LIMIT_S = 300.0  # of one command
EVERY, FAILS_AT, STEPS = 4, 15, 20
WORKLOAD = f"""
import os
import time
import torch
import paceline

class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 40
    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        return torch.randn(6, dtype=torch.float64, generator=generator), torch.tensor(float(index % 3)).double()

def loss(model, batch):
    x, y = batch
    return ((model(x)[:, 0] - y) ** 2).sum(), len(y)

workload = paceline.Workload(
    model=lambda: torch.nn.Sequential(
        torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Dropout(0.1), torch.nn.Linear(16, 1)
    ),
    loss=loss,
    optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=0.05),
    scheduler=lambda optimizer: torch.optim.lr_scheduler.MultiStepLR(optimizer, [6, 14], gamma=0.5),
    data=Numbers(),
    batch_size=8,
    epochs=4,
    precision="float64",
)

if __name__ == "__main__":
    job = paceline.distribute(workload)
    for batch in job.batches():
        job.step(batch)
        if os.environ.get("FAILS") and job.step_number == {FAILS_AT}:
            last = "runs/a/checkpoints/step-{(FAILS_AT - 1) // EVERY * EVERY:08d}/manifest.json"
            until = time.monotonic() + 60
            while not os.path.exists(last) and time.monotonic() < until:
                time.sleep(0.01)  # it is written in the background
            raise BaseException("as asked")  # after an Exception the last step would be saved
"""
Weights = dict[str, np.ndarray]


@dataclass
class Outcome:
    """What one flip led to.

    Attributes:
        word: "same": no effect; "noticed": an earlier checkpoint was used; "refused": an error; "wrong".
    """

    number: int
    file: str
    bit: int
    command: str
    word: str
    said: str


def paceline(folder: Path, *words: str, fails: bool = False) -> subprocess.CompletedProcess[str]:
    """Run the command in a folder, with both outputs in one text."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **({"FAILS": "1"} if fails else {})}
    command = [sys.executable, "-m", "paceline.cli.main", *words]
    return subprocess.run(
        command,
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        timeout=LIMIT_S,
    )


def exported(folder: Path, source: Path) -> Weights:
    """The weights of a checkpoint, or of a run's newest."""
    target = folder / "exported"
    shutil.rmtree(target, ignore_errors=True)
    done = paceline(folder, "export", "--to", "safetensors", str(source), str(target))
    if done.returncode:
        raise RuntimeError(f"the export of {source} failed:\n{done.stdout}")
    return dict(safetensors.numpy.load_file(target / "model.safetensors"))


def are_equal(one: Weights, other: Weights) -> bool:
    """Whether both have the same tensors, bit for bit."""
    return one.keys() == other.keys() and all(one[name].tobytes() == other[name].tobytes() for name in one)


@dataclass
class Undisturbed:
    """A run that failed in its middle, and what it should become.

    Attributes:
        folder: where the file is, and the run in runs/a.
        ranks: of the run.
        by_step: the weights of each checkpoint.
        last: the weights after the last step.
    """

    folder: Path
    ranks: int
    by_step: dict[int, Weights]
    last: Weights


def prepare(folder: Path, ranks: int) -> Undisturbed:
    """Run the job until it fails, and once to its end."""
    (folder / "train.py").write_text(WORKLOAD)
    words = ["run", "-n", str(ranks), "--job", "a", "--checkpoint-every", str(EVERY), "train.py"]
    done = paceline(folder, *words, fails=True)
    run = folder / "runs" / "a"
    steps = sorted(int(path.name.removeprefix("step-")) for path in (run / "checkpoints").glob("step-*"))
    if steps != list(range(EVERY, FAILS_AT, EVERY)):
        raise RuntimeError(f"the run has the checkpoints {steps}:\n{done.stdout}")
    whole = folder / "whole"
    shutil.copytree(folder / "runs", whole / "runs")
    shutil.copy(folder / "train.py", whole)
    done = paceline(whole, "run", "--resume", "--job", "a", "-n", str(ranks), "train.py")
    if done.returncode:
        raise RuntimeError(f"the undisturbed run can't be resumed:\n{done.stdout}")
    by_step = {step: exported(folder, run / "checkpoints" / f"step-{step:08d}") for step in steps}
    return Undisturbed(folder, ranks, by_step, exported(folder, whole / "runs" / "a"))


def files_of(run: Path) -> list[Path]:
    """The files of the run in which a bit can be flipped."""
    return sorted(path for path in run.rglob("*") if path.is_file() and path.stat().st_size)


def flip(path: Path, dice: random.Random) -> int:
    """Flip a random bit; its number in the file."""
    content = bytearray(path.read_bytes())
    bit = dice.randrange(8 * len(content))
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)
    return bit


def is_clear(text: str) -> bool:
    """Whether an output has an error of three parts, and no traceback."""
    return "\n  found: " in text and "fix: " in text and "Traceback" not in text


def judge_resume(folder: Path, run: Path, file: str, good: Undisturbed, words: Sequence[str]) -> tuple[str, str]:
    """Resume, and compare the end with that of the undisturbed run."""
    done = paceline(folder, *words)
    text = done.stdout
    if "Traceback" in text:
        return "wrong", text
    if done.returncode:
        return ("refused" if is_clear(text) else "wrong"), text
    end = exported(folder, run)
    if not are_equal(end, good.last):
        return "wrong", f"other weights at the end\n{text}"
    newest = f"checkpoints/step-{max(good.by_step):08d}/"
    if "is passed over" in text:
        return "noticed", text
    return ("wrong", f"it was not noticed\n{text}") if file.startswith(newest) else ("same", text)


def judge_export(folder: Path, run: Path, file: str, good: Undisturbed) -> tuple[str, str]:
    """Export, and compare with the checkpoint that it says it took."""
    target = folder / "out"
    done = paceline(folder, "export", "--to", "safetensors", "--json", str(run), str(target))
    text = done.stdout
    if "Traceback" in text:
        return "wrong", text
    if done.returncode:
        return ("refused" if is_clear(text) else "wrong"), text
    said = json.loads([line for line in text.splitlines() if line.startswith("{")][-1])
    weights = safetensors.numpy.load_file(target / "model.safetensors")
    if not are_equal(dict(weights), good.by_step.get(said["step"], {})):
        return "wrong", f"other weights than those of step {said['step']}\n{text}"
    is_newest = said["step"] == max(good.by_step)
    if is_newest and file.startswith(f"checkpoints/step-{said['step']:08d}/"):
        return "wrong", f"a flipped checkpoint was used\n{text}"
    return ("same" if is_newest else "noticed"), text


def try_flip(number: int, seed: int, good: Undisturbed) -> Outcome:
    """One flip in a copy of the run."""
    dice = random.Random(f"{seed} {number}")
    folder = good.folder / "trial"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(good.folder / "runs", folder / "runs")
    shutil.copy(good.folder / "train.py", folder)
    run = folder / "runs" / "a"
    for path in (run / "job.json",):  # the file that it names is the copy's
        path.write_text(path.read_text().replace(str(good.folder / "train.py"), str(folder / "train.py")))
    newest = f"step-{max(good.by_step):08d}"
    chosen = [path for path in files_of(run) if newest in path.parts] if dice.random() < 0.4 else files_of(run)
    path = dice.choice(chosen)
    file = str(path.relative_to(run))
    bit = flip(path, dice)
    command = dice.choice(["export", "resume", "resume the newest"])
    try:
        if command == "export":
            word, said = judge_export(folder, run, file, good)
        else:
            named = ["--job", "a"] if command == "resume" else []
            words = ["run", "--resume", *named, "-n", str(good.ranks), "train.py"]
            word, said = judge_resume(folder, run, file, good, words)
    except (RuntimeError, subprocess.TimeoutExpired) as error:
        word, said = "wrong", str(error)
    return Outcome(number, file, bit, command, word, said)


def shown(outcomes: Sequence[Outcome]) -> str:
    """How often which kind of file led to what, and what was wrong."""
    words = ("same", "noticed", "refused", "wrong")
    kinds = Counter((Path(one.file).suffix if "step-" in one.file else one.file, one.word) for one in outcomes)
    rows = [[kind, *[kinds[kind, word] for word in words]] for kind in sorted({kind for kind, _ in kinds})]
    lines = [table(["file", *words], rows)]
    for one in outcomes:
        if one.word == "wrong":
            lines.append(f"wrong: number {one.number}, bit {one.bit} of {one.file}, {one.command}:\n{one.said[-2000:]}")
    return "\n".join(lines)


def parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    """The arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=60, metavar="N", help="flips (60)")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="of the flips (0)")
    parser.add_argument("--ranks", type=int, default=2, metavar="R", help="of the run (2)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what each flip led to")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the trial. 0: nothing was wrong."""
    arguments = parsed(argv)
    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory(prefix="bit-flips-") as name:
        good = prepare(Path(name), arguments.ranks)
        progress = Progress("flips", arguments.count)
        for number in range(arguments.count):
            outcomes.append(try_flip(number, arguments.seed, good))
            progress.show(number + 1, sum(one.word == "wrong" for one in outcomes))
    wrong = sum(one.word == "wrong" for one in outcomes)
    print(shown(outcomes))
    print(f"{arguments.count} flips, seed {arguments.seed}: {wrong} wrong")
    if arguments.json:
        result: dict[str, Any] = {"count": arguments.count, "seed": arguments.seed, "wrong": wrong}
        arguments.json.write_text(json.dumps({**result, "flips": [asdict(one) for one in outcomes]}, indent=1) + "\n")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
