"""What `paceline plan --explain-memory`, `--explain-oom` and `paceline profile` print, and what they refuse."""

from __future__ import annotations

import json
import re
import signal

import pytest

from paceline.cli.main import main
from paceline.run.supervise import progress

from support.jobs import leftovers, paceline, start, wait_for

pytestmark = pytest.mark.slow

MODEL = """
import torch
import paceline

class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(256, 1024), torch.nn.Linear(1024, 256)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))

workload = paceline.Workload(
    model=lambda: torch.nn.Sequential(*(Block() for _ in range(4))),
    loss=lambda model, batch: (model(batch).square().sum(), len(batch)),
    optimizer=lambda model: torch.optim.AdamW(model.parameters()),
    data=list(torch.randn(32768, 256)),
    batch_size=16384,
)
print("a person's own line")
"""


def test_where_memory_goes_and_the_ways_out(tmp_path, monkeypatch, capsys):
    """And what the command says while it looks for them: standard output has the answer alone."""
    (tmp_path / "train.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(progress, "_SILENT_S", 0.0)
    monkeypatch.setattr(progress.Screen, "__init__", _without_pauses(progress.Screen.__init__))
    assert main(["plan", "--explain-oom", "--device", "V100-0.9GB", "train.py"]) == 0
    printed = capsys.readouterr()
    assert "OUT OF MEMORY" in printed.out
    ways = printed.out.split("The cheapest changes that fit:\n")[1].splitlines()
    assert len(ways) == 4
    assert ways[0].startswith("micro_batch_size=8192 in the workload")
    assert all("cost: " in way for way in ways)
    assert "bf16" not in printed.out, "the card has none"
    assert "^forward" in printed.out
    assert "0.up" in printed.out
    check_progress(printed)


def check_progress(printed):
    """What is simulated, how many steps of how many, how fast, how long still."""
    assert "so far" not in printed.out
    assert "simulated" not in printed.out
    lines = printed.err.splitlines()
    assert lines[0] == "loading train.py: 0:00 so far"
    assert "rank 0 under replicate=1: " in printed.err
    told = re.compile(
        r"\d+ of up to \d+ steps simulated, [\d.,]+ a minute, at most \d+:\d\d left: .*micro_batch_size=8192"
    )
    assert any(told.match(line) for line in lines), lines


def _without_pauses(made):
    return lambda self, out, status: made(self, out, status, every_s=0.0)


def test_there_is_no_way_out_of_what_fits(tmp_path):
    (tmp_path / "train.py").write_text(MODEL)
    out = paceline(tmp_path, "plan", "--explain-oom", "--device", "A100-80GB", "--json", "train.py").out
    facts = json.loads(out)["memory"]
    assert facts["ways_out"] == []
    assert facts["ranks"][0]["is_too_large"] is False


def test_an_interruption_is_one_line_and_leaves_nothing(tmp_path):
    (tmp_path / "train.py").write_text(MODEL)
    command = start(tmp_path, "plan", "--explain-oom", "--device", "V100-0.9GB", "train.py")
    assert wait_for(lambda: any("paceline.profile." in found for found in leftovers(tmp_path)), 120)
    command.send_signal(signal.SIGINT)
    out, err = command.communicate()
    # Where the signal meets Python's `exec`, as in a dataclass, Python ends by the signal: a shell sees 130 then too.
    assert command.returncode in (130, -signal.SIGINT), err
    assert out == ""
    assert err.splitlines()[-1] == "paceline: interrupted"
    assert "Traceback" not in err
    assert wait_for(lambda: not leftovers(tmp_path), 60), leftovers(tmp_path)


MOMENTS = """
import torch
import paceline

workload = paceline.Workload(
    model=lambda: torch.nn.Sequential(*[torch.nn.Linear(2048, 2048) for _ in range(16)]),
    loss=lambda model, batch: (model(batch).square().sum(), len(batch)),
    optimizer=lambda model: torch.optim.OPTIMIZER(model.parameters()),
    data=torch.zeros(1, 2048),
    batch_size=1,
)
"""


@pytest.mark.complete  # which ways there are, and their order: tests/plan/test_memory_report.py
@pytest.mark.parametrize(("optimizer", "device", "is_offered"), [("AdamW", "1.6GB", True), ("SGD", "1GB", False)])
def test_explain_oom_offers_8bit_moments_only_where_they_help(tmp_path, optimizer, device, is_offered):
    pytest.importorskip("torchao")
    (tmp_path / "train.py").write_text(MOMENTS.replace("OPTIMIZER", optimizer))
    ended = paceline(tmp_path, "plan", "--explain-oom", "--device", device, "train.py")
    assert ended.code == 0, ended.err
    assert "OUT OF MEMORY" in ended.out
    offered = [line for line in ended.out.splitlines() if line.startswith("optimizer_states=8bit in the plan")]
    assert len(offered) == is_offered
    if is_offered:
        assert "cost: Adam's moments rounded to 8 bits" in offered[0]
        words = ["--plan", "replicate=1,optimizer_states=8bit", "--explain-memory", "--device", device, "train.py"]
        assert "OUT OF MEMORY" not in paceline(tmp_path, "plan", *words).out


def test_each_stage_has_a_column(tmp_path):
    (tmp_path / "train.py").write_text(MODEL)
    ended = paceline(tmp_path, "plan", "--plan", "pipeline=2,tensor=2", "--explain-memory", "train.py")
    assert ended.code == 0, ended.err
    header = next(line for line in ended.out.splitlines() if line.strip().startswith("rank 0"))
    assert header.split() == ["rank", "0", "rank", "2"]


def test_a_profile_as_a_file_and_as_sums(tmp_path):
    (tmp_path / "train.py").write_text(MODEL)
    ended = paceline(tmp_path, "profile", "-o", "profile.json", "train.py")
    assert ended.code == 0, ended.err
    assert "GFLOP on this rank" in ended.out
    kept = json.loads((tmp_path / "profile.json").read_text())
    assert sum(flops for _, flops, _ in kept["operations"].values()) == 6 * 4 * 2 * 16384 * 256 * 1024 - (
        2 * 16384 * 256 * 1024
    )
    sums = json.loads(paceline(tmp_path, "profile", "--json", "train.py").out.splitlines()[-1])
    assert sums["memory"]["peak"] > 0
    assert not (tmp_path / "runs").exists()


def test_what_the_persons_code_raises_is_told(tmp_path):
    broken = MODEL.replace("model(batch).square().sum()", "model(batch).nothing()")
    (tmp_path / "train.py").write_text(broken.replace("32768", "64").replace("16384", "32"))
    ended = paceline(tmp_path, "profile", "train.py")
    assert ended.code == 2
    assert "it raised AttributeError: " in ended.err
    assert "has no attribute 'nothing'" in ended.err
    assert "Traceback" not in ended.err


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["plan", "--explain-oom", "train.py"], "has no memory of a known size"),
        (["plan", "--explain-oom", "--device", "V100", "train.py"], "its memory is not known"),
        (["profile", "--rank", "2", "--plan", "shard=2", "train.py"], "its ranks are 0 to 1"),
        (["profile", "--device", "tpu", "train.py"], "its memory is not known"),
        (["profile", "-o", "none/profile.json", "train.py"], "it can't be written"),
        (["profile", "--plan", "replicate=1,compile=on", "train.py"], "the plan has compile=on"),
    ],
    ids=str,
)
def test_bad_input(tmp_path, words, found):
    (tmp_path / "train.py").write_text(MODEL.replace("32768", "64").replace("16384", "32"))
    ended = paceline(tmp_path, *words)
    assert ended.code == 2, ended.out
    assert found in ended.err
    assert "fix: " in ended.err
    assert "Traceback" not in ended.err
