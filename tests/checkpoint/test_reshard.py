"""Parts of tensors: however a tensor is cut, its parts give it back, and their hashes add up."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from paceline.checkpoint import reshard
from paceline.checkpoint.manifest_merge import as_hex, of_hex, sum_of
from paceline.checkpoint.reshard import hash_of, put, take
from paceline.checkpoint.shard_geometry import boxes_of, fault_of_cover, is_needed, is_sound, move
from paceline.checkpoint.tensor_file import DTYPES
from paceline.nouns.shard_spec import FLAT, Cut, ShardSpec

FEW = settings(max_examples=150, deadline=None)


@st.composite
def shapes(draw):
    return tuple(draw(st.lists(st.integers(0, 7), max_size=3)))


@st.composite
def blocks(draw, size):
    left, found = size, []
    while left and draw(st.booleans()):
        found.append(draw(st.integers(0, left)))
        left -= found[-1]
    return (*found, left)


@st.composite
def cut_all_ways(draw, shape, depth=3):
    """Placements that make up a tensor: at every level, one more cut of some or all of the parts."""
    found = [ShardSpec(shape)]
    for _ in range(draw(st.integers(0, depth))):
        shared = draw(st.booleans())  # as meshes cut: all parts alike; else each part on its own
        how = None
        after = []
        for shard_spec in found:
            local = shard_spec.local_shape
            if how is None or not shared or how[0] >= len(local):
                how = (draw(st.integers(FLAT, len(local) - 1)), draw(st.integers(1, 4)))
            dim, parts = how
            size = math.prod(local) if dim == FLAT else local[dim]
            sizes = draw(blocks(size))
            after += [ShardSpec(shape, (*shard_spec.cuts, Cut(dim, sizes, part, parts))) for part in range(parts)]
        found = after
        if len(found) > 30:
            break
    return found


@st.composite
def cut_tensors(draw):
    shape = draw(shapes())
    return shape, draw(cut_all_ways(shape))


def tensor_of(shape, dtype=torch.int32, seed=0):
    bits = torch.randint(0, 256, (math.prod(shape) * dtype.itemsize,), generator=torch.Generator().manual_seed(seed))
    bits = bits.to(torch.uint8) & (1 if dtype == torch.bool else 255)
    return bits.view(dtype).view(shape) if bits.numel() else torch.empty(shape, dtype=dtype)


def by_hand(full, shard_spec):
    """The part, as the definition in nouns/shard_spec.py says it, word for word."""
    for cut in shard_spec.cuts:
        full = full.reshape(-1) if cut.dim == FLAT else full
        rows = []
        for block, at in zip(cut.blocks, [sum(cut.blocks[:i]) for i in range(len(cut.blocks))], strict=True):
            length = -(-block // cut.parts)
            rows += range(at + min(block, cut.part * length), at + min(block, (cut.part + 1) * length))
        full = full.index_select(max(cut.dim, 0), torch.tensor(rows, dtype=torch.int64))
    return full


@given(cut_tensors())
@example(
    ((6, 4), [ShardSpec((6, 4), (Cut(1, (2, 2), p, 2), Cut(FLAT, (12,), q, 5))) for p in (0, 1) for q in range(5)])
)
@FEW
def test_the_parts_of_a_tensor_give_it_back(case):
    shape, parts = case
    full = tensor_of(shape)
    again = torch.full_like(full, -1)
    for part in parts:
        assert is_sound(part)
        local = take(full, part)
        assert local.shape == part.local_shape
        assert torch.equal(local, by_hand(full, part))
        assert sum(box.numel for box in boxes_of(part)) == local.numel()
        put(again, part, local)
    assert torch.equal(again, full)
    assert fault_of_cover(shape, tuple(parts)) is None


@given(cut_tensors(), st.sampled_from(sorted(DTYPES)))
@FEW
def test_the_hashes_of_parts_add_up(case, dtype):
    shape, parts = case
    full = tensor_of(shape, getattr(torch, dtype))
    whole = hash_of(full, ShardSpec(shape))
    assert sum_of(hash_of(take(full, part), part) for part in parts) == whole
    assert of_hex(as_hex(whole)) == whole


@given(st.data())
@FEW
def test_one_mesh_reads_what_another_wrote(data):
    shape = data.draw(shapes())
    written, wanted = data.draw(cut_all_ways(shape)), data.draw(cut_all_ways(shape))
    full = tensor_of(shape)
    for want in wanted:
        local, array = torch.zeros(want.local_shape, dtype=torch.int32), np.zeros(want.local_shape, np.int32)
        for part in written:
            source = take(full, part)
            if is_needed(want, part):
                move(local, want, source, part)
                move(array, want, source.numpy(), part)
        assert torch.equal(local, by_hand(full, want))
        assert np.array_equal(array, local.numpy())


@given(cut_tensors(), st.data())
@FEW
def test_a_part_that_is_missing_or_there_twice_is_seen(case, data):
    shape, parts = case
    parts = [part for part in parts if math.prod(part.local_shape)]
    assume(parts)
    chosen = data.draw(st.sampled_from(parts))
    assert fault_of_cover(shape, tuple(part for part in parts if part != chosen)) is not None
    assert fault_of_cover(shape, (*parts, chosen)) is not None
    others = [part for part in parts if math.prod(part.local_shape) == math.prod(chosen.local_shape) and part != chosen]
    if others:
        swapped = tuple(chosen if part == others[0] else part for part in parts)
        assert fault_of_cover(shape, swapped) == "two of its parts overlap"


def test_parts_that_overlap_in_the_middle_are_seen():
    """Rows 0..3, 3..5 and 7 of 8: as many elements as there are, but 3 twice and 6 never."""
    parts = [Cut(0, (8,), 0, 2), Cut(0, (8,), 1, 3), Cut(0, (8,), 7, 8)]
    assert fault_of_cover((8,), tuple(ShardSpec((8,), (cut,)) for cut in parts)) == "two of its parts overlap"


@given(shapes(), st.sampled_from(sorted(DTYPES)), st.data())
@FEW
def test_a_flipped_bit_or_an_exchange_changes_both_sums(shape, dtype, data):
    numel = math.prod(shape)
    assume(numel)
    full = tensor_of(shape, getattr(torch, dtype), data.draw(st.integers(0, 99)))
    before = hash_of(full, ShardSpec(shape))
    bits = data.draw(st.sampled_from(reshard.bits_of(full))).view(-1)  # of complex128 those of one part
    one, other = (data.draw(st.integers(0, numel - 1)) for _ in range(2))
    old = bits.clone()
    bits[one] ^= 1 << data.draw(st.integers(0, 0 if dtype == "bool" else bits.element_size() * 8 - 2))
    after = hash_of(full, ShardSpec(shape))
    assert after[0] != before[0]
    assert after[1] != before[1]
    bits.copy_(old)
    bits[one], bits[other] = old[other].clone(), old[one].clone()
    assert (hash_of(full, ShardSpec(shape)) == before) == (old[one] == old[other])


def test_zeros_ones_and_moved_rows_have_hashes_of_their_own():
    """Structure that an addition without position, or a weak one, would miss."""
    place = ShardSpec((64, 64))
    square = torch.zeros(64, 64)
    square[:32] = 1
    seen = {hash_of(t.contiguous(), place) for t in (square, square.T, square.flip(0), torch.zeros(64, 64), -square)}
    assert len(seen) == 5
    rows = torch.arange(64.0).view(64, 1).repeat(1, 64)
    hashes = [hash_of(rows.roll(shift, 0), place) for shift in range(64)]
    assert len({first for first, _ in hashes}) == len({second for _, second in hashes}) == 64
    assert hash_of(torch.zeros(4), ShardSpec((4,))) != hash_of(torch.zeros(5), ShardSpec((5,)))
    assert hash_of(torch.tensor(0.0), ShardSpec(())) != hash_of(torch.tensor(-0.0), ShardSpec(()))


def by_definition(values):
    """The hash in Python's own numbers, an element at a time."""
    sums = [0, 0]
    for position, bits in enumerate(values):
        x = (position * 0x9E3779B97F4A7C15 ^ bits) % 2**64
        x = (x ^ x >> 33) * 0xFF51AFD7ED558CCD % 2**64
        x = (x ^ x >> 29) * 0xC4CEB9FE1A85EC53 % 2**64
        sums[0] += x
        sums[1] += (x ^ x >> 32) * 0xBF58476D1CE4E5B9
    return "".join(f"{lane % 2**64:016x}" for lane in sums)


def test_the_hash_is_what_it_was():
    """Checkpoints keep it: another one would make all of them look damaged."""
    full = torch.arange(24, dtype=torch.float32).view(2, 3, 4)
    said = as_hex(hash_of(full, ShardSpec((2, 3, 4))))
    assert said == by_definition(full.view(torch.int32).flatten().tolist()) == "28c6c07b0bf07ded8ab9d87c4c5a24de"


@pytest.mark.parametrize("shape", [(1000,), (7, 1000), (300, 3), (3, 5, 67)])
def test_chunks_do_not_change_the_hash(shape, monkeypatch):
    full = tensor_of(shape)
    cuts = [ShardSpec(shape, (Cut(len(shape) - 1, (shape[-1],), part, 2),)) for part in range(2)]
    whole = hash_of(full, ShardSpec(shape))
    for limit in (1, 7, 64):
        monkeypatch.setitem(reshard._CHUNK, "cpu", limit)
        reshard._ramp.cache_clear()
        assert hash_of(full, ShardSpec(shape)) == whole
        assert hash_of(full.T.contiguous().T if len(shape) == 2 else full, ShardSpec(shape)) == whole
        assert sum_of(hash_of(take(full, cut), cut) for cut in cuts) == whole
    monkeypatch.undo()
    reshard._ramp.cache_clear()


def largest_allocation(function, *arguments):
    with torch.profiler.profile(profile_memory=True, activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        function(*arguments)
    return max(event.cpu_memory_usage for event in profile.events())


@pytest.mark.slow
def test_a_large_part_is_hashed_in_little_memory():
    # Not contiguous, and half a tensor: a careless view would copy 32 MiB, positions would take twice that.
    place = ShardSpec((4096, 4096), (Cut(1, (1024, 3072), 1, 2),))
    local = torch.empty(2048, 4096).T
    assert largest_allocation(hash_of, local, place) <= 2**21
    assert largest_allocation(hash_of, local.contiguous(), place) <= 2**21
