"""The MPI words on real ranks, against what they mean."""

from __future__ import annotations

import os

import pytest
import torch

import paceline
from paceline.comm import api
from paceline.comm.process_group import RankInfo, _file_store, find_rank_info
from paceline.nouns.errors import UsageError

from support.ranks import run_ranks


def every_word(rank):
    paceline.init()
    paceline.init()
    mine = torch.arange(6, dtype=torch.float64).view(3, 2) + 10 * rank
    kept = mine.clone()
    rows = torch.full((rank + 1, 2), float(rank))
    answers = {
        "place": (
            paceline.rank(),
            paceline.size(),
            paceline.local_rank(),
            paceline.local_size(),
            paceline.cross_rank(),
        ),
        "ops": {op: paceline.all_reduce(mine, op) for op in ("sum", "mean", "min", "max", "product")},
        "strided": paceline.all_reduce(mine.T),
        "gathered": paceline.all_gather(rows),
        "sent": paceline.broadcast(mine, root=1),
        "scattered": paceline.reduce_scatter(torch.cat([mine, mine]), "sum"),
        "uneven": paceline.reduce_scatter(torch.arange(4.0) + rank, "mean"),
        "exchanged": paceline.all_to_all(torch.arange(3.0) + 10 * rank, [0, 1, 2]),
        "bf16": paceline.all_reduce(torch.ones(2, dtype=torch.bfloat16)),
    }
    paceline.barrier()
    assert torch.equal(mine, kept), "an argument was changed"
    answers["ledger"] = {key: api.world().comm.ledger.calls[key, "world"] for key in ("all_reduce", "barrier")}
    return answers


def test_words_mean_what_mpi_says():
    ranks = run_ranks(3, every_word)
    base = torch.arange(6, dtype=torch.float64).view(3, 2)
    all_of_them = torch.stack([base, base + 10, base + 20])
    expected = {
        "sum": all_of_them.sum(0),
        "mean": all_of_them.mean(0),
        "min": base,
        "max": base + 20,
        "product": all_of_them.prod(0),
    }
    for rank, answers in enumerate(ranks):
        assert answers["place"] == (rank, 3, rank, 3, 0)
        for op, value in answers["ops"].items():
            torch.testing.assert_close(value, expected[op])
        torch.testing.assert_close(answers["strided"], expected["sum"].T)
        assert answers["gathered"][:, 0].tolist() == [0, 1, 1, 2, 2, 2]
        assert torch.equal(answers["sent"], base + 10)
        whole = torch.cat([expected["sum"], expected["sum"]])
        torch.testing.assert_close(answers["scattered"], whole[2 * rank : 2 * rank + 2])
        assert answers["uneven"].tolist() == [[1.0, 2.0], [3.0], [4.0]][rank]
        assert answers["exchanged"][1] == [rank] * 3
        expected_rows = {0: [], 1: [0.0, 10.0, 20.0], 2: [1.0, 2.0, 11.0, 12.0, 21.0, 22.0]}
        assert answers["exchanged"][0].tolist() == expected_rows[rank]
        assert answers["bf16"].tolist() == [3.0, 3.0]
        assert answers["ledger"] == {"all_reduce": 7, "barrier": 1}


def test_a_world_of_one_needs_no_launcher():
    answers = run_ranks(1, one_rank)[0]
    assert answers == [1.0, 1.0, 1.0, 1.0, 1.0]


def one_rank(rank):
    paceline.init()
    one = torch.ones(1)
    results = [
        paceline.all_reduce(one),
        paceline.all_gather(one),
        paceline.broadcast(one),
        paceline.reduce_scatter(one),
    ]
    return [float(result) for result in [*results, paceline.all_to_all(one)[0]]]


def test_other_names_are_the_same_functions():
    assert paceline.allgather is paceline.all_gather
    assert paceline.alltoall is paceline.all_to_all


def both_spellings(rank):
    paceline.init()
    mine = torch.arange(4.0) + rank
    pairs = [(paceline.allreduce(mine, op), paceline.all_reduce(mine, op)) for op in ("sum", "mean", "max")]
    return pairs + [(paceline.reducescatter(mine, op), paceline.reduce_scatter(mine, op)) for op in ("sum", "mean")]


def test_horovods_spellings_do_the_same():
    for pairs in run_ranks(2, both_spellings):
        for theirs, ours in pairs:
            assert torch.equal(theirs, ours)


@pytest.mark.parametrize("name", ["allreduce", "reducescatter"])
def test_a_reduction_by_horovods_name_is_written(name):
    """Horovod averages where MPI adds up: the result of a default would be wrong for one of them, and silently."""
    with pytest.raises(UsageError) as caught:
        getattr(paceline, name)(torch.ones(4))
    assert "Horovod would average" in caught.value.found
    assert f'{name}(tensor, "mean")' in caught.value.fix


def wrong_calls(rank):
    said = []
    calls = [
        lambda: paceline.rank(),
        lambda: paceline.init() or paceline.all_reduce(torch.ones(1), "average"),
        lambda: paceline.allreduce(torch.ones(1), "average"),
        lambda: paceline.allreduce(torch.ones(1), "gradients.0"),  # where Horovod has a name
        lambda: paceline.all_reduce(torch.ones(1), torch.distributed.ReduceOp.PRODUCT),
        lambda: paceline.broadcast(torch.ones(1), root=5),
        lambda: paceline.all_gather(torch.tensor(1.0)),
        lambda: paceline.all_to_all(torch.ones(3), [3]),
        lambda: paceline.all_to_all(torch.ones(3)),
    ]
    for call in calls:
        try:
            call()
        except UsageError as error:
            said.append(str(error))
    paceline.all_reduce(torch.ones(1))  # a rank that ended here might leave another alone in its init
    return said


def test_wrong_calls_say_what_to_do():
    first, *others = run_ranks(2, wrong_calls)[0]
    assert "call paceline.init() first" in first
    for word, text in zip(
        ["write 'mean'", "write 'mean'", "one of these", "write 'product'", "0 to 1", "reshape(1)", "splits", "splits"],
        others,
        strict=True,
    ):
        assert word in text


CALLS = {
    "all_reduce": paceline.all_reduce,
    "all_gather": paceline.all_gather,
    "broadcast": paceline.broadcast,
    "reduce_scatter": paceline.reduce_scatter,
    "all_to_all": lambda tensor: paceline.all_to_all(tensor)[0],
}
MOVES = ("all_gather", "broadcast", "all_to_all")
# What no collective takes, and what to do. A DTensor is known by its method: to make one takes ranks.
NOT_DENSE = {
    "sparse": (lambda: torch.eye(2).to_sparse(), "its layout is torch.sparse_coo", "tensor.to_dense()"),
    "sparse rows": (lambda: torch.eye(2).to_sparse_csr(), "its layout is torch.sparse_csr", "tensor.to_dense()"),
    "nested": (lambda: torch.nested.nested_tensor([torch.ones(2)]), "it is nested", "to_padded_tensor"),
    "jagged": (
        lambda: torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged),
        "it is nested",
        "to_padded_tensor",
    ),
    "quantized": (lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8), "quantized", "dequantize()"),
    "meta": (lambda: torch.ones(2, device="meta"), "the device meta", "make it on the CPU or a GPU"),
    "in parts": (lambda: Part(), "it is a DTensor", "tensor.full_tensor()"),
}


class Part(torch.Tensor):
    def full_tensor(self):
        return self


@pytest.mark.filterwarnings("ignore")  # torch's, that such tensors are new
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("kind", NOT_DENSE)
def test_a_tensor_without_dense_values_here_is_refused(kind, name):
    make, found, fix = NOT_DENSE[kind]
    paceline.init()
    with pytest.raises(UsageError) as caught:
        CALLS[name](make())
    assert found in caught.value.found
    assert fix in caught.value.fix
    assert caught.value.asked == f"{name} takes a dense tensor"


REDUCED = {torch.bool, torch.uint8, torch.int8, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32}
REDUCED |= {torch.float64, torch.complex64, torch.complex128}
OTHERS = [torch.int16, torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2]
VIEWS = {
    "a transposed view": lambda: torch.arange(8.0).view(2, 4).T,
    "an expanded view": lambda: torch.ones(1).expand(4),
    "a conjugated view": lambda: torch.full((4,), 1j, dtype=torch.complex64).conj(),
    "a negated view": lambda: torch.full((4,), 1j, dtype=torch.complex64).conj().imag,
    "channels last": lambda: torch.ones(2, 3, 2, 2).to(memory_format=torch.channels_last),
    "one that needs a gradient": lambda: torch.ones(4, requires_grad=True) * 2,
}


def every_kind(rank):
    """What becomes of each dtype and view: the result, or the error's second line."""
    paceline.init()
    answers = {}
    for dtype in [*REDUCED, *OTHERS]:
        for name, call in CALLS.items():
            try:
                value = call(torch.tensor([1, 0, rank, 1]).to(dtype))
                answers[str(dtype), name] = value.dtype == dtype, value.tolist()
            except UsageError as error:
                answers[str(dtype), name] = error.found
    for view, make in VIEWS.items():
        for name, call in CALLS.items():
            answers[view, name] = call(make())
    return answers


def test_every_dtype_and_view_is_carried_or_refused():
    for answers in run_ranks(2, every_kind):
        for dtype in [*REDUCED, *OTHERS]:
            both = torch.tensor([1, 0, 0, 1, 1, 0, 1, 1]).to(dtype).tolist()
            assert answers[str(dtype), "broadcast"] == (True, both[:4])
            assert answers[str(dtype), "all_gather"] == (True, both)
            for name in CALLS:
                value = answers[str(dtype), name]
                assert value[0] is True if name in MOVES or dtype in REDUCED else value == f"the dtype is {dtype}"
        for view, make in VIEWS.items():
            torch.testing.assert_close(answers[view, "all_reduce"], 2 * make().detach().clone())
            torch.testing.assert_close(answers[view, "broadcast"], make().detach().clone())
            torch.testing.assert_close(answers[view, "all_gather"], torch.cat([make(), make()]).detach())


@pytest.mark.parametrize("op", ["min", "max", "product"])
def test_complex_numbers_have_sums_and_means_alone(op):
    paceline.init()
    with pytest.raises(UsageError, match="which has sums and means alone"):
        paceline.all_reduce(torch.ones(2, dtype=torch.complex64), op)


TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "1"}
STORE = {"MASTER_ADDR": "h1", "MASTER_PORT": "29500"}
OURS = {"PACELINE_RANK": "1", "PACELINE_WORLD_SIZE": "2", "PACELINE_LOCAL_RANK": "1", "PACELINE_LOCAL_SIZE": "2"}


@pytest.mark.parametrize(
    ("environment", "place"),
    [
        ({}, RankInfo()),
        ({**TORCHRUN, **STORE}, RankInfo(3, 4, 1, 2, 1)),
        ({**OURS, "PACELINE_RENDEZVOUS": "x"}, RankInfo(1, 2, 1, 2, 0, "x")),
        (
            {**OURS, "PACELINE_LOCAL_SIZE": "1", "PACELINE_LOCAL_RANK": "0", "PACELINE_MASTER": "h1:29400"},
            RankInfo(1, 2, 0, 1, 1, None, ("h1", 29400), None, True),
        ),
    ],
)
def test_a_place_is_read_from_the_launchers_variables(environment, place):
    assert find_rank_info(environment) == place


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({"PACELINE_RANK": "0"}, "only PACELINE_RANK is set"),
        ({"RANK": "x", "WORLD_SIZE": "2"}, "it is 'x'"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "rank 2 of 2"),
        ({**TORCHRUN, **STORE, **OURS}, "paceline run and torchrun"),
    ],
)
def test_contradicting_variables_are_refused(environment, said):
    with pytest.raises(UsageError, match=said):
        find_rank_info(environment)


@pytest.mark.parametrize("is_linked", [False, True])
def test_a_folder_to_meet_in_is_no_link_to_another(tmp_path, is_linked):
    """In a folder where all may write, somebody else's link could lead to what is swept there."""
    own, shared = tmp_path / "precious", tmp_path / f"paceline-{os.getuid()}"
    (own if is_linked else shared).mkdir(mode=0o700)
    if is_linked:
        shared.symlink_to(own)
    for name, age in (("old", 1), ("new", None)):
        (shared / name).write_text("x")
        if age:
            os.utime(shared / name, (age, age))
    place = RankInfo(0, 1, 0, 1, 0, str(shared / "meeting"))
    if is_linked:
        with pytest.raises(UsageError, match="its folder is a link"):
            _file_store(place)
        assert (own / "old").exists()
    else:
        _file_store(place)
        assert sorted(path.name for path in shared.iterdir() if path.name != "meeting") == ["new"]
        shared.chmod(0o770)
        with pytest.raises(UsageError, match="others may write"):
            _file_store(place)


def test_only_the_shared_folder_is_swept(tmp_path):
    (tmp_path / "mine").mkdir(mode=0o700)
    (tmp_path / "mine" / "old").write_text("x")
    os.utime(tmp_path / "mine" / "old", (1, 1))
    _file_store(RankInfo(0, 1, 0, 1, 0, str(tmp_path / "mine" / "meeting")))
    assert (tmp_path / "mine" / "old").exists()
