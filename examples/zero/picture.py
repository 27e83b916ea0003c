"""Draws solve rates against steps, what became of proposals, and tasks that were proposed early and late."""

from __future__ import annotations

from pathlib import Path
from typing import Any

COLORS = {"deduction": "#0072b2", "abduction": "#d55e00", "induction": "#009e73"}


def draw(result: dict[str, Any], path: Path) -> None:
    """Write the picture of a result."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    curve = result["curve"]
    figure, (rates, proposals, tasks) = pyplot.subplots(
        1, 3, figsize=(11, 3.2), width_ratios=[3, 2, 2.6], layout="constrained"
    )
    for kind, color in COLORS.items():
        points = [(point["step"], 100 * point["held_out"][kind]) for point in curve if kind in point["held_out"]]
        if points:
            rates.plot(*zip(*points, strict=True), "o-", markersize=3, color=color, label=kind)
    rates.set(xlabel="steps of self-play", ylabel="held-out tasks solved, %", ylim=(0, 100))
    rates.legend(frameon=False, fontsize="small", loc="upper left")
    rates.set_title(f"{result['data']}, {result['size']}", fontsize="medium")
    for kind, color in COLORS.items():
        points = [(point["step"], 100 * _accepted(point["proposals"][kind])) for point in curve if point["proposals"]]
        proposals.plot(*zip(*points, strict=True), color=color)
    proposals.set(xlabel="steps of self-play", ylabel="proposals accepted, %", ylim=(0, 100))
    tasks.axis("off")
    tasks.set_title("proposed tasks, and the attempts that solved them", fontsize="small", loc="left")
    tasks.text(0, 1, "\n".join(_lines(curve)), va="top", family="monospace", fontsize=8, transform=tasks.transAxes)
    for axes in (rates, proposals):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=75, metadata={"Software": None})
    pyplot.close(figure)


def _accepted(counts: dict[str, int]) -> float:
    return counts.get("accepted", 0) / max(sum(counts.values()), 1)


def _lines(curve: list[dict[str, Any]]) -> list[str]:
    points = [point for point in curve if point.get("examples")]
    lines = []
    for at in sorted({0, len(points) // 2, len(points) - 1} if points else ()):
        lines.append(f"step {points[at]['step']}")
        for each in points[at]["examples"]:
            pairs = " ".join(map("{}->{}".format, each["inputs"], each["outputs"])).replace("'", "")
            program = each["program"].strip().splitlines()
            lines.append(f"  {each['kind'][:3]}  {program[-1].strip()[:18]:5} {pairs[:20]:20} {each['rate']:4.0%}")
        lines.append("")
    return lines
