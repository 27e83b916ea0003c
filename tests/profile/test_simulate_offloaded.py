"""With checkpointing=offload a GPU's step has activations of two blocks at a time, and its host has the others."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import paceline
from paceline.cli import plan_memory
from paceline.nouns.device import Device
from paceline.nouns.errors import PlanError
from paceline.nouns.plan import Plan
from paceline.nouns.profile import ACTIVATIONS, NOTHING_TO_OFFLOAD, Profile
from paceline.plan.memory import memory_of
from paceline.plan.memory_table import table
from paceline.plan.oom_advice import cheapest, ways
from paceline.profile.simulate import simulate

BLOCKS, BATCH, WIDTH = 6, 1024, 256
TENSOR = BATCH * WIDTH * 4  # bytes


class Block(nn.Sequential):
    """Saves what enters it and the results of its functions."""

    def __init__(self):
        super().__init__(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Sigmoid())


def workload(blocks=BLOCKS, **parts):
    def loss(model, batch):
        return model(batch).sum(), len(batch)

    def model():
        if not blocks:
            return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
        return nn.Sequential(*(Block() for _ in range(blocks)))

    return paceline.Workload(
        model=model,
        loss=loss,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        data=list(torch.zeros(2 * BATCH, WIDTH)),
        batch_size=BATCH,
        **parts,
    )


@pytest.fixture(scope="module")
def pair():
    return [simulate(workload(), Plan.parse(line), device="cuda") for line in ("replicate=1", "checkpointing=offload")]


def test_the_peak_has_two_blocks_less_than_all(pair):
    """A block keeps the results of its two functions, and the next one reads the second."""
    here, there = (memory_of(profile) for profile in pair)
    assert here.at_peak[ACTIVATIONS] >= (2 * BLOCKS - 1) * TENSOR
    assert there.at_peak[ACTIVATIONS] <= 5 * TENSOR
    assert there.peak < here.peak - 4 * TENSOR  # not 6: at its peak there are gradients already


def test_all_blocks_but_the_last_are_copied_there_and_back(pair):
    here, there = pair
    # Of a block leave the results of its two functions; of the first also the batch. The last has its own yet, and
    # keeps what the block before it returned: that doesn't come back.
    leave = 2 * (BLOCKS - 1) + 1
    assert there.copied_bytes == (2 * leave - 1) * TENSOR
    assert memory_of(there).host == there.host_bytes == leave * TENSOR
    assert here.copied_bytes == here.host_bytes == 0


def test_pinned_memory_is_in_no_gpus_recording(pair):
    _, there = pair
    assert sum(block.nbytes for block in there.recording.blocks) > 0
    born = {event for event in there.recording.events if event > 0}
    assert born >= {-event for event in there.recording.events if event < 0}
    assert memory_of(there).between.keys() == memory_of(pair[0]).between.keys()
    assert memory_of(there).between == memory_of(pair[0]).between


def test_many_micro_batches_copy_as_often():
    cut = simulate(workload(micro_batch_size=BATCH // 4), Plan.parse("checkpointing=offload"), device="cuda")
    brief = simulate(workload(micro_batch_size=BATCH // 4), Plan.parse("checkpointing=offload"), 0, "cuda", True)
    leave = 2 * (BLOCKS - 1) + 1
    assert cut.copied_bytes == brief.copied_bytes == (2 * leave - 1) * TENSOR


def test_it_is_shown_and_read_again(pair, tmp_path):
    _, there = pair
    lines = table([memory_of(there)], Device.parse("16GB"), 1)
    assert any(line.startswith("in the host's memory, besides") and "11.0 MiB" in line for line in lines)
    assert any(line.startswith("copied to the host and back") and "21.0 MiB" in line for line in lines)
    there.write(tmp_path / "profile.json")
    assert Profile.read(tmp_path / "profile.json") == there
    older = json.loads((tmp_path / "profile.json").read_text())
    del older["copied_bytes"]
    assert Profile.of_json(older).copied_bytes == 0


@pytest.mark.parametrize(("blocks", "is_way"), [(BLOCKS, True), (0, False)])
def test_it_is_a_way_out_with_its_cost(blocks, is_way):
    (way,) = [way for way in ways(Plan(), 8, "float32") if way.kind == "offload"]
    profile = simulate(workload(blocks), way.plan, device="cuda")
    assert any(NOTHING_TO_OFFLOAD in notice for notice in profile.notices) != is_way
    simulators = SimpleNamespace(ask=lambda *_: [profile])
    found = plan_memory._tried([way], simulators, None, Device.parse("16GB"))
    assert len(found) == is_way
    for suggestion in cheapest(found, Plan(), profile.flops):
        assert suggestion.cost == "21.0 MiB copied between device and host in each step, 11.0 MiB of the host's memory"


def test_it_is_no_way_out_beside_another_or_compiled():
    for line in ("checkpointing=full", "checkpointing=offload", "compile=on"):
        assert not [way for way in ways(Plan.parse(line), 8, "float32") if way.kind == "offload"]


def test_a_step_of_the_cpu_is_refused():
    with pytest.raises(PlanError) as caught:
        simulate(workload(), Plan.parse("checkpointing=offload"))
    assert caught.value.found == "the model is on cpu"
