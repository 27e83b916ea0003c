"""A package is trained by the name of its module, or by a file that imports it."""

from __future__ import annotations

import json

import pytest

from support.jobs import paceline

TRAIN = """
import json, sys
import torch
from .models import Net

def main():
    from paceline import prepare
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    data = torch.utils.data.TensorDataset(torch.randn(16, 4), torch.randn(16, 1))
    loader = torch.utils.data.DataLoader(data, batch_size=8)
    job, model, optimizer, loader = prepare(model, optimizer, loader)
    for x, y in loader:
        optimizer.zero_grad()
        job.backward(((model(x) - y) ** 2).mean())
        optimizer.step()
    print(json.dumps([sys.argv, [float(value) for value in model.a.weight.flatten()]]))

if __name__ == "__main__":
    main()
"""
MODELS = """
import torch
import tools

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a = torch.nn.Linear(4, 1)
    def forward(self, x):
        return self.a(x)
"""
ENTRY = "from pkg.train import main\n\nif __name__ == '__main__':\n    main()\n"


@pytest.fixture
def package(tmp_path):
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg/__init__.py").write_text("")
    (tmp_path / "pkg/train.py").write_text(TRAIN)
    (tmp_path / "pkg/models.py").write_text(MODELS)
    (tmp_path / "tools.py").write_text("")
    (tmp_path / "entry.py").write_text(ENTRY)
    return tmp_path


def printed(ended):
    """Return what rank 0 printed: its arguments, and its weights."""
    assert ended.code == 0, ended.out + ended.err
    (line,) = [line for line in ended.out.splitlines() if line.startswith("[0] [[")]
    return json.loads(line.removeprefix("[0] "))


def test_a_module_trains_as_the_file_that_imports_it_does(package):
    arguments, weights = printed(paceline(package, "run", "-n", "2", "-m", "pkg.train", "--lr", "3"))
    assert arguments == [str(package / "pkg/train.py"), "--lr", "3"]
    arguments, same = printed(paceline(package, "run", "-n", "2", "entry.py"))
    assert arguments == [str(package / "entry.py")]
    assert same == weights


@pytest.mark.parametrize(
    "program", [["-m", "pkg.train"], pytest.param(["entry.py"], marks=pytest.mark.complete)], ids=["module", "entry"]
)
def test_a_loop_of_a_package_is_planned_and_verified(package, program):
    ended = paceline(package, "plan", "-n", "2", *program)
    assert ended.code == 0, ended.err
    assert "Net: 5 parameters" in ended.out
    ended = paceline(package, "verify", "-n", "2", *program)
    assert ended.code == 0, ended.out + ended.err
    assert "step float64  ok" in ended.out


def test_a_rank_of_another_launcher_runs_the_module(package):
    launched = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29555"}
    ended = paceline(package, "run", "-m", "pkg.train", **launched, TORCHELASTIC_RUN_ID="1", LOCAL_WORLD_SIZE="1")
    assert ended.code == 0, ended.out + ended.err
    assert json.loads(ended.out)[0] == [str(package / "pkg/train.py")]


def test_a_file_without_paceline_starts_and_is_told(tmp_path):
    (tmp_path / "plain.py").write_text("print('it ran')\n")
    ended = paceline(tmp_path, "run", "-n", "2", "plain.py")
    assert ended.code == 2
    assert "[0] it ran" in ended.out
    assert ended.err.startswith("note: plain.py does not import paceline")
    assert "found: it made no job" in ended.err
