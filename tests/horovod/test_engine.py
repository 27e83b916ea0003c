"""How ranks that use Horovod's names begin and end, alone and together: init, shutdown, process sets, death, stalls."""

from __future__ import annotations

import json
import os
import signal
import time

import pytest
import torch

import paceline.horovod.torch as hvd
from paceline.horovod.common.exceptions import HorovodInternalError
from paceline.horovod.negotiation import Negotiator, Request

from support.ranks import run_ranks


def _again_and_again(rank, turns):
    found = []
    for turn in range(turns):
        hvd.init()
        found.append(float(hvd.allreduce(torch.tensor(float(turn)), op=hvd.Sum)))
        hvd.shutdown()
    return found, len(os.listdir("/proc/self/fd"))


def test_init_and_shutdown_a_hundred_times():
    few = run_ranks(2, _again_and_again, 3)
    many = run_ranks(2, _again_and_again, 100)
    for (found, open_files), (_, few_open) in zip(many, few, strict=True):
        assert found == [2.0 * turn for turn in range(100)]
        assert open_files <= few_open + 2  # connections are closed


def _shut_down_early(rank):
    hvd.init()
    if rank == 1:
        hvd.shutdown()
        return "left"
    handle = hvd.allreduce_async(torch.ones(2), name="waits")
    with pytest.raises(HorovodInternalError, match="Horovod has been shut down"):
        hvd.synchronize(handle)
    with pytest.raises(HorovodInternalError, match="Horovod has been shut down"):
        hvd.allreduce(torch.ones(2))
    hvd.shutdown()
    return "told"


def test_a_shutdown_fails_what_is_under_way_on_all_ranks():
    assert run_ranks(2, _shut_down_early) == ["told", "left"]


def _shut_down_and_begin_again(rank):
    hvd.init()
    if rank == 1:
        hvd.shutdown()
    else:
        with pytest.raises(HorovodInternalError):
            hvd.allreduce(torch.ones(2))
        hvd.shutdown()
    hvd.init()
    return float(hvd.allreduce(torch.tensor(1.0), op=hvd.Sum))


def test_init_follows_a_shutdown_with_work_in_flight():
    assert run_ranks(2, _shut_down_and_begin_again) == [2.0, 2.0]


def _one_is_killed(rank, folder):
    hvd.init()
    hvd.allreduce(torch.ones(2))
    (folder / f"{rank}").write_text(str(os.getpid()))
    if rank == 1:
        while len(list(folder.iterdir())) < 2:
            time.sleep(0.01)
        # The others are told by the closed connection: rank 1 does not say goodbye. It answers the test first.
        pid = os.fork()
        if pid == 0:
            parent = os.getppid()
            time.sleep(1.0)
            os.kill(parent, signal.SIGKILL)
            os._exit(0)
        return "killed later"
    started = time.monotonic()
    with pytest.raises(HorovodInternalError):
        hvd.allreduce(torch.ones(2), name="with a dead rank")
    return time.monotonic() - started < 60


def test_a_killed_rank_is_an_error_on_the_others(tmp_path):
    assert run_ranks(2, _one_is_killed, tmp_path) == [True, "killed later"]


def _forked(rank):
    hvd.init()
    hvd.allreduce(torch.ones(1))
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            hvd.allreduce(torch.ones(1))
        except HorovodInternalError as error:
            os.write(writing, f"{hvd.rank()}: {error}".encode())
        os._exit(0)
    os.waitpid(pid, 0)
    after = float(hvd.allreduce(torch.tensor(2.0)))
    return os.read(reading, 1000).decode(), after


def test_a_forked_process_is_told_that_it_is_no_rank():
    for rank, (text, after) in enumerate(run_ranks(2, _forked)):
        assert text.startswith(f"{rank}: this process was forked from a rank")
        assert after == 2.0


def _many_names(rank):
    from paceline.horovod import collective_engine

    hvd.init()
    for index in range(5000):
        hvd.allreduce(torch.ones(1), name=f"n{index}")
    for _ in range(100):
        hvd.allreduce(torch.ones(1))
    assert float(hvd.allreduce(torch.ones(1), name="n4999", op=hvd.Sum)) == 2.0
    return len(collective_engine.engine().known)


def test_requests_that_are_remembered_have_a_limit():
    assert run_ranks(2, _many_names) == [4096, 4096]


def _with_a_stranger(rank, is_silent):
    """Before rank 1 comes, a process that does not know the key connects, and says nothing or something else."""
    from multiprocessing import AuthenticationError
    from multiprocessing.connection import Client

    from paceline.horovod import control

    plain = control.Client
    strangers = []

    def after_a_stranger(address, family=None, authkey=None):
        if rank > 0 and is_silent:
            strangers.extend(plain(address, family) for _ in range(3))
        elif rank > 0:
            with pytest.raises((AuthenticationError, EOFError, OSError)):
                plain(address, family, authkey=b"a guess")
        return plain(address, family, authkey=authkey)

    assert plain is Client
    control.Client = after_a_stranger
    hvd.init()
    assert len(strangers) == 3 * (rank > 0 and is_silent)
    return float(hvd.allreduce(torch.tensor(1.0), op=hvd.Sum))


@pytest.mark.parametrize("is_silent", [False, True])
def test_a_stranger_at_the_coordinator_holds_up_nobody(is_silent):
    assert run_ranks(2, _with_a_stranger, is_silent, timeout_s=60) == [2.0, 2.0]


def _stalled(rank, variables, log):
    os.environ.update(variables)
    os.dup2(os.open(log, os.O_CREAT | os.O_WRONLY | os.O_APPEND), 2)  # what the coordinator prints
    hvd.init()
    if rank == 0:
        handle = hvd.allreduce_async(torch.ones(1), name="late")
        if "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS" in variables:
            with pytest.raises(HorovodInternalError, match="Horovod has been shut down"):
                hvd.synchronize(handle)
            return log.read_text()
        while "fix: " not in log.read_text():
            time.sleep(0.05)
    if rank == 1 and "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS" in variables:
        with pytest.raises(HorovodInternalError, match="Horovod has been shut down"):
            hvd.allgather(torch.ones(1), name="another")
        return ""
    hvd.barrier()
    if rank == 1:
        handle = hvd.allreduce_async(torch.ones(1), name="late")
    hvd.synchronize(handle)
    return log.read_text()


def test_a_stall_names_the_tensor_and_the_missing_rank(tmp_path):
    text, _ = run_ranks(2, _stalled, {"HOROVOD_STALL_CHECK_TIME_SECONDS": "0.3"}, tmp_path / "log")
    assert "allreduce.late was not submitted by rank 1" in text
    assert text.count("allreduce.late was not submitted") == 1


def test_a_stall_ends_the_ranks_where_asked(tmp_path):
    variables = {"HOROVOD_STALL_CHECK_TIME_SECONDS": "0.2", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "0.5"}
    text, _ = run_ranks(2, _stalled, variables, tmp_path / "log")
    assert "allreduce.late was not submitted by rank 1" in text


# ---- process sets


def _process_sets(rank, size):
    even, odd = hvd.ProcessSet(range(0, size, 2)), hvd.ProcessSet(range(1, size, 2))
    assert even.process_set_id is None
    assert even.size() is None
    assert even.rank() is None
    hvd.init(process_sets=[even, odd])
    own, other = (odd, even) if rank % 2 else (even, odd)
    assert own.included()
    assert not other.included()
    assert own.size() == size // 2
    assert own.rank() == rank // 2
    assert (hvd.global_process_set.size(), hvd.global_process_set.rank()) == (size, rank)
    with pytest.raises(ValueError, match="no member"):
        other.rank()
    with pytest.raises(ValueError, match="no member"):
        hvd.allreduce(torch.ones(1), process_set=other)
    tensor = torch.full((2,), float(rank))
    assert hvd.allreduce(tensor, op=hvd.Sum, process_set=own).tolist() == [float(sum(own.ranks))] * 2
    assert hvd.allgather(tensor[:1], process_set=own).tolist() == [float(each) for each in own.ranks]
    assert hvd.broadcast(tensor, own.ranks[-1], process_set=own).tolist() == [float(own.ranks[-1])] * 2
    with pytest.raises(ValueError, match="no rank"):
        hvd.broadcast(tensor, other.ranks[0], process_set=own)
    count = len(own.ranks)
    assert hvd.alltoall(torch.full((count,), float(rank)), process_set=own).tolist() == [float(r) for r in own.ranks]
    scattered = hvd.reducescatter(torch.full((count,), float(rank)), op=hvd.Sum, process_set=own)
    assert scattered.tolist() == [float(sum(own.ranks))]
    assert hvd.allgather_object(rank, process_set=own) == own.ranks
    assert hvd.broadcast_object(rank, own.ranks[0], process_set=own) == own.ranks[0]
    hvd.barrier(process_set=own)
    # Sets at different speeds don't wait for each other.
    for turn in range(rank % 2 * 20):
        hvd.allreduce(tensor, name=f"more{turn}", process_set=own)
    with pytest.raises(ValueError, match="HOROVOD_DYNAMIC_PROCESS_SETS"):
        hvd.add_process_set([0])
    hvd.barrier()
    return own.process_set_id


def test_process_sets_of_init():
    assert run_ranks(4, _process_sets, 4) == [1, 2, 1, 2]


def _dynamic_of_four(rank):
    hvd.init(process_sets="dynamic")
    numbers = []
    for ranks in ([0, 1], [2, 3], [0, 3]):
        added = hvd.add_process_set(ranks)
        numbers.append(added.process_set_id)
        if added.included():
            assert hvd.allreduce(torch.tensor(float(rank)), op=hvd.Sum, process_set=added) == sum(ranks)
        assert hvd.remove_process_set(added)
        assert added.process_set_id is None
    assert not hvd.remove_process_set(added)
    return numbers


def test_process_sets_come_and_go():
    assert run_ranks(4, _dynamic_of_four) == [[1, 2, 3]] * 4


def _whole_world(rank):
    hvd.init(process_sets="dynamic")
    with pytest.raises(ValueError, match="added before"):
        hvd.add_process_set([0, 1])
    with pytest.raises(ValueError, match="each once"):
        hvd.add_process_set([0, 0])
    with pytest.raises(ValueError, match="the rank 7"):
        hvd.add_process_set([0, 7])
    with pytest.raises(HorovodInternalError, match="Mismatched process sets"):
        hvd.add_process_set([rank])
    assert not hvd.remove_process_set(hvd.global_process_set)
    assert not hvd.remove_process_set(hvd.ProcessSet([0]))
    with pytest.raises(ValueError, match="was not added"):
        hvd.allreduce(torch.ones(1), process_set=hvd.ProcessSet([0]))


def test_process_sets_that_are_refused():
    run_ranks(2, _whole_world)


@pytest.mark.parametrize("ranks", [[], [1, 1], [-1], "ab", 3])
def test_a_process_set_needs_ranks(ranks):
    with pytest.raises(ValueError, match="ProcessSet"):
        hvd.ProcessSet(ranks)


def _init_with(rank, arguments, text):
    with pytest.raises(ValueError, match=text):
        hvd.init(**arguments)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"comm": [0]}, "all 2 ranks"),
        ({"comm": object()}, "mpi4py"),
        ({"process_sets": "static"}, "dynamic"),
        ({"process_sets": [[0, 5]]}, "the rank 5"),
    ],
)
def test_init_refuses(arguments, text):
    run_ranks(2, _init_with, {key: value for key, value in arguments.items()}, text)


# ---- timeline


def _timeline(rank, path):
    os.environ["HOROVOD_TIMELINE"] = str(path)
    hvd.init()
    for _ in range(3):
        hvd.allreduce(torch.ones(4), name="traced")
    hvd.stop_timeline()
    hvd.start_timeline(str(path.with_suffix(".second")), mark_cycles=True)
    hvd.allgather(torch.ones(4), name="second")
    hvd.barrier()
    hvd.stop_timeline()


def test_the_timeline_is_a_trace(tmp_path):
    path = tmp_path / "timeline.json"
    run_ranks(2, _timeline, path)
    events = json.loads(path.read_text())
    names = [event.get("name") for event in events]
    assert names.count("NEGOTIATE_ALLREDUCE") == 3
    assert names.count("ALLREDUCE") == 3
    assert {"name": "process_name", "ph": "M", "pid": 1, "args": {"name": "allreduce.traced"}} in events
    # Rank 1 may be at the next collective already, which has another row.
    begins = [event for event in events if event.get("ph") == "B" and event["pid"] == 1]
    ends = [event for event in events if event.get("ph") == "E" and event["pid"] == 1]
    assert len(begins) == len(ends) == 6
    second = [event.get("name") for event in json.loads(path.with_suffix(".second").read_text())]
    assert "CYCLE_START" in second
    assert "ALLGATHER" in second


# ---- the coordinator, by itself


def submit(negotiator, rank, name, **fields):
    request = Request(
        fields.pop("kind", "allreduce"), name, **{"dtype": "float32", "shape": (2,), "op": "Sum", **fields}
    )
    negotiator.submit(rank, request, 0.0)


def names_of(answers):
    return [[entry.request.name for entry in answer.entries] for answer in answers]


def test_nothing_is_answered_before_all_ranks_have_submitted():
    negotiator = Negotiator(3, 1000)
    submit(negotiator, 0, "a")
    submit(negotiator, 2, "a")
    assert negotiator.take() == []
    submit(negotiator, 1, "a")
    assert names_of(negotiator.take()) == [["a"]]


def test_sums_are_fused_up_to_the_limit():
    negotiator = Negotiator(1, 16)
    for name in "abc":
        submit(negotiator, 0, name)  # 8 bytes each
    submit(negotiator, 0, "d", dtype="float64", shape=(1,))
    submit(negotiator, 0, "e", prescale=2.0)
    assert names_of(negotiator.take()) == [["a", "b"], ["c"], ["d"], ["e"]]


def test_a_batch_is_held_back_while_another_is_executed():
    negotiator = Negotiator(1, 1000)
    submit(negotiator, 0, "a")
    assert names_of(negotiator.take()) == [["a"]]
    submit(negotiator, 0, "b")
    submit(negotiator, 0, "c")
    assert negotiator.take() == []
    negotiator.executed(0)
    assert names_of(negotiator.take()) == [["b", "c"]]


def test_a_group_waits_for_its_last():
    negotiator = Negotiator(2, 1000)
    for rank in (0, 1):
        submit(negotiator, rank, "g.0", group="g", group_size=2)
    assert negotiator.take() == []
    for rank in (0, 1):
        submit(negotiator, rank, "g.1", group="g", group_size=2)
    assert names_of(negotiator.take()) == [["g.0", "g.1"]]


def test_a_rank_that_joins_completes_what_waits_for_it():
    negotiator = Negotiator(2, 1000)
    submit(negotiator, 0, "a")
    negotiator.submit(1, Request("join", "join"), 0.0)
    assert names_of(negotiator.take()) == [["a"]]
    negotiator.executed(0)
    negotiator.submit(0, Request("join", "join"), 0.0)
    (answer,) = negotiator.take()
    assert answer.entries[0].number == 0


def test_what_waits_too_long_is_listed():
    negotiator = Negotiator(3, 1000)
    submit(negotiator, 1, "a")
    assert negotiator.stalled(5.0, 10.0) == []
    assert [late[:2] for late in negotiator.stalled(11.0, 10.0)] == [("a", [0, 2])]
