"""The closed form of `shard`, on a model small enough to count by hand. Real ranks: tests/parallel/test_shard.py."""

import pytest

from paceline.nouns.plan import Plan

from support.closed_traffic import FLAG_BYTES, ShardTraffic, shard_traffic

# Two blocks with 5 rows of 3 (padded to 6 on 2 ranks, so 18 numbers), a root with 4 numbers, a scalar.
PARTS = [
    ShardTraffic((4,), 4, "float32", ""),
    ShardTraffic((5, 3), 4, "float32", "layers.0"),
    ShardTraffic((5, 3), 4, "float32", "layers.1", is_trained=False),
    ShardTraffic((), 4, "float32", "", is_whole=True),
]
FLAGS = FLAG_BYTES * (2 + 1 + 3)


@pytest.mark.parametrize(
    ("zero", "gathers", "gathered", "reduces", "reduced"),
    [
        (2, 3, 4 * (2 + 9 + 9), 6, 3 * 4 * (4 + 18)),
        (3, 15, 3 * 4 * (2 + 2 * 9 + 2 * 9), 6, 3 * 4 * (4 + 18)),
    ],
)
def test_three_micro_batches_on_two_ranks(zero, gathers, gathered, reduces, reduced):
    rows = shard_traffic(Plan(zero=zero), 2, PARTS, micro_batches=3)
    assert rows == {
        ("all_gather", "shard"): (gathers, gathered),
        ("all_reduce", "shard"): (2, FLAGS + 4),
        ("reduce_scatter", "shard"): (reduces, reduced),
    }


def test_bf16_halves_what_is_cut_and_one_rank_sends_nothing():
    exact, half = (shard_traffic(Plan(compression=word), 2, PARTS) for word in ("none", "bf16"))
    for operation, (calls, sent) in exact.items():
        share = 1 if operation[0] == "all_reduce" else 2
        assert half[operation] == (calls, sent // share)
    assert not shard_traffic(Plan(), 1, PARTS)
