"""The scripts of examples/horovod, `horovod.run`, and the loaders of `horovod.data`."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.horovod.common.util.env import get_env_rank_and_size
from paceline.horovod.data import AsyncDataLoaderMixin, BaseDataLoader
from paceline.horovod.runner import run
from paceline.nouns.errors import UsageError

from support.jobs import paceline

FOLDER = Path(__file__).parents[2] / "examples" / "horovod"
# What rank 0 prints, in part.
PRINTED = {
    "horovod_digits": "epoch 2: test loss",
    "horovod_benchmark": "total images/s on 2 ranks",
    "horovod_elastic": "after 24 batches",
    "horovod_warmup": "epoch 1: loss",
    "horovod_uneven": "batches [3, 5], rank 1 was last",
}


def test_every_script_is_run():
    assert {path.stem for path in FOLDER.glob("*.py")} == set(PRINTED)


@pytest.mark.long
@pytest.mark.parametrize("name", PRINTED)
def test_a_script_runs_on_two_ranks(name, tmp_path):
    done = paceline(tmp_path, "horovodrun", "-np", "2", "python", FOLDER / f"{name}.py")
    assert done.code == 0, done.err
    assert PRINTED[name] in done.out


def add(first, second=0):
    import horovod.torch as hvd

    hvd.init()
    return {"rank": hvd.rank(), "sum": first + second}


@pytest.mark.long
def test_a_function_returns_the_results_of_all_ranks():
    assert run(add, (3,), {"second": 4}, num_proc=2) == [{"rank": 0, "sum": 7}, {"rank": 1, "sum": 7}]


@pytest.mark.parametrize("option", ["hosts", "min_np", "use_mpi", "executable"])
def test_an_option_that_can_not_be_met_is_refused(option):
    with pytest.raises(UsageError, match=f"horovod.run\\({option}="):
        run(add, (3,), **{option: "x"})


def test_two_numbers_of_processes_are_refused():
    with pytest.raises(UsageError, match="one number"):
        run(add, (3,), num_proc=2, np=3)


class Numbers(BaseDataLoader):
    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def _iterate(self):
        for number in range(self.count):
            if number == 7:
                raise RuntimeError("broken")
            yield number

    def _process_batch(self, batch):
        return batch * 10


class AsyncNumbers(AsyncDataLoaderMixin, Numbers):
    pass


@pytest.mark.parametrize("size", [0, 1, 64])
def test_a_thread_yields_the_same_batches(size):
    loader = AsyncNumbers(size, 5)
    assert list(loader) == list(Numbers(5)) == [0, 10, 20, 30, 40]
    assert next(iter(loader)) == 0  # left before its end
    assert list(loader) == [0, 10, 20, 30, 40]
    loader.close_async_loader()


@pytest.mark.parametrize("size", [0, 2])
def test_an_error_of_the_thread_is_raised(size):
    with pytest.raises(RuntimeError, match="broken"):
        list(AsyncNumbers(size, 9))


def test_rank_and_size_come_from_variables():
    assert get_env_rank_and_size({}) == (0, 1)
    assert get_env_rank_and_size({"HOROVOD_RANK": "1", "HOROVOD_SIZE": "2"}) == (1, 2)
    with pytest.raises(ValueError, match="both be set"):
        get_env_rank_and_size({"HOROVOD_RANK": "1"})
