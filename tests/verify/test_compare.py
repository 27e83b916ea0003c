"""The judge itself, on values made by hand: what it must see, and what it must let pass."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from paceline.nouns.mesh import Mesh
from paceline.nouns.shard_spec import FLAT, Cut, ShardSpec
from paceline.verify.judge.compare import RankResult, Reference, differences, relation, take
from paceline.verify.judge.fingerprints import added, differ, times_of
from paceline.verify.judge.order_of_collectives import Call, find_disorder
from paceline.verify.judge.verdict import Verdict
from paceline.verify.ranks.watch import fingerprint
from paceline.verify.workloads import precisions_of

FULL = np.linspace(0.1, 1.0, 24).reshape(6, 4)


def reference(noise=0.0):
    tensors = {"0/parameter/a.w": FULL, "2/parameter/a.w": FULL, "2/gradient/a.w": FULL, "2/buffer/a.n": np.array(3)}
    return Reference(tensors, {"2/parameter/a.w": noise}, {"modules": ["a"]}, "float64")


def rank(tensors, cuts=None, number=0):
    shard_specs = {"a.w": ShardSpec((6, 4), cuts).to_json()} if cuts else {}
    return RankResult(number, tensors, {"placements": shard_specs, "has_gradient": {"a.w": True}})


def all_of(change=lambda values: values, key="2/parameter/a.w"):
    tensors = {name: values.copy() for name, values in reference().tensors.items()}
    tensors[key] = change(tensors[key])
    return rank(tensors)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda v: v * (1 + 1e-8), "1 times"),
        (lambda v: v * 2, "2 times"),
        (lambda v: v * 0, "zero"),
        (lambda v: np.where(v > 0.95, np.nan, v), "NaN"),
        (lambda v: v[::-1], ""),
        (lambda v: v.T, "shape"),
        (lambda v: np.where(v > 0.99, v + 1e-9, v), ""),
    ],
)
def test_a_wrong_tensor_is_seen(change, says):
    (found,) = differences(reference(), [all_of(change)])
    assert (found.kind, found.name) == ("parameter", "a.w")
    assert says in found.found


def test_what_rounding_does_passes():
    assert differences(reference(), [all_of()]) == []
    assert differences(reference(), [all_of(lambda v: v * (1 + 1e-12))]) == []
    assert differences(reference(), [all_of(lambda v: v + 1e-8)]) != []
    assert differences(reference(noise=1e-9), [all_of(lambda v: v + 1e-8)]) == []


def test_a_count_must_be_exact():
    assert [one.kind for one in differences(reference(), [all_of(lambda v: v + 1, "2/buffer/a.n")])] == ["buffer"]


def test_a_missing_gradient_and_a_missing_piece_are_seen():
    lacking = all_of()
    del lacking.tensors["2/gradient/a.w"]
    assert differences(reference(), [lacking])[0].found == "it has none"
    first = Cut(0, (6,), 0, 2)
    shard_spec = ShardSpec((6, 4), (first,))
    half = rank({k: take(v, shard_spec) if v.ndim else v for k, v in all_of().tensors.items()}, (first,))
    found = differences(reference(), [half])
    assert "12 of its elements are on no rank" in found[0].found


def test_compare_finds_wrong_or_missing_state_held_by_one_rank():
    """Two ranks with three rows each, of which one says that it has the state of all six."""
    state = "2/state/exp_avg/a.w"
    one = reference()
    one.tensors[state] = FULL
    halves = []
    for number in range(2):
        cut = Cut(0, (6,), number, 2)
        tensors = {k: take(v, ShardSpec((6, 4), (cut,))) if v.ndim else v for k, v in reference().tensors.items()}
        halves.append(rank(tensors, (cut,), number))
        halves[number].facts["whole_states"] = {"a.w": number == 1}
    found = differences(one, halves)
    assert [(each.rank, each.found) for each in found] == [(1, "it has none"), (-1, "it is on no rank")]
    halves[1].tensors[state] = FULL.copy()
    assert differences(one, halves) == []
    halves[1].tensors[state] = FULL * 2
    assert [(each.rank, each.found) for each in differences(one, halves)] == [(1, "2 times what it should be")]
    # No rank says that it has it.
    del halves[1].tensors[state]
    halves[1].facts["whole_states"] = {"a.w": False}
    assert [each.found for each in differences(one, halves)] == ["it is on no rank"]


ROWS, COLUMN_BLOCKS, FLAT_ROW = Cut(0, (6,), 0, 2), Cut(1, (2, 2), 1, 2), Cut(FLAT, (24,), 1, 5)


@pytest.mark.parametrize("cuts", [(ROWS,), (COLUMN_BLOCKS,), (ROWS, Cut(1, (4,), 1, 2)), (FLAT_ROW,)])
def test_pieces_are_those_of_the_checkpoints(cuts):
    """The judge's own way of cutting against the one that checkpoints use."""
    from paceline.checkpoint.reshard import take as saved

    shard_spec = ShardSpec((6, 4), cuts)
    assert np.array_equal(take(FULL, shard_spec), saved(torch.tensor(FULL), shard_spec).numpy())


def test_a_relation_is_only_told_where_it_holds():
    assert relation(FULL * 3, FULL) == "3 times what it should be"
    assert relation(FULL + 1, FULL) == ""


def calls(*collectives):
    return [Call(name, "replicate", 8, f"train.py:{number}") for number, name in enumerate(collectives)]


@pytest.mark.parametrize(
    ("first", "second", "odd"),
    [
        (["all_reduce"] * 3, ["all_reduce"] * 2, 1),
        (["all_reduce", "broadcast", "all_reduce"], ["all_reduce", "all_reduce"], 1),
        (["all_reduce", "all_reduce"], ["all_reduce", "broadcast", "all_reduce"], 0),
        ([], ["barrier"], 0),
    ],
)
def test_the_rank_that_left_the_order_is_named(first, second, odd):
    found = find_disorder({0: calls(*first), 1: calls(*second)}, Mesh.parse("replicate=2"))
    assert found is not None
    assert found.rank == odd
    assert f"rank {odd}" in found.describe()


def test_ranks_of_different_groups_may_differ():
    mesh = Mesh.parse("replicate=2,tensor=2")
    traces = {r: [Call("all_reduce", "tensor", 8 if r < 2 else 16, "")] for r in range(4)}
    assert find_disorder(traces, mesh) is None
    traces[3] = []
    assert find_disorder(traces, mesh).rank == 3


def test_fingerprints_of_pieces_add_up_and_tell_tensors_apart():
    whole = torch.randn(6, 4, dtype=torch.float64)
    places = torch.arange(24).view(6, 4)
    pieces = [fingerprint(whole[:, cut], places[:, cut]) for cut in (slice(0, 3), slice(3, 4))]
    assert not differ(added(pieces), fingerprint(whole))
    assert differ(fingerprint(whole.flip(0)), fingerprint(whole))
    assert differ(fingerprint(whole + 1e-8), fingerprint(whole))
    assert not differ(fingerprint(whole * (1 + 1e-15)), fingerprint(whole))
    assert differ(fingerprint(whole * float("nan")), fingerprint(whole))


@pytest.mark.parametrize(
    ("failed", "says"),
    [
        (["step float64", "traffic"], "bug (the distributed step is not the single-process step)"),
        (["order"], "bug (the distributed step is not the single-process step)"),
        (["run"], "bug (the distributed step is not the single-process step)"),
        (
            ["dropout", "traffic"],
            "draw wrong masks, or drift apart; ranks send something else than what was predicted)",
        ),
        (["resume draws"], "single-process step, but a job that resumes goes on differently)"),
        (["reshard replicate=4"], "but a checkpoint loaded under another mesh goes on differently)"),
    ],
)
def test_the_verdict_says_what_is_wrong(failed, says):
    verdict = Verdict("replicate=2", is_compared=True)
    for name in ("order", "step float64", "dropout", "traffic", *failed):
        verdict.add(name, name not in failed, "")
    assert verdict.word == "bug"
    assert verdict.is_step_right == ("is not" not in says)
    assert verdict.lines()[-1].endswith(says)


def test_steps_under_bf16_are_taken_in_float32_too():
    assert precisions_of("bf16") == ["float64", "float32", "bf16"]
    assert precisions_of("float32") == ["float64", "float32"]
    assert precisions_of("float64") == ["float64"]


@pytest.mark.parametrize(
    ("change", "factor"),
    [
        (lambda v: v * 2, 2),
        (lambda v: v * -0.5, -0.5),
        (lambda v: v, 1),
        (lambda v: v + 1, None),
        (lambda v: v[1:], None),
    ],
)
def test_a_multiple_is_told_from_another_tensor(change, factor):
    values = torch.linspace(0.1, 1.0, 24, dtype=torch.float64)
    assert times_of(fingerprint(change(values)), fingerprint(values)) == pytest.approx(factor)
