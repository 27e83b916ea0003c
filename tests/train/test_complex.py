"""Complex parameters: trained, compared, saved, loaded and handed out by both of their parts under every plan."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import nn

import paceline
from paceline.checkpoint.load import read_checkpoint, read_own
from paceline.checkpoint.manifest import file_name
from paceline.checkpoint.save import as_stored
from paceline.comm import api
from paceline.comm.dtypes import checksum
from paceline.nouns.errors import PacelineError, PlanError
from paceline.nouns.plan import Plan
from paceline.server.handle import _entry
from paceline.train.job import Job

from support.ranks import run_ranks

PLANS = ("replicate=2", "shard=2", "shard=2,zero=2", "shard=2,zero=1", "tensor=2", "pipeline=2")


class Spectral(nn.Module):
    """A layer of a Fourier neural operator; complex numbers in float32's digits, as its code usually makes them."""

    def __init__(self, modes=3):
        super().__init__()
        self.modes = modes
        self.weight = nn.Parameter(torch.randn(4, 4, modes, dtype=torch.cfloat) / 8)

    def forward(self, x):
        spectrum = torch.fft.rfft(x)
        out = torch.zeros(x.shape[0], 4, spectrum.shape[-1], dtype=spectrum.dtype)
        out[:, :, : self.modes] = torch.einsum("bix,iox->box", spectrum[:, :, : self.modes], self.weight)
        return torch.fft.irfft(out, n=x.shape[-1])


class Net(nn.Module):
    """With parameters that no number of ranks divides, one of a single number, and a buffer that is a conjugate."""

    def __init__(self):
        super().__init__()
        self.lift, self.head = nn.Linear(8, 16), nn.Linear(32, 64)
        self.spectral = nn.ModuleList(Spectral() for _ in range(2))
        self.filter = nn.Parameter(torch.randn(5, dtype=torch.complex128) * 0.3)
        self.factor = nn.Parameter(torch.tensor(1 + 0.5j, dtype=torch.complex128))
        self.register_buffer("phases", torch.polar(torch.ones(5), torch.arange(5.0)).conj())

    def forward(self, x):
        x = torch.tanh(self.lift(x)).unflatten(1, (4, 4)).repeat(1, 1, 2)
        for layer in self.spectral:
            x = torch.tanh(layer(x)) + x
        x = torch.fft.irfft(torch.fft.rfft(x) * self.filter * self.phases * self.factor, n=8)
        return self.head(x.flatten(1))


def loss(model, batch):
    return (model(batch[0]) - batch[1]).square().sum(), len(batch[0])


def workload(**parts):
    random = torch.Generator().manual_seed(1)
    rows = torch.randn(24, 8, generator=random, dtype=torch.float64)
    given = {
        "model": Net,
        "loss": loss,
        "optimizer": lambda model: torch.optim.AdamW(model.parameters(), lr=0.01),
        "data": torch.utils.data.TensorDataset(rows, rows.repeat(1, 8)),
        "batch_size": 6,
        "steps": 4,
        "precision": "float64",
        "clip_norm": 1.0,
    }
    return paceline.Workload(**given | parts)


def train_all(rank, folder, plans):
    """Of each plan its losses, the model after two steps, and the losses when it goes on with the last plan's state."""
    api.init()
    found = {}
    for number, plan in enumerate(plans):
        job = Job(workload(), Plan.parse(plan))
        batches = job.batches()
        losses = [job.step(next(batches)) for _ in range(2)]
        whole = {name: value.clone() for name, value in job.whole_model().state_dict().items()}
        job.save(f"{folder}/{number}")
        losses += [job.step(batch) for batch in batches]
        job.load(f"{folder}/{(number or 1) - 1}")  # saved by another plan, but for the first
        again = [job.step(batch) for batch in job.batches()]
        job.close()
        found[plan] = losses, again, whole
    return found


@functools.cache
def alone(folder):
    return train_all(0, folder, ("replicate=1",))["replicate=1"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return str(tmp_path_factory.mktemp("alone")), str(tmp_path_factory.mktemp("ranks"))


@pytest.fixture(scope="module")
def ranks(folders):
    return run_ranks(2, train_all, folders[1], PLANS)


@pytest.mark.parametrize("plan", PLANS)
def test_every_plan_trains_saves_and_loads_complex_parameters(folders, ranks, plan):
    losses, again, whole = alone(folders[0])
    assert again == losses[2:]
    for found, resumed, copy in (rank[plan] for rank in ranks):
        assert found == pytest.approx(losses, rel=1e-11)
        assert resumed == pytest.approx(again, rel=1e-11)
        assert {name: value.dtype for name, value in copy.items()} == {name: v.dtype for name, v in whole.items()}
        for name, value in whole.items():
            torch.testing.assert_close(copy[name], value, rtol=1e-10, atol=1e-12)


def test_a_checkpoint_has_the_values_and_their_dtype(folders, ranks):
    _, tensors, _ = read_checkpoint(Path(folders[1], "0"), 0, {"model/filter": None, "model/phases": None})
    whole = ranks[0][PLANS[0]][2]
    assert tensors["model/filter"].dtype == torch.complex128
    assert torch.equal(tensors["model/filter"], whole["filter"])
    assert torch.equal(tensors["model/phases"], whole["phases"])


def test_servers_refuse_them_with_a_form_that_they_take():
    with pytest.raises(PlanError, match=r"it is of complex64\n  fix: .*view_as_complex"):
        _entry("weight", torch.zeros(2, dtype=torch.complex64), 0)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_a_checksum_differs_where_one_part_differs(dtype):
    values = torch.tensor([1 + 2j, 3 - 1j], dtype=dtype)
    others = [values + 0.5j, values + 0.5, values + (0.5 - 0.5j), values.conj()]
    assert len({float(checksum(each)) for each in [values, *others]}) == 5


def by_rank(rank):
    model = Net()
    with torch.no_grad():
        model.filter.imag.add_(rank)
    return model


def refused(rank, plans):
    """The error of each plan where the ranks make imaginary parts of their own."""
    api.init()
    texts = []
    for plan in plans:
        try:
            Job(workload(model=functools.partial(by_rank, rank)), Plan.parse(plan))
            texts.append("")
        except PacelineError as error:
            texts.append(str(error))
    return texts


def test_imaginary_parts_that_ranks_make_apart_are_found():
    for texts in run_ranks(2, refused, ("shard=2", "pipeline=2")):
        assert all("those of rank 1 are not those of rank 0" in text for text in texts)


def loop_apart(rank):
    """A loop in which rank 1 moves an imaginary part after its second step."""
    torch.manual_seed(0)
    model = nn.Linear(2, 2, dtype=torch.cfloat)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = torch.utils.data.DataLoader(torch.randn(24, 2, dtype=torch.cfloat), batch_size=4)
    job, model, optimizer, loader = paceline.prepare(model, optimizer, loader)
    try:
        for batch in loader:
            optimizer.zero_grad()
            job.backward(model(batch).abs().square().mean())
            optimizer.step()
            if rank == 1 and job.step_number == 1:
                model.weight.data.imag.add_(1.0)
    except PacelineError as error:
        return str(error)
    return ""


def test_imaginary_parts_that_come_apart_in_a_loop_are_found():
    assert all("differs between rank 0 and rank 1" in text for text in run_ranks(2, loop_apart))


def test_complex_own_tensors_keep_their_dtype_at_any_file_offset(tmp_path):
    values = torch.randn(3, 2, dtype=torch.complex128)
    tensors = {"own/a": values, "own/b": values[0, 0].clone(), "own/c": values[:0].clone(), "own/odd": torch.ones(3)}
    for begin in range(3):  # a file's tensors begin at a multiple of 8 bytes, which is not always one of 16
        content = safetensors.torch.save(*as_stored({**tensors, "own/before": torch.ones(begin, dtype=torch.float64)}))
        (tmp_path / file_name(0)).write_bytes(content)
        found = read_own(tmp_path, {"world_size": 1}, 0)
        for name, value in tensors.items():
            assert found[name.removeprefix("own/")].dtype == value.dtype
            assert torch.equal(found[name.removeprefix("own/")], value)
