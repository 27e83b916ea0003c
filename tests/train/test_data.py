"""What a sample is does not depend on ranks, micro-batches or loader workers; precision and devices are kept."""

from __future__ import annotations

import importlib.util
import random
import subprocess
import sys
from collections import namedtuple

import numpy as np
import pytest
import torch

from paceline.nouns.errors import WorkloadError
from paceline.nouns.own_errors import own_line
from paceline.nouns.workload import Workload
from paceline.train.data import Batch, RankLoader
from paceline.train.loader import moved
from paceline.train.seed import random_state, restore_random_state, seed_everything

from support.ranks import run_ranks


class Noisy(torch.utils.data.Dataset):
    """Samples with numbers of every random generator in them."""

    def __len__(self):
        return 20

    def __getitem__(self, index):
        return index, float(torch.rand(())), random.random(), float(np.random.rand())


def loader(rank=0, size=1, **parts):
    workload = Workload(
        model=list, loss=print, optimizer=list, data=Noisy(), batch_size=6, collate=list, seed=4, **parts
    )  # fmt: skip
    return RankLoader(Noisy(), workload, rank, size, torch.device("cpu"))


def samples_of(rank, size, parts):
    batches = list(loader(rank, size, **parts).training(0, 40))
    return [(batch.positions, [sample for micro in batch.microbatches for sample in micro]) for batch in batches]


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize(
    "parts", [{}, {"micro_batch_size": 1}, pytest.param({"loader_workers": 2}, marks=pytest.mark.slow)], ids=str
)
def test_the_same_samples_whatever_the_split(size, parts):
    whole = samples_of(0, 1, {})
    ranks = [run_ranks(1, samples_of_rank, rank, size, parts)[0] for rank in range(size)]
    for number, (positions, samples) in enumerate(whole):
        assert all(part[number][0] == positions for part in ranks)
        assert [sample for part in ranks for sample in part[number][1]] == samples
    noise = [sample[1] for _, samples in whole for sample in samples]
    assert len(set(noise)) == 40, "a sample looked the same in both epochs"


def samples_of_rank(_, rank, size, parts):
    return samples_of(rank, size, parts)


def test_loading_leaves_the_models_random_numbers_alone():
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    next(loader().training(0, 6))
    assert torch.equal(torch.rand(3), expected)


def test_random_states_come_back():
    seed_everything(9)
    kept = random_state(torch.device("cpu"))
    drawn = torch.rand(2).tolist(), random.random(), np.random.rand()
    restore_random_state(kept, torch.device("cpu"))
    assert (torch.rand(2).tolist(), random.random(), np.random.rand()) == drawn


def test_data_collate_error_without_python_frames_is_of_the_user():
    data = [torch.ones(2), torch.ones(3)]
    parts = {"model": list, "loss": print, "optimizer": list, "data": data, "batch_size": 2, "collate": torch.stack}
    with pytest.raises(RuntimeError, match="equal size") as raised:
        RankLoader(data, Workload(**parts), 0, 1, torch.device("cpu")).example()
    assert own_line(raised.value) == ""


Pair = namedtuple("Pair", "x y")


def test_batches_of_any_shape_are_moved():
    one = torch.ones(2)
    batch = {"a": [one, (one.long(), "text")], "b": Pair(one, 3)}
    double = moved(batch, torch.device("cpu"), to_float64=True)
    assert double["a"][0].dtype == torch.float64
    assert double["a"][1][0].dtype == torch.int64
    assert double["a"][1][1] == "text"
    assert isinstance(double["b"], Pair)
    assert double["b"].y == 3


@pytest.mark.slow
@pytest.mark.parametrize(
    "take", [lambda batch: next(iter(batch)), lambda batch: batch[0], lambda batch: batch["input_ids"]]
)
def test_a_batch_that_is_taken_apart_says_what_to_do_with_it(take):
    """As in a loop that was written for DDP."""
    batch = Batch([(torch.ones(2), torch.ones(2))], range(2))
    with pytest.raises(WorkloadError, match=r"write `job\.step\(batch\)`.*batch\.microbatches"):
        take(batch)
    with pytest.raises(WorkloadError, match=r"handed to job\.step as it is"):
        _inputs, _targets = batch


def test_data_profiler_is_imported_before_loader_processes_start(tmp_path):
    """Their SIGCHLD would raise in the import, and torch would log a traceback."""
    name = "torch.profiler._cupti_monitor"
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"this torch has no {name}")
    (tmp_path / "check.py").write_text(
        "import sys, torch\n"
        "from paceline.nouns.workload import Workload\n"
        "from paceline.train.data import RankLoader\n"
        f"assert {name!r} not in sys.modules\n"
        "seen, plain = [], torch.utils.data.DataLoader.__iter__\n"
        "def begin(loader):\n"
        f"    seen.append({name!r} in sys.modules)\n"
        "    return plain(loader)\n"
        "torch.utils.data.DataLoader.__iter__ = begin\n"
        "data = list(range(8))\n"
        "parts = dict(model=list, loss=print, optimizer=list, data=data, batch_size=4, collate=list)\n"
        "loader = RankLoader(data, Workload(**parts, loader_workers=1), 0, 1, torch.device('cpu'))\n"
        "assert len(list(loader.training(0, 8))) == 2\n"
        "assert seen == [True], seen\n"
    )
    done = subprocess.run([sys.executable, tmp_path / "check.py"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
