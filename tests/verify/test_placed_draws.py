"""Random numbers that depend on where they are drawn: as those of a stream look, and alike under every plan."""

from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from paceline.verify.ranks.placed_draws import call_of_the_loss, drawn_by_place

MANY = (3, 40_000)


class Drawing(torch.nn.Module):
    def __init__(self, draw):
        super().__init__()
        self.draw = draw

    def forward(self, *arguments):
        return self.draw(*arguments)


def drawn(draw, *arguments):
    """What a model draws that a loss is called with."""
    model = torch.nn.Sequential(Drawing(draw))
    with drawn_by_place(), call_of_the_loss(model):
        return model[0](*arguments)


def empty():
    return torch.empty(MANY)


DRAWS = {
    "rand": (lambda: torch.rand(*MANY), 0.5, 12**-0.5),
    "rand of a tuple": (lambda: torch.rand(MANY), 0.5, 12**-0.5),
    "rand by name": (lambda: torch.rand(size=MANY, dtype=torch.float64), 0.5, 12**-0.5),
    "rand_like": (lambda: torch.rand_like(empty()), 0.5, 12**-0.5),
    "randn": (lambda: torch.randn(MANY), 0.0, 1.0),
    "randn_like": (lambda: torch.randn_like(empty()), 0.0, 1.0),
    "uniform_": (lambda: empty().uniform_(-1, 3), 1.0, 4 * 12**-0.5),
    "uniform_ by name": (lambda: empty().uniform_(to=2.0), 1.0, 2 * 12**-0.5),
    "normal_": (lambda: empty().normal_(2, 3), 2.0, 3.0),
    "bernoulli_": (lambda: empty().bernoulli_(0.8), 0.8, 0.4),
    "bernoulli": (lambda: torch.bernoulli(torch.full(MANY, 0.8)), 0.8, 0.4),
    "exponential_": (lambda: empty().exponential_(2.0), 0.5, 0.5),
}


@pytest.mark.parametrize("name", DRAWS)
def test_they_are_spread_as_those_of_a_stream(name):
    draw, mean, deviation = DRAWS[name]
    before = torch.get_rng_state()
    found = drawn(draw)
    assert torch.equal(torch.get_rng_state(), before), "nothing is taken from the stream"
    stream = draw()
    assert (found.shape, found.dtype, found.is_contiguous()) == (stream.shape, stream.dtype, True)
    assert float(found.mean()) == pytest.approx(mean, abs=0.02 * deviation)
    assert float(found.std()) == pytest.approx(deviation, rel=0.02)
    assert torch.equal(found, drawn(draw)), "the same in every step"
    assert torch.equal(found[0], found[2]), "and for every sample"


def test_a_batch_in_parts_draws_what_the_whole_one_does():
    def draw(rows):
        return torch.rand(rows, 5)

    assert torch.equal(torch.cat([drawn(draw, 2), drawn(draw, 6)]), drawn(draw, 8))


def test_a_single_number_and_none():
    assert 0 <= float(drawn(lambda: torch.rand(()))) < 1
    assert drawn(lambda: torch.rand(0, 3)).shape == (0, 3)


def test_layers_and_lines_draw_differently():
    def two():
        return torch.rand(1, 9), torch.rand(1, 9)

    first, second = drawn(lambda: (torch.rand(1, 9), drawn_elsewhere()))
    assert not torch.equal(first, second)
    model = torch.nn.ModuleList([Drawing(two), Drawing(two)])
    with drawn_by_place(), call_of_the_loss(model):
        assert not torch.equal(model[0]()[0], model[1]()[0])


def drawn_elsewhere():
    return torch.rand(1, 9)


def test_modules_of_a_data_set_draw_from_the_stream():
    model, augmentation = torch.nn.Linear(2, 2), Drawing(lambda: torch.rand(4))
    with drawn_by_place():
        with call_of_the_loss(model):
            pass
        torch.manual_seed(3)
        found = augmentation()
    torch.manual_seed(3)
    assert torch.equal(found, torch.rand(4))


def test_a_generator_of_its_own_is_drawn_from():
    found = drawn(lambda: torch.rand(4, generator=torch.Generator().manual_seed(3)))
    assert torch.equal(found, torch.rand(4, generator=torch.Generator().manual_seed(3)))


@pytest.mark.parametrize("knows_its_module", [True, False])
def test_what_is_computed_again_draws_the_same(knows_its_module):
    seen = []

    def noisy(values):
        seen.append(torch.rand(1, 4))
        return (values * seen[-1]).sin()

    class Block(torch.nn.Module):
        def forward(self, values):
            def inner(values):
                return noisy(values) if self.training else values

            return checkpoint(inner if knows_its_module else noisy, values, use_reentrant=False)

    model = torch.nn.Sequential(Block())
    with drawn_by_place():
        with call_of_the_loss(model):
            loss = model(torch.ones(2, 4, requires_grad=True)).sum()
        loss.backward()
    assert len(seen) == 2
    assert torch.equal(*seen)


def test_torch_has_its_functions_back():
    before = torch.rand, torch.Tensor.uniform_, torch.bernoulli
    drawn(lambda: torch.rand(2))
    assert (torch.rand, torch.Tensor.uniform_, torch.bernoulli) == before
