"""Worker processes of a loader end with their rank, also where it was killed before they began."""

from __future__ import annotations

import multiprocessing
import os
import sys

import pytest
from torch.utils.data import DataLoader

from paceline.train import loader as module
from paceline.train.loader import ends_with_rank

FORK = multiprocessing.get_context("fork")


def exit_code(begin):
    process = FORK.Process(target=begin, args=(0,))
    process.start()
    process.join(30)
    return process.exitcode


def test_a_worker_begins_where_its_rank_is_there():
    assert exit_code(ends_with_rank(context=FORK)) == 0


def test_a_worker_ends_where_its_rank_has_gone(monkeypatch):
    gone = os.getpid() + 1  # what the rank was: not the parent that the worker finds
    monkeypatch.setattr(module.os, "getpid", lambda: gone)
    begin = ends_with_rank(context=FORK)
    monkeypatch.undo()
    assert exit_code(begin) == 1


class Noted:
    """Its samples are what `note` has noted in the worker."""

    worker = -1

    def __len__(self):
        return 4

    def __getitem__(self, place):
        return Noted.worker


def note(worker):
    Noted.worker = worker


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_the_users_function_is_called_in_each_worker(method):
    begin = ends_with_rank(note, multiprocessing.get_context(method))
    loader = DataLoader(Noted(), num_workers=2, worker_init_fn=begin, multiprocessing_context=method)
    assert [int(batch) for batch in loader] == [0, 1, 0, 1]


def test_a_users_error_is_raised_in_the_loop():
    def fails(worker):
        raise ValueError(f"no file for worker {worker}")

    loader = DataLoader(
        range(4), num_workers=1, worker_init_fn=ends_with_rank(fails, FORK), multiprocessing_context=FORK
    )
    with pytest.raises(ValueError, match="no file for worker 0"):
        list(loader)


@pytest.mark.parametrize(
    ("is_alone", "error", "is_shown"),
    [
        (True, ConnectionResetError("reset by peer"), False),  # the rank was killed while it fetched a batch
        (True, EOFError(), False),
        (False, ConnectionResetError("reset by peer"), True),
        (True, ValueError("no"), True),
    ],
)
def test_data_worker_thread_error_is_shown_unless_rank_is_killed(is_alone, error, is_shown, monkeypatch):
    monkeypatch.setattr(module, "_KILLED_S", 0)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    shown = []
    sys.excepthook = lambda *error: shown.append(error)
    rank = os.getppid()
    monkeypatch.setattr(os, "getpid", lambda: rank)
    ends_with_rank(context=FORK)(0)
    if is_alone:
        monkeypatch.setattr(os, "getppid", lambda: 1)
    sys.excepthook(type(error), error, None)
    assert len(shown) == is_shown
