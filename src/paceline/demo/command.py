"""Run the demo from its first line to its table: prepare text, measure one process, train with several, report."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.demo import report
from paceline.demo.corpus import Corpus, open_tokenizer, prepare
from paceline.demo.lines import GUESSES_AFTER, GUESSES_BEFORE, LONGEST, SHORTEST, Line, choose_lines, write_lines
from paceline.nouns import module_names
from paceline.nouns.plan import Plan
from paceline.run import directory
from paceline.run.directory import RunChoice
from paceline.run.failures import format_failure
from paceline.run.supervise.progress import Screen
from paceline.run.supervise.supervised_job import run_job
from paceline.run.supervise.supervisor import JobRequest

WORKLOAD = Path(__file__).with_name("demo_workload.py")
# Imported once, before the ranks are forked.
PRELOAD = ("numpy", "torch.utils.data", module_names.DEMO_WORKLOAD)
_SPEED_STEPS = 64
_WARM_UP = 8  # steps that a speed leaves out


@dataclass(frozen=True, slots=True)
class DemoRequest:
    """The sizes of the demo, and the folder of its runs."""

    steps: int
    batch_size: int
    ranks: int
    runs: Path


class DemoFailed(Exception):
    """A job of the demo did not end well; the supervisor's exit code is in it."""

    def __init__(self, exit_code: int, text: str) -> None:
        super().__init__(text)
        self.exit_code = exit_code


def run_demo(request: DemoRequest, say: Callable[[str], None], screen: Screen) -> dict[str, Any]:
    """Run the demo.

    Args:
        request: the sizes of the demo, and the folder of its runs.
        say: a function that prints a line.
        screen: the screen that shows the jobs' progress.

    Returns:
        Everything in the table, and the paths of the results.

    Raises:
        DemoFailed: a job failed or was stopped.
        UsageError: the tokenizers library is missing.
    """
    began_s = time.monotonic()
    cores = max(1, (os.cpu_count() or 1) // request.ranks)
    os.environ.setdefault("OMP_NUM_THREADS", str(cores))  # for the single process, too
    with directory.new_run(RunChoice(runs=request.runs), Path("demo"), say) as owned:
        return _train_and_show(request, owned.folder, say, screen, began_s)


def _train_and_show(
    request: DemoRequest, folder: Path, say: Callable[[str], None], screen: Screen, began_s: float
) -> dict[str, Any]:
    say("Paceline trains a small BERT to fill in hidden tokens, on text that every Python has:")
    say("the source and docstrings of the standard library.")
    say("")
    say(f"1/3  preparing the text (once; kept in {request.runs / 'demo-text'})")
    corpus = prepare(request.runs / "demo-text")
    say(_about(corpus))
    lines = choose_lines(Path(corpus.folder))
    write_lines(lines, folder / "lines.json")
    threads = os.environ["OMP_NUM_THREADS"]
    say(f"2/3  {_SPEED_STEPS} steps with one process, for its speed ({threads} thread per process, here and below)")
    one_process_rate = _job(request, folder / "one-process", 1, ["--steps", str(_SPEED_STEPS)], screen, corpus)
    say(
        f"3/3  {request.steps} steps of {request.batch_size} sequences with {request.ranks} processes; "
        "held-out text is looked at now and then"
    )
    every = -(-request.steps // 6)  # rounded up: six evaluations at most, besides the first
    arguments = ["--steps", str(request.steps), "--evaluate-every", str(every), "--save", str(folder / "model")]
    arguments += ["--lines", str(folder / "lines.json")]
    trained_rate = _job(request, folder, request.ranks, arguments, screen, corpus)
    speeds = {1: one_process_rate, request.ranks: trained_rate}  # with one rank, the speed of the longer job
    facts = _close(folder, speeds, corpus, began_s, say, screen.out.encoding)
    facts["lines"] = _fill_in(folder, lines, corpus, say, screen.out.encoding)
    facts["next"] = report.next_commands(corpus.folder, WORKLOAD)
    say("\n".join(["", "next:", *(f"  {command}" for command in facts["next"])]))
    return facts


def _fill_in(
    folder: Path, lines: Sequence[Line], corpus: Corpus, say: Callable[[str], None], encoding: str | None
) -> list[dict[str, str]]:
    """Print the lines with the tokens filled in before and after training, and return them."""
    if not lines:
        return []
    tokenizer = open_tokenizer(Path(corpus.folder))
    before, after = (
        [tokenizer.id_to_token(guess) for guess in json.loads((folder / name).read_text())]
        for name in (GUESSES_BEFORE, GUESSES_AFTER)
    )
    answers = [tokenizer.id_to_token(line.answer) for line in lines]
    say("")
    say(report.filled_in(lines, before, after, answers, encoding))
    say(f"  Chosen by a rule: in each of {len(lines)} files the first statement of {SHORTEST} to {LONGEST} characters")
    say("  in a function; hidden is its last whole word.")
    return [
        {"file": line.file, "line": line.left + line.hidden + line.right, "hidden": answer, "before": a, "after": b}
        for line, answer, a, b in zip(lines, answers, before, after, strict=True)
    ]


def _close(
    folder: Path,
    speeds: dict[int, float],
    corpus: Corpus,
    began_s: float,
    say: Callable[[str], None],
    encoding: str | None,
) -> dict[str, Any]:
    """Draw the curve, print the table, and return its values."""
    steps = report.read_events(folder, "step")
    evaluations = report.read_events(folder, "evaluation")
    has_picture = report.draw_curve(steps, evaluations, folder / "loss.png")
    rows = report.summary(evaluations[0], evaluations[-1], speeds, corpus.most_frequent)
    took_s = time.monotonic() - began_s
    minutes, seconds = divmod(round(took_s), 60)
    rows += [
        ("time in all", f"{minutes} min {seconds} s"),
        ("run directory", str(folder)),
        ("model for transformers", str(folder / "model")),
    ]
    if has_picture:
        rows.append(("loss curve", str(folder / "loss.png")))
    say("")
    if report.can_show(report.LEVELS, encoding):
        say(f"  loss  {report.terminal_curve([step['loss'] for step in steps])}")
        say("")
    say(report.table(rows))
    return {
        "run_dir": str(folder),
        "steps": steps[-1]["step"],
        "loss_first": evaluations[0]["loss"],
        "loss_last": evaluations[-1]["loss"],
        "accuracy_first": evaluations[0]["accuracy"],
        "accuracy": evaluations[-1]["accuracy"],
        "baseline_accuracy": evaluations[-1]["baseline"],
        "samples_per_s": {str(ranks): round(rate, 2) for ranks, rate in speeds.items()},
        "model": str(folder / "model"),
        "seconds": round(took_s, 1),
        "picture": str(folder / "loss.png") if has_picture else None,
    }


def _about(corpus: Corpus) -> str:
    return (
        f"     {corpus.files} files, {corpus.text_bytes / 1e6:.1f} MB; {corpus.sequences} sequences to train on, "
        f"{corpus.held_out_sequences} from {corpus.held_out_files} held-out files"
    )


def _job(
    request: DemoRequest, folder: Path, ranks: int, options: Sequence[str], screen: Screen, corpus: Corpus
) -> float:
    """Run one job and return its samples per second."""
    for name in ("checkpoints", "failures"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    arguments = [corpus.folder, *options, "--batch-size", str(request.batch_size)]
    plan = Plan(mesh=f"replicate={ranks}")
    ending, _, _ = run_job(plan, JobRequest(WORKLOAD, arguments, ranks, folder, preload=PRELOAD), screen)
    if ending.status != "done":
        text = f"the demo was stopped; {folder}"
        if ending.cause:
            text = format_failure(ending.cause, ending.peer_count)
        raise DemoFailed(ending.exit_code or 1, text)
    return _speed_of_steps(folder)


def _speed_of_steps(folder: Path) -> float:
    """Return samples per second of only the steps: evaluations and, of enough steps, the first are left out."""
    steps = report.read_events(folder, "step")
    steps = steps[_WARM_UP:] or steps
    samples = sum(step["samples"] for step in steps)
    seconds = sum(step["seconds"] for step in steps)
    return float(samples / seconds)
