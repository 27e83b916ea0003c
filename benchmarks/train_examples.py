"""Train the examples and write the table of docs/examples.md.

    python benchmarks/train_examples.py --data DIR            # all of them
    python benchmarks/train_examples.py --data DIR gpt logs   # some; the rows of the others stay
    python benchmarks/train_examples.py --table               # only write the table, from what was measured before

DIR has a folder for each data set, as the examples' pages describe it. Each example is trained with seeds 0, 1 and 2
on two processes, and once, with seed 0, under every other plan. What comes out is in benchmarks/examples/NAME.json:
scores, seconds, memory and the machine's load of each run. Runs that end with other scores than those of two processes
make the exit code 1.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "examples"
PAGE = ROOT / "docs" / "examples.md"
BEGIN, END = "<!-- table of benchmarks/train_examples.py -->", "<!-- end of the table -->"
SEEDS = (0, 1, 2)
USUAL_PLAN = "replicate=2"


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One row of the table.

    Args:
        name: of the row, and of its results' file.
        example: its folder in examples/.
        data: the folder inside --data that the example is handed; None where it makes up its data.
        arguments: more arguments of the example.
        scores: the reported ones, as `--output` calls them, with the format of each.
        reference: what they are compared with, and where that is from.
        plans: under which it is trained once, besides two processes.
        tolerance: by which scores may differ between plans: float32 sums in another order, and what training makes of
            them.
    """

    name: str
    example: str
    data: str | None
    arguments: tuple[str, ...] = ()
    scores: Mapping[str, str] = field(default_factory=dict)
    reference: str
    plans: tuple[str, ...]
    tolerance: float


ENTRIES: tuple[Entry, ...] = (
    Entry(
        name="distil",
        example="distil",
        data="glue",
        scores={"teacher": ".3f", "student": ".3f", "alone": ".3f"},
        reference="pre-trained on books and Wikipedia: BERT 0.927, DistilBERT 0.913; tf-idf and logistic regression "
        "0.814",
        plans=("replicate=1", "shard=2", "shard=2,zero=1"),
        tolerance=0.03,
    ),
    Entry(
        name="forecast",
        example="forecast",
        data="forecast/ett",
        arguments=("--task", "etth1", "--steps", "400", "--windows", "600"),
        scores={"mse": ".4f", "mae": ".4f", "crps": ".4f", "coverage_50": ".3f", "coverage_90": ".3f"},
        reference="DeepAR in Zhou et al. 2021 (Informer), table 1, 24 hours: MSE 0.107, MAE 0.280; "
        "the last value repeated: 0.034, 0.139",
        plans=("replicate=1", "shard=2", "shard=2,zero=1", "pipeline=2"),
        tolerance=1e-2,
    ),
    Entry(
        name="gpt",
        example="gpt",
        data="tinyshakespeare",
        scores={"validation loss": ".3f"},
        reference="nanoGPT's setting for CPUs, 2,000 steps: 1.88 (its README)",
        plans=("replicate=1", "shard=2", "tensor=2"),
        tolerance=0.02,
    ),
    Entry(
        name="typographic",
        example="typographic",
        data="images/usps",
        scores={
            "accuracy, no defence": ".1%",
            "attack success, no defence": ".1%",
            "accuracy, random words": ".1%",
            "attack success, random words": ".1%",
        },
        reference="accuracy of 1 nearest neighbour 94.4 % (Hastie et al. 2009); none is published of the attack on it",
        plans=("replicate=1", "shard=2", "shard=2,zero=1", "tensor=2"),
        tolerance=0.02,
    ),
    Entry(
        name="racer",
        example="racer",
        data="deepracer",
        arguments=("--precision", "float64"),
        scores={"laps, learned": ".1%", "laps, held out": ".1%", "metres a second": ".2f"},
        reference="none is published for such a car; it drives 4 m/s at most",
        plans=("replicate=1", "shard=2", "shard=2,zero=1", "tensor=2"),
        tolerance=0.02,
    ),
    Entry(
        name="racer-cartpole",
        example="racer",
        data=None,
        arguments=("--task", "cartpole", "--precision", "float64"),
        scores={"mean return": ".1f"},
        reference="gymnasium calls CartPole-v1 solved at 475 of 500",
        plans=("replicate=1", "shard=2", "shard=2,zero=1"),
        tolerance=30,
    ),
    Entry(
        name="embed",
        example="embed",
        data="glue/STS-B",
        scores={
            "spearman_dev": ".3f",
            "spearman_test": ".3f",
            "spearman_test_untrained": ".3f",
            "recall_at_10": ".3f",
        },
        reference="Spearman on test: tf-idf of three-letter parts 0.703, untrained too; mean of GloVe vectors 0.580 "
        "(sbert.net); all-MiniLM-L6-v2, trained on a billion pairs, 0.820",
        plans=("replicate=1", "shard=2", "tensor=2"),
        tolerance=0.01,
    ),
    Entry(
        name="logs",
        example="logs",
        data="logs/deeplog_hdfs",
        scores={"precision": ".4f", "recall": ".4f", "f1": ".4f", "false_alarm_rate": ".4f"},
        reference="DeepLog on the full test set (Du et al. 2017): precision 0.95, recall 0.96, F1 0.96",
        plans=("replicate=1", "shard=2", "tensor=2"),
        tolerance=0.02,
    ),
    Entry(
        name="logs-hdfs",
        example="logs",
        data="logs/hdfs_sessions",
        arguments=("--task", "hdfs", "--linear"),
        scores={"precision": ".3f", "recall": ".3f", "f1": ".3f"},
        reference="logistic regression of event counts, same split: F1 0.690",
        plans=("replicate=1", "shard=2,zero=1", "pipeline=2"),
        tolerance=0.02,
    ),
    Entry(
        name="logs-adfa",
        example="logs",
        data="logs/adfa_ld",
        arguments=("--task", "adfa", "--linear"),
        scores={"precision": ".3f", "recall": ".3f", "f1": ".3f"},
        reference="logistic regression of 3-grams, same fold: F1 0.888",
        plans=("replicate=1", "shard=2", "shard=2,zero=1"),
        tolerance=0.03,
    ),
    Entry(
        name="contracts",
        example="contracts",
        data="solidity",
        scores={
            "mean f1": ".3f",
            "f1": ".3f",
            "auc": ".3f",
            "accuracy, RSD": ".3f",
            "f1, RSD": ".3f",
            "auc, RSD": ".3f",
            "f1, SmartBugs": ".3f",
            "auc, SmartBugs": ".3f",
        },
        reference="F1 where only copies are in one fold: tf-idf and logistic regression 0.874, Slither 0.889; "
        "the former on RSD: accuracy 0.497, F1 0.596 (chance)",
        plans=("replicate=1", "shard=2,zero=1", "shard=2"),
        tolerance=0.02,
    ),
    Entry(
        name="zero",
        example="zero",
        data=None,
        arguments=("--warm-up", "100", "--steps", "150", "--precision", "float64"),
        scores={"deduction": ".2f", "abduction": ".2f", "induction": ".2f", "valid proposals": ".2f"},
        reference="before the self-play: deduction 0.17, abduction 0.26, induction 0.17; Absolute Zero's own models "
        "have 3 to 14 billion parameters",
        plans=("replicate=1", "shard=2", "shard=2,zero=1"),
        tolerance=0.15,  # of few held-out tasks, after games that part once a plan draws another token
    ),
)


def main() -> int:
    """Run what is asked for, and write the table."""
    parser = argparse.ArgumentParser(description="Train the examples and write the table of docs/examples.md.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="rows (default: all)")
    parser.add_argument("--data", type=Path, metavar="DIR", help="folder of the data sets")
    parser.add_argument("--table", action="store_true", help="train nothing; write the table from earlier results")
    arguments = parser.parse_args()
    entries = chosen(arguments.names)
    if not arguments.table:
        if arguments.data is None:
            parser.error("--data DIR is needed to train; --table only writes the table")
        for entry in entries:
            result = {"entry": entry.name, "machine": machine(), "runs": measure(entry, arguments.data)}
            RESULTS.mkdir(exist_ok=True)
            (RESULTS / f"{entry.name}.json").write_text(json.dumps(result, indent=1) + "\n")
    write_page()
    print(table())
    differing = [line for entry in entries for line in differences(entry)]
    print("\n".join(differing))
    return 1 if differing else 0


def chosen(names: Sequence[str]) -> list[Entry]:
    """Return the entries of these names, or all of them."""
    known = {entry.name: entry for entry in ENTRIES}
    unknown = [name for name in names if name not in known]
    if unknown:
        sys.exit(f"train_examples.py: no row is called {', '.join(unknown)}\n  fix: name some of {', '.join(known)}")
    return [known[name] for name in names] if names else list(ENTRIES)


def machine() -> dict[str, Any]:
    """Return what the times depend on."""
    return {
        "date": datetime.date.today().isoformat(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def measure(entry: Entry, data: Path) -> list[dict[str, Any]]:
    """Return one record for each run of an entry."""
    asked = [(USUAL_PLAN, seed) for seed in SEEDS] + [(plan, SEEDS[0]) for plan in entry.plans]
    records = []
    for number, (plan, seed) in enumerate(asked, 1):
        record = train(entry, data, plan, seed)
        print(
            f"{entry.name}  {number}/{len(asked)}  {plan}  seed {seed}  {record['seconds']:.0f} s  {record['scores']}",
            flush=True,
        )
        records.append(record)
    return records


def train(entry: Entry, data: Path, plan: str, seed: int) -> dict[str, Any]:
    """Train once; return the scores, the seconds, the memory and the load before it."""
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "result.json"
        words = [sys.executable, "-m", "paceline", "run", "--plan", plan, "--runs", folder, "--job", "job"]
        words += [str(ROOT / "examples" / entry.example / "workload.py"), *entry.arguments]
        if entry.data is not None:
            words += ["--data", str(data / entry.data)]
        words += ["--seed", str(seed), "--output", str(output)]
        # One thread, as each of two processes has: with several, a core that is busy otherwise holds all of them up.
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(words, check=False, capture_output=True, text=True, env=environment)
        if done.returncode != 0:
            sys.exit(
                f"train_examples.py: {entry.name} failed under {plan} with seed {seed}\n{done.stdout}{done.stderr}"
            )
        result: dict[str, Any] = json.loads(output.read_text())
        events = [json.loads(line) for line in (Path(folder) / "job" / "events.jsonl").read_text().splitlines()]
    memory = max(event["memory_bytes"] for event in events if event["event"] == "step")
    return {"plan": plan, "seed": seed, "load_before": round(load, 1), "memory_bytes": memory, **result}


def results_of(entry: Entry) -> list[dict[str, Any]]:
    """Return the runs that were measured for an entry; none if it was not."""
    path = RESULTS / f"{entry.name}.json"
    return json.loads(path.read_text())["runs"] if path.exists() else []


def differences(entry: Entry) -> list[str]:
    """Return a line for each score that another plan ended with, of those with the same seed."""
    runs = [run for run in results_of(entry) if run["seed"] == SEEDS[0]]
    if not runs:
        return []
    usual = next(run for run in runs if run["plan"] == USUAL_PLAN)
    lines = []
    for run in runs:
        for name in entry.scores:
            here, there = run["scores"][name], usual["scores"][name]
            if not math.isclose(here, there, rel_tol=0, abs_tol=entry.tolerance):
                lines.append(f"{entry.name}: {name} is {here} under {run['plan']}, and {there} under {USUAL_PLAN}")
    return lines


def row(entry: Entry) -> str:
    """Return an entry's row of the table."""
    runs = results_of(entry)
    usual = [run for run in runs if run["plan"] == USUAL_PLAN]
    reached = []
    for name, form in entry.scores.items():
        values = [run["scores"][name] for run in usual]
        mean, spread = statistics.mean(values), max(values) - min(values)
        reached.append(f"{name.replace('_', ' ')} {mean:{form}} (spread {spread:{form}})")
    plans = ", ".join(f"`{run['plan']}`" for run in runs if run["plan"] != USUAL_PLAN)
    seconds = statistics.median(run["seconds"] for run in usual)
    memory = max(run["memory_bytes"] for run in usual) / 2**20
    load = max(run["load_before"] for run in usual)
    cells = [
        f"[{entry.name}](../examples/{entry.example}/README.md)",
        usual[0]["data"],
        usual[0]["size"],
        entry.reference,
        "; ".join(reached),
        plans,
        f"{seconds:.0f} s (load {load:.1f})",
        f"{memory:.0f} MiB",
    ]
    return f"| {' | '.join(cells)} |"


def table() -> str:
    """Return the table of all entries that were measured, in Markdown."""
    head = "| example | data | size | reference | reached | plans besides | time | memory |"
    return "\n".join(
        [head, "|---|---|---|---|---|---|--:|--:|", *(row(entry) for entry in ENTRIES if results_of(entry))]
    )


def page_with(new: str) -> str:
    """Return the page with this table."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{new}\n{END}{after}"


def write_page() -> None:
    """Write the table into the page."""
    PAGE.write_text(page_with(table()))


if __name__ == "__main__":
    sys.exit(main())
