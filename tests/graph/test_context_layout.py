"""How the sequences of a graph are shared: by which way, with how much work and traffic, and what is refused."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import default_collate

from paceline.graph.capture import capture
from paceline.graph.context.context_exchanges import AttentionSplit, pairs_seen
from paceline.graph.context.context_layout import attention_cost, split_sequence
from paceline.graph.context.find_attention import merge_attention
from paceline.graph.labels import tensor_inputs
from paceline.graph.reshape_rules import shape_of
from paceline.graph.skeleton import skeleton
from paceline.nouns.errors import PlanError
from paceline.nouns.plan import Plan
from paceline.profile.simulate import step_traffic

from support.attention_models import LENGTH, MODELS, WIDTH, Dropped, Grouped, Reader, rows, workload
from support.closed_traffic import by_operation

BATCH = 4


def captured_of(name, model=None):
    made = skeleton(model or MODELS[name][0](), torch.float64).train()
    return capture(made, MODELS[name][1], default_collate(rows()[:BATCH]), torch.device("cpu"))


@pytest.mark.parametrize(
    ("name", "ranks", "way", "shared"),
    [
        ("absolute", 2, "auto", "heads over 2"),
        ("absolute", 4, "auto", "heads over 4"),
        ("absolute", 4, "ring", "ring of 4"),
        ("rotary", 2, "heads", "heads over 2"),
        ("rotary", 4, "auto", "heads over 2, ring of 2"),
        ("absolute", 8, "auto", "heads over 4, ring of 2"),
        ("absolute", 3, "auto", "ring of 3"),
        ("drops", 2, "auto", "gathered"),
        ("drops", 2, "ring", "gathered"),
    ],
)
def test_the_way_that_is_asked_for_or_the_cheapest(name, ranks, way, shared):
    layout = split_sequence(captured_of(name), ranks, way)
    assert {found.way for found in layout.found} == {shared}
    assert [found.module for found in layout.found] == ["layers.0", "layers.1"]


@pytest.mark.parametrize(
    ("name", "ranks", "way", "says"),
    [
        ("absolute", 8, "heads", "has 4 heads, not a multiple"),
        ("rotary", 4, "heads", "has 4 heads and 2 of keys, not a multiple"),
        ("drops", 2, "heads", "drops weights"),
        ("absolute", 17, "auto", "has 16 positions"),
        ("absolute", 17, "ring", "has 16 positions, too few"),
    ],
)
def test_what_cannot_be_shared_is_refused(name, ranks, way, says):
    with pytest.raises(PlanError, match=says):
        split_sequence(captured_of(name), ranks, way)


@pytest.mark.parametrize("name", ["alibi", "window"])
def test_attention_written_by_hand_is_found(name):
    captured = captured_of(name)
    assert merge_attention(captured, 2) == 2
    captured.graph.lint()
    assert len(split_sequence(captured, 2).found) == 2
    assert not [node for node in captured.graph.nodes if "softmax" in str(node.target)]


def by_hand(change, ranks=2):
    """A reader whose attention is written so; how many attentions are found."""

    class Own(Grouped):
        groups = 4

        def attend(self, query, key, value):
            return change(query, key, value)

    return merge_attention(captured_of("one_group", Reader(Own)), ranks)


def test_what_only_looks_like_attention_is_left_alone():
    def plain(query, key, value):
        return torch.softmax(query @ key.transpose(-1, -2), -1) @ value

    def over_the_queries(query, key, value):
        return torch.softmax(query @ key.transpose(-1, -2), -2) @ value

    def weights_are_kept(query, key, value):
        weights = torch.softmax(query @ key.transpose(-1, -2), -1)
        return weights @ value + weights.sum()

    def a_mask_that_counts(query, key, value):
        scores = (query @ key.transpose(-1, -2)).masked_fill(torch.eye(LENGTH, dtype=torch.bool), -5.0)
        return torch.softmax(scores, -1) @ value

    def scaled_after_a_mask(query, key, value):
        scores = (query @ key.transpose(-1, -2) + torch.ones(LENGTH, LENGTH)) * 0.5
        return torch.softmax(scores, -1) @ value

    assert by_hand(plain) == 2
    assert by_hand(plain, LENGTH + 1) == 0  # it can't be shared anyway
    for other in (over_the_queries, weights_are_kept, a_mask_that_counts, scaled_after_a_mask):
        assert by_hand(other) == 0, other.__name__


@pytest.mark.parametrize(
    ("fills", "found"),
    [((-1e9,), 2), ((-1e4,), 2), ((float("-inf"),), 2), ((-1e9, -1e9), 2), ((-1e9, float("-inf")), 2),
     ((-1e30, -1e38), 2), ((-1e9, -1e4), 0), ((-1e38, -1e9), 0), ((-9e3,), 0), ((1e9,), 0)],
)  # fmt: skip
def test_masks_are_large_numbers_that_hide_alike(fills, found):
    """Beside -1e9 a key that -1e4 hides is seen, in a row that sees no other."""

    def masked(query, key, value):
        scores = query @ key.transpose(-1, -2)
        for number, fill in enumerate(fills):
            scores = scores.masked_fill(torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1 + number), fill)
        return torch.softmax(scores, -1) @ value

    assert by_hand(masked) == found


@pytest.mark.parametrize("length", [16, 17, 250, 4097])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_causal_work_is_balanced(length, ranks):
    half = length // 2
    blocks = (length - half, -half)
    work = pairs_seen(AttentionSplit(blocks, blocks, 1), True, ranks)
    assert sum(work) == length * (length + 1) // 2
    if length >= 250:
        assert max(work) / (sum(work) / ranks) < 1.05
    plain = pairs_seen(AttentionSplit((length,), (length,), 1), True, ranks)
    assert max(plain) / (sum(plain) / ranks) > 1.2  # what the halves are for


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_ring_sends_what_the_paper_says(ranks):
    """Keys and values N - 1 times forward; backward these and their gradients as often."""
    plan = Plan.parse(f"context={ranks},context_by=ring")
    sent = by_operation(step_traffic(workload("absolute", precision="float32"), plan))["send", "context"]
    keys_and_values = 2 * BATCH * LENGTH // ranks * WIDTH * 4
    messages = 2 * 3 * (ranks - 1)  # of two layers
    assert sent == (messages, messages * keys_and_values)


def test_costs_follow_the_sizes():
    """Few heads of keys make the ring cheaper; without a second rank nothing is exchanged."""
    assert attention_cost([1e6, 1e6, 1e6], 1, 1) == 0
    assert attention_cost([1e6, 1e6, 1e6], 4, 4) < attention_cost([1e6, 1e6, 1e6], 4, 1)
    assert attention_cost([8e6, 1e6, 1e6], 2, 1) < attention_cost([8e6, 1e6, 1e6], 2, 2)


def test_what_runs_whole_is_said():
    class Counted(Grouped):
        def forward(self, x):
            return Grouped.forward(self, x + torch.cumsum(x, 1))

    layout = split_sequence(captured_of("one_group", Reader(Counted)), 2)
    assert layout.gathered == {"aten.cumsum.default in layers.0": 1, "aten.cumsum.default in layers.1": 1}


def test_convolutions_by_steps_of_one_stay_in_pieces():
    captured = captured_of("convolved")
    layout = split_sequence(captured, 2)
    kinds = [choice.kind for node, choice in layout.choices.items() if "conv1d" in str(node.target)]
    assert kinds == ["convolution"] * 4
    assert not layout.gathered


def test_context_layout_splits_masks_in_a_ring_but_not_by_heads():
    for way, is_split in (("ring", True), ("heads", False)):
        captured = captured_of("relative")
        layout = split_sequence(captured, 2, way)
        attentions = [node for node, choice in layout.choices.items() if choice.attention is not None]
        assert len(attentions) == 2
        for node in attentions:
            mask = tensor_inputs(node)[3]
            assert shape_of(mask)[-2:] == (LENGTH, LENGTH)
            assert (layout.choices[node].inputs[3] is not None) == is_split


def test_dropout_of_a_model_in_evaluation_is_shared():
    made = skeleton(Reader(Dropped), torch.float64).eval()
    captured = capture(made, MODELS["drops"][1], default_collate(rows()[:BATCH]), torch.device("cpu"))
    assert {found.way for found in split_sequence(captured, 2, "ring").found} == {"ring of 2"}
