"""Show the demo's results: a table, the lines that the model filled in, and the curve as text and as a picture."""

from __future__ import annotations

import itertools
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paceline.demo.corpus import MASKED, MASKED_HELD_OUT
from paceline.demo.lines import Line
from paceline.nouns.table import aligned
from paceline.run.read.event_columns import EventIndex

LEVELS = "▁▂▃▄▅▆▇█"
_COLUMNS = 60
_NARROWEST = 60  # columns; a narrower terminal still wraps


def read_events(run_dir: Path, kind: str) -> list[dict[str, Any]]:
    """Return the events of one kind that a run wrote."""
    return EventIndex(run_dir / "events.jsonl").read_on().events(kind)[::-1]


def terminal_curve(losses: Sequence[float], columns: int = _COLUMNS) -> str:
    """Return the losses as one line of blocks, each the mean of a stretch of steps."""
    width = min(columns, len(losses))
    edges = [round(index * len(losses) / width) for index in range(width + 1)]
    means = [sum(losses[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]
    low, high = min(means), max(means)
    span = (high - low) or 1.0  # all losses alike: the lowest block
    blocks = ""
    for mean in means:
        level = int((mean - low) / span * len(LEVELS))
        blocks += LEVELS[min(len(LEVELS) - 1, level)]  # the highest mean would be one level more
    return f"{high:.2f} {blocks} {low:.2f}"


def draw_curve(steps: Sequence[dict[str, Any]], evaluations: Sequence[dict[str, Any]], path: Path) -> bool:
    """Write the losses, and the share of hidden tokens that is right, as a PNG; False where matplotlib is missing."""
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")  # needs no display; chosen before pyplot is imported
    from matplotlib import pyplot

    figure, (losses, shares) = pyplot.subplots(1, 2, figsize=(10, 4), dpi=110)
    at = [evaluation["step"] for evaluation in evaluations]
    losses.plot([step["step"] for step in steps], [step["loss"] for step in steps], color="#9db4c0", linewidth=0.6)
    losses.lines[0].set_label(f"training batch, {MASKED:.0%} masked")
    losses.plot(at, [row["loss"] for row in evaluations], color="#c1440e", marker="o", markersize=4)
    losses.lines[1].set_label(f"held-out text, {MASKED_HELD_OUT:.0%} masked")
    losses.set_title("loss of a masked token (nats)", fontsize=11)
    shares.plot(at, [100 * row["accuracy"] for row in evaluations], color="#c1440e", marker="o", markersize=4)
    shares.lines[0].set_label("the model")
    shares.plot(at, [100 * row["baseline"] for row in evaluations], color="#6b7a81", linestyle="--")
    shares.lines[1].set_label("always the most frequent token")
    shares.set_title("masked tokens of held-out text filled in right (%)", fontsize=11)
    shares.set_ylim(bottom=0)
    for axes in (losses, shares):
        axes.set_xlabel("optimizer step")
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", alpha=0.3)
        axes.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)
    return True


def table(rows: Sequence[tuple[str, str]]) -> str:
    """Return the rows as two aligned columns."""
    return "\n".join(aligned(rows, "  {:<}  {}"))


def summary(first: dict[str, Any], last: dict[str, Any], speeds: dict[int, float], word: str) -> list[tuple[str, str]]:
    """Return the rows of the closing table.

    Args:
        first: the evaluation before the first step.
        last: the evaluation after the last step.
        speeds: the samples per second, by number of processes.
        word: the most frequent token.
    """
    rows = [
        ("held-out loss, before", f"{first['loss']:.3f}"),
        ("held-out loss, after", f"{last['loss']:.3f}"),
        ("masked tokens right", f"{100 * last['accuracy']:.1f} %"),
        (f"always guessing {word!r}", f"{100 * last['baseline']:.1f} %"),
    ]
    for ranks, rate in sorted(speeds.items()):
        plural = "es" if ranks > 1 else ""
        value = f"{rate:.1f}"
        if ranks > 1 and 1 in speeds:
            value += f"  ({rate / speeds[1]:.2f} times one process)"
        rows.append((f"samples/s, {ranks} process{plural}", value))
    return rows


def filled_in(
    lines: Sequence[Line], before: Sequence[str], after: Sequence[str], answers: Sequence[str], encoding: str | None
) -> str:
    """Return a table of lines with the hidden token marked, and the model's guesses for it.

    Args:
        lines: the lines of held-out files.
        before: the token filled in before training, for every line.
        after: the token filled in after training, for every line.
        answers: the hidden token of every line, as the tokenizer writes it.
        encoding: the encoding of the stream that the table is printed to.
    """
    tick, *marks = ("\u2713", "\u00ab", "\u00bb") if can_show("\u2713\u00ab\u00bb", encoding) else ("yes", "<<", ">>")
    widths = [max(map(len, column)) for column in (["before", *before], ["after", *after], [tick])]
    columns = max(_NARROWEST, shutil.get_terminal_size().columns) - sum(widths) - len("    ") - len("   ")
    rows = [(f"held-out code, a token {marks[0]}hidden{marks[1]}", "before", "after", "")]
    for line, first, last, answer in zip(lines, before, after, answers, strict=True):
        rows.append((_marked(line, marks, columns), first, last, tick if last == answer else ""))
    return "\n".join(row.rstrip() for row in aligned(rows, "  {:<}  {:<}  {:<} {}"))


def _marked(line: Line, marks: Sequence[str], columns: int) -> str:
    """Return the line with its hidden token between marks; of a line too long, the part around the token."""
    prefix, suffix = line.left, line.right
    token = f"{marks[0]}{line.hidden}{marks[1]}"
    spare = max(0, columns - len(token))
    if len(prefix) + len(suffix) > spare:
        kept_right = min(len(suffix), max(spare // 3, spare - len(prefix)))
        prefix = _cut(prefix[::-1], spare - kept_right)[::-1]
        suffix = _cut(suffix, kept_right)
    return prefix + token + suffix


def _cut(text: str, columns: int) -> str:
    """Return the text's beginning, with dots for the rest."""
    return text if len(text) <= columns else (text[: max(0, columns - 3)] + "..."[: max(0, columns)])


def next_commands(text_folder: str, workload: Path) -> list[str]:
    """Return commands to go on with; `workload` is the demo's own file."""
    program, file, text = _program(), shlex.quote(str(_near(workload))), shlex.quote(text_folder)
    return [
        f"{program} verify --plan tensor=2 {file} -- {text} --batch-size 4",
        f"{program} plan --plan shard=2 --explain-memory {file} {text}",
        f"{program} examples copy train",
    ]


def _program() -> str:
    """Return the command that starts Paceline in this shell as it was started now."""
    called = Path(sys.argv[0])
    if called.name == "__main__.py":
        return shlex.join([str(_near(Path(sys.executable))), "-m", "paceline"])
    found = shutil.which("paceline")
    if found and Path(found).resolve() == called.resolve():
        return "paceline"
    return shlex.quote(str(_near(called)))


def _near(path: Path) -> Path:
    """Return the path as seen from here, if it is below."""
    path = path.absolute()  # without `resolve`: a virtual environment's Python is a link
    folder = Path.cwd()
    return path.relative_to(folder) if path.is_relative_to(folder) else path


def can_show(text: str, encoding: str | None) -> bool:
    """Return True if a stream's encoding has every character of the text."""
    try:
        text.encode(encoding or "ascii")
    except UnicodeEncodeError:
        return False
    return True
