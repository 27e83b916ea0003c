"""Write what a rank's memory holds to `memory/RANK.json` in the run directory, once for each process; and read it.

Parameters, buffers, gradients and the optimizer's state are counted by their storages, when the second step has ended:
the first one makes the state.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from paceline.nouns.errors import ReadError
from paceline.nouns.reading import COUNT, read_json

FOLDER = "memory"
VERSION = 1
_FORM = {
    "version": COUNT, "rank": COUNT, "step": COUNT, "device": str,
    "parameters": COUNT, "buffers": COUNT, "gradients": COUNT, "optimizer state": COUNT, "peak": COUNT, "name?": str,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class RankMemory:
    """What a rank's memory holds.

    Attributes:
        rank: whose.
        step: after which it was counted.
        device: whose memory, such as "cpu".
        by_kind: bytes of "parameters", "buffers", "gradients" and "optimizer state", and as "rest" what the peak has
            beside them: activations, and on a CPU the whole process.
        peak: bytes: on a CPU the largest resident memory of the process so far, on a GPU torch's largest allocation.
        name: of the GPU, such as "NVIDIA A100-SXM4-80GB"; "" for a CPU.
    """

    rank: int
    step: int
    device: str
    by_kind: Mapping[str, int]
    peak: int
    name: str = ""


def write_memory(run_dir: Path, rank: int, content: Mapping[str, int | str]) -> None:
    """Write a rank's file. Where that can't be, training goes on without.

    Args:
        run_dir: of the job.
        rank: this process's.
        content: step, device, its name, peak, and bytes by kind.
    """
    path = run_dir / FOLDER / f"{rank}.json"
    draft = path.with_name(f".{path.name}.draft")
    with contextlib.suppress(OSError):
        path.parent.mkdir(exist_ok=True)
        draft.write_text(json.dumps({"version": VERSION, "rank": rank, **content}) + "\n")
        draft.replace(path)


def read_memory(run_dir: Path, ranks: int) -> list[RankMemory]:
    """Return what the ranks of a job have written, by rank; of those that have not yet, nothing.

    Args:
        run_dir: of the job.
        ranks: how many it has now; an earlier start may have had more.
    """
    found = []
    for path in (run_dir / FOLDER).glob("*.json"):
        if not path.stem.isdecimal() or int(path.stem) >= ranks:
            continue
        try:
            value = read_json(path, _FORM)
        except ReadError:
            continue
        if value["version"] == VERSION:
            kinds = {kind: value[kind] for kind in ("parameters", "buffers", "gradients", "optimizer state")}
            kinds["rest"] = max(0, value["peak"] - sum(kinds.values()))
            name = value.get("name", "")
            found.append(RankMemory(int(path.stem), value["step"], value["device"], kinds, value["peak"], name))
    return sorted(found, key=lambda row: row.rank)
