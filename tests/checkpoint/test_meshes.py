"""Saved under any mesh, loaded under any other: the same bits under the same names."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from paceline.checkpoint import save
from paceline.checkpoint.load import check_files_together, read_checkpoint, read_own, verify_hashes
from paceline.checkpoint.manifest import file_hash, file_name, read_manifest, sealed
from paceline.checkpoint.manifest_merge import as_hex
from paceline.checkpoint.reshard import LocalTensor, hash_of, take
from paceline.checkpoint.save import CheckpointWriter
from paceline.nouns.errors import CheckpointError
from paceline.nouns.mesh import Mesh
from paceline.nouns.shard_spec import FLAT, Cut, LocalShard, ShardSpec

OPTIMIZER = {"class": "SGD", "groups": [{"parameters": []}], "numbers": {}}
FACTS = {"step": 1, "position": 8, "seed": 0, "samples": 24, "optimizer": OPTIMIZER, "scheduler": None}
# Of each tensor: shape, dtype, how `tensor` cuts it (dim, blocks), along which dim `shard` does, and its stage.
TENSORS = {
    "model/fused.weight": ((12, 5), "float32", (0, (6, 6)), 0, 0),
    "model/row.weight": ((5, 8), "bfloat16", (1, (8,)), 0, 1),
    "model/norm.weight": ((7,), "float64", None, FLAT, 0),
    "model/three.weight": ((4, 3, 5), "float8_e4m3fn", (1, (3,)), FLAT, 1),
    "model/scale": ((), "float32", None, None, None),
    "model/mask": ((5,), "bool", None, 0, 1),
    "model/nothing": ((0, 4), "int64", None, 0, 0),
    "model/large": ((64, 64), "float32", None, None, None),
}
MESHES = ["replicate=1", "replicate=2,shard=3,tensor=2", "shard=4", "tensor=3", "pipeline=2,replicate=2,tensor=2"]


def full_tensors():
    random = torch.Generator().manual_seed(0)
    values = {}
    for name, (shape, dtype, *_) in TENSORS.items():
        values[name] = torch.randn(shape, generator=random).mul(50).to(getattr(torch, dtype))
    return values


def placement_of(name, mesh, rank):
    """The part of a tensor that a rank of the mesh has; None: its stage has none."""
    shape, _, tensor, shard, stage = TENSORS[name]
    at = mesh.coordinate(rank)
    if stage is not None and stage % mesh.size("pipeline") != at["pipeline"]:
        return None
    shard_spec = ShardSpec(shape)
    if tensor is not None:
        shard_spec = ShardSpec(shape, (Cut(*tensor, at["tensor"], mesh.size("tensor")),))
    if shard is not None:
        local = shard_spec.local_shape
        size = placement_numel(local) if shard == FLAT else local[shard]
        shard_spec = ShardSpec(shape, (*shard_spec.cuts, Cut(shard, (size,), at["shard"], mesh.size("shard"))))
    return shard_spec


def placement_numel(shape):
    return torch.Size(shape).numel()


def held_by(mesh, rank):
    found = {}
    for name in TENSORS:
        shard_spec = placement_of(name, mesh, rank)
        if shard_spec is not None:
            holders = [other for other in range(mesh.world_size) if placement_of(name, mesh, other) == shard_spec]
            found[name] = LocalShard(shard_spec, tuple(holders))
    return found


def parts_of(mesh, rank, full):
    return {name: LocalTensor(take(full[name], held.shard_spec), held) for name, held in held_by(mesh, rank).items()}


def save_under(mesh, folder, change=lambda rank, parts: parts, facts=FACTS):
    """Save as the ranks of `mesh` would, all in this process; the failures, by rank."""
    full, told = full_tensors(), []
    writers = [CheckpointWriter(rank, mesh.world_size, told.append) for rank in range(mesh.world_size)]
    for writer in writers:
        parts = change(writer.rank, parts_of(mesh, writer.rank, full))
        own = {"own/random/torch": torch.tensor([writer.rank])}
        writer.begin(folder, parts, own, {**facts, "world_size": mesh.world_size}, 0)
    return [writer.wait() for writer in writers]


class Rendezvous:
    """All ranks' all_reduce, as threads of this process."""

    axis = "world"

    def __init__(self, size):
        self.size, self.barrier, self.rows = size, threading.Barrier(size, timeout=30), [None] * size

    def at(self, rank):
        comm = Rendezvous.__new__(Rendezvous)
        comm.__dict__ = {**self.__dict__, "rank": rank}
        return comm

    def all_reduce(self, tensor, op="sum"):
        assert op == "sum"
        self.rows[self.rank] = tensor.clone()
        self.barrier.wait()
        total = sum(self.rows[1:], self.rows[0].clone())
        self.barrier.wait()
        tensor.copy_(total)


def on_ranks(size, function):
    """`function(comm)` as every rank; what each returned or raised."""
    meeting = Rendezvous(size)

    def one(rank):
        try:
            return function(meeting.at(rank))
        except CheckpointError as error:
            return error

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(one, range(size)))


@pytest.fixture(scope="module", params=MESHES)
def saved(request, tmp_path_factory):
    mesh = Mesh.parse(request.param)
    folder = tmp_path_factory.mktemp("saved") / "step-00000001"
    assert save_under(mesh, folder) == [None] * mesh.world_size
    return mesh, folder


@pytest.mark.parametrize("mesh", MESHES)
def test_what_one_mesh_saved_another_loads(saved, mesh):
    _, folder = saved
    mesh = Mesh.parse(mesh)
    full = full_tensors()

    def load(comm):
        held = held_by(mesh, comm.rank)
        wanted = {name: one.shard_spec for name, one in held.items()}
        manifest, tensors, _ = read_checkpoint(folder, comm.rank, wanted)
        check_files_together(folder, manifest, comm)
        verify_hashes(folder, manifest, {name: LocalTensor(tensors[name], held[name]) for name in held}, comm)
        for name, tensor in tensors.items():
            expected = take(full[name], wanted[name])
            assert tensor.dtype == expected.dtype
            assert torch.equal(tensor.view(torch.uint8), expected.view(torch.uint8)) if tensor.dim() else True
            assert tensor.shape == expected.shape
        return set(tensors)

    names = on_ranks(mesh.world_size, load)
    assert set().union(*names) == set(TENSORS)


def test_the_manifest_has_every_tensor_once_and_its_hash(saved):
    mesh, folder = saved
    manifest = read_manifest(folder)
    for name, full in full_tensors().items():
        entry = manifest["tensors"][name]
        assert entry["hash"] == as_hex(hash_of(full, ShardSpec(tuple(full.shape))))
        written = [ShardSpec.of_json(part["placement"]).local_shape for part in entry["parts"]]
        assert sum(map(placement_numel, written)) == full.numel()
        assert not full.numel() or all(map(placement_numel, written)), "a part of nothing was written"
    for rank in range(mesh.world_size):
        assert read_own(folder, manifest, rank) == {"random/torch": torch.tensor([rank])}
    assert read_own(folder, manifest, mesh.world_size) == {}


def test_none_is_all_of_a_tensor_and_another_shape_is_refused(saved):
    _, folder = saved
    _, tensors, _ = read_checkpoint(folder, 0, {"model/fused.weight": None})
    assert torch.equal(tensors["model/fused.weight"], full_tensors()["model/fused.weight"])
    with pytest.raises(CheckpointError, match=r"has the shape \(12, 5\) in it, not \(5, 12\)"):
        read_checkpoint(folder, 0, {"model/fused.weight": ShardSpec((5, 12))})
    with pytest.raises(CheckpointError, match=r"model/other is not in it"):
        read_checkpoint(folder, 0, {"model/other": None})


def test_the_writing_is_spread_over_those_who_hold_the_same():
    mesh = Mesh.parse("replicate=4")
    shapes = [(100,), (60,), (40,), (30,), (30,), (20,), (10,), (10,)]
    held = [LocalShard(ShardSpec(shape), (0, 1, 2, 3)) for shape in shapes]
    parts = {f"{n}": LocalTensor(torch.zeros(one.shard_spec.shape), one) for n, one in enumerate(held)}
    names = [save.assigned(parts, rank) for rank in range(mesh.world_size)]
    assert sorted(name for mine in names for name in mine) == sorted(parts)
    assert sorted(sum(parts[name].tensor.numel() for name in mine) for mine in names) == [60, 70, 70, 100]


def lose(rank, parts):
    return {name: part for name, part in parts.items() if rank != 3 or name != "model/norm.weight"}


def give_twice(rank, parts):
    """Ranks 0 and 1 do not know that they hold the same part."""
    name = "model/fused.weight"
    if rank < 2:
        parts[name] = LocalTensor(parts[name].tensor, LocalShard(parts[name].shard.shard_spec, (rank,)))
    return parts


def hold_anothers_place(rank, parts):
    name = "model/fused.weight"
    if rank == 2:
        cut = Cut(0, (12,), 0, 2)
        parts[name] = LocalTensor(parts[name].tensor, LocalShard(ShardSpec((12, 5), (cut,)), (rank,)))
    return parts


def differ_in_dtype(rank, parts):
    name = "model/norm.weight"
    if rank == 1:
        parts[name] = LocalTensor(parts[name].tensor.float(), parts[name].shard)
    return parts


@pytest.mark.parametrize(
    ("mesh", "change", "said"),
    [
        ("shard=4", lose, "its parts have 6 of 7 elements"),
        ("replicate=2", give_twice, "two of its parts overlap"),
        ("replicate=2,tensor=2", hold_anothers_place, "two of its parts overlap"),
        ("shard=2", differ_in_dtype, "another file as"),
    ],
)
def test_what_does_not_make_up_the_tensors_is_not_published(tmp_path, mesh, change, said):
    mesh = Mesh.parse(mesh)
    failures = save_under(mesh, tmp_path / "saved", change)
    assert said in failures[0].found
    assert "strategies disagree" in failures[0].fix
    assert list(tmp_path.iterdir()) == []


def test_a_part_of_another_shape_than_its_placement_is_a_slip():
    with pytest.raises(ValueError, match="whose shape is"):
        LocalTensor(torch.zeros(3), LocalShard(ShardSpec((4,)), (0,)))


def test_a_tensor_that_no_file_can_keep_is_refused(tmp_path):
    part = LocalTensor(torch.empty(3, dtype=torch.float8_e8m0fnu), LocalShard(ShardSpec((3,)), (0,)))
    with pytest.raises(CheckpointError, match=r"it is torch.float8_e8m0fnu"):
        CheckpointWriter(0, 1, print).begin(tmp_path / "saved", {"model/x": part}, {}, {**FACTS, "world_size": 1}, 0)


@pytest.fixture
def shard(tmp_path):
    mesh = Mesh.parse("shard=4")
    save_under(mesh, tmp_path / "saved")
    return mesh, tmp_path / "saved"


def resealed(folder, change):
    """Change the manifest as somebody would who also makes its hashes fit."""
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text())
    change(manifest)
    for entry in manifest["files"]:
        entry["sha256"] = file_hash(folder / entry["name"])
    path.write_text(json.dumps(sealed(manifest)))


def loaded(mesh, folder):
    def load(comm):
        held = held_by(mesh, comm.rank)
        manifest, tensors, _ = read_checkpoint(folder, comm.rank, {name: one.shard_spec for name, one in held.items()})
        return verify_hashes(folder, manifest, {name: LocalTensor(tensors[name], held[name]) for name in held}, comm)

    return on_ranks(mesh.world_size, load)


def test_load_finds_by_tensor_hash_a_bit_the_file_hash_misses(shard):
    mesh, folder = shard
    path = folder / file_name(1)
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    resealed(folder, lambda manifest: None)
    found = {error.found.split(" was")[0] for error in loaded(mesh, folder)}
    assert len(found) == 1, "all ranks say the same"
    assert found <= {name.removeprefix("model/") for name in TENSORS}


def test_exchanged_parts_are_found_by_the_tensors_hash(shard):
    mesh, folder = shard

    def exchange(manifest):
        parts = manifest["tensors"]["model/fused.weight"]["parts"]
        parts[0]["file"], parts[1]["file"] = parts[1]["file"], parts[0]["file"]

    resealed(folder, exchange)
    assert all("fused.weight was loaded with the hash" in error.found for error in loaded(mesh, folder))


def test_a_part_that_is_not_in_its_file_is_refused(shard):
    _, folder = shard
    resealed(folder, lambda manifest: manifest["tensors"]["model/mask"]["parts"][0].update(key="model/masque"))
    with pytest.raises(
        CheckpointError, match=r"rank-00000.safetensors should hold tensors\n  found: it lacks model/masque"
    ):
        read_checkpoint(folder, 0, {"model/mask": None})
    resealed(folder, lambda manifest: manifest["tensors"]["model/mask"]["parts"][0].update(key="model/large"))
    with pytest.raises(CheckpointError, match=r"should hold tensors\n  found: it lacks|\n  found: its model/large is"):
        read_checkpoint(folder, 0, {"model/mask": None})


def test_load_reports_unused_tensors_and_rank_errors_everywhere(shard):
    mesh, folder = shard
    manifest = read_manifest(folder)

    def load(comm, leave_out, failure):
        held = held_by(mesh, comm.rank)
        wanted = {name: one.shard_spec for name, one in held.items() if name != leave_out}
        _, tensors, _ = read_checkpoint(folder, comm.rank, wanted)
        mine = failure if comm.rank == 2 else None
        verify_hashes(folder, manifest, {n: LocalTensor(tensors[n], held[n]) for n in wanted}, comm, mine)

    errors = on_ranks(4, lambda comm: load(comm, "model/mask", None))
    assert all("its mask of shape (5,) is not in the model" in error.found for error in errors)
    failure = CheckpointError("asked", "found", "fix")
    errors = on_ranks(4, lambda comm: load(comm, None, failure))
    assert errors[2] is failure
    assert all("another rank could not load" in errors[rank].found for rank in (0, 1, 3))


def test_a_torn_file_is_told_by_all_ranks_whoever_read_it(shard):
    _, folder = shard
    manifest = read_manifest(folder)
    path = folder / file_name(1)
    path.write_bytes(path.read_bytes()[:-1])
    errors = on_ranks(4, lambda comm: check_files_together(folder, manifest, comm))
    assert all("rank-00001.safetensors" in error.found for error in errors)
