"""List the runs of a folder, show one, compare some, or remove some.

paceline runs                          a line for each, the newest first
paceline runs show JOB                 its plan, losses, evaluations, speed, memory and checkpoints
paceline runs compare JOB JOB ...      side by side
paceline runs rm JOB ...               after a question; --yes removes without one

JOB is a run's name in the folder of --runs, or the path of its run directory. All of it is read from files, also while
a job runs.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from paceline.checkpoint.owner import check_free
from paceline.nouns.errors import UsageError
from paceline.nouns.table import aligned, printable
from paceline.run.prediction import rates, read_predictions
from paceline.run.read.runs import (
    QUIET_S,
    RUNNING,
    SILENT,
    Run,
    difference,
    find_folder,
    is_run,
    list_runs,
    read_details,
    read_plan,
    read_run,
    size_of,
)
from paceline.run.read.times import recent_splits
from paceline.run.shown import compared, facts_of, nbytes, number, scores, steps, when
from paceline.train.memory_file import read_memory

_SHOWN = 20  # runs in the list without --all
_EVALUATIONS = 5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    _add_common(parser)
    parser.set_defaults(runs=Path("runs"), json=False, all=False)
    parser.add_argument("--all", action="store_true", help=f"list all runs, and not the newest {_SHOWN}")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB")
    for name, count, summary_of in (
        ("show", None, "show one run"),
        ("compare", "+", "put runs side by side"),
        ("rm", "+", "remove runs with their checkpoints"),
    ):
        verb = verbs.add_parser(name, help=summary_of, allow_abbrev=False)
        verb.add_argument("jobs", nargs=count, metavar="JOB", help="a run's name, or its run directory")
        _add_common(verb)
        if name == "rm":
            verb.add_argument("--yes", action="store_true", help="remove without a question")
            verb.add_argument("--dry-run", action="store_true", help="say what would be removed")


def _add_common(parser: argparse.ArgumentParser) -> None:
    """Add the flags that stand before a verb or after it: a default of the second would hide the first."""
    default = argparse.SUPPRESS
    parser.add_argument("--runs", type=Path, default=default, metavar="DIR", help="where runs are kept (default runs)")
    parser.add_argument("--json", action="store_true", default=default, help="print JSON on stdout")


def run(arguments: argparse.Namespace) -> int:
    """List, show, compare or remove."""
    if arguments.verb is not None and arguments.all:
        raise UsageError("--all", f"`paceline runs {arguments.verb}` names its runs", "leave --all out")
    if arguments.verb == "show":
        return _show(arguments)
    if arguments.verb == "compare":
        return _compare(arguments)
    if arguments.verb == "rm":
        return _remove(arguments)
    return _list(arguments)


def _list(arguments: argparse.Namespace) -> int:
    found = list_runs(arguments.runs)
    if arguments.json:
        print(json.dumps([run.to_json() for run in found]))
        return 0
    if not found:
        print(f"paceline runs: there is none in {arguments.runs}", file=sys.stderr)
        return 0
    shown = found if arguments.all else found[:_SHOWN]
    rows: list[Sequence[str]] = [("job", "status", "started", "steps", "loss", "evaluation", "ranks", "plan")]
    for run in shown:
        rows.append(
            (
                run.name,
                run.status,
                when(run.started),
                steps(run),
                number(run.loss),
                scores(run.evaluation),
                str(run.ranks or "-"),
                run.plan or "-",
            )
        )
    _print(aligned(rows, "{:<}  {:<}  {:<}  {:>}  {:>}  {:<}  {:>}  {}"))
    num_hidden = len(found) - len(shown)
    if num_hidden:
        print(f"paceline runs: {num_hidden} older ones; --all lists them", file=sys.stderr)
    return 0


def _show(arguments: argparse.Namespace) -> int:
    from paceline.demo.report import terminal_curve

    folder = find_folder(arguments.runs, arguments.jobs)
    run, details = read_run(folder), read_details(folder)
    if arguments.json:
        predicted = [asdict(prediction) for prediction in read_predictions(run.folder, run.plan)]
        print(json.dumps({**run.to_json(), **details.to_json(), "predicted": predicted}))
        return 0
    rows = [("job", run.name), *compared([facts_of(run, details)]), *_predicted(run)]
    _print(aligned(rows, "{:<}  {}"))
    lines = []
    if details.finite_losses:
        lines.append(f"loss over the steps  {terminal_curve(details.finite_losses)}")
    for step, ratios in details.evaluations[-_EVALUATIONS:]:
        lines.append(f"evaluation at step {step}  {scores(ratios)}")
    for name, (step, value) in sorted(details.logged.items()):
        lines.append(f"logged at step {step}  {name} {number(value)}")
    _print(lines)
    return 0


def _predicted(run: Run) -> list[tuple[str, str]]:
    """Return the predictions for the ranks' steps, and the rates of computation by them."""
    predictions = read_predictions(run.folder, run.plan)
    rows = []
    for prediction in predictions:
        sent = sum(row["bytes"] for row in prediction.traffic)
        peak = f"tensors of {nbytes(prediction.peak)} at the peak, in {prediction.phase}"
        step = f"{prediction.flops / 1e9:,.3g} GFLOP and {nbytes(sent)} sent in a step"
        rows.append((f"rank {prediction.rank}, predicted", f"{peak}; {step}"))
    if predictions:
        splits, memories = recent_splits(run.folder, run.ranks), read_memory(run.folder, run.ranks)
        rows += [(f"rank {rate.rank} computes", rate.text) for rate in rates(predictions, splits, memories)]
    return rows


def _compare(arguments: argparse.Namespace) -> int:
    folders = [find_folder(arguments.runs, job) for job in arguments.jobs]
    if len(folders) < 2:
        raise UsageError(f"compare {arguments.jobs[0]}", "that is one run", "name two or more")
    found = [(read_run(folder), read_details(folder)) for folder in folders]
    differing = difference([read_plan(folder) for folder in folders])
    if arguments.json:
        runs = [{**run.to_json(), **details.to_json()} for run, details in found]
        print(json.dumps({"runs": runs, "plans_differ": differing}))
        return 0
    rows = [("", *(run.name for run, _ in found)), *compared([facts_of(run, details) for run, details in found])]
    rows += [(f"plan: {name}", *(str(value) for value in values)) for name, values in differing.items()]
    _print(aligned(rows, "  ".join(["{:<}", *["{:>}"] * len(found)])))
    return 0


def _remove(arguments: argparse.Namespace) -> int:
    if arguments.dry_run and arguments.yes:
        raise UsageError("--dry-run with --yes", "one removes nothing, the other without a question", "choose one")
    found = {}
    for job in arguments.jobs:
        folder = find_folder(arguments.runs, job)
        found[folder.resolve()] = folder
    for folder in found.values():
        _check_may_remove(folder)
    sizes = {folder: size_of(folder) for folder in found.values()}
    if not arguments.json:
        _print([f"{folder}  {nbytes(size)}" for folder, size in sizes.items()])
    if not arguments.dry_run and not arguments.yes and not _agrees(len(sizes), arguments.json):
        print("paceline runs: nothing was removed", file=sys.stderr)
        return 1
    if not arguments.dry_run:
        for folder in sizes:
            _remove_one(folder)
    if arguments.json:
        listed = [{"run_dir": str(folder), "bytes": size} for folder, size in sizes.items()]
        print(json.dumps({"removed": [] if arguments.dry_run else listed, "found": listed}))
    else:
        verb = "would be removed" if arguments.dry_run else "removed"
        print(f"paceline runs: {len(sizes)} {verb}, {nbytes(sum(sizes.values()))}", file=sys.stderr)
    return 0


def _check_may_remove(folder: Path) -> None:
    """Raise UsageError for a run that may be training, for a link, and for a folder that is no run."""
    asked = f"rm {folder}"
    if folder.is_symlink():
        raise UsageError(asked, "it is a link to another folder", "remove the link, or name that folder")
    if not is_run(folder):
        found = "its job.json or plan.json is not that of a run, or damaged"
        raise UsageError(asked, found, f"look into it, and remove it yourself: rm -r {folder}")
    check_free(folder, asked)  # also of one that is only about to start, and has a result still
    status = read_run(folder).status
    if status == RUNNING:
        fix = "stop it first (Ctrl-C, or `kill` the command that started it)"
        raise UsageError(asked, f"it has no result, and had an event within the last {QUIET_S:.0f} s", fix)
    if status == SILENT:
        found = "it has no result: it may be in a long step, here or on another host"
        raise UsageError(asked, found, f"if you know that it was killed, remove it yourself: rm -r {folder}")


def _remove_one(folder: Path) -> None:
    """Remove a run.

    Raises:
        UsageError: a part of it can't be removed.
    """
    try:
        shutil.rmtree(folder)
    except OSError as error:
        found = f"{error.filename} can't be removed ({error.strerror}); what stood before it is gone"
        raise UsageError(f"rm {folder}", found, "make that removable, and try again") from None


def _agrees(count: int, as_json: bool) -> bool:
    """Ask the user whether to remove; without a terminal nobody can answer."""
    if as_json or not sys.stdin.isatty():
        found = "--json is for programs" if as_json else "standard input is no terminal"
        raise UsageError("rm without --yes", f"nobody can be asked: {found}", "write --yes if you are sure")
    question = f"remove {'it' if count == 1 else f'these {count}'}, with the checkpoints? [y/N] "
    print(question, end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def _print(lines: Sequence[str]) -> None:
    """Print lines whose texts come from files and names of folders."""
    for line in lines:
        print(printable(line).rstrip())
