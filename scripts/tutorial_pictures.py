"""Draw the pictures of docs/tutorial.md from what Paceline says and writes about the tutorial's model.

    python scripts/tutorial_pictures.py            # runs the commands in a temporary folder, two minutes on two cores
    python scripts/tutorial_pictures.py FOLDER     # FOLDER has the tutorial's letters.py and its runs/

Which rank holds what is in the manifests of the runs' checkpoints; memory and messages are those of
`paceline plan --json`; the timeline is that of `paceline plan --schedule-picture`.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "tutorial.md"
FOLDER = ROOT / "docs" / "tutorial"
# Named runs of the tutorial, and their plans.
RUNS = {"data": "replicate=2", "sharded": "shard=2", "tensor": "tensor=2", "pipeline": "pipeline=2"}
PLANS = ("replicate=1", "replicate=2", "shard=2,zero=1", "shard=2", "tensor=2", "pipeline=2")
SCHEDULES = ("gpipe", "1f1b")
PARAMETERS = ("letter.weight", "blocks.0.up.weight", "blocks.0.down.weight", "blocks.1.up.weight", "head.weight")
# Okabe and Ito's colours, which colour-blind readers can tell apart; all are light enough for black text.
RANKS = ("#56b4e9", "#e69f00")
BOTH = "#b8d8a8"
KINDS = {
    "parameters": "#56b4e9",
    "gathered parameters": "#a6d8f5",
    "gradients": "#e69f00",
    "gradient buckets": "#f5cf80",
    "optimizer state": "#009e73",
    "activations": "#f0e442",
    "temporaries": "#cc79a7",
    "inputs": "#bbbbbb",
}
STEPS = {"F": "#56b4e9", "B": "#e69f00", ".": "#eeeeee"}
WIDTH = 760


@dataclass
class Facts:
    """What the pictures show.

    Attributes:
        parts: by run and parameter, the file, cuts and shape of each part that a rank saved.
        plans: by plan, what `paceline plan --json --explain-memory` prints.
        timelines: by schedule, the words of each rank's line.
    """

    parts: dict[str, dict[str, list[dict[str, Any]]]]
    plans: dict[str, dict[str, Any]]
    timelines: dict[str, list[list[str]]]


class Drawing:
    """A picture of rectangles and words."""

    def __init__(self, title: str, height: int) -> None:
        self.lines = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
            'font-family="sans-serif" font-size="13">',
            f"<title>{escape(title)}</title>",
            f'<rect x="0" y="0" width="{WIDTH}" height="{height}" fill="#ffffff"/>',
        ]

    def box(self, left: float, top: float, width: float, height: float, fill: str, edge: bool = True) -> None:
        """Add a rectangle."""
        line = ' stroke="#555555"' if edge else ""
        self.lines.append(
            f'<rect x="{left:.1f}" y="{top:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{fill}"{line}/>'
        )

    def text(self, left: float, top: float, text: str, anchor: str = "start", size: int = 13) -> None:
        """Add words whose baseline is at `top`."""
        self.lines.append(
            f'<text x="{left:.1f}" y="{top:.1f}" text-anchor="{anchor}" font-size="{size}" fill="#000000">'
            f"{escape(text)}</text>"
        )

    def legend(self, left: float, top: float, colours: dict[str, str], step: float) -> None:
        """Add a row of colours and what they mean."""
        for index, (name, colour) in enumerate(colours.items()):
            self.box(left + index * step, top - 11, 12, 12, colour)
            self.text(left + index * step + 17, top, name, size=12)

    def svg(self) -> str:
        """Return the picture."""
        return "\n".join([*self.lines, "</svg>", ""])


def letters() -> str:
    """Return the tutorial's file."""
    (text,) = re.findall(r"^<!-- file: letters.py -->\n```python\n(.*?)^```$", PAGE.read_text(), re.M | re.S)
    return str(text)


def printed(folder: Path, *words: str) -> str:
    """Return what a command of Paceline's prints in `folder`."""
    command = [sys.executable, "-m", "paceline.cli.main", *words]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(words)}: {done.stderr}")
    return done.stdout


def gather(folder: Path) -> Facts:
    """Return the facts of a folder in which the tutorial's jobs have run."""
    parts = {}
    for run in RUNS:
        (manifest,) = sorted((folder / "runs" / run / "checkpoints").glob("*/manifest.json"))[-1:]
        tensors = json.loads(manifest.read_text())["tensors"]
        parts[run] = {name: tensors[f"model/{name}"]["parts"] for name in PARAMETERS}
    plans = {}
    for plan in PLANS:
        plans[plan] = json.loads(printed(folder, "plan", "--plan", plan, "--explain-memory", "--json", "letters.py"))
    timelines = {}
    for schedule in SCHEDULES:
        plan = f"pipeline=2,schedule={schedule},micro_batches=4"
        text = printed(folder, "plan", "--plan", plan, "--schedule-picture", "letters.py")
        timelines[schedule] = [line.split() for line in re.findall(r"^rank +\d+ +(.*)$", text, re.M)]
    return Facts(parts, plans, timelines)


def draw_parts(facts: Facts) -> str:
    """Draw which rank holds which part of five parameters, under each plan."""
    drawing = Drawing("Which rank holds which part of a parameter", 40 + 105 * len(RUNS) + 30)
    for column, name in enumerate(PARAMETERS):
        drawing.text(150 + 122 * column + 52, 22, name, "middle", 11)
    for row, (run, plan) in enumerate(RUNS.items()):
        top = 36 + 105 * row
        drawing.text(10, top + 42, plan, size=14)
        for column, name in enumerate(PARAMETERS):
            draw_parameter(drawing, 150 + 122 * column, top, plan, facts.parts[run][name])
    drawing.legend(150, 40 + 105 * len(RUNS) + 14, {"rank 0": RANKS[0], "rank 1": RANKS[1], "both ranks": BOTH}, 110)
    return drawing.svg()


def draw_parameter(drawing: Drawing, left: float, top: float, plan: str, parts: list[dict[str, Any]]) -> None:
    """Draw one parameter, cut as the parts say that were saved."""
    width, height = 104, 84
    axis = plan.split("=")[0]
    if len(parts) == 1:
        # A checkpoint has equal copies once. A stage of a pipeline has no copy; along the other axes all ranks have.
        rank = int(re.findall(r"rank-(\d+)", parts[0]["file"])[0])
        drawing.box(left, top, width, height, RANKS[rank] if axis == "pipeline" else BOTH)
        drawing.text(left + width / 2, top + 47, str(rank) if axis == "pipeline" else "both", "middle")
        return
    for part in parts:
        rank = int(re.findall(r"rank-(\d+)", part["file"])[0])
        ((dim, _, index, count),) = part["placement"]["cuts"]
        box = [left, top, width, height]
        box[2 + (dim == 0)] /= count
        box[dim == 0] += box[2 + (dim == 0)] * index
        drawing.box(*box, RANKS[rank])
        drawing.text(box[0] + box[2] / 2, box[1] + box[3] / 2 + 5, str(rank), "middle")


def draw_memory(facts: Facts) -> str:
    """Draw what each rank's memory is for between two steps, and at its peak."""
    drawing = Drawing("Memory of a rank between two steps and at its peak", 32 + 52 * bars(facts) + 62)
    largest = max(rank["peak"] for plan in facts.plans.values() for rank in plan["memory"]["ranks"])
    drawing.text(165, 18, "upper bar: between two steps; lower bar: at the peak of a step", size=12)
    top = 32
    for plan, said in facts.plans.items():
        for rank in said["memory"]["ranks"]:
            several = len(said["memory"]["ranks"]) > 1
            drawing.text(10, top + 24, "one process" if plan == "replicate=1" else plan)
            if several:
                drawing.text(10, top + 40, f"rank {rank['rank']}", size=11)
            for index, held in enumerate((rank["between"], rank["at_peak"])):
                draw_bar(drawing, top + 21 * index, held, largest)
            top += 52
    kinds = list(KINDS.items())
    drawing.legend(20, top + 22, dict(kinds[:4]), 180)
    drawing.legend(20, top + 46, dict(kinds[4:]), 180)
    return drawing.svg()


def bars(facts: Facts) -> int:
    """Return how many ranks the picture of memory shows."""
    return sum(len(plan["memory"]["ranks"]) for plan in facts.plans.values())


def draw_bar(drawing: Drawing, top: float, held: dict[str, int], largest: int) -> None:
    """Draw one bar of kinds of memory, and their sum."""
    left = 165.0
    for kind, colour in KINDS.items():
        width = held.get(kind, 0) / largest * 500
        if width >= 0.5:
            drawing.box(left, top, width, 18, colour, edge=False)
        left += width
    drawing.text(left + 6, top + 14, f"{sum(held.values()) / 2**20:.1f} MiB", size=12)


def draw_messages(facts: Facts) -> str:
    """Draw what is sent in a step, by collective."""
    rows = [(plan, line) for plan, said in facts.plans.items() for line in said["traffic"]]
    rows = [(plan, line) for plan, line in rows if line["payload_bytes"] >= 1024]  # others are sums of a few numbers
    drawing = Drawing("Messages of a step, by collective", 20 + 30 * len(rows))
    largest = max(line["payload_bytes"] for _, line in rows)
    before = ""
    for index, (plan, line) in enumerate(rows):
        top = 10 + 30 * index
        drawing.text(10, top + 17, plan if plan != before else "")
        before = plan
        stage = f", stage {line['stage']}" if line["collective"] == "send" else ""
        drawing.text(135, top + 17, line["collective"] + stage, size=12)
        width = line["payload_bytes"] / largest * 330
        drawing.box(255, top + 3, width, 20, "#56b4e9", edge=False)
        calls = f"{line['calls']} call{'s' * (line['calls'] > 1)}"
        drawing.text(255 + width + 6, top + 18, f"{line['payload_bytes'] / 2**20:.2f} MiB in {calls}", size=12)
    return drawing.svg()


def draw_timeline(facts: Facts) -> str:
    """Draw which micro-batch each stage of the pipeline works on, tick by tick."""
    drawing = Drawing("Timeline of a pipeline of two stages", 30 + 110 * len(SCHEDULES) + 20)
    for index, (schedule, ranks) in enumerate(facts.timelines.items()):
        top = 14 + 110 * index
        drawing.text(10, top + 12, f"schedule={schedule}", size=14)
        for rank, ticks in enumerate(ranks):
            drawing.text(10, top + 44 + 36 * rank, f"rank {rank}")
            for tick, work in enumerate(ticks):
                drawing.box(75 + 60 * tick, top + 24 + 36 * rank, 58, 30, STEPS[work[0]])
                label = "waits" if work == "." else work
                drawing.text(104 + 60 * tick, top + 44 + 36 * rank, label, "middle", 12)
    names = {"F forward of a micro-batch": STEPS["F"], "B its backward": STEPS["B"]}
    drawing.legend(75, 14 + 110 * len(SCHEDULES) + 18, names, 210)
    return drawing.svg()


def draw(facts: Facts) -> dict[str, str]:
    """Return the pictures by the names of their files."""
    return {
        "parts.svg": draw_parts(facts),
        "memory.svg": draw_memory(facts),
        "messages.svg": draw_messages(facts),
        "timeline.svg": draw_timeline(facts),
    }


def main() -> None:
    """Make the pictures anew."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(sys.argv[1] if len(sys.argv) > 1 else temporary)
        if len(sys.argv) == 1:
            (folder / "letters.py").write_text(letters())
            for run, plan in RUNS.items():
                printed(folder, "run", "--job", run, "--plan", plan, "letters.py")
        FOLDER.mkdir(exist_ok=True)
        for name, text in draw(gather(folder)).items():
            (FOLDER / name).write_text(text)
            print(FOLDER / name)


if __name__ == "__main__":
    main()
