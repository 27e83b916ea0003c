"""Horovod's collectives on 2 and 4 ranks, against the same computed on one process from the tensors of all ranks."""

from __future__ import annotations

import functools
import math
import warnings

import pytest
import torch

import paceline.horovod.torch as hvd
from paceline.horovod.common.exceptions import HorovodInternalError

from support.rank_cases import outcomes

SIZES = (2, 4)
REDUCED = ["uint8", "int8", "int32", "int64", "float16", "bfloat16", "float32", "float64"]
SENT = [*REDUCED, "int16", "bool"]
SHAPES = [(), (1,), (17,), (5, 3), (2, 3, 4), (0,)]
CASES = {}


def case(*names):
    """Make cases of a function: one, or one for each of `names`, which it gets as its third argument."""

    def note(function):
        if not names:
            CASES[function.__name__.replace("_", " ")] = function
        for name in names:
            text = getattr(name, "__name__", str(name))
            CASES[f"{function.__name__.replace('_', ' ')} {text}"] = functools.partial(_call, function, name)
        return function

    return note


def _call(function, argument, rank, size):
    function(rank, size, argument)


def values(rank, dtype, shape, seed=0):
    """A rank's tensor of small whole numbers, so that sums of them are exact in every dtype."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    return torch.randint(0, 6, shape, generator=generator).to(getattr(torch, dtype))


def all_values(size, dtype, shape, seed=0):
    return [values(rank, dtype, shape, seed) for rank in range(size)]


def equal(found, wanted):
    assert found.dtype == wanted.dtype, (found.dtype, wanted.dtype)
    assert found.shape == wanted.shape, (found.shape, wanted.shape)
    assert torch.equal(found, wanted), (found, wanted)


def close(found, wanted):
    torch.testing.assert_close(found, wanted)


def total(tensors):
    return torch.stack(tensors).sum(0, dtype=tensors[0].dtype)


def raises(error, function, *parts):
    """Check that a call raises an error whose text has all parts."""
    with pytest.raises(error) as caught:
        function()
    for part in parts:
        assert part in str(caught.value), str(caught.value)
    return str(caught.value)


# ---- allreduce


@case(*REDUCED)
def allreduce_sums(rank, size, dtype):
    for shape in SHAPES:
        own = values(rank, dtype, shape)
        before = own.clone()
        equal(hvd.allreduce(own, op=hvd.Sum), total(all_values(size, dtype, shape)))
        equal(own, before)


@case(*REDUCED)
def allreduce_averages(rank, size, dtype):
    for shape in SHAPES:
        exact = total([each.double() for each in all_values(size, dtype, shape)]) / size
        equal(hvd.allreduce(values(rank, dtype, shape)), exact.to(getattr(torch, dtype)))


@case(*REDUCED)
def allreduce_in_place_returns_the_tensor(rank, size, dtype):
    own = values(rank, dtype, (7, 2))
    assert hvd.allreduce_(own, op=hvd.Sum) is own
    equal(own, total(all_values(size, dtype, (7, 2))))


@case(*REDUCED)
def allreduce_takes_minima(rank, size, dtype):
    equal(
        hvd.allreduce(values(rank, dtype, (9,)), op=hvd.Min), torch.stack(all_values(size, dtype, (9,))).min(0).values
    )


@case(*REDUCED)
def allreduce_takes_maxima(rank, size, dtype):
    equal(
        hvd.allreduce(values(rank, dtype, (9,)), op=hvd.Max), torch.stack(all_values(size, dtype, (9,))).max(0).values
    )


@case("int32", "int64", "float32", "float64")
def allreduce_takes_products(rank, size, dtype):
    own = values(rank, dtype, (9,))
    equal(hvd.allreduce(own, op=hvd.Product), torch.stack(all_values(size, dtype, (9,))).prod(0, dtype=own.dtype))


@case(*REDUCED)
def allreduce_scales_before(rank, size, dtype):
    factor = 2.0
    wanted = total([each * 2 for each in all_values(size, dtype, (12,))])
    equal(hvd.allreduce(values(rank, dtype, (12,)), op=hvd.Sum, prescale_factor=factor), wanted)


@case(*REDUCED)
def allreduce_scales_after(rank, size, dtype):
    whole = total(all_values(size, dtype, (12,)))
    wanted = (whole.double() * 0.25).to(whole.dtype)  # integers are cut
    equal(hvd.allreduce(values(rank, dtype, (12,)), op=hvd.Sum, postscale_factor=0.25), wanted)


@case("float32", "float64")
def allreduce_scales_averages(rank, size, dtype):
    wanted = total(all_values(size, dtype, (12,))) * 0.5 * 4.0 / size
    close(hvd.allreduce(values(rank, dtype, (12,)), prescale_factor=0.5, postscale_factor=4.0), wanted)


@case("float32", "float64", "int64")
def allreduce_of_many_at_once(rank, size, dtype):
    handles = [
        hvd.allreduce_async(values(rank, dtype, (index, 3), index), name=f"m{index}", op=hvd.Sum) for index in range(30)
    ]
    for index, handle in enumerate(handles):
        equal(hvd.synchronize(handle), total(all_values(size, dtype, (index, 3), index)))


@case("float32", "float64", "int32")
def allreduce_of_more_than_shared_memory_holds(rank, size, dtype):
    shape = (2**20 + 12345,)
    equal(hvd.allreduce(values(rank, dtype, shape), op=hvd.Sum), total(all_values(size, dtype, shape)))


@case()
def allreduce_by_float16(rank, size):
    wanted = total(all_values(size, "float32", (6,))) / size
    equal(hvd.allreduce(values(rank, "float32", (6,)), compression=hvd.Compression.fp16), wanted)


@case()
def allreduce_with_the_deprecated_average(rank, size):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        equal(hvd.allreduce(values(rank, "float32", (4,)), average=False), total(all_values(size, "float32", (4,))))
    assert [each.category for each in caught] == [DeprecationWarning]


@case()
def results_are_the_same_bits_on_all_ranks(rank, size):
    own = torch.randn(1000, generator=torch.Generator().manual_seed(rank))
    found = hvd.allgather(hvd.allreduce(own).view(1, -1))
    assert all(torch.equal(found[0], row) for row in found)


@case("float32", "float64")
def allreduce_gradients(rank, size, dtype):
    own = values(rank, dtype, (5, 2)).requires_grad_()
    weights = values(rank, dtype, (5, 2), seed=1)
    (hvd.allreduce(own, op=hvd.Sum) * weights).sum().backward()
    close(own.grad, total(all_values(size, dtype, (5, 2), seed=1)))


@case("float32", "float64")
def allreduce_gradients_of_averages_with_factors(rank, size, dtype):
    own = values(rank, dtype, (5, 2)).requires_grad_()
    weights = values(rank, dtype, (5, 2), seed=1)
    (hvd.allreduce(own, prescale_factor=2.0, postscale_factor=0.25) * weights).sum().backward()
    close(own.grad, total(all_values(size, dtype, (5, 2), seed=1)) / size / 2)


@case()
def allreduce_differentiated_twice(rank, size):
    own = torch.tensor([1.0 + rank], dtype=torch.float64, requires_grad=True)
    mean = hvd.allreduce(own, name="twice")
    (gradient,) = torch.autograd.grad((mean**2).sum(), own, create_graph=True)
    gradient.sum().backward()
    # The gradient on each rank is the mean of all ranks' 2 * mean: its derivative averages three times.
    close(own.grad, torch.tensor([2.0], dtype=torch.float64))


# ---- groups


@case(*REDUCED)
def grouped_allreduce(rank, size, dtype):
    shapes = [(3,), (2, 2), (), (40,)]
    found = hvd.grouped_allreduce([values(rank, dtype, shape, at) for at, shape in enumerate(shapes)], op=hvd.Sum)
    assert isinstance(found, list)
    for at, shape in enumerate(shapes):
        equal(found[at], total(all_values(size, dtype, shape, at)))


@case()
def grouped_allreduce_of_several_dtypes(rank, size):
    dtypes = ["float32", "int64", "float64"]
    found = hvd.grouped_allreduce([values(rank, dtype, (3,)) for dtype in dtypes], op=hvd.Sum)
    for dtype, tensor in zip(dtypes, found, strict=True):
        equal(tensor, total(all_values(size, dtype, (3,))))


@case()
def grouped_allreduce_in_place(rank, size):
    own = [values(rank, "float64", (3,), at) for at in range(3)]
    found = hvd.grouped_allreduce_(own, op=hvd.Sum, name="in place")
    for at in range(3):
        assert found[at] is own[at]
        equal(own[at], total(all_values(size, "float64", (3,), at)))


@case()
def grouped_allreduce_handles(rank, size):
    handle = hvd.grouped_allreduce_async([values(rank, "float32", (3,), at) for at in range(2)], op=hvd.Sum)
    found = hvd.synchronize(handle)
    assert isinstance(found, tuple)
    equal(found[1], total(all_values(size, "float32", (3,), 1)))


@case()
def grouped_allreduce_gradients(rank, size):
    own = [values(rank, "float64", (3,), at).requires_grad_() for at in range(2)]
    one, two = hvd.grouped_allreduce(own, op=hvd.Sum)
    (one.sum() * 2 + two.sum() * (rank + 1)).backward()
    close(own[0].grad, torch.full((3,), 2.0 * size, dtype=torch.float64))
    close(own[1].grad, torch.full((3,), size * (size + 1) / 2, dtype=torch.float64))


@case()
def a_group_of_nothing_is_refused(rank, size):
    raises(ValueError, lambda: hvd.grouped_allreduce([]), "at least one tensor")


@case("float32", "int16", "bool")
def grouped_allgather(rank, size, dtype):
    found = hvd.grouped_allgather([values(rank, dtype, (rank + 1, 2)), values(rank, dtype, (3,), 1)])
    equal(found[0], torch.cat([values(each, dtype, (each + 1, 2)) for each in range(size)]))
    equal(found[1], torch.cat(all_values(size, dtype, (3,), 1)))


@case()
def grouped_allgather_gradients(rank, size):
    own = [torch.ones(rank + 1, 2, requires_grad=True), torch.ones(3, requires_grad=True)]
    one, two = hvd.grouped_allgather(own)
    (one.sum() * (rank + 1) + two.sum()).backward()
    close(own[0].grad, torch.full((rank + 1, 2), (size + 1) / 2))
    close(own[1].grad, torch.ones(3))


@case("float32", "float64", "int32")
def grouped_reducescatter(rank, size, dtype):
    shapes = [(2 * size + 1, 2), (size,)]
    found = hvd.grouped_reducescatter([values(rank, dtype, shape, at) for at, shape in enumerate(shapes)], op=hvd.Sum)
    for at, shape in enumerate(shapes):
        equal(found[at], total(all_values(size, dtype, shape, at)).tensor_split(size)[rank])


# ---- sparse tensors


@case("Sum", "Average")
def sparse_allreduce(rank, size, op):
    dense = torch.zeros(6, 2)
    dense[rank] = rank + 1.0
    dense[5] = 1.0
    handle = hvd.sparse_allreduce_async(dense.to_sparse(1), name=f"sparse {op}", op=getattr(hvd, op))
    wanted = torch.zeros(6, 2)
    for each in range(size):
        wanted[each] += each + 1.0
    wanted[5] = size if size < 6 else wanted[5]
    found = hvd.synchronize(handle)
    assert found.is_sparse
    close(found.to_dense(), wanted if op == "Sum" else wanted / size)


@case()
def sparse_allreduce_of_nothing_on_a_rank(rank, size):
    dense = torch.zeros(4)
    if rank == 0:
        dense[1] = 3.0
    found = hvd.sparse_allreduce_async(dense.to_sparse(), name="none", op=hvd.Sum)()
    close(found.to_dense(), torch.tensor([0.0, 3.0, 0.0, 0.0]))


@case()
def sparse_allreduce_refuses_other_reductions(rank, size):
    raises(ValueError, lambda: hvd.sparse_allreduce_async(torch.eye(2).to_sparse(), name="x", op=hvd.Max), "Average")


# ---- allgather


@case(*SENT)
def allgather_joins_rows(rank, size, dtype):
    for shape in [(3,), (2, 3), (1, 2, 2), (0, 4)]:
        equal(hvd.allgather(values(rank, dtype, shape)), torch.cat(all_values(size, dtype, shape)))


@case(*SENT)
def allgather_joins_uneven_rows(rank, size, dtype):
    wanted = torch.cat([values(each, dtype, (2 * each, 3)) for each in range(size)])  # none of rank 0
    equal(hvd.allgather(values(rank, dtype, (2 * rank, 3))), wanted)


@case()
def allgather_handles(rank, size):
    handle = hvd.allgather_async(values(rank, "float32", (rank + 1,)))
    equal(hvd.synchronize(handle), torch.cat([values(each, "float32", (each + 1,)) for each in range(size)]))


@case("float32", "float64")
def allgather_gradients_are_averaged(rank, size, dtype):
    own = torch.ones(rank + 1, 2, dtype=getattr(torch, dtype), requires_grad=True)
    (hvd.allgather(own) * (rank + 1)).sum().backward()
    close(own.grad, torch.full_like(own, (size + 1) / 2))


@case()
def allgather_of_a_scalar_is_refused(rank, size):
    raises(HorovodInternalError, lambda: hvd.allgather(torch.tensor(1.0), name="scalar"), "without dimensions")


# ---- broadcast


@case(*SENT)
def broadcast_from_each_rank(rank, size, dtype):
    for root in range(size):
        for shape in SHAPES:
            own = values(rank, dtype, shape, root)
            before = own.clone()
            equal(hvd.broadcast(own, root), values(root, dtype, shape, root))
            equal(own, before)


@case(*SENT)
def broadcast_in_place(rank, size, dtype):
    own = values(rank, dtype, (4, 2))
    assert hvd.broadcast_(own, size - 1) is own
    equal(own, values(size - 1, dtype, (4, 2)))


@case("float32", "float64")
def broadcast_gradients_go_to_the_root(rank, size, dtype):
    own = torch.ones(3, dtype=getattr(torch, dtype), requires_grad=True)
    (hvd.broadcast(own, 1) * (rank + 1)).sum().backward()
    close(own.grad, torch.full_like(own, (size + 1) / 2 if rank == 1 else 0.0))


@case()
def broadcast_from_a_rank_that_is_none(rank, size):
    raises(ValueError, lambda: hvd.broadcast(torch.ones(2), size), f"there is no rank {size}")


# ---- alltoall


@case(*SENT)
def alltoall_in_equal_parts(rank, size, dtype):
    own = values(rank, dtype, (2 * size, 3))
    wanted = torch.cat([values(each, dtype, (2 * size, 3)).split(2)[rank] for each in range(size)])
    equal(hvd.alltoall(own), wanted)


@case(*SENT)
def alltoall_by_splits(rank, size, dtype):
    def splits(source):
        return [(source + 2 * to) % 3 for to in range(size)]

    def sent(source):
        return values(source, dtype, (sum(splits(source)), 2), 3)

    found, received = hvd.alltoall(sent(rank), torch.tensor(splits(rank), dtype=torch.int32))
    wanted = [sent(source).split(splits(source))[rank] for source in range(size)]
    equal(found, torch.cat(wanted))
    equal(received, torch.tensor([len(rows) for rows in wanted], dtype=torch.int32))


@case()
def alltoall_sends_nothing_to_some(rank, size):
    splits = [0] * size
    splits[0] = 2
    found, received = hvd.alltoall(values(rank, "float32", (2, 2)), splits)
    if rank == 0:
        equal(found, torch.cat(all_values(size, "float32", (2, 2))))
    else:
        assert found.shape == (0, 2)
    assert received.tolist() == ([2] * size if rank == 0 else [0] * size)


@case()
def alltoall_leaves_rows_that_no_split_names(rank, size):
    own = torch.ones(size + 3, 2, dtype=torch.float64, requires_grad=True)
    found, _ = hvd.alltoall(own, [1] * size)
    assert found.shape == (size, 2)
    found.sum().backward()
    close(own.grad, torch.cat([torch.ones(size, 2), torch.zeros(3, 2)]).double())


@case()
def alltoall_handles_have_pairs(rank, size):
    output, received = hvd.synchronize(hvd.alltoall_async(values(rank, "float32", (size,))))
    assert output.shape == (size,)
    assert received.tolist() == [1] * size


@case()
def alltoall_gradients(rank, size):
    splits = [(rank + to) % 2 + 1 for to in range(size)]
    own = torch.ones(sum(splits), dtype=torch.float64, requires_grad=True)
    found, _ = hvd.alltoall(own, splits)
    (found * (rank + 1)).sum().backward()
    wanted = [torch.full((count,), to + 1.0) for to, count in enumerate(splits)]
    close(own.grad, torch.cat(wanted).double())


@case("uneven", "too many", "wrong length", "negative", "floats", "scalar")
def alltoall_refuses_splits(rank, size, kind):
    calls = {
        "uneven": (lambda: hvd.alltoall(torch.ones(size + 1)), "evenly"),
        "too many": (lambda: hvd.alltoall(torch.ones(2), [2] * size), "don't fit"),
        "wrong length": (lambda: hvd.alltoall(torch.ones(2), [1]), f"{size} ranks"),
        "negative": (lambda: hvd.alltoall(torch.ones(2), [-1] + [0] * (size - 1)), "don't fit"),
        "floats": (lambda: hvd.alltoall(torch.ones(2), torch.ones(size)), "int32"),
        "scalar": (lambda: hvd.alltoall(torch.tensor(1.0)), "no dimensions"),
    }
    call, text = calls[kind]
    raises(ValueError, call, text)


# ---- reducescatter


@case(*REDUCED)
def reducescatter_gives_each_rank_its_rows(rank, size, dtype):
    for rows in (size, 2 * size + 1, 1):
        own = values(rank, dtype, (rows, 2))
        wanted = total(all_values(size, dtype, (rows, 2))).tensor_split(size)[rank]
        equal(hvd.reducescatter(own, op=hvd.Sum), wanted)


@case("float32", "float64")
def reducescatter_averages_and_scales(rank, size, dtype):
    wanted = total(all_values(size, dtype, (size,))).tensor_split(size)[rank] / size * 6
    close(hvd.reducescatter(values(rank, dtype, (size,)), prescale_factor=2.0, postscale_factor=3.0), wanted)


@case()
def reducescatter_by_float16(rank, size):
    found = hvd.reducescatter(values(rank, "float32", (size, 2)), compression=hvd.Compression.fp16, op=hvd.Sum)
    equal(found, total(all_values(size, "float32", (size, 2))).tensor_split(size)[rank])


@case("Sum", "Average")
def reducescatter_gradients(rank, size, op):
    own = torch.ones(size + 1, 2, dtype=torch.float64, requires_grad=True)
    (hvd.reducescatter(own, op=getattr(hvd, op)) * (rank + 1)).sum().backward()
    rows = [len(part) for part in torch.ones(size + 1).tensor_split(size)]
    wanted = torch.cat([torch.full((count, 2), each + 1.0) for each, count in enumerate(rows)]).double()
    close(own.grad, wanted * size if op == "Sum" else wanted)


@case()
def reducescatter_refuses(rank, size):
    raises(RuntimeError, lambda: hvd.reducescatter(torch.ones(size), op=hvd.Adasum), "Adasum")
    raises(ValueError, lambda: hvd.reducescatter(torch.ones(size), op=hvd.Min), "Min")
    raises(HorovodInternalError, lambda: hvd.reducescatter(torch.tensor(1.0), name="s"), "without dimensions")


# ---- Adasum


def adasum_of(tensors):
    """Adasum in float64, by pairs of neighbours."""
    while len(tensors) > 1:
        tensors = [pair_of(a, b) for a, b in zip(tensors[::2], tensors[1::2], strict=True)]
    return tensors[0]


def pair_of(a, b):
    dot = (a * b).sum()
    return a * (1 - dot / (2 * (a * a).sum())) + b * (1 - dot / (2 * (b * b).sum()))


@case("float32", "float64")
def adasum_combines_pairs(rank, size, dtype):
    def own(each):
        return torch.randn(3, 4, generator=torch.Generator().manual_seed(each), dtype=torch.float64)

    found = hvd.allreduce(own(rank).to(getattr(torch, dtype)), op=hvd.Adasum)
    close(found, adasum_of([own(each) for each in range(size)]).to(found.dtype))


@case()
def adasum_of_equal_vectors_is_their_average(rank, size):
    close(hvd.allreduce(torch.tensor([1.0, 2.0]), op=hvd.Adasum), torch.tensor([1.0, 2.0]))


@case()
def adasum_of_orthogonal_vectors_is_their_sum(rank, size):
    close(hvd.allreduce(torch.eye(size)[rank].contiguous(), op=hvd.Adasum), torch.ones(size))


@case()
def adasum_with_zeros(rank, size):
    own = torch.zeros(2) if rank else torch.ones(2)
    close(hvd.allreduce(own, op=hvd.Adasum), torch.ones(2))


# ---- names and order


@case()
def names_match_in_any_order(rank, size):
    order = list(range(20))
    shift = 7 * rank % 20
    handles = {}
    for index in order[shift:] + order[:shift]:
        handles[index] = hvd.allreduce_async(torch.full((index + 1,), float(index)), name=f"o{index}", op=hvd.Sum)
    for index in order:
        equal(hvd.synchronize(handles[index]), torch.full((index + 1,), float(index * size)))


@case()
def kinds_of_collectives_mix_in_any_order(rank, size):
    calls = [
        lambda: hvd.allreduce_async(torch.ones(3), name="mix", op=hvd.Sum),
        lambda: hvd.allgather_async(torch.ones(rank + 1), name="mix"),
        lambda: hvd.broadcast_async(torch.full((2,), float(rank)), 1, name="mix"),
        lambda: hvd.reducescatter_async(torch.ones(size), name="mix", op=hvd.Sum),
    ]
    order = [(index + rank) % len(calls) for index in range(len(calls))]
    handles = {index: calls[index]() for index in order}
    reduced, gathered, sent, scattered = (hvd.synchronize(handles[index]) for index in range(4))
    equal(reduced, torch.full((3,), float(size)))
    assert gathered.shape == (size * (size + 1) // 2,)
    equal(sent, torch.full((2,), 1.0))
    equal(scattered, torch.tensor([float(size)]))


@case()
def a_name_is_used_again(rank, size):
    for turn in range(50):
        equal(
            hvd.allreduce(torch.full((3,), float(turn)), name="again", op=hvd.Sum), torch.full((3,), turn * size * 1.0)
        )


@case()
def a_name_may_get_another_shape(rank, size):
    for length in (3, 5, 3):
        equal(hvd.allreduce(torch.ones(length), name="grows", op=hvd.Sum), torch.full((length,), float(size)))


@case()
def a_name_under_way_is_refused(rank, size):
    handle = None
    if rank == 0:
        handle = hvd.allreduce_async(torch.ones(2), name="double")
        raises(ValueError, lambda: hvd.allreduce_async(torch.ones(2), name="double"), "Duplicate", "allreduce.double")
    hvd.barrier()  # overtakes the collective that waits
    if rank > 0:
        handle = hvd.allreduce_async(torch.ones(2), name="double")
    equal(hvd.synchronize(handle), torch.ones(2))


@case()
def poll_tells_when_a_collective_has_ended(rank, size):
    handle = hvd.allreduce_async(torch.ones(2), name="polled") if rank == 0 else None
    if rank == 0:
        assert not hvd.poll(handle)
    hvd.barrier()
    if rank > 0:
        handle = hvd.allreduce_async(torch.ones(2), name="polled")
    hvd.synchronize(handle)
    assert hvd.poll(handle)


@case()
def a_handle_is_synchronized_once(rank, size):
    handle = hvd.allreduce_async(torch.ones(2))
    assert hvd.synchronize(handle) is not None
    assert hvd.synchronize(handle) is None
    assert hvd.synchronize(10**9) is None


# ---- what ranks disagree on, and what a call refuses


MISMATCHES = {
    "shape": (lambda rank: hvd.allreduce(torch.ones(2 + rank), name="e"), "Mismatched allreduce tensor shapes"),
    "dims": (lambda rank: hvd.allreduce(torch.ones([2] * (1 + rank)), name="e"), "Mismatched allreduce tensor shapes"),
    "dtype": (
        lambda rank: hvd.allreduce(torch.ones(2, dtype=torch.float64 if rank else torch.float32), name="e"),
        "Mismatched data types",
    ),
    "op": (
        lambda rank: hvd.allreduce(torch.ones(2), name="e", op=hvd.Min if rank else hvd.Sum),
        "Mismatched reduction",
    ),
    "prescale": (
        lambda rank: hvd.allreduce(torch.ones(2), name="e", prescale_factor=1.0 + rank),
        "Mismatched prescale",
    ),
    "root": (lambda rank: hvd.broadcast(torch.ones(2), min(rank, 1), name="e"), "Mismatched broadcast root ranks"),
    "broadcast shape": (lambda rank: hvd.broadcast(torch.ones(2 + rank), 0, name="e"), "Mismatched broadcast tensor"),
    "gathered dims": (lambda rank: hvd.allgather(torch.ones(2, 1 + rank), name="e"), "Mismatched allgather tensor"),
    "gathered dtype": (
        lambda rank: hvd.allgather(torch.ones(2, dtype=torch.int32 if rank else torch.int64), name="e"),
        "Mismatched data types",
    ),
    "scattered shape": (lambda rank: hvd.reducescatter(torch.ones(4 + rank), name="e"), "Mismatched reducescatter"),
    "sent dims": (
        lambda rank: hvd.alltoall(torch.ones(4, 1 + rank), name="e"),
        "Mismatched alltoall tensor shapes",
    ),
}


@case(*MISMATCHES)
def a_mismatch_raises_on_all_ranks(rank, size, kind):
    call, text = MISMATCHES[kind]
    raises(HorovodInternalError, lambda: call(rank), text, "rank 0", "rank 1")
    # And the next collectives go on, under the same name too.
    equal(hvd.allreduce(torch.ones(2), name="e", op=hvd.Sum), torch.full((2,), float(size)))


@case()
def a_mismatch_in_a_group_raises(rank, size):
    tensors = [torch.ones(2), torch.ones(2 + rank)]
    raises(HorovodInternalError, lambda: hvd.grouped_allreduce(tensors, name="g"), "Mismatched")


@case("strided", "complex", "list", "both op and average", "unknown op", "int16 sum", "bool sum")
def a_call_refuses(rank, size, kind):
    calls = {
        "strided": (lambda: hvd.allreduce(torch.ones(2, 3).t()), "contiguous"),
        "complex": (lambda: hvd.allreduce(torch.ones(2, dtype=torch.complex64)), "complex64"),
        "list": (lambda: hvd.allgather_async([1.0]), "not a list"),
        "both op and average": (lambda: hvd.allreduce(torch.ones(2), average=True, op=hvd.Sum), "supersedes average"),
        "unknown op": (lambda: hvd.allreduce(torch.ones(2), op=17), "unknown"),
        "int16 sum": (lambda: hvd.allreduce(torch.ones(2, dtype=torch.int16), op=hvd.Sum), "int16"),
        "bool sum": (lambda: hvd.allreduce(torch.ones(2, dtype=torch.bool), op=hvd.Sum), "bool"),
    }
    call, text = calls[kind]
    raises(ValueError, call, text)


# ---- join


@case()
def joined_ranks_contribute_zeros(rank, size):
    for turn in range(rank):
        found = hvd.allreduce(torch.ones(2), name=f"j{turn}", op=hvd.Sum)
        equal(found, torch.full((2,), float(size - 1 - turn)))
    hvd.join()


@case()
def averages_with_joined_ranks_divide_by_all(rank, size):
    if rank > 0:
        equal(hvd.allreduce(torch.full((2,), 1.0), name="avg"), torch.full((2,), (size - 1) / size))
    hvd.join()


@case()
def join_returns_the_last_rank_everywhere(rank, size):
    if rank == 0:  # later than the others: it waits for its own collective, to which they contribute zeros
        hvd.allreduce(torch.ones(1), name="alone")
    assert hvd.join() == 0


@case("allgather", "broadcast", "alltoall", "reducescatter")
def with_joined_ranks_raises(rank, size, kind):
    calls = {
        "allgather": lambda: hvd.allgather(torch.ones(2), name="jx"),
        "broadcast": lambda: hvd.broadcast(torch.ones(2), 1, name="jx"),
        "alltoall": lambda: hvd.alltoall(torch.ones(size), name="jx"),
        "reducescatter": lambda: hvd.reducescatter(torch.ones(size), name="jx"),
    }
    if rank > 0:
        raises(HorovodInternalError, calls[kind], "is not supported with Join")
    hvd.join()


@case()
def groups_with_joined_ranks(rank, size):
    if rank > 0:
        found = hvd.grouped_allreduce([torch.ones(2), torch.ones(3)], op=hvd.Sum, name="jg")
        equal(found[1], torch.full((3,), size - 1.0))
    hvd.join()


# ---- objects


@case()
def objects_are_broadcast(rank, size):
    value = {"epoch": 3, "rates": [0.1, (1, "a")], 2: None, "raw": b"\0\1", "t": torch.arange(3), "yes": True}
    found = hvd.broadcast_object(value if rank == 1 else "other", root_rank=1)
    assert found.keys() == value.keys()
    equal(found.pop("t"), torch.arange(3))
    assert found == {key: value[key] for key in found}


@case()
def objects_are_gathered(rank, size):
    assert hvd.allgather_object({"rank": rank, "text": "x" * rank}) == [
        {"rank": each, "text": "x" * each} for each in range(size)
    ]


@case()
def objects_with_code_are_refused(rank, size):
    raises(ValueError, lambda: hvd.allgather_object(lambda: 1), "plain data")


@case()
def objects_by_a_function(rank, size):
    assert hvd.broadcast_object_fn(root_rank=0)(rank) == 0


# ---- ranks


@case()
def ranks_are_those_of_the_launcher(rank, size):
    assert (hvd.rank(), hvd.size()) == (rank, size)
    assert (hvd.local_rank(), hvd.local_size()) == (rank, size)
    assert (hvd.cross_rank(), hvd.cross_size()) == (0, 1)
    assert hvd.is_initialized()


@case()
def init_again_does_nothing(rank, size):
    hvd.init()
    assert hvd.size() == size


@case()
def what_is_built(rank, size):
    assert hvd.gloo_built()
    assert hvd.gloo_enabled()
    for is_built in (hvd.mpi_built, hvd.mpi_enabled, hvd.ddl_built, hvd.ccl_built):
        assert not is_built()
    assert isinstance(hvd.nccl_built(), int)
    raises(ValueError, hvd.mpi_threads_supported, "MPI is not enabled")


@functools.cache
def _outcomes(size):
    return outcomes(CASES, size, hvd.init)


def count():
    return len(CASES) * len(SIZES)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", CASES)
def test_on_ranks(name, size):
    failed = _outcomes(size)[name]
    assert not failed, failed


def test_adasum_needs_a_power_of_two():
    failed = outcomes({"three": _adasum_on_three}, 3, hvd.init)
    assert not failed["three"], failed["three"]


def _adasum_on_three(rank, size):
    raises(NotImplementedError, lambda: hvd.allreduce(torch.ones(2), op=hvd.Adasum), "power of 2")
    assert math.isclose(float(hvd.allreduce(torch.tensor(3.0))), 3.0)
