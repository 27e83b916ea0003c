"""Grouped matrix products, as of mixtures of experts: on fake tensors, in pieces, in float64, and their layouts."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from paceline.graph.capture import capture
from paceline.graph.grouped_mm import KnownCounts, counts, grouped_mm_of_pieces, register_fake
from paceline.graph.placement import Split
from paceline.graph.tensor.explain import explain
from paceline.graph.tensor.tensor_layout import choose_layout
from paceline.nouns.errors import WorkloadError
from paceline.train.precision import grouped_products_in_float64

from support.operations import piece

CPU = torch.device("cpu")
ENDS = [3, 3, 8]  # the second group has no row
ROWS, INNER, OUTER = 8, 16, 32


def test_counts_that_the_code_asks_for_have_a_shape():
    numbers = torch.tensor([0, 2, 2, 1])
    with KnownCounts():
        assert torch.bincount(numbers, minlength=4).tolist() == numbers.bincount(None, 4).tolist() == [1, 1, 2, 0]
        assert torch.bincount(numbers, torch.ones(4), 4).tolist() == [1.0, 1.0, 2.0, 0.0]
        with pytest.raises(WorkloadError, match=r"there are numbers up to 2\n  fix: write minlength=3"):
            torch.bincount(numbers, minlength=2)
    with FakeTensorMode():
        assert counts(torch.zeros(5, dtype=torch.int64), 4).shape == (4,)


def ends():
    return torch.tensor(ENDS, dtype=torch.int32)


def by_hand(rows, weight):
    pairs = itertools.pairwise([0, *ENDS])
    return torch.cat([rows[begin:end] @ weight[number] for number, (begin, end) in enumerate(pairs)])


def operands(dtype=torch.float32, inner=INNER, outer=OUTER):
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(ROWS, inner, generator=generator).to(dtype).requires_grad_()
    # As transformers keeps them: (groups, out, in), transposed where they are used.
    weight = torch.randn(len(ENDS), outer, inner, generator=generator).to(dtype).requires_grad_()
    return rows, weight


def product_and_gradients(rows, weight, function):
    product = function(rows, weight.transpose(1, 2))
    product.backward(torch.ones_like(product))
    return product, rows.grad, weight.grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_fakes_are_as_the_real_ones(dtype):
    register_fake()

    def function(rows, weight):
        return F.grouped_mm(rows, weight, offs=ends())

    real = product_and_gradients(*operands(dtype), function)
    with FakeTensorMode():
        fake = product_and_gradients(*operands(dtype), function)
    for one, other in zip(real, fake, strict=True):
        assert (one.shape, one.dtype, one.stride()) == (other.shape, other.dtype, other.stride())


def test_operations_are_counted():
    register_fake()
    with FlopCounterMode(display=False) as counter:
        product_and_gradients(*operands(), lambda rows, weight: F.grouped_mm(rows, weight, offs=ends()))
    assert counter.get_total_flops() == 3 * 2 * ROWS * INNER * OUTER, "forward, and two products backward"


@pytest.mark.parametrize(("inner", "outer"), [(16, 32), (5, 32), (16, 3), (7, 9)])
def test_pieces_whose_rows_are_no_multiple_of_16_bytes(inner, outer):
    found = product_and_gradients(*operands(inner=inner, outer=outer), lambda *two: grouped_mm_of_pieces(*two, ends()))
    expected = product_and_gradients(*operands(inner=inner, outer=outer), by_hand)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


def test_without_filling_up_torch_refuses_them():
    rows, weight = operands(inner=7)
    with pytest.raises(RuntimeError, match="16 bytes"):
        F.grouped_mm(rows, weight.transpose(1, 2), offs=ends())


def test_float64_is_computed_group_by_group_and_only_inside():
    with grouped_products_in_float64():
        found = product_and_gradients(
            *operands(torch.float64), lambda rows, weight: F.grouped_mm(rows, weight, offs=ends())
        )
        expected = product_and_gradients(*operands(torch.float64), by_hand)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-14, atol=1e-14)
        narrow = F.grouped_mm(operands()[0], operands()[1].transpose(1, 2), offs=ends())
    assert torch.equal(narrow, F.grouped_mm(operands()[0], operands()[1].transpose(1, 2), offs=ends()))
    with pytest.raises(RuntimeError, match="Double"):
        F.grouped_mm(*operands(torch.float64)[:1], operands(torch.float64)[1].transpose(1, 2), offs=ends())


def test_all_forms_of_the_product_in_float64():
    left, right = torch.randn(4, 8, dtype=torch.float64), torch.randn(8, 6, dtype=torch.float64)
    three = torch.randn(3, 4, 8, dtype=torch.float64)
    pairs = list(itertools.pairwise([0, *ENDS]))
    with grouped_products_in_float64():
        summed = torch._grouped_mm(left, right, ends())
        columns = torch._grouped_mm(three, torch.randn(8, 9, dtype=torch.float64), ends())
        batched = torch._grouped_mm(three, torch.ones(3, 8, 2, dtype=torch.float64))
    assert torch.equal(summed, torch.stack([left[:, a:b] @ right[a:b] for a, b in pairs]))
    assert columns.shape == (4, 9)
    assert torch.equal(columns[:, 8:], torch.zeros(4, 1, dtype=torch.float64)), "after the last group"
    assert torch.equal(batched, three @ torch.ones(3, 8, 2, dtype=torch.float64))


class Experts(torch.nn.Module):
    """Experts as transformers has them: one table of both first matrices, one of the second ones."""

    def __init__(self, width=32, inner=64):
        super().__init__()
        self.first = torch.nn.Parameter(torch.randn(3, 2 * inner, width) / 8)
        self.second = torch.nn.Parameter(torch.randn(3, width, inner) / 8)

    def forward(self, rows):
        gate, up = F.grouped_mm(rows, self.first.transpose(1, 2), offs=ends()).chunk(2, -1)
        return F.grouped_mm(F.silu(gate) * up, self.second.transpose(1, 2), offs=ends())


class Transposed(torch.nn.Module):
    """Two layers whose weights are transposed by hand, and a table of positions that is cut to length."""

    def __init__(self):
        super().__init__()
        self.first = torch.nn.Parameter(torch.randn(32, 128) / 8)
        self.second = torch.nn.Parameter(torch.randn(128, 32) / 8)
        self.positions = torch.nn.Parameter(torch.randn(64, 32))

    def forward(self, rows):
        return torch.relu((rows + self.positions[:ROWS]) @ self.first.t().t()) @ self.second.t().t()


def laid_out(model):
    rows = torch.randn(ROWS, 32)
    captured = capture(model, lambda model, rows: (model(rows).pow(2).sum(), ROWS), rows, CPU)
    layout = choose_layout(captured, 2)
    return captured, layout


def test_experts_are_split_by_columns_and_then_by_rows():
    captured, layout = laid_out(Experts())
    assert layout.placements == {"first": Split(1, (64, 64)), "second": Split(2, (64,))}
    why = {line.name: line.why for line in explain(captured, layout, 2)}
    assert why["first"].startswith("columns:")
    assert why["second"].startswith("rows:")


def test_grouped_mm_splits_transposed_weights_but_not_positions():
    _, layout = laid_out(Transposed())
    assert layout.placements["first"] == Split(1, (128,))
    assert layout.placements["second"] == Split(0, (128,))
    assert layout.placements["positions"] is None


def test_pieces_of_experts_make_the_whole():
    """What two ranks compute by the layout, added up, is what one computes."""
    model = Experts()
    rows = torch.randn(ROWS, 32)
    parts = []
    for part in range(2):
        first = piece(model.first.detach(), Split(1, (64, 64)), part, 2)
        second = piece(model.second.detach(), Split(2, (64,)), part, 2)
        gate, up = grouped_mm_of_pieces(rows, first.transpose(1, 2), ends()).chunk(2, -1)
        parts.append(grouped_mm_of_pieces(F.silu(gate) * up, second.transpose(1, 2), ends()))
    torch.testing.assert_close(sum(parts), model(rows).detach())


@pytest.mark.parametrize("model", [Experts, Transposed])
def test_another_graph_of_the_model_keeps_its_placements(model):
    captured, layout = laid_out(model())
    again = choose_layout(captured, 2, layout.placements)
    assert again.placements == layout.placements
    assert again.choices == layout.choices
    whole = choose_layout(captured, 2, dict.fromkeys(layout.placements))
    assert set(whole.placements.values()) == {None}
    assert not any(choice.is_split for choice in whole.choices.values())
