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

from paceline.nouns.reading import COUNT, read_by_rank, write_whole

FOLDER = "memory"
VERSION = 1
_FORM = {
    "version": COUNT, "rank": COUNT, "step": COUNT, "device": str,
    "parameters": COUNT, "buffers": COUNT, "gradients": COUNT, "optimizer state": COUNT, "peak": COUNT, "name?": str,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class RankMemory:
    """The bytes in a rank's memory.

    Attributes:
        rank: the rank whose memory it is.
        step: the step after which it was counted.
        device: the device whose memory it is, such as "cpu".
        by_kind: the bytes of "parameters", "buffers", "gradients" and "optimizer state", and as "rest" what the peak
            has beside them: activations, and on a CPU the whole process.
        peak: the peak in bytes: on a CPU the largest resident memory of the process so far, on a GPU torch's largest
            allocation.
        name: the name of the GPU, such as "NVIDIA A100-SXM4-80GB"; "" for a CPU.
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
        run_dir: the run directory of the job.
        rank: the rank of this process.
        content: the step, device, its name, peak, and bytes by kind.
    """
    path = run_dir / FOLDER / f"{rank}.json"
    with contextlib.suppress(OSError):
        path.parent.mkdir(exist_ok=True)
        write_whole(path, json.dumps({"version": VERSION, "rank": rank, **content}) + "\n")


def read_memory(run_dir: Path, ranks: int) -> list[RankMemory]:
    """Return the memory of the ranks that have written theirs, by rank.

    Args:
        run_dir: the run directory of the job.
        ranks: the number of ranks that it has now; an earlier start may have had more.
    """
    found = []
    for rank, value in read_by_rank(run_dir / FOLDER, _FORM).items():
        if rank < ranks and value["version"] == VERSION:
            kinds = {kind: value[kind] for kind in ("parameters", "buffers", "gradients", "optimizer state")}
            kinds["rest"] = max(0, value["peak"] - sum(kinds.values()))
            found.append(RankMemory(rank, value["step"], value["device"], kinds, value["peak"], value.get("name", "")))
    return found
