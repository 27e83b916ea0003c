"""Parameters in pieces on servers: where they lie, what updates make of them, how they are handed on."""

from __future__ import annotations

import json

import numpy
import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.nouns.errors import CheckpointError, PlanError
from paceline.server.handle import laid_out
from paceline.server.optimizers import KNOWN, build, describe, implementation_of
from paceline.server.protocol.admission import Mode
from paceline.server.protocol.messages import Push, Update
from paceline.server.range_tensors import MEAN, STOPPING, FlatTensor, Segments, first_content, states_of
from paceline.server.server_layout import AVERAGE, SEGMENT_BYTES, Entry, ServerLayout
from paceline.server.transport.frames import PREFIX, read_header, read_prefix, write_frame

SHAPES = st.lists(st.lists(st.integers(0, 700), min_size=0, max_size=2).map(tuple), min_size=1, max_size=8)


def layout_of(shapes, dtype="float32", optimizer="SGD", **group):
    entries = tuple(Entry(f"p{number}", shape, dtype, 0) for number, shape in enumerate(shapes))
    return ServerLayout(entries, optimizer, ({"lr": 0.1, **group},), 0)


@settings(max_examples=60, deadline=None)
@given(shapes=SHAPES, dtype=st.sampled_from(["float32", "float64", "bfloat16"]), servers=st.integers(1, 4))
def test_pieces_cover_every_element_once(shapes, dtype, servers):
    layout = layout_of(shapes, dtype)
    segments = layout.segments()
    if not segments:
        with pytest.raises(PlanError, match="the model has none"):
            layout.ranges(servers)
        return
    ranges = layout.ranges(servers)
    assert len(ranges) == min(servers, len(segments))  # a small model has fewer ranges than servers
    assert [segment for own in ranges for segment in own] == segments
    assert all(own for own in ranges)
    values = [torch.randn(shape).to(getattr(torch, dtype)) for shape in shapes]
    flats = [FlatTensor(layout, own) for own in ranges]
    back = [torch.full_like(value, 7) for value in values]
    for flat in flats:
        flat.gather(values)
        flat.scatter(back)
    assert all(torch.equal(a, b) for a, b in zip(values, back, strict=True))
    for segment in segments:
        assert segment.nbytes <= SEGMENT_BYTES
        assert all(piece.offset % 64 == 0 and piece.start % 4096 == 0 for piece in segment.pieces)
    assert ServerLayout.of_json(layout.to_json()) == layout


@pytest.mark.parametrize(
    "value",
    [
        torch.randn(70, 90).t(),
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.randn(90, 90)[3:70, 10:80],
        torch.randn(64, 64)[::2, ::3],
    ],
    ids=["transposed", "channels_last", "part", "strided"],
)
@pytest.mark.parametrize("servers", [1, 2])
def test_a_tensor_of_any_strides_comes_back(value, servers):
    large = torch.randn(700, 500).t()  # in several segments, and on both servers
    layout = layout_of([tuple(value.shape), tuple(large.shape)])
    back = [torch.empty_strided(value.shape, value.stride()), torch.empty_like(large)]
    assert not any(tensor.is_contiguous() for tensor in back)
    for segments in layout.ranges(servers):
        flat = FlatTensor(layout, segments)
        flat.gather([value, large])
        flat.scatter(back)
    assert torch.equal(back[0], value)
    assert torch.equal(back[1], large)


@pytest.mark.parametrize(
    "change",
    [
        lambda value: value.pop("groups"),
        lambda value: value["entries"][0].update(shape=[-1]),
        lambda value: value["entries"][0].update(dtype="complex64"),
        lambda value: value["entries"][0].update(group=3),
        lambda value: value["entries"][0].update(name=5),
        lambda value: value.update(optimizer=None),
        lambda value: value.update(groups=["lr"]),
    ],
)
def test_a_layout_of_another_form(change):
    value = json.loads(layout_of([(3,)]).to_json())
    change(value)
    with pytest.raises(ValueError, match=r"layout|entry|group"):
        ServerLayout.of_json(json.dumps(value))


def pushes_of(layout, gradients, **note):
    """A push of every worker for each segment."""
    facts = {"loss": 1.0, "weight": 2.0, "flags": 0, "absent": [], "settings": layout.groups[0], **note}
    found = []
    for segment in range(len(layout.segments())):
        found.append([])
        for worker, gradient in enumerate(gradients):
            flat = FlatTensor(layout, layout.segments())
            absent = flat.gather(gradient)
            own = {**facts, "absent": absent[segment]}
            found[-1].append(Push(0, (worker, 0), 0, segment, 0, own, flat.whole[segment].clone()))
    return found


def store_of(layout, implementation=None, mode=None, clip_norm=None):
    return Segments(layout, layout.segments(), implementation or {}, clip_norm, 2, mode or Mode())


def apply(store, pushes):
    made = []
    for own in pushes:
        payload, note = store.combine(own)
        made.append(Update(own[0].segment, tuple((push.worker, 0) for push in own), note, payload))
    total = store.measure(made)
    for update in made:
        store.apply(store.finish(update, [total]))
    return made


ARGUMENTS = {"SGD": {"lr": 0.1, "momentum": 0.9, "nesterov": True}, "AdamW": {"amsgrad": True}}


@pytest.mark.slow
@pytest.mark.parametrize("name", KNOWN)
@pytest.mark.parametrize("clip_norm", [None, 0.5])
def test_an_optimizer_on_pieces_ends_where_it_does_on_parameters(name, clip_norm):
    torch.manual_seed(0)
    shapes = [(700, 500), (500,), (3, 700), ()]
    whole = [torch.nn.Parameter(torch.randn(shape)) for shape in shapes]
    optimizer = getattr(torch.optim, name)(whole, **ARGUMENTS.get(name, {}))
    kind, (group,) = describe(optimizer)
    entries = tuple(Entry(f"p{number}", tuple(p.shape), "float32", 0) for number, p in enumerate(whole))
    layout = ServerLayout(entries, kind, (group,), 0)
    assert len(layout.segments()) > 1
    store = store_of(layout, implementation_of(optimizer, is_deterministic=True), clip_norm=clip_norm)
    store.restore(first_content(layout, layout.segments(), whole, [{}] * len(whole)))
    for _ in range(4):
        gradients = [[torch.randn(shape) for shape in shapes] for _ in range(2)]
        gradients[1][1] = gradients[0][1] = None  # nobody reached it: it must not move, nor its state
        apply(store, pushes_of(layout, gradients))
        for number, parameter in enumerate(whole):
            own = [one[number] for one in gradients]
            parameter.grad = None if own[0] is None else (own[0] + own[1]) * 0.25
        if clip_norm is not None:
            norm = torch.sqrt(sum(p.grad.double().square().sum() for p in whole if p.grad is not None))
            for parameter in whole:
                if parameter.grad is not None:
                    parameter.grad *= (clip_norm / (norm + 1e-6)).clamp(max=1.0)
        optimizer.step()
    after = [torch.empty_like(parameter) for parameter in whole]
    store.values.scatter(after)
    same = torch.equal if clip_norm is None else lambda a, b: torch.allclose(a, b, rtol=1e-5, atol=1e-7)
    assert all(same(a, b.detach()) for a, b in zip(after, whole, strict=True))
    for state, parameter in zip(states_of(layout, [layout.segments()], [store.content()]), whole, strict=True):
        expected = {k: v for k, v in optimizer.state.get(parameter, {}).items() if isinstance(v, torch.Tensor)}
        assert state.keys() == expected.keys()
        assert all(same(state[key].reshape(-1), expected[key].reshape(-1)) for key in expected)


@pytest.mark.slow
@pytest.mark.parametrize("name", KNOWN)
def test_a_store_is_handed_on_whole(name):
    layout = layout_of([(600, 600), (5,)], optimizer=name)
    first, second = store_of(layout), store_of(layout)
    gradients = [[torch.randn(600, 600), torch.randn(5)] for _ in range(2)]
    apply(first, pushes_of(layout, gradients))
    second.restore(first.content())
    for store in (first, second):
        apply(store, pushes_of(layout, gradients))
    assert torch.equal(first.values.memory, second.values.memory)
    assert first.content() == second.content()


@pytest.mark.parametrize("content", [b"", b"x" * 100, safetensors.torch.save({"value/0": torch.ones(3)})])
def test_a_state_that_is_none(content):
    with pytest.raises(CheckpointError, match="it is not of this range, or of another version"):
        store_of(layout_of([(600, 600)])).restore(content)


def test_flags_weights_and_means():
    layout = layout_of([(4,)])
    ones = [[torch.ones(4)], [torch.full((4,), 3.0)]]
    store = store_of(layout)
    ((first, second),) = pushes_of(layout, ones)
    second.note["flags"] = STOPPING
    payload, note = store.combine([first, second])
    assert payload[:4].tolist() == [1.0] * 4  # (1 + 3) / (2 + 2)
    assert (note["loss"], note["weight"], note["flags"]) == (2.0, 4.0, STOPPING)
    ((mean,),) = pushes_of(layout, [[torch.ones(4)]], flags=MEAN)
    assert store.combine([mean])[0][:4].tolist() == [1.0] * 4  # it was divided before
    before = store.values.memory.clone()
    apply(store, pushes_of(layout, ones, weight=0.0))
    assert torch.equal(store.values.memory, before)  # a batch that weighs nothing changes nothing


def test_a_norm_without_end_changes_nothing():
    layout = layout_of([(4,)])
    store = store_of(layout, clip_norm=1.0)
    (made,) = apply(store, pushes_of(layout, [[torch.tensor([1.0, float("nan"), 1.0, 1.0])]]))
    assert store.measure([made]) == float("inf")
    assert store.values.memory.count_nonzero() == 0


def test_buffers_become_the_mean_over_those_who_changed_them():
    model = torch.nn.BatchNorm1d(3)
    tensors, layout = laid_out(model, torch.optim.SGD(model.parameters(), lr=0.1), 0)
    assert [entry.group for entry in layout.entries] == [0, 0, AVERAGE, AVERAGE]  # not the count of batches
    store = store_of(layout)
    gradient = [torch.zeros(3), torch.zeros(3)]
    workers = [
        [*gradient, torch.full((3,), 1.0), torch.full((3,), 4.0)],
        [*gradient, torch.full((3,), 3.0), torch.full((3,), 8.0)],
        [*gradient, None, None],  # it had no samples
    ]
    apply(store, pushes_of(layout, workers))
    after = [torch.empty_like(tensor) for tensor in tensors]
    store.values.scatter(after)
    assert after[2].tolist() == [2.0] * 3
    assert after[3].tolist() == [6.0] * 3
    alone = store_of(layout, mode=Mode("async"))
    apply(alone, pushes_of(layout, workers[:1]))
    alone.values.scatter(after)
    assert after[3].tolist() == [2.0] * 3  # one of two workers moves it half the way, from 0


@pytest.mark.parametrize(
    ("name", "group", "says"),
    [("LBFGS", {"lr": 1}, "it is unknown there"), ("SGD", {"lr": -1.0}, "torch refuses it")],
)
def test_an_optimizer_that_can_t_be_built(name, group, says):
    with pytest.raises(PlanError, match=says):
        build(name, [torch.nn.Parameter(torch.ones(2))], group, {})


@pytest.mark.parametrize(
    ("setting", "sent"),
    [
        ({"name": "decay"}, {}),
        ({"scale": lambda step: step, "mask": torch.ones(3), "where": object()}, {}),
        ({"lr": torch.tensor(0.5)}, {"lr": 0.5}),
        ({"lr": numpy.float32(0.5), "weight_decay": numpy.float64(0.25)}, {"lr": 0.5, "weight_decay": 0.25}),
        ({"betas": [numpy.float64(0.5), 0.25]}, {"betas": [0.5, 0.25]}),
        ({"weight_decay": 2**70}, {"weight_decay": float(2**70)}),
        ({"decoupled_weight_decay": False}, {"decoupled_weight_decay": False}),
    ],
    ids=["name", "objects", "tensor", "numpy", "betas", "large", "of_the_base"],
)
def test_what_the_class_reads_of_a_group_is_sent(setting, sent):
    parameters = [torch.nn.Parameter(torch.ones(2))]
    optimizer = torch.optim.AdamW([{"params": parameters, **setting}], lr=0.1)
    _, (plain,) = describe(torch.optim.AdamW(parameters, lr=0.1))
    _, (settings,) = describe(optimizer)
    assert settings == {**plain, **sent}
    note = {"loss": 1.0, "weight": 1.0, "flags": 0, "absent": [], "settings": settings}
    frame = write_frame(0, Push(0, (0, 0), 0, 0, 0, note, None), 0)
    assert read_header(read_prefix(frame[: PREFIX.size]), frame[PREFIX.size :]).note == note


def test_a_setting_that_is_no_number_is_refused():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)
    optimizer.param_groups[0]["weight_decay"] = "0.1"
    with pytest.raises(PlanError, match=r"'weight_decay' of the optimizer SGD\n  found: a group of it has '0.1'"):
        describe(optimizer)
