"""Ranks hang where all of them wait in collectives, and none computes; by what their watchdogs wrote."""

from __future__ import annotations

import json

import paceline
from paceline.run.read.standing import STALLS
from paceline.verify.judge.order_of_collectives import IDLE_S, HangWatch

OURS = f"{paceline.__path__[0]}/"


def report(rank, **changes):
    waits = {
        "rank": rank, "at": 1.0, "stalled_s": IDLE_S + 1, "cpu_s": 0.1, "step": 2, "steps_done": 1,
        "waits_in": "all_reduce", "is_in_step": True, "is_closing": False, "line": "train.py:7",
        "stack": [[f"{OURS}comm/collectives.py", 3, "all_reduce"], [f"{OURS}train/step.py", 5, "step"]],
    }  # fmt: skip
    return {**waits, **changes}


def watch(folder, *reports):
    (folder / STALLS).mkdir()
    for one in reports:
        (folder / STALLS / f"{one['rank']}.json").write_text(json.dumps(one))
    return HangWatch(folder, 2)


def test_ranks_that_all_wait_hang(tmp_path):
    hang = watch(tmp_path, report(0), report(1, line=None))
    assert hang()
    assert hang.has_hung
    assert hang.describe() == "rank 0 at train.py:7; rank 1 at paceline/train/step.py:5"


OTHERS = {
    "one makes progress": [],
    "one computes": [report(1, waits_in=None)],
    "one sends much": [report(1, cpu_s=IDLE_S)],
    "one has just begun to wait": [report(1, stalled_s=IDLE_S / 2)],
}


def test_others_do_not(tmp_path):
    for name, reports in OTHERS.items():
        (tmp_path / name).mkdir()
        hang = watch(tmp_path / name, report(0), *reports)
        assert not hang(), name
        assert not hang.has_hung, name
