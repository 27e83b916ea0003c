"""Collectives with `grad=True`: first and second derivatives, in float64, are those of one process.

One process computes the same with plain tensor operations: it holds the inputs of all ranks, and its loss is the sum of
the ranks' losses.
"""

from __future__ import annotations

import pytest
import torch

import paceline
from paceline.comm import api
from paceline.nouns.errors import PeerLostError, UsageError
from paceline.verify.ranks.dry_run import as_rank

from support.ranks import run_ranks

TIMEOUT_S = 60  # a rank that does not take part in a backward pass leaves the others waiting


def splits_of(rank, size):
    """How many rows `rank` sends to each rank: all different, some none."""
    return [(rank + 2 * other) % 3 for other in range(size)]


def exchanged(tensors, size):
    """What each rank receives by `splits_of`."""
    pieces = [tensor.split(splits_of(rank, size)) for rank, tensor in enumerate(tensors)]
    return [torch.cat([pieces[source][rank] for source in range(size)]) for rank in range(size)]


def dealt(tensor, size):
    """The rows of a tensor for each rank; the first ranks take the rest."""
    return list(tensor.tensor_split(size))


# By name: the shape of a rank's tensor, the collective, and what it means for the list of all ranks' tensors.
CASES = {
    "all_reduce sum": (
        lambda rank, size: (3, 2),
        lambda tensor: paceline.all_reduce(tensor, grad=True),
        lambda tensors, size: [sum(tensors)] * size,
    ),
    "all_reduce mean of a scalar": (
        lambda rank, size: (),
        lambda tensor: paceline.all_reduce(tensor, "mean", grad=True),
        lambda tensors, size: [sum(tensors) / size] * size,
    ),
    "all_reduce of a transposed tensor": (
        lambda rank, size: (3, 2),
        lambda tensor: paceline.all_reduce(tensor.T, grad=True),
        lambda tensors, size: [sum(tensors).T] * size,
    ),
    "all_gather": (
        lambda rank, size: (2, 3),
        lambda tensor: paceline.all_gather(tensor, grad=True),
        lambda tensors, size: [torch.cat(tensors)] * size,
    ),
    "all_gather of uneven rows": (
        lambda rank, size: ((2, 0, 3, 1)[rank], 2),
        lambda tensor: paceline.all_gather(tensor, grad=True),
        lambda tensors, size: [torch.cat(tensors)] * size,
    ),
    "broadcast": (
        lambda rank, size: (2, 2),
        lambda tensor: paceline.broadcast(tensor, paceline.size() - 1, grad=True),
        lambda tensors, size: [tensors[size - 1]] * size,
    ),
    "reduce_scatter sum": (
        lambda rank, size: (7, 2),
        lambda tensor: paceline.reduce_scatter(tensor, grad=True),
        lambda tensors, size: dealt(sum(tensors), size),
    ),
    "reduce_scatter mean of one row": (
        lambda rank, size: (1, 2),
        lambda tensor: paceline.reduce_scatter(tensor, "mean", grad=True),
        lambda tensors, size: dealt(sum(tensors) / size, size),
    ),
    "all_to_all": (
        lambda rank, size: (sum(splits_of(rank, size)), 2),
        lambda tensor: paceline.all_to_all(tensor, splits_of(paceline.rank(), paceline.size()), grad=True)[0],
        exchanged,
    ),
    "all_to_all without splits": (
        lambda rank, size: (2 * size,),
        lambda tensor: paceline.all_to_all(tensor, grad=True)[0],
        lambda tensors, size: [torch.cat([t.chunk(size)[rank] for t in tensors]) for rank in range(size)],
    ),
}


def tensor_of(name, rank, size):
    generator = torch.Generator().manual_seed(10 * list(CASES).index(name) + rank)
    shape = CASES[name][0](rank, size)
    return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()


def loss_of(result, rank):
    """A loss with third derivatives, another on each rank."""
    weights = torch.arange(1.0, result.numel() + 1, dtype=torch.float64).view(result.shape) + 5 * rank
    return (weights * result**3).sum()


def penalty_of(gradient, rank):
    """A loss of a gradient, another on each rank."""
    return (rank + 1) * (gradient**2).sum()


def derivatives_of_a_rank(rank, size):
    paceline.init()
    found = {}
    for name, (_, collective, _) in CASES.items():
        tensor = tensor_of(name, rank, size)
        result = collective(tensor)
        loss_of(result, rank).backward()
        first = tensor.grad
        tensor.grad = None
        (gradient,) = torch.autograd.grad(loss_of(collective(tensor), rank), tensor, create_graph=True)
        penalty_of(gradient, rank).backward()
        found[name] = result.detach(), first, tensor.grad
    return found


@pytest.mark.parametrize("size", [2, 3, 4])
def test_first_and_second_derivatives_are_those_of_one_process(size):
    by_rank = run_ranks(size, derivatives_of_a_rank, size, timeout_s=TIMEOUT_S)
    for name, (_, _, meaning) in CASES.items():
        tensors = [tensor_of(name, rank, size) for rank in range(size)]
        results = meaning(tensors, size)
        total = sum(loss_of(result, rank) for rank, result in enumerate(results))
        first = torch.autograd.grad(total, tensors, create_graph=True, materialize_grads=True)
        penalty = sum(penalty_of(gradient, rank) for rank, gradient in enumerate(first))
        second = torch.autograd.grad(penalty, tensors, materialize_grads=True)
        for rank in range(size):
            expected = (results[rank], first[rank], second[rank])
            torch.testing.assert_close(
                by_rank[rank][name], expected, rtol=1e-12, atol=1e-12, msg=lambda text, name=name: f"{name}: {text}"
            )


def checked_numerically(rank):
    paceline.init()
    checked = []
    for name, (_, collective, _) in CASES.items():
        inputs = (tensor_of(name, 0, 1),)
        assert torch.autograd.gradcheck(collective, inputs)
        assert torch.autograd.gradgradcheck(collective, inputs)
        checked.append(name)
    complex_one = torch.randn(3, dtype=torch.complex128, requires_grad=True)
    assert torch.autograd.gradcheck(lambda tensor: paceline.all_reduce(tensor, "mean", grad=True), (complex_one,))
    return checked


def test_derivatives_are_the_numerical_ones_on_one_rank():
    assert run_ranks(1, checked_numerically) == [list(CASES)]


def only_the_root_needs_a_gradient(rank):
    paceline.init()
    table = torch.full((2,), 3.0 + rank, dtype=torch.float64, requires_grad=rank == 1)
    paceline.broadcast(table, 1, grad=True).square().sum().backward()
    return table.grad


def test_a_rank_whose_tensor_needs_no_gradient_takes_part():
    first, root, last = run_ranks(3, only_the_root_needs_a_gradient, timeout_s=TIMEOUT_S)
    assert root.tolist() == [3 * 2 * 4.0] * 2
    assert first is None
    assert last is None


def kinds_of_results(rank):
    paceline.init()
    tensor = torch.ones(2, 2, requires_grad=True)
    calls = [
        lambda **named: paceline.all_reduce(tensor, **named),
        lambda **named: paceline.all_gather(tensor, **named),
        lambda **named: paceline.broadcast(tensor, **named),
        lambda **named: paceline.reduce_scatter(tensor, **named),
        lambda **named: paceline.all_to_all(tensor, **named)[0],
    ]
    detached = [call().requires_grad for call in calls]
    attached = [call(grad=True).requires_grad for call in calls]
    with torch.no_grad():
        without = [call(grad=True).requires_grad for call in calls]
    in_place = paceline.all_reduce(tensor, grad=True)
    in_place *= 2
    return detached, attached, without, tensor.tolist()


@pytest.mark.parametrize("size", [1, 2])
def test_results_are_detached_unless_gradients_are_asked_for(size):
    for detached, attached, without, tensor in run_ranks(size, kinds_of_results):
        assert detached == [False] * 5
        assert attached == [True] * 5
        assert without == [False] * 5
        assert tensor == [[1.0, 1.0]] * 2, "the argument was changed"


def sent_by(call):
    """Calls and bytes of a forward pass, and those that the backward pass adds."""
    ledger = api.world().comm.ledger
    sent = []
    before = {}
    result = call()
    for run in (lambda: None, result.sum().backward):
        run()
        rows = {row["collective"]: (row["calls"], row["bytes"]) for row in ledger.rows()}
        sent.append(
            {name: (n - before.get(name, (0, 0))[0], b - before.get(name, (0, 0))[1]) for name, (n, b) in rows.items()}
        )
        before = rows
    ledger.calls.clear()
    ledger.payload_bytes.clear()
    return [{name: numbers for name, numbers in part.items() if numbers[0]} for part in sent]


def ledger_of_a_rank(rank):
    paceline.init()
    tensor = torch.ones(4, 2, dtype=torch.float64, requires_grad=True)  # 64 bytes
    rows = torch.ones(1 + rank, 2, dtype=torch.float64, requires_grad=True)  # 16 bytes a row
    return [
        sent_by(lambda: paceline.all_reduce(tensor, grad=True)),
        sent_by(lambda: paceline.all_gather(rows, grad=True)),
        sent_by(lambda: paceline.broadcast(tensor, grad=True)),
        sent_by(lambda: paceline.reduce_scatter(tensor, grad=True)),
        sent_by(lambda: paceline.all_to_all(tensor, [1, 3], grad=True)[0]),
    ]


def test_the_ledger_counts_the_backward_pass():
    for rank, answers in enumerate(run_ranks(2, ledger_of_a_rank)):
        counts_of_rows = 8
        assert answers == [
            [{"all_reduce": (1, 64)}, {"all_reduce": (1, 64)}],
            [{"all_gather": (2, counts_of_rows + 16 * (1 + rank))}, {"reduce_scatter": (1, 16 * 3)}],
            [{"broadcast": (1, 64)}, {"reduce": (1, 64)}],
            [{"reduce_scatter": (1, 64)}, {"all_gather": (1, 32)}],
            [{"all_to_all": (2, 2 * counts_of_rows + 64)}, {"all_to_all": (1, 16 * (2, 6)[rank])}],
        ]


INTEGERS = torch.arange(4)
ROWS = torch.ones(4, 2, requires_grad=True)
# A call, and what its error has: what can't be done, what was found, what to do.
REFUSED = {
    "min": (
        lambda: paceline.all_reduce(ROWS, "min", grad=True),
        "all_reduce with grad=True needs the reduction sum or mean",
        "the reduction is 'min'",
        "leave grad=True out, or write all_gather(tensor.unsqueeze(0), grad=True).amin(0)",
    ),
    "max": (
        lambda: paceline.all_reduce(ROWS, "max", grad=True),
        "all_reduce with grad=True needs the reduction sum or mean",
        "the reduction is 'max'",
        "leave grad=True out, or write all_gather(tensor.unsqueeze(0), grad=True).amax(0)",
    ),
    "product": (
        lambda: paceline.all_reduce(ROWS, "product", grad=True),
        "all_reduce with grad=True needs the reduction sum or mean",
        "the reduction is 'product'",
        "leave grad=True out, or write all_gather(tensor.unsqueeze(0), grad=True).prod(0)",
    ),
    **{
        f"{name} of integers": (
            lambda name=name: getattr(paceline, name)(INTEGERS, grad=True),
            f"{name} with grad=True needs a tensor of a floating-point dtype",
            "the dtype is torch.int64, which has no gradients",
            "leave grad=True out, or convert the tensor first, as with tensor.float()",
        )
        for name in ("all_reduce", "all_gather", "broadcast", "reduce_scatter", "all_to_all")
    },
    **{
        f"{name} of integers, mean": (
            lambda name=name: getattr(paceline, name)(INTEGERS, "mean"),
            "a mean over ranks needs a tensor of a floating-point dtype",
            "the dtype is torch.int64",
            "convert the tensor first, as with tensor.float(), or take the sum",
        )
        for name in ("all_reduce", "reduce_scatter")
    },
}


def refusals(rank):
    paceline.init()
    said = {}
    for name, (call, *_) in REFUSED.items():
        try:
            call()
        except UsageError as error:
            said[name] = [error.asked, error.found, error.fix]
    rows = api.world().comm.ledger.rows()
    paceline.all_reduce(ROWS)  # a rank that has gone would end another that still connects
    return said, rows


@pytest.mark.parametrize("size", [1, 2])
def test_collective_without_gradient_or_mean_is_refused_unsent(size):
    for said, rows in run_ranks(size, refusals):
        assert said == {name: parts for name, (_, *parts) in REFUSED.items()}
        assert rows == []


def the_way_round(op):
    """What the error for `op` advises."""
    rows = torch.tensor([2.0, 3.0], dtype=torch.float64) * (paceline.rank() + 1)
    tensor = rows.requires_grad_()
    every_rank = paceline.all_gather(tensor.unsqueeze(0), grad=True)
    result = {"min": every_rank.amin, "max": every_rank.amax, "product": every_rank.prod}[op](0)
    assert torch.equal(result, paceline.all_reduce(tensor, op))
    result.sum().backward()
    return tensor.grad.tolist()


def advice(rank):
    paceline.init()
    return {op: the_way_round(op) for op in ("min", "max", "product")}


def test_collective_gradient_advice_for_min_max_product_is_right():
    first, second = run_ranks(2, advice)
    assert first == {"min": [2.0, 2.0], "max": [0.0, 0.0], "product": [8.0, 12.0]}  # of the sum of two equal losses
    assert second == {"min": [0.0, 0.0], "max": [2.0, 2.0], "product": [4.0, 6.0]}


def leave_before_backward(rank):
    paceline.init()
    tensor = torch.ones(2, requires_grad=True)
    result = paceline.all_reduce(tensor, grad=True)
    if rank == 1:
        return None
    try:
        result.sum().backward()
    except PeerLostError as error:
        return error.asked
    return "no error"


def test_a_rank_that_ends_without_its_backward_pass_is_reported():
    said = run_ranks(2, leave_before_backward, timeout_s=TIMEOUT_S)
    assert said == ["all_reduce on the axis world waits for its peers", None]


def test_the_dry_run_of_verify_answers_backward_passes():
    """A loss may take gradients of its own, through collectives too."""
    for rank in range(3):
        with as_rank(rank, 3) as calls:
            for name in ("all_reduce", "all_gather", "broadcast", "reduce_scatter", "all_to_all"):
                tensor = torch.ones(6, 2, requires_grad=True)
                result = getattr(paceline, name)(tensor, grad=True)
                rows = result[0] if name == "all_to_all" else result
                rows.sum().backward()
                assert tensor.grad.shape == (6, 2)
        names = [name for name, *_ in calls]
        forward_and_backward = [
            *("all_reduce", "all_reduce", "all_gather", "all_gather", "reduce_scatter", "broadcast", "reduce"),
            *("reduce_scatter", "all_gather", "all_to_all", "all_to_all", "all_to_all"),
        ]
        assert names == forward_and_backward
