"""A job with servers whose model writes its own buffers: assigned, through `.data`, and with other shapes."""

from __future__ import annotations

import json

import pytest

from support.jobs import paceline

pytestmark = pytest.mark.slow

FILE = """
import json, sys
import torch
import paceline

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 3)
        self.calls = 0
        self.register_buffer("assigned", torch.zeros(4))
        self.register_buffer("unseen", torch.zeros(4))
        self.register_buffer("grown", torch.zeros(1), persistent=PERSISTENT)

    def forward(self, x):
        self.calls += 1
        now = x.detach().mean(0)
        old = self.assigned.clone()
        self.assigned = 0.5 * self.assigned + 0.5 * now
        self.unseen.data.lerp_(now, 0.5)
        if self.calls > 1:
            self.grown = torch.zeros(self.calls)
        return self.layer(x - old)

torch.manual_seed(0)
workload = paceline.Workload(
    model=Model,
    loss=lambda model, x: (model(x).square().sum(), len(x)),
    optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.01),
    data=[(index + 1) * torch.randn(4) for index in range(16)],
    batch_size=4, steps=5, precision="float64",
)

if __name__ == "__main__":
    job = paceline.distribute(workload)
    losses = [job.step(batch) for batch in job.batches()]
    with open(f"{sys.argv[1]}-{job.rank}.json", "w") as file:
        json.dump([losses, job.model.assigned.tolist(), job.model.unseen.tolist()], file)
"""


def test_workers_end_with_the_mean_that_one_process_has(tmp_path):
    file = tmp_path / "own.py"
    file.write_text(FILE.replace("PERSISTENT", "False"))
    for name, words in {"alone": ("-n", "1"), "servers": ("-n", "2", "--plan", "server=1")}.items():
        ended = paceline(tmp_path, "run", *words, file, "--", name)
        assert ended.code == 0, ended.err
    losses, assigned, unseen = json.loads((tmp_path / "alone-0.json").read_text())
    for rank in range(2):
        found = json.loads((tmp_path / f"servers-{rank}.json").read_text())
        assert found[0] == pytest.approx(losses, rel=1e-12)
        assert found[1] == pytest.approx(assigned, rel=1e-12)
        assert found[2] == pytest.approx(unseen, rel=1e-12)


def test_state_that_changes_its_shape_is_refused_by_name(tmp_path):
    file = tmp_path / "own.py"
    file.write_text(FILE.replace("PERSISTENT", "True"))
    ended = paceline(tmp_path, "run", "-n", "2", "--plan", "server=1", file, "--", "refused")
    assert ended.code == 2
    assert "the buffer grown should become the mean of all workers'" in ended.err
