"""`paceline bench planner`: what the planner says of memory, against what was measured here and published elsewhere.

On CPUs small models are trained under plans, their peaks of live tensors seen by torch's profiler; on a GPU models of
the size that people use, by torch's caching allocator. The profile of a Llama of seven billion parameters is timed.
Rows of a table of published measurements are predicted where `published` names one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from paceline.bench import published_table
from paceline.bench.step import machine
from paceline.nouns import module_names
from paceline.nouns.errors import UsageError
from paceline.nouns.plan import Plan

Tell = Callable[[str], None]
# The programs that the published measurements were made with: in a clone, not in the installed package.
PROGRAMS = Path(__file__).parents[3] / "benchmarks"
OTHERWISE = {"precision": "bf16", "optimizer": "sgd"}
# Model, plan and how: all seven models, both optimizers, both precisions and every axis, alone and with others.
CELLS: list[tuple[str, str, dict[str, Any]]] = [
    *((name, "replicate=1", {}) for name in ("bert", "gpt2", "llama", "t5", "vit", "cnn", "mlp")),
    *((name, "replicate=1", OTHERWISE) for name in ("bert", "cnn")),
    *((name, "replicate=1,checkpointing=full", {}) for name in ("gpt2", "llama")),
    *(("bert", "replicate=2", {}), ("t5", "shard=2", {}), ("llama", "shard=2,zero=2", OTHERWISE)),
    *(("vit", "shard=2,zero=1", {}), ("gpt2", "tensor=2", {}), ("llama", "tensor=2", OTHERWISE)),
    *(("bert", "pipeline=2", {}), ("mlp", "replicate=4", {}), ("gpt2", "replicate=2,shard=2", {})),
    *(("llama", "shard=2,tensor=2", {}), ("t5", "pipeline=2,tensor=2", {})),
]
TRIES = 3  # the profiler does not hear what other threads free: on a busy machine it may see too much
# Model, samples, words or pixels, and how: ten steps on a GPU.
GPU_CELLS: list[tuple[str, int, int, dict[str, Any]]] = [
    *(("bert", 32, 128, {}), ("bert", 16, 512, {"precision": "bf16"}), ("gpt2", 8, 512, {})),
    *(("gpt2", 16, 1024, {"precision": "bf16"}), ("llama", 4, 1024, {}), ("llama", 8, 2048, {"precision": "bf16"})),
    *(("t5", 16, 256, {}), ("vit", 64, 224, {"precision": "bf16"}), ("cnn", 16, 128, {}), ("mlp", 4096, 0, {})),
]


def run_planner(folder: Path, device: str, published: Path | None, tell: Tell) -> dict[str, Any]:
    """Run the whole comparison in `folder`.

    Args:
        folder: an empty one.
        device: "cpu", or "cuda" to measure on a GPU of this host besides.
        published: a table of measurements; None leaves its ratios out.
        tell: told what is going on.

    Returns:
        `rows` (model, plan, predicted and measured bytes), `published` (what was said of each row and why), `ratios`
        (`cpu_memory_error_max`, `profile_7b_s`, and where asked `gpu_memory_error_max`, `gpu_reserved_error_max`,
        `published_fit_accuracy`, `published_memory_error_median`), and the machine.

    Raises:
        UsageError: a GPU is asked for and there is none, or a run failed.
    """
    load_before = os.getloadavg()[0]
    if published is not None:  # both before anything takes time
        _need_the_programs()
        published_table.read(published)
    if device == "cuda":
        _need_a_gpu()
    rows = []
    for number, cell in enumerate(CELLS):
        tell(f"planner: {number + 1} of {len(CELLS)}, {cell[0]} under {cell[1]}")
        rows += check_cell(folder / str(number), cell)
    ratios: dict[str, float | None] = {"cpu_memory_error_max": max(row["error"] for row in rows)}
    if device == "cuda":
        rows += (measured := _on_gpu(tell))
        ratios["gpu_memory_error_max"] = max(row["error"] for row in measured)
        ratios["gpu_reserved_error_max"] = max(row["reserved_error"] for row in measured)
    tell("planner: a profile of 7 billion parameters")
    taken = time_7b()
    result: dict[str, Any] = {"rows": rows, "profile_7b": taken}
    ratios |= {"published_fit_accuracy": None, "published_memory_error_median": None}
    if published is not None:
        result["published"] = _predict(published)
        ratios |= result["published"].pop("ratios")
    ratios["profile_7b_s"] = taken["seconds"]
    return {**result, "ratios": ratios, "machine": machine(load_before)}


def check_cell(folder: Path, cell: tuple[str, str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Each rank's peak under a plan, rehearsed and measured.

    Raises:
        UsageError: the run failed.
    """
    name, line, parts = cell
    plan = Plan.parse(line)
    predicted = [memory["peak"] for memory in _rehearse(["cpu", name, line, json.dumps(parts)])]
    lowest: list[int] = []
    for _ in range(TRIES):
        peaks = [answer["peak"] for answer in _measure(folder, cell, plan.world_size)]
        lowest = peaks if not lowest else [min(pair) for pair in zip(lowest, peaks, strict=True)]
        if all(peak <= own for own, peak in zip(predicted, lowest, strict=True)):
            break
    return [
        {"device": "cpu", "model": name, "plan": line, "parts": parts, "rank": rank}
        | {"predicted": own, "measured": peak, "error": abs(own / peak - 1)}
        for rank, (own, peak) in enumerate(zip(predicted, lowest, strict=True))
    ]


def _measure(folder: Path, cell: tuple[str, str, dict[str, Any]], ranks: int) -> list[dict[str, Any]]:
    name, line, parts = cell
    folder.mkdir(exist_ok=True)
    script = Path(__file__).with_name("planner_peaks.py")
    runs = ["--runs", str(folder / "runs"), "--checkpoint-every", "0"]
    command = [sys.executable, "-m", module_names.COMMAND, "run", "-n", str(ranks), *runs]
    command += [str(script), name, line, json.dumps(parts), str(folder)]
    _run(command, f"{name} under {line}", {"OMP_NUM_THREADS": "1"})
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]


def _rehearse(words: Sequence[str]) -> list[dict[str, Any]]:
    """By rank, what a rehearsal says of memory."""
    command = [sys.executable, "-m", module_names.PLANNER_REHEARSAL, *words]
    return list(json.loads(_run(command, "the rehearsal", {"OMP_NUM_THREADS": "1"}).splitlines()[-1]))


def _on_gpu(tell: Tell) -> list[dict[str, Any]]:
    """Steps on a GPU of this host, each in a process of its own, and what was predicted of them."""
    rows = []
    for name, batch, length, parts in GPU_CELLS:
        tell(f"planner: {name}, {batch} x {length}, on the GPU")
        words = [name, str(batch), str(length), json.dumps(parts)]
        command = [sys.executable, "-m", module_names.PLANNER_GPU, *words]
        real = json.loads(_run(command, f"{name} on the GPU", {}).splitlines()[-1])
        (memory,) = _rehearse(["cuda", *words])
        rows.append(
            {"device": real["device"], "model": name, "batch": batch, "length": length, "parts": parts}
            | {"predicted": memory["peak"], "measured": real["allocated"]}
            | {"predicted_reserved": memory["reserved"], "measured_reserved": real["reserved"]}
            | {"error": abs(memory["peak"] / real["allocated"] - 1)}
            | {"reserved_error": abs(memory["reserved"] / real["reserved"] - 1)}
        )
    return rows


def _need_a_gpu() -> None:
    code = "import torch; print(torch.cuda.is_available())"
    if _run([sys.executable, "-c", code], "torch", {}).strip() != "True":
        raise UsageError(
            "bench planner --device cuda", "this host has no GPU that torch can use", "leave --device out, or go to one"
        )


def _need_the_programs() -> None:
    if not (PROGRAMS / "published").is_dir():
        raise UsageError(
            "bench planner --published",
            f"the programs that were measured are not in {PROGRAMS}: the installed package does not have them",
            "run it in a clone of the project, after `pip install -e .`",
        )


def _predict(published: Path) -> dict[str, Any]:
    """The table's rows; its process tells on stderr how far it is."""
    command = [sys.executable, "-m", "published.predict", str(published)]
    folders = [str(PROGRAMS), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(folders)}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment)
    if done.returncode:
        raise UsageError(f"can't predict the table {published}", "its process failed (see above)", "report this")
    return dict(json.loads(done.stdout))


def time_7b() -> dict[str, float]:
    """How long a profile of a Llama of 7 billion parameters takes, and its memory, in a process of its own."""
    began = time.monotonic()
    said = json.loads(_run([sys.executable, "-m", module_names.LLAMA_7B], "the profile", {}).splitlines()[-1])
    return {"seconds": time.monotonic() - began, "resident_bytes": said["resident_bytes"]}


def _run(command: Sequence[str], what: str, more: dict[str, str]) -> str:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PACELINE_")}
    done = subprocess.run(command, capture_output=True, text=True, env={**environment, **more})
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise UsageError(f"can't measure {what}", f"it failed: {last}", "run it alone: " + " ".join(command))
    return done.stdout


def table(result: dict[str, Any]) -> str:
    """The result as aligned lines."""
    mib = 2**20
    lines = [f"{'':<40}{'rank':>5}{'predicted MiB':>15}{'measured MiB':>14}{'off':>9}"]
    for row in result["rows"]:
        what = f"{row['model']}, {row.get('plan') or str(row['batch']) + ' x ' + str(row['length'])}"
        what += "".join(f", {value}" for value in row["parts"].values())
        lines.append(
            f"{what:<40}{row.get('rank', 0):>5}{row['predicted'] / mib:>15.2f}{row['measured'] / mib:>14.2f}"
            f"{100 * row['error']:>8.3f}%"
        )
    resident = result["profile_7b"]["resident_bytes"] / 2**30
    lines += ["", f"a profile of 7 billion parameters held {resident:.2f} GiB", ""]
    lines += [
        f"{name:<40}{'-' if value is None else format(value, '.4f'):>10}" for name, value in result["ratios"].items()
    ]
    if "published" in result:
        lines += ["", *published_table.table(result["published"])]
    return "\n".join(lines)
