"""The example of docs/collectives.md: with any number of ranks it ends with the parameters of one process."""

from __future__ import annotations

import re

import pytest
import safetensors.torch
import torch

from support.documented_commands import ROOT
from support.jobs import paceline

PAGE = (ROOT / "docs" / "collectives.md").read_text()
(EXAMPLE,) = re.findall(r"^<!-- test: contrastive.py -->\n```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
KEEP = """
import safetensors.torch
kept = {str(index): parameter.detach() for index, parameter in enumerate(parameters)}
safetensors.torch.save_file(kept, f"{paceline.size()}-{paceline.rank()}.safetensors")
"""
# The same in plain torch, written for one process: no collectives, the loss of the whole batch at once.
ALONE = """
import torch
from torch.nn import functional as F
torch.manual_seed(0)
images = torch.randn(22, 12, dtype=torch.float64)
texts = torch.randn(22, 8, dtype=torch.float64)
image_tower = torch.nn.Linear(12, 6, dtype=torch.float64)
text_tower = torch.nn.Linear(8, 6, dtype=torch.float64)
scale = torch.nn.Parameter(torch.tensor(2.0, dtype=torch.float64))
parameters = [*image_tower.parameters(), *text_tower.parameters(), scale]
optimizer = torch.optim.Adam(parameters, lr=0.02)
for step in range(20):
    scores = scale.exp() * F.normalize(image_tower(images)) @ F.normalize(text_tower(texts)).T
    labels = torch.arange(22)
    loss = (F.cross_entropy(scores, labels) + F.cross_entropy(scores.T, labels)) / 2
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def ended_with(folder, ranks, text=EXAMPLE):
    """The parameters of each rank at the end, and what was printed."""
    (folder / "contrastive.py").write_text(text + KEEP)
    ended = paceline(folder, "run", "-n", str(ranks), "contrastive.py")
    assert ended.code == 0, ended.err
    files = [folder / f"{ranks}-{rank}.safetensors" for rank in range(ranks)]
    return [list(safetensors.torch.load_file(file).values()) for file in files], ended.out


def alone():
    names = {}
    exec(ALONE, names)
    return [parameter.detach() for parameter in names["parameters"]], names["loss"].item()


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_the_example_ends_with_the_parameters_of_one_process(ranks, tmp_path):
    by_rank, out = ended_with(tmp_path, ranks)
    parameters, loss = alone()
    for found in by_rank:
        torch.testing.assert_close(found, parameters, rtol=1e-10, atol=1e-12)
        assert all(torch.equal(one, other) for one, other in zip(found, by_rank[0], strict=True))
    assert f"step 20  loss {loss:.6f}" in out
    assert len(re.findall("step .*loss", out)) == 4


@pytest.mark.slow
def test_without_gradients_the_example_ends_elsewhere(tmp_path):
    """What the gradients are for: each rank's own rows alone would train another model, without an error."""
    assert EXAMPLE.count(", grad=True") == 2
    by_rank, _ = ended_with(tmp_path, 2, EXAMPLE.replace(", grad=True", ""))
    differences = [float((one - other).abs().max()) for one, other in zip(by_rank[0], alone()[0], strict=True)]
    assert max(differences) > 0.01
