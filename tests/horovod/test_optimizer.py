"""Horovod's optimizer on 2 and 4 ranks ends where one process on the whole batch does, in float64."""

from __future__ import annotations

import functools
import warnings

import pytest
import torch
from torch import nn

import paceline.horovod.torch as hvd

from support.rank_cases import outcomes
from support.ranks import run_ranks

SIZES = (2, 4)
STEPS = 4
ROWS = 8
CASES = {}


def case(*names):
    def note(function):
        if not names:
            CASES[function.__name__.replace("_", " ")] = function
        for name in names:
            CASES[f"{function.__name__.replace('_', ' ')} {name}"] = functools.partial(_call, function, name)
        return function

    return note


def _call(function, argument, rank, size):
    function(rank, size, argument)


def make_model(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 3)).double()


def batch(step, size):
    generator = torch.Generator().manual_seed(step)
    inputs = torch.randn(ROWS * size, 6, generator=generator, dtype=torch.float64)
    return inputs, torch.randint(0, 3, (ROWS * size,), generator=generator)


OPTIMIZERS = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.05),
    "Adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.05),
    "RMSprop": lambda parameters: torch.optim.RMSprop(parameters, lr=0.02),
}


def alone(size, make, passes=1, clip=None):
    """The parameters after some steps of one process on the whole batches."""
    model = make_model()
    optimizer = make(model.parameters())
    for step in range(STEPS):
        optimizer.zero_grad()
        for each in range(passes):
            inputs, targets = batch(step * passes + each, size)
            nn.functional.cross_entropy(model(inputs), targets).backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


def train(rank, size, model, optimizer, passes=1, clip=None):
    for step in range(STEPS):
        optimizer.zero_grad()
        for each in range(passes):
            inputs, targets = (part[rank::size] for part in batch(step * passes + each, size))
            nn.functional.cross_entropy(model(inputs), targets).backward()
        if clip:
            optimizer.synchronize()
            nn.utils.clip_grad_norm_(model.parameters(), clip)
            with optimizer.skip_synchronize():
                optimizer.step()
        else:
            optimizer.step()


def check(found, wanted):
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one.detach(), other, rtol=1e-9, atol=1e-12)


@case(*OPTIMIZERS)
def ends_as_one_process(rank, size, name):
    model = make_model()
    optimizer = hvd.DistributedOptimizer(OPTIMIZERS[name](model.parameters()), model.named_parameters())
    assert isinstance(optimizer, getattr(torch.optim, name))
    train(rank, size, model, optimizer)
    check(model.parameters(), alone(size, OPTIMIZERS[name]))


@case("groups=2", "groups=lists", "groups=100", "predivide", "accumulation", "clip", "unnamed", "sparse_as_dense")
def with_option_ends_as_one_process(rank, size, option):
    model = make_model()
    parameters = list(model.parameters())
    options = {
        "groups=2": {"groups": 2},
        "groups=lists": {"groups": [parameters[:1], parameters[2:]]},
        "groups=100": {"groups": 100},
        "predivide": {"gradient_predivide_factor": float(size)},
        "accumulation": {"backward_passes_per_step": 2},
        "sparse_as_dense": {"sparse_as_dense": True},
    }.get(option, {})
    names = None if option == "unnamed" else model.named_parameters()
    make = OPTIMIZERS["AdamW"]
    optimizer = hvd.DistributedOptimizer(make(parameters), names, **options)
    passes = 2 if option == "accumulation" else 1
    clip = 0.3 if option == "clip" else None
    train(rank, size, model, optimizer, passes, clip)
    check(model.parameters(), alone(size, make, passes, clip))


@case()
def sums_of_gradients(rank, size):
    model = make_model()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1 / size), op=hvd.Sum)
    train(rank, size, model, optimizer)
    check(model.parameters(), alone(size, lambda parameters: torch.optim.SGD(parameters, lr=0.1)))


@case()
def passes_per_step_may_change(rank, size):
    model = make_model()
    optimizer = hvd.DistributedOptimizer(OPTIMIZERS["SGD"](model.parameters()), backward_passes_per_step=5)
    optimizer.set_backward_passes_per_step(2)
    train(rank, size, model, optimizer, passes=2)
    check(model.parameters(), alone(size, OPTIMIZERS["SGD"], passes=2))


@case()
def float16_is_near(rank, size):
    model = make_model()
    optimizer = hvd.DistributedOptimizer(OPTIMIZERS["SGD"](model.parameters()), compression=hvd.Compression.fp16)
    train(rank, size, model, optimizer)
    for one, other in zip(model.parameters(), alone(size, OPTIMIZERS["SGD"]), strict=True):
        torch.testing.assert_close(one.detach(), other, rtol=1e-2, atol=1e-2)


@case()
def a_parameter_that_one_rank_does_not_reach(rank, size):
    used, unused = nn.Linear(2, 1).double(), nn.Linear(2, 1).double()
    both = [*used.named_parameters("used"), *unused.named_parameters("unused")]
    hvd.broadcast_parameters(both, 0)
    before = unused.weight.detach().clone()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([parameter for _, parameter in both], lr=1.0), both)
    inputs = torch.ones(1, 2, dtype=torch.float64)
    loss = used(inputs).sum()
    if rank == 0:
        loss = loss + unused(inputs).sum()
    loss.backward()
    optimizer.step()
    torch.testing.assert_close(unused.weight, before - 1.0 / size)  # the others count as zeros


@case()
def parameters_are_frozen(rank, size):
    model = make_model()
    model[0].weight.requires_grad_(False)
    kept = model[0].weight.clone()
    optimizer = hvd.DistributedOptimizer(OPTIMIZERS["SGD"](model.parameters()), model.named_parameters())
    train(rank, size, model, optimizer)
    assert torch.equal(kept, model[0].weight)


@case()
def sparse_gradients(rank, size):
    torch.manual_seed(0)
    table = nn.Embedding(10, 2, sparse=True)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(table.parameters(), lr=1.0), table.named_parameters())
    before = table.weight.detach().clone()
    table(torch.tensor([rank, 9])).sum().backward()
    optimizer.step()
    wanted = before.clone()
    wanted[:size] -= 1.0 / size
    wanted[9] -= 1.0
    torch.testing.assert_close(table.weight.detach(), wanted)


@case()
def adasum_of_changes(rank, size):
    """Ranks with the same batch make the same change: Adasum keeps it."""
    model, other = make_model(), make_model()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), op=hvd.Adasum)
    plain = torch.optim.SGD(other.parameters(), lr=0.1)
    inputs, targets = batch(0, 1)
    for _ in range(2):
        for each, own in ((model, optimizer), (other, plain)):
            own.zero_grad()
            nn.functional.cross_entropy(each(inputs), targets).backward()
            own.step()
    check(model.parameters(), list(other.parameters()))


@case()
def in_a_process_set(rank, size):
    """Ranks of the set average; the others train on their own."""
    halves = [hvd.add_process_set(list(range(size // 2))), hvd.add_process_set(list(range(size // 2, size)))]
    own = halves[rank // (size // 2)]
    torch.manual_seed(0)
    model = nn.Linear(2, 1, bias=False).double()
    before = model.weight.detach().clone()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), process_set=own)
    (model(torch.ones(1, 2, dtype=torch.float64)) * rank).sum().backward()
    optimizer.step()
    torch.testing.assert_close(model.weight.detach(), before - sum(own.ranks) / len(own.ranks))
    hvd.barrier()
    for each in halves:
        assert hvd.remove_process_set(each)


@case("step after synchronize", "zero_grad early", "too many passes", "skip with Adasum")
def a_loop_is_told(rank, size, fault):
    model = make_model()
    op = hvd.Adasum if fault == "skip with Adasum" else hvd.Average
    optimizer = hvd.DistributedOptimizer(OPTIMIZERS["SGD"](model.parameters()), op=op)
    inputs, targets = batch(0, 1)
    nn.functional.cross_entropy(model(inputs), targets).backward()
    if fault == "step after synchronize":
        optimizer.synchronize()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            optimizer.step()
        assert any(
            "optimizer.step() called without optimizer.skip_synchronize()" in str(each.message) for each in caught
        )
    elif fault == "zero_grad early":
        with pytest.raises(AssertionError, match="race condition"):
            optimizer.zero_grad()
        optimizer.step()
    elif fault == "too many passes":
        with pytest.raises(AssertionError, match="backward_passes_per_step"):
            nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
    else:
        with pytest.raises(AssertionError, match="Adasum"), optimizer.skip_synchronize():
            pass
        optimizer.step()


REFUSED = {
    "doubled names": (lambda m, o: hvd.DistributedOptimizer(o, [("a", p) for p in m.parameters()]), "unique"),
    "missing names": (lambda m, o: hvd.DistributedOptimizer(o, list(m.named_parameters())[1:]), "not named"),
    "no pairs": (lambda m, o: hvd.DistributedOptimizer(o, list(m.parameters())), "tuples"),
    "predivided sum": (
        lambda m, o: hvd.DistributedOptimizer(o, op=hvd.Sum, gradient_predivide_factor=2.0),
        "gradient_predivide_factor",
    ),
    "minimum": (lambda m, o: hvd.DistributedOptimizer(o, op=hvd.Min), "hvd.Average"),
    "negative groups": (lambda m, o: hvd.DistributedOptimizer(o, groups=-1), "groups"),
    "flat groups": (lambda m, o: hvd.DistributedOptimizer(o, groups=list(m.parameters())), "groups"),
    "doubled groups": (
        lambda m, o: hvd.DistributedOptimizer(o, groups=[[m[0].weight], [m[0].weight]]),
        "only appear once",
    ),
    "strange groups": (
        lambda m, o: hvd.DistributedOptimizer(o, groups=[[nn.Parameter(torch.ones(1))]]),
        "does not train",
    ),
    "Adasum in groups": (lambda m, o: hvd.DistributedOptimizer(o, op=hvd.Adasum, groups=1), "groups"),
    "Adasum of dense": (lambda m, o: hvd.DistributedOptimizer(o, op=hvd.Adasum, sparse_as_dense=True), "sparse"),
    "parameters": (lambda m, o: hvd.broadcast_parameters(7, 0), "invalid params"),
    "pairs of parameters": (lambda m, o: hvd.broadcast_parameters([(1, 2)], 0), "invalid params"),
    "LBFGS": (lambda m, o: hvd.broadcast_optimizer_state(torch.optim.LBFGS(m.parameters()), 0), "LBFGS"),
}


@case(*REFUSED)
def refused(rank, size, name):
    call, text = REFUSED[name]
    model = make_model()
    with pytest.raises(ValueError, match=text):
        call(model, torch.optim.SGD(model.parameters(), lr=0.1))


@case("dict", "named", "list")
def parameters_are_broadcast(rank, size, form):
    model = make_model(seed=rank)
    hvd.broadcast_parameters(
        {"dict": model.state_dict(), "named": model.named_parameters(), "list": list(model.parameters())}[form], 1
    )
    check(model.parameters(), list(make_model(seed=1).parameters()))


@case()
def strided_parameters_are_broadcast(rank, size):
    own = torch.full((3, 2), float(rank)).t()
    hvd.broadcast_parameters([own], 0)
    assert torch.equal(own, torch.zeros(2, 3))


@case(*OPTIMIZERS)
def optimizer_states_are_broadcast(rank, size, name):
    model = make_model()
    optimizer = OPTIMIZERS[name](model.parameters())
    if rank == 0:  # the others have no state yet
        nn.functional.cross_entropy(model(batch(0, 1)[0]), batch(0, 1)[1]).backward()
        optimizer.step()
        optimizer.param_groups[0]["lr"] = 0.77
    before = [parameter.detach().clone() for parameter in model.parameters()]
    hvd.broadcast_optimizer_state(optimizer, 0)
    check(model.parameters(), before)
    assert optimizer.param_groups[0]["lr"] == 0.77
    states = hvd.allgather_object([list(each.items()) for each in optimizer.state_dict()["state"].values()])
    assert states[0]
    for state in states[1:]:
        for mine, other in zip(states[0], state, strict=True):
            for (key, one), (key_again, two) in zip(mine, other, strict=True):
                assert key == key_again
                assert one == two if not isinstance(one, torch.Tensor) else torch.equal(one, two)


@case()
def states_of_other_parameters_are_replaced(rank, size):
    """The root has a state of one parameter, another rank of both, and the rest none."""
    both = [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3))]
    optimizer = torch.optim.AdamW(both)
    for parameter in both[: [1, 2, 0, 0][rank]]:
        parameter.grad = torch.full_like(parameter, 1.0 + rank)
    optimizer.step()
    hvd.broadcast_optimizer_state(optimizer, 0)
    assert list(optimizer.state_dict()["state"]) == [0]
    assert float(optimizer.state[both[0]]["step"]) == 1
    torch.testing.assert_close(optimizer.state[both[0]]["exp_avg"], torch.full((2,), 0.1))


@case()
def networks_take_turns(rank, size):
    """A GAN freezes one network while it trains the other; hooks last."""
    torch.manual_seed(0)
    first, second = nn.Linear(2, 2), nn.Linear(2, 1)
    optimizers = [hvd.DistributedOptimizer(torch.optim.SGD(each.parameters(), lr=0.1)) for each in (first, second)]
    for turn in range(4):
        for index, each in enumerate((first, second)):
            each.requires_grad_(index == turn % 2)
            optimizers[index].zero_grad()
        second(first(torch.full((1, 2), 1.0 + rank))).sum().backward()
        trained = (first, second)[turn % 2]
        before = trained.bias.detach().clone()
        optimizers[turn % 2].step()
        assert not torch.equal(before, trained.bias)
        rows = hvd.allgather(trained.weight.detach().view(1, -1))
        assert all(torch.equal(rows[0], row) for row in rows)


@case()
def options_keep_their_types(rank, size):
    optimizer = torch.optim.Adam(make_model().parameters(), lr=0.1 + rank, betas=(0.8, 0.9 - 0.1 * rank))
    hvd.broadcast_optimizer_state(optimizer, 0)
    assert optimizer.param_groups[0]["betas"] == (0.8, 0.9)
    assert isinstance(optimizer.param_groups[0]["betas"], tuple)
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert isinstance(optimizer.param_groups[0]["amsgrad"], bool)


@case()
def a_scheduler_takes_the_optimizer(rank, size):
    model = make_model()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    train(rank, size, model, optimizer)
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.05


@case("train", "eval", "cumulative", "gradients")
def batch_norm_of_all_samples(rank, size, mode):
    momentum = None if mode == "cumulative" else 0.1
    shared = hvd.SyncBatchNorm(3, momentum=momentum).double()
    plain = nn.BatchNorm1d(3, momentum=momentum).double()
    whole = torch.randn(4 * size, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    if mode == "eval":
        shared.eval()
        plain.eval()
    own = whole[4 * rank : 4 * rank + 4].clone().requires_grad_()
    whole.requires_grad_()
    found, wanted = shared(own), plain(whole)
    torch.testing.assert_close(found, wanted[4 * rank : 4 * rank + 4])
    torch.testing.assert_close(shared.running_mean, plain.running_mean)
    torch.testing.assert_close(shared.running_var, plain.running_var)
    if mode == "gradients":
        (found**3).sum().backward()
        (wanted**3).sum().backward()
        torch.testing.assert_close(own.grad, whole.grad[4 * rank : 4 * rank + 4])


def _start():
    hvd.init(process_sets="dynamic")


@functools.cache
def _outcomes(size):
    return outcomes(CASES, size, _start)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", CASES)
def test_on_ranks(name, size):
    failed = _outcomes(size)[name]
    assert not failed, failed


def _without_init(rank):
    texts = []
    calls = (
        hvd.size, hvd.rank, hvd.local_rank, hvd.cross_size, hvd.join, hvd.barrier, hvd.stop_timeline,
        lambda: hvd.allreduce(torch.ones(1)), lambda: hvd.allgather(torch.ones(1)),
        lambda: hvd.broadcast(torch.ones(1), 0), lambda: hvd.start_timeline("t.json"),
    )  # fmt: skip
    for call in calls:
        with pytest.raises(ValueError) as caught:  # noqa: PT011  the text is checked
            call()
        texts.append(str(caught.value))
    return texts


def test_before_init_every_call_says_so():
    (texts,) = run_ranks(1, _without_init)
    assert set(texts) == {"Horovod has not been initialized; use hvd.init()."}


def _alone(rank):
    hvd.init()
    model = make_model()
    optimizer = hvd.DistributedOptimizer(OPTIMIZERS["AdamW"](model.parameters()), model.named_parameters())
    train(0, 1, model, optimizer)
    check(model.parameters(), alone(1, OPTIMIZERS["AdamW"]))
    assert hvd.join() == 0
    found, received = hvd.alltoall(torch.ones(3), [2])
    return found.tolist(), received.tolist(), hvd.allgather_object(3), hvd.reducescatter(torch.ones(3)).tolist()


def test_one_process_has_all_of_it():
    assert run_ranks(1, _alone) == [([1.0, 1.0], [2], [3], [1.0, 1.0, 1.0])]
