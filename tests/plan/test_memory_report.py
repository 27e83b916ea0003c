"""From a recording to what a person reads: peak, moment, holders, the device, suggestions."""

from __future__ import annotations

import json
import random
from collections import defaultdict
from dataclasses import asdict, replace
from types import SimpleNamespace

import pytest

from paceline.cli import plan_loop, plan_memory
from paceline.cli.main import main
from paceline.cli.plan_memory import by_allocator, notices_of
from paceline.launch.simulators import Simulators, ranks_to_profile
from paceline.nouns.device import CONTEXT_BYTES, Device
from paceline.nouns.errors import PlanError, WorkloadError
from paceline.nouns.plan import Plan
from paceline.nouns.profile import ACTIVATIONS, PARAMETERS, TEMPORARY, Block, Profile, Recording, Work
from paceline.plan.memory import memory_of
from paceline.plan.memory_table import holders, picture, size, table
from paceline.plan.oom_advice import Change, cheapest, ways

from support.jobs import LOOP, TINY

GIB = 2**30
BLOCKS = [
    Block(4 * GIB, PARAMETERS, "weight", "start"),
    Block(9 * GIB, TEMPORARY, "first", "forward"),  # in the first step, which is not looked at
    Block(2 * GIB, ACTIVATIONS, "first", "forward"),
    Block(3 * GIB, ACTIVATIONS, "second", "forward"),
    Block(GIB, TEMPORARY, "", "backward"),
]
EVENTS = [1, 2, -2, 3, 4, 5, -5, -4, -3]
PHASES = [(0, "start"), (1, "forward"), (5, "backward"), (8, "update")]


def profile(device="cpu"):
    recording = Recording(list(BLOCKS), EVENTS, PHASES, last_step=3)
    work = {"aten.mm (8, 8)x(8, 8) float32": Work(2, 2048, 1536)}
    rows = [{"collective": "all_reduce", "axis": "replicate", "calls": 1, "bytes": 8}]
    return Profile("replicate=1", 0, device, 8, "float32", recording, work, {"first": Work(2, 2048, 1536)}, rows)


def test_the_peak_of_the_last_step_and_whose_it_is():
    memory = memory_of(profile())
    assert (memory.peak, memory.phase, memory.reserved) == (10 * GIB, "backward", None)
    assert memory.at_peak == {PARAMETERS: 4 * GIB, ACTIVATIONS: 5 * GIB, TEMPORARY: GIB}
    assert memory.between == {PARAMETERS: 4 * GIB}
    assert [(one.name, one.nbytes // GIB) for one in memory.holders] == [
        ("weight", 4), ("second", 3), ("first", 2), ("", 1),
    ]  # fmt: skip


@pytest.mark.parametrize(("text", "is_too_large"), [("16GB", False), ("V100-16GB", False), ("12GB", True)])
def test_whether_a_device_has_enough(text, is_too_large):
    """13 GiB are reserved at most: the first step's temporary leaves a segment that the second goes on in."""
    device = Device.parse(text)
    memory = memory_of(profile("cuda"), device.capacity(0))
    assert (memory.reserved, memory.is_too_large) == (13 * GIB, is_too_large)
    lines = table([memory], device, 0)
    assert lines[-1].split() == (["OUT", "OF", "MEMORY"] if is_too_large else ["fits"])
    assert len({len(line) for line in lines}) == 1


def fragmented():
    """Of 6 GiB that were freed, 1 is in use; so 6.5 GiB come from elsewhere, unless a segment can grow."""
    sizes = (6 * GIB, GIB, 13 * GIB // 2)
    blocks = [Block(nbytes, TEMPORARY, "", "forward") for nbytes in sizes]
    recording = Recording(blocks, [1, -1, 2, 3, -3, -2], [(0, "forward")], last_step=0)
    return replace(profile("cuda"), recording=recording)


@pytest.mark.parametrize(("text", "fits"), [("13.5GB", (True, True)), ("9GB", (False, True)), ("7GB", (False, False))])
def test_expandable_segments_have_no_fragments(text, fits):
    device = Device.parse(text)
    page = 20 * 2**20
    for expandable, reserved, has_room in zip((False, True), (25 * GIB // 2, 384 * page), fits, strict=True):
        memory = memory_of(fragmented(), device.capacity(0), expandable)
        assert (memory.reserved, memory.is_too_large) == (reserved, not has_room)
        lines = table([memory], replace(device, expandable_segments=expandable), 0)
        assert [line.split()[2] for line in lines if "expandable_segments" in line] == [str(expandable)]
    assert memory_of(profile("cpu"), None, expandable_segments=True).reserved is None


def test_memory_report_offers_expandable_segments_if_they_help():
    plan = Plan()
    device = Device.parse("9GB")
    ((change, needed, flops),) = by_allocator(plan, [fragmented()], device)
    assert (change.plan, needed) == (plan, 384 * 20 * 2**20 + CONTEXT_BYTES)
    smaller = [(way, 5, flops) for way in ways(plan, 8, "float32", True) if way.kind in ("micro-batch", "precision")]
    outs = cheapest([*smaller, (change, needed, flops)], plan, flops)
    assert [out.way.kind for out in outs] == ["allocator", "micro-batch", "precision"]
    assert outs[0].way.text.startswith("PYTORCH_ALLOC_CONF=expandable_segments:True")
    assert outs[0].cost == "none"
    assert by_allocator(plan, [fragmented()], Device.parse("7GB")) == []  # live tensors alone are too many
    assert by_allocator(plan, [fragmented(), profile("cuda")], device) == []  # another rank does not fit
    assert by_allocator(plan, [fragmented()], replace(device, expandable_segments=True)) == []  # it has them


def refused(*_):
    raise WorkloadError("a step of it", "nothing else is tried here", "wait")


@pytest.mark.parametrize(("text", "wanted"), [("9GB", True), ("7GB", False), ("16GB", False)])
def test_the_page_offers_expandable_segments(text, wanted, monkeypatch):
    error = WorkloadError("a step of it", "nothing else is tried here", "wait")
    answer = {True: error, False: fragmented()}
    monkeypatch.setattr(Simulators, "ask", lambda _, requests, *__, **___: [answer[one.is_brief] for one in requests])
    report, lines, _ = plan_memory.explain(Plan(), ["train.py"], Device.parse(text), with_ways_out=True)
    offered = [line for line in lines if line.startswith("PYTORCH_ALLOC_CONF=expandable_segments:True in the env")]
    assert [line.partition("needs")[2].split() for line in offered] == [["8,192.0", "MiB", "cost:", "none"]] * wanted
    assert report["expandable_segments"] is False
    assert [way["more_devices"] for way in report["ways_out"]] == [0] * wanted


def all_rounds(plan, fits):
    """The cheapest of all changes that fit, where in each round the next of every kind is tried."""
    waiting = defaultdict(list)
    for way in ways(plan, 8, "float32", True):
        waiting[way.kind].append(way)
    fitting = []
    tried = 0
    while waiting and (len(fitting) < 4 or "micro-batch" in waiting):
        for kind in list(waiting):
            way = waiting[kind].pop(0)
            tried += 1
            if fits(way):
                fitting.append((way, 5, 100.0))
            if fits(way) or not waiting[kind]:
                del waiting[kind]
    return cheapest(fitting, plan, 100.0), tried


@pytest.mark.parametrize("share", [0.1, 0.4, 0.7, 1.0])
def test_memory_report_tries_more_devices_only_if_maybe_cheapest(share, monkeypatch):
    monkeypatch.setattr(plan_memory, "needed_if_it_fits", lambda plan, profiles, device: profiles[0].shared_bytes)
    monkeypatch.setattr(plan_memory, "by_allocator", lambda *_: [])
    saved = 0
    for seed in range(100):
        dice = {way.text: random.Random(f"{seed} {way.text}").random() < share for way in ways(Plan(), 8, "float32")}
        asked = []

        def ask(requests, progress, dice=dice, asked=asked):
            asked += requests
            return [replace(profile("cuda"), shared_bytes=5 if dice[one.name] else None) for one in requests]

        progress = SimpleNamespace(num_done=0)
        found = plan_memory._ways_out(
            Plan(), SimpleNamespace(ask=ask), progress, Device.parse("16GB"), [replace(profile("cuda"), micro_batch=8)]
        )
        wanted, tried = all_rounds(Plan(), lambda way, dice=dice: dice[way.text])
        assert [out.way.text for out in found] == [out.way.text for out in wanted]
        assert len(asked) <= tried
        saved += tried - len(asked)
    assert saved > 0


@pytest.mark.parametrize(("text", "wanted"), [("9GB", True), ("7GB", False)])
def test_a_loop_is_offered_expandable_segments(text, wanted, monkeypatch):
    monkeypatch.setattr(plan_loop, "profile_loop", refused)
    tried = plan_loop._Tried(["loop.py"], Device.parse(text), {Plan(): [SimpleNamespace(profile=fragmented())]}, None)
    found = plan_loop._ways_out(Plan(), tried, {"ranks": [{"is_too_large": True}]})
    assert [way.way.kind for way in found] == ["allocator"] * wanted
    tried.device = replace(tried.device, expandable_segments=True)
    assert [memory.is_too_large for memory in tried.memories(Plan())] == [not wanted]


@pytest.mark.parametrize("flag", [[], ["--expandable-segments"]])
def test_a_profile_of_either_allocator(flag, monkeypatch, tmp_path, capsys):
    (tmp_path / "train.py").write_text(TINY + LOOP)
    monkeypatch.setattr(Simulators, "ask", lambda *_: [fragmented()])
    assert main(["profile", "--device", "9GB", *flag, "--json", str(tmp_path / "train.py")]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["expandable_segments"] is bool(flag)
    assert facts["memory"]["is_too_large"] is not bool(flag)


@pytest.mark.parametrize("text", ["16", "GB", "V100", "-GB", "xGB", "0GB", "V100-16MB"])
def test_a_device_whose_memory_is_not_said(text):
    with pytest.raises(PlanError, match="its memory is not known"):
        Device.parse(text)


def test_a_device():
    assert Device.parse("cpu").capacity(3) is None
    a100 = Device.parse("A100-80GB")
    assert a100.kind == "cuda"
    assert 78 * GIB < a100.memory < 80 * GIB
    assert a100.memory - a100.capacity(0) == CONTEXT_BYTES
    assert a100.capacity(0) > a100.capacity(1)


def test_the_picture_and_the_holders():
    lines = picture(profile())
    assert lines[0].strip().startswith("10.00 GiB |")
    assert {"^forward", "^backward"} <= set(lines[-1].replace("|", " ").split())
    assert len({len(line) for line in lines}) == 1
    assert holders(memory_of(profile()))[1].split()[:2] == ["weight", "parameters"]
    assert (size(2**20), size(20 * GIB)) == ("1.0 MiB", "20.00 GiB")


def test_a_profile_is_read_as_it_was_written(tmp_path):
    profile().write(tmp_path / "profile.json")
    assert Profile.read(tmp_path / "profile.json") == profile()
    value = json.loads((tmp_path / "profile.json").read_text())
    for broken in ({**value, "version": 9}, {}, [], {**value, "blocks": [[1, 99, 0, 0, 0]]}):
        (tmp_path / "broken.json").write_text(json.dumps(broken))
        with pytest.raises(WorkloadError, match="it can't be read"):
            Profile.read(tmp_path / "broken.json")


@pytest.mark.parametrize(
    ("plan", "ranks"),
    [("replicate=4", [0]), ("shard=2,tensor=2", [0]), ("pipeline=2,tensor=2", [0, 2]), ("pipeline=4", [0, 1, 2, 3])],
)
def test_one_rank_of_each_stage_is_profiled(plan, ranks):
    assert ranks_to_profile(Plan.parse(plan)) == ranks


def test_the_cheapest_ways_out_one_of_each_kind():
    plan = Plan()
    known = {way.text: way for way in ways(plan, 8, "float32")}
    found = [
        (known["shard=2 as the plan"], 5, 100.0),
        (known["micro_batch_size=2 in the workload"], 3, 100.0),
        (known["micro_batch_size=4 in the workload"], 4, 100.0),
        (known["checkpointing=full in the plan"], 4, 133.0),
    ]
    outs = cheapest(found, plan, 100.0)
    assert [out.way.kind for out in outs] == ["micro-batch", "checkpointing", "shard"]
    assert outs[0].way.micro_batch_size == 4
    assert outs[1].cost == "33% more computation"
    assert outs[2].cost == "1 more device"


def test_memory_report_lists_exact_changes_before_8bit_moments():
    """Where neither needs more devices or more computation."""
    known = {way.text: way for way in ways(Plan(), 8, "float32")}
    texts = [
        "optimizer_states=8bit in the plan",
        "checkpointing=offload in the plan",
        "micro_batch_size=1 in the workload",
    ]
    outs = cheapest([(known[text], 5 + row, 100.0) for row, text in enumerate(texts)], Plan(), 100.0)
    assert [out.way.text for out in outs] == texts[::-1]
    assert outs[2].cost == "Adam's moments rounded to 8 bits"


@pytest.mark.parametrize(
    ("line", "is_offered"), [("tensor=2", True), ("tensor=2,sequence=on", False), ("shard=2", False)]
)
def test_norms_along_the_sequence_are_a_way_out_of_tensor(line, is_offered):
    found = [way for way in ways(Plan.parse(line), 8, "bf16") if way.kind == "sequence"]
    assert [way.plan.sequence for way in found] == ["on"] * is_offered


def test_ways_that_a_plan_can_not_go():
    plan = Plan.parse("pipeline=2,checkpointing=full")
    assert {way.kind for way in ways(plan, 8, "bf16")} == {"moments"}
    assert {way.kind for way in ways(replace(plan, optimizer_states="8bit"), 8, "bf16")} == set()
    assert [way.micro_batch_size for way in ways(Plan(), 1, "bf16") if way.kind == "micro-batch"] == []
    with_buckets = Plan.parse("replicate=1", bucket_bytes=100_000, transport="gloo")
    for way in ways(with_buckets, 8, "float32"):  # each is a plan that can be asked for
        assert Plan.of(asdict(way.plan), "a request") == way.plan
    assert "shard" not in {way.kind for way in ways(Plan.parse("server=1"), 8, "float32")}
    assert isinstance(next(ways(Plan(), 8, "float32")), Change)
    for line in ("server=1", "shard=2,offload=on", "expert=2"):  # which refuse optimizer_states
        assert "moments" not in {way.kind for way in ways(Plan.parse(line), 8, "float32")}


@pytest.mark.parametrize(
    ("has_bf16", "names"),
    [
        (False, ["V100-16GB", "Tesla-V100-SXM2-32GB", "v100s-32GB", "P100-16GB", "T4-16GB", "P40-24GB", "K80-12GB"]),
        (False, ["M60-8GB", "RTX2080Ti-11GB", "RTX-2080-Ti-11GB", "GTX1080Ti-11GB", "Titan-V-12GB", "MI50-16GB"]),
        (True, ["cpu", "A100-40GB", "A100-SXM4-80GB", "H100-80GB", "H200-141GB", "A10G-24GB", "L4-24GB", "L40S-48GB"]),
        (True, ["RTX4090-24GB", "RTX-3090-24GB", "RTX-A6000-48GB", "B200-192GB", "GH200-96GB", "MI300X-192GB"]),
        (None, ["16GB", "cuda", "Gaudi-96GB", "RTX-6000-48GB"]),
    ],
)
def test_what_a_name_says_of_bf16(has_bf16, names):
    assert {name: Device.parse(name).has_bf16 for name in names} == dict.fromkeys(names, has_bf16)


@pytest.mark.parametrize(("has_bf16", "precision"), [(True, "bf16"), (False, "fp16"), (None, "bf16")])
def test_the_narrow_precision_of_the_device_is_a_way_out(has_bf16, precision):
    found = [way for way in ways(Plan(), 8, "float32", has_bf16) if way.precision]
    assert [way.precision for way in found] == [precision]
    cost = cheapest([(found[0], 5, 100.0)], Plan(), 100.0)[0].cost
    assert f"rounded to {precision}" in cost
    assert ("where the GPU has bf16" in cost) == (has_bf16 is None)


@pytest.mark.parametrize("plan", ["server=1", "replicate=2,compression=topk"])
def test_fp16_is_no_way_out_where_an_update_can_not_be_left_out(plan):
    assert [way for way in ways(Plan.parse(plan), 8, "float32", has_bf16=False) if way.precision] == []


@pytest.mark.parametrize(
    ("name", "is_told"), [("V100-16GB", True), ("T4-16GB", True), ("A100-40GB", False), ("16GB", False)]
)
def test_precision_that_the_device_lacks_is_told(name, is_told):
    wide, narrow = profile("cuda"), replace(profile("cuda"), precision="bf16", notices=["another"])
    device = Device.parse(name)
    assert notices_of(wide, device) == []
    assert notices_of(narrow, device)[0] == "another"
    assert [name in notice and "has no bf16" in notice for notice in notices_of(narrow, device)[1:]] == [True] * is_told
