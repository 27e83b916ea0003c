"""`scripts/bench planner`: compare predicted memory with what was measured here and what was published elsewhere.

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

from compare import published_table
from compare.startup import alone, progress
from compare.step import machine
from paceline.nouns import module_names
from paceline.nouns.errors import UsageError
from paceline.nouns.plan import Plan
from paceline.nouns.table import aligned

Tell = Callable[[str], None]
OTHERWISE = {"precision": "bf16", "optimizer": "sgd"}
# Model, plan and parts of the Workload: all seven models, both optimizers, both precisions, and every axis alone and
# with others.
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
# Model, samples, words or pixels, and parts of the Workload: ten models on a GPU.
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
        tell: called with progress lines.

    Returns:
        `rows` (model, plan, predicted and measured bytes), `published` (the prediction of each row, or why there is
        none), `ratios` (`cpu_memory_error_max`, `profile_7b_s`, and where asked `gpu_memory_error_max`,
        `gpu_reserved_error_max`, `published_fit_accuracy`, `published_memory_error_median`), and the machine.

    Raises:
        UsageError: a GPU is asked for and there is none, or a run failed.
    """
    load_before = os.getloadavg()[0]
    # What was asked for is checked before anything takes time.
    if published is not None:
        published_table.read(published)
    if device == "cuda":
        _need_a_gpu()

    rows = []
    began_s = time.monotonic()
    for number, cell in enumerate(CELLS):
        what = f"planner: {cell[0]} under {cell[1]}"
        tell(progress(what, number, len(CELLS), time.monotonic() - began_s))
        rows += check_cell(folder / str(number), cell)
    ratios: dict[str, float | None] = {"cpu_memory_error_max": max(row["error"] for row in rows)}

    if device == "cuda":
        gpu_rows = _on_gpu(tell)
        rows += gpu_rows
        ratios["gpu_memory_error_max"] = max(row["error"] for row in gpu_rows)
        ratios["gpu_reserved_error_max"] = max(row["reserved_error"] for row in gpu_rows)

    tell("planner: a profile of 7 billion parameters")
    profile = time_7b()
    result: dict[str, Any] = {"rows": rows, "profile_7b": profile}

    ratios["published_fit_accuracy"] = None
    ratios["published_memory_error_median"] = None
    if published is not None:
        result["published"] = _predict(published)
        ratios |= result["published"].pop("ratios")
    ratios["profile_7b_s"] = profile["seconds"]
    return {**result, "ratios": ratios, "machine": machine(load_before)}


def check_cell(folder: Path, cell: tuple[str, str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Simulate and measure a plan, and return each rank's predicted and measured peak, in bytes.

    Raises:
        UsageError: the run failed.
    """
    name, line, parts = cell
    plan = Plan.parse(line)
    predicted = [memory["peak"] for memory in _simulate(["cpu", name, line, json.dumps(parts)])]

    # The lowest of some tries counts: what goes wrong in a measurement only makes it larger (see TRIES).
    lowest: list[int] = []
    for _ in range(TRIES):
        peaks = [answer["peak"] for answer in _measure(folder, cell, plan.world_size)]
        if lowest:
            peaks = [min(pair) for pair in zip(lowest, peaks, strict=True)]
        lowest = peaks
        has_excess = any(peak > prediction for prediction, peak in zip(predicted, lowest, strict=True))
        if not has_excess:
            break

    rows = []
    for rank, (prediction, peak) in enumerate(zip(predicted, lowest, strict=True)):
        row = {"device": "cpu", "model": name, "plan": line, "parts": parts, "rank": rank}
        row |= {"predicted": prediction, "measured": peak, "error": abs(prediction / peak - 1)}
        rows.append(row)
    return rows


def _measure(folder: Path, cell: tuple[str, str, dict[str, Any]], ranks: int) -> list[dict[str, Any]]:
    """Train under a plan, and return what each rank measured."""
    name, line, parts = cell
    folder.mkdir(exist_ok=True)
    script = Path(__file__).with_name("planner_peaks.py")
    runs = ["--runs", str(folder / "runs"), "--checkpoint-every", "0"]
    command = [sys.executable, "-m", module_names.COMMAND, "run", "-n", str(ranks), *runs]
    command += [str(script), name, line, json.dumps(parts), str(folder)]
    _run(command, f"{name} under {line}", {"OMP_NUM_THREADS": "1"})
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]


def _simulate(arguments: Sequence[str]) -> list[dict[str, Any]]:
    """Return the memory that a simulation predicts, by rank."""
    command = [sys.executable, "-m", "compare.planner_simulation", *arguments]
    # One thread, as the ranks have: the size of kernels' buffers depends on it.
    output = _run(command, "the simulation", {"OMP_NUM_THREADS": "1"})
    return list(_last_line(output))


def _last_line(output: str) -> Any:
    """Return what the last line of a program's output says in JSON; libraries may print before it."""
    return json.loads(output.splitlines()[-1])


def _on_gpu(tell: Tell) -> list[dict[str, Any]]:
    """Train on a GPU of this host and simulate the same, and return measured and predicted bytes.

    Each model has a process of its own: the caching allocator keeps what an earlier one reserved.
    """
    rows: list[dict[str, Any]] = []
    began_s = time.monotonic()
    for name, batch, length, parts in GPU_CELLS:
        what = f"planner: {name}, {batch} x {length}, on the GPU"
        tell(progress(what, len(rows), len(GPU_CELLS), time.monotonic() - began_s))
        arguments = [name, str(batch), str(length), json.dumps(parts)]
        command = [sys.executable, "-m", "compare.planner_gpu", *arguments]
        measured = _last_line(_run(command, f"{name} on the GPU", {}))
        (predicted,) = _simulate(["cuda", *arguments])
        row = {"device": measured["device"], "model": name, "batch": batch, "length": length, "parts": parts}
        row |= {
            "predicted": predicted["peak"],
            "measured": measured["allocated"],
            "predicted_reserved": predicted["reserved"],
            "measured_reserved": measured["reserved"],
            "error": abs(predicted["peak"] / measured["allocated"] - 1),
            "reserved_error": abs(predicted["reserved"] / measured["reserved"] - 1),
        }
        rows.append(row)
    return rows


def _need_a_gpu() -> None:
    # In a process of its own: this one does not import torch.
    code = "import torch; print(torch.cuda.is_available())"
    if _run([sys.executable, "-c", code], "torch", {}).strip() != "True":
        raise UsageError(
            "bench planner --device cuda", "this host has no GPU that torch can use", "leave --device out, or go to one"
        )


def _predict(published: Path) -> dict[str, Any]:
    """Predict the rows of a table; the process prints its progress to stderr, which is not caught."""
    command = [sys.executable, "-m", "published.predict", str(published)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise UsageError(f"can't predict the table {published}", "its process failed (see above)", "report this")
    return dict(json.loads(done.stdout))


def time_7b() -> dict[str, float]:
    """Profile a Llama of 7 billion parameters in a process of its own, and return its time and memory."""
    began_s = time.monotonic()
    answer = _last_line(_run([sys.executable, "-m", "compare.llama_7b"], "the profile", {}))
    return {"seconds": time.monotonic() - began_s, "resident_bytes": answer["resident_bytes"]}


def _run(command: Sequence[str], what: str, variables: dict[str, str]) -> str:
    """Run a program with some variables set, and return its output.

    Raises:
        UsageError: it failed.
    """
    # Settings of this shell must not change what is measured.
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PACELINE_")}
    done = subprocess.run(command, capture_output=True, text=True, env={**environment, **variables})
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        last_line = lines[-1] if lines else "it said nothing"
        raise UsageError(f"can't measure {what}", f"it failed: {last_line}", alone(command))
    return done.stdout


def table(result: dict[str, Any]) -> str:
    """Return the result as aligned lines."""
    mib = 2**20
    rows = [("", "rank", "predicted MiB", "measured MiB", "off")]
    for row in result["rows"]:
        size = row.get("plan") or f"{row['batch']} x {row['length']}"  # rows of a GPU have no plan
        cells = [row["model"], size, *(str(value) for value in row["parts"].values())]
        sizes = (f"{row['predicted'] / mib:.2f}", f"{row['measured'] / mib:.2f}")
        rows.append((", ".join(cells), row.get("rank", 0), *sizes, f"{100 * row['error']:.3f}%"))
    lines = aligned(rows, "{:<40}{:>5}{:>15}{:>14}{:>9}")
    resident = result["profile_7b"]["resident_bytes"] / 2**30
    lines += ["", f"a profile of 7 billion parameters held {resident:.2f} GiB", ""]
    ratios = [(name, "-" if value is None else f"{value:.4f}") for name, value in result["ratios"].items()]
    lines += aligned(ratios, "{:<40}{:>10}")
    if "published" in result:
        lines += ["", *published_table.table(result["published"])]
    return "\n".join(lines)
