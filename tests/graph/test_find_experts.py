"""Which layers of experts are found in a graph, how they are spread, and what is refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import default_collate

from paceline.graph.capture import capture
from paceline.graph.context.context_layout import split_sequence
from paceline.graph.expert.expert_layout import describe_experts, first_layout, spread_experts
from paceline.graph.expert.find_experts import find_experts
from paceline.graph.loss_is_additive import coupled_at
from paceline.graph.skeleton import skeleton
from paceline.nouns.errors import PlanError
from paceline.nouns.plan import Plan
from paceline.profile.describe_split import describe_split
from paceline.profile.simulate import step_traffic

from support.expert_models import BATCH, EXPERTS, LENGTH, MODELS, Mixture, Reader, rows, word_loss, workload

SLOTS = {"lonely": BATCH * LENGTH}


def captured_of(name, model=None, loss=None, count=BATCH):
    made = skeleton(model or MODELS[name][0](), torch.float64).train()
    return capture(made, loss or MODELS[name][1], default_collate(rows()[:count]), torch.device("cpu"))


GROUPED = [name for name in MODELS if name not in ("looped", "switch")]  # these call modules, in a loop


@pytest.mark.parametrize("name", GROUPED)
def test_a_layer_is_found(name):
    (layer,) = find_experts(captured_of(name))
    assert layer.count == (8 if name == "lonely" else EXPERTS)
    assert layer.slots == SLOTS.get(name, 2 * BATCH * LENGTH)
    assert layer.tokens == BATCH * LENGTH


@pytest.mark.parametrize("name", GROUPED)
def test_its_weights_are_spread_and_its_rows_are_sent(name):
    captured = captured_of(name)
    layout = spread_experts(captured, 2)
    (line,) = describe_experts(captured, layout, 2)
    assert line.way == "rows sent"
    assert len(line.weights) >= 2
    split = {key for key, placement in layout.placements.items() if placement is not None}
    assert split == set(line.weights)


@pytest.mark.parametrize("name", GROUPED)
def test_a_piece_of_a_sequence_has_its_own_rows(name):
    gathered = split_sequence(captured_of(name), 2).gathered
    assert not any("experts" in reason or "mixture" in reason for reason in gathered), gathered


@pytest.mark.parametrize(
    ("name", "meets"), [("mixture", None), ("lonely", None), ("counted", "sum"), ("counted_after", "to.dtype")]
)
def test_tokens_are_known_to_stay_apart_in_it(name, meets):
    met = coupled_at(captured_of(name))
    assert (met is None) if meets is None else meets in str(met.target)


class Shuffled(Mixture):
    """Rows are read in the order of experts: what a rank has of them is not what one process has."""

    def forward(self, x):
        tokens = x.flatten(0, 1)
        expert, order = self.router(tokens).argmax(-1).sort(stable=True)
        ends = torch.histc(expert.float(), self.experts, 0, self.experts - 1).cumsum(0).to(torch.int32)
        made = F.grouped_mm(F.grouped_mm(tokens[order], self.up, offs=ends), self.down, offs=ends)
        return made.view_as(x)


class Dropping(Mixture):
    """Dropout of sorted rows: which are dropped depends on where they lie."""

    def forward(self, x):
        tokens = x.flatten(0, 1)
        expert, order = self.router(tokens).argmax(-1).sort(stable=True)
        ends = torch.histc(expert.float(), self.experts, 0, self.experts - 1).cumsum(0).to(torch.int32)
        made = F.dropout(F.grouped_mm(tokens[order], self.up, offs=ends), 0.5)
        made = F.grouped_mm(made, self.down, offs=ends)
        return torch.zeros_like(tokens).index_add(0, order, made).view_as(x)


class WithinRows(Mixture):
    """Each row sees the one before it among those of its expert."""

    def forward(self, x):
        tokens = x.flatten(0, 1)
        expert, order = self.router(tokens).argmax(-1).sort(stable=True)
        ends = torch.histc(expert.float(), self.experts, 0, self.experts - 1).cumsum(0).to(torch.int32)
        made = F.grouped_mm(F.grouped_mm(tokens[order].cumsum(0), self.up, offs=ends), self.down, offs=ends)
        return torch.zeros_like(tokens).index_add(0, order, made).view_as(x)


class Dense(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x):
        return self.linear(x)


@pytest.mark.parametrize("kind", [Shuffled, Dropping, WithinRows])
def test_rows_that_do_not_stay_apart_are_no_layer(kind):
    captured = captured_of("mixture", Reader(kind), word_loss)
    assert find_experts(captured) == []
    with pytest.raises(PlanError, match="2 grouped matrix products none is of rows that are sorted by expert"):
        first_layout(captured, 2)


def test_a_model_without_experts_is_refused():
    with pytest.raises(PlanError, match="the model has no grouped matrix products"):
        first_layout(captured_of("mixture", Reader(Dense), word_loss), 2)


@pytest.mark.parametrize(("ranks", "fix"), [(3, "write expert=2"), (5, "write expert=4")])
def test_a_rank_without_an_expert_is_refused(ranks, fix):
    with pytest.raises(PlanError, match="mixture has 4, which leave a rank without one") as refused:
        spread_experts(captured_of("mixture"), ranks)
    assert fix in str(refused.value)


def test_tokens_that_no_size_divides_are_whole_on_every_rank():
    captured = captured_of("mixture", count=3)
    (line,) = describe_experts(captured, spread_experts(captured, 2), 2)
    assert line.way == "rows of all on each"


def plan_with(**parts):
    describe_split(workload("mixture", precision="float32", **parts), Plan(mesh="expert=4"))


def test_a_batch_that_is_shorter_than_the_axis_is_refused():
    with pytest.raises(PlanError, match="the batch, or micro-batch, that these ranks share has 3"):
        plan_with(batch_size=3)


class Whole(torch.optim.SGD):
    """It divides each gradient by its norm."""

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad /= parameter.grad.norm()
        return super().step(closure)


def test_an_optimizer_that_looks_at_whole_weights_is_refused():
    looking = workload("mixture", precision="float32", optimizer=lambda made: Whole(made.parameters(), lr=0.1))
    with pytest.raises(PlanError, match=r"the optimizer looks at the whole of mixture\.down and 2 more"):
        step_traffic(looking, Plan(mesh="expert=4"))


class OtherCounts(Mixture):
    """Groups end where something else was counted: rows of a rank alone would meet other matrices."""

    first = 0

    def forward(self, x):
        tokens = x.flatten(0, 1)
        expert, order = self.router(tokens).argmax(-1).sort(stable=True)
        counts = torch.histc(self.counted(expert).float(), self.experts, self.first, self.experts - 1)
        ends = counts.cumsum(0).to(torch.int32)
        made = F.grouped_mm(F.grouped_mm(tokens[order], self.up, offs=ends), self.down, offs=ends)
        return torch.zeros_like(tokens).index_add(0, order, made).view_as(x)

    def counted(self, expert):
        return self.experts - 1 - expert


class OtherBins(OtherCounts):
    first = 1

    def counted(self, expert):
        return expert


class OtherTokens(Mixture):
    """Rows are taken of other tokens than the slots are of."""

    def forward(self, x):
        tokens = x.flatten(0, 1)
        expert, order = self.router(tokens).argmax(-1).sort(stable=True)
        ends = torch.histc(expert.float(), self.experts, 0, self.experts - 1).cumsum(0).to(torch.int32)
        made = F.grouped_mm(F.grouped_mm(tokens[order // 2], self.up, offs=ends), self.down, offs=ends)
        return torch.zeros_like(tokens).index_add(0, order, made).view_as(x)


@pytest.mark.parametrize("kind", [OtherCounts, OtherBins, OtherTokens])
def test_groups_of_something_else_are_no_layer(kind):
    assert find_experts(captured_of("mixture", Reader(kind), word_loss)) == []
