"""With offload=on a GPU's rank has less on the GPU, and the host has the rest."""

from __future__ import annotations

import pytest

from compare import planner_models
from paceline.nouns.device import Device
from paceline.nouns.plan import Plan
from paceline.nouns.profile import GRADIENTS, OPTIMIZER, PARAMETERS
from paceline.plan.memory import memory_of
from paceline.plan.memory_table import table
from paceline.profile.simulate import simulate

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def pair():
    """The same rank's step without and with it, as on a GPU."""
    workload = planner_models.workload("bert")
    return [simulate(workload, Plan.parse(line), device="cuda") for line in ("shard=2", "shard=2,offload=on")]


def test_parts_and_their_state_are_the_hosts(pair):
    here, there = (memory_of(profile) for profile in pair)
    moved = here.between[PARAMETERS] + here.between[OPTIMIZER] + here.between[GRADIENTS]
    assert not {PARAMETERS, OPTIMIZER, GRADIENTS} & there.between.keys()
    assert moved <= there.host <= 1.3 * moved  # and what the update takes meanwhile
    assert here.host == 0


def test_the_gpu_has_copies_of_what_it_gathers(pair):
    here, there = pair
    clones = [work for name, work in there.operations.items() if "clone" in name]
    before = [work for name, work in here.operations.items() if "clone" in name]
    parts = memory_of(here).between[PARAMETERS]
    copied = sum(work.nbytes for work in clones) - sum(work.nbytes for work in before)
    assert copied > 3 * parts  # read and written, for forward and backward; the root is gathered once for both
    assert memory_of(there).peak < memory_of(here).peak


def test_a_gradients_part_is_on_the_gpu_for_a_moment(pair):
    _, there = pair
    events = there.recording.events
    parts = {n + 1 for n, block in enumerate(there.recording.blocks) if block.kind == GRADIENTS}
    born = [index for index, event in enumerate(events) if event in parts]
    assert born
    assert all(events[index + 1] == -events[index] for index in born)


def test_the_recording_is_whole(pair):
    """Everything is taken once and given back once at the most; the moments are in order."""
    recording = pair[1].recording
    taken = set()
    for event in recording.events:
        assert (event not in taken) if event > 0 else (-event in taken)
        taken.add(event) if event > 0 else taken.discard(-event)
    assert [at for at, _ in recording.phases] == sorted(at for at, _ in recording.phases)
    assert 0 < recording.last_step < len(recording.events)


def test_it_is_shown(pair):
    lines = table([memory_of(pair[1])], Device.parse("16GB"), 1)
    assert any(line.startswith("in the host's memory, besides") for line in lines)
