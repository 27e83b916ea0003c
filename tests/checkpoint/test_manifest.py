"""A manifest that is damaged or made up is one clear error, whatever is wrong with it."""

from __future__ import annotations

import copy
import json
import math
import time
import tracemalloc

import pytest

from paceline.checkpoint.manifest import FORMAT, VERSION, file_name, read_manifest, sealed
from paceline.checkpoint.save import _publish
from paceline.nouns.errors import CheckpointError

GOOD = {
    "format": FORMAT,
    "version": VERSION,
    "step": 5,
    "position": 40,
    "seed": 0,
    "samples": 24,
    "world_size": 2,
    "files": [{"name": file_name(rank), "bytes": 100, "sha256": "0" * 64} for rank in range(2)],
    "tensors": {
        "model/weight": {
            "shape": [2, 3],
            "dtype": "float32",
            "hash": "0" * 32,
            "parts": [
                {
                    "file": file_name(rank),
                    "key": "model/weight",
                    "placement": {"shape": [2, 3], "cuts": [[0, [2], rank, 2]]},
                }
                for rank in range(2)
            ],
        }
    },
    "optimizer": {"class": "SGD", "groups": [{"parameters": ["weight"], "lr": 0.1}], "numbers": {}},
    "scheduler": None,
}


def write(folder, content):
    (folder / "manifest.json").write_text(content if isinstance(content, str) else json.dumps(content))
    return folder


def test_a_good_one_is_read_back(tmp_path):
    manifest = read_manifest(write(tmp_path, sealed(GOOD)))
    assert {key: manifest[key] for key in GOOD} == GOOD


def test_one_changed_number_is_noticed(tmp_path):
    changed = {**sealed(GOOD), "position": 48}
    with pytest.raises(CheckpointError, match=r"manifest.json was altered"):
        read_manifest(write(tmp_path, changed))


def whole(shape, file=0):
    """A float32 tensor that one file holds."""
    part = {"file": file_name(file), "key": "x", "placement": {"shape": shape, "cuts": []}}
    return {"shape": shape, "dtype": "float32", "hash": "0" * 32, "parts": [part]}


def combed(blocks):
    """A tensor in two parts, one element of every two along both dims: a piece for each element."""
    shape = [2 * blocks, 2 * blocks]
    cuts = [[0, [2] * blocks, 0, 2], [1, [2] * blocks, 0, 2]]
    parts = [{"file": file_name(rank), "key": "x", "placement": {"shape": shape, "cuts": cuts}} for rank in range(2)]
    return {"shape": shape, "dtype": "bool", "hash": "0" * 32, "parts": parts}


PART = ["tensors", "model/weight", "parts", 0]
# The way to a value, and what somebody who also made the hash fit put there; None takes the key out.
MADE_UP = {
    "a step of text": (["step"], "5"),
    "a step below zero": (["step"], -1),
    "a step of yes": (["step"], True),
    "a position of a list": (["position"], [40]),
    "a seed of text": (["seed"], "0"),
    "no ranks": (["world_size"], 0),
    "more ranks than files": (["world_size"], 3),
    "no step": (["step"], None),
    "no files": (["files"], None),
    "files as an object": (["files"], {"name": "x"}),
    "files as a number": (["files"], 7),
    "a file as text": (["files", 0], "rank-00000.safetensors"),
    "a file without a name": (["files", 0, "name"], None),
    "a file without a size": (["files", 0, "bytes"], None),
    "a file without a hash": (["files", 1, "sha256"], None),
    "a name that is a list": (["files", 0, "name"], ["rank-00000.safetensors"]),
    "a name outside the folder": (["files", 0, "name"], "../rank-00000.safetensors"),
    "a size of text": (["files", 0, "bytes"], "100"),
    "a size with a fraction": (["files", 0, "bytes"], 100.5),
    "a hash of a number": (["files", 0, "sha256"], 0),
    "a hash too short": (["files", 0, "sha256"], "00"),
    "one key too many in a file": (["files", 0, "offset"], 3),
    "tensors as a list": (["tensors"], ["model/weight"]),
    "a tensor as a number": (["tensors", "model/weight"], 3),
    "a shape of text": (["tensors", "model/weight", "shape"], "2x3"),
    "a dtype of a number": (["tensors", "model/weight", "dtype"], 32),
    "a dtype that is none": (["tensors", "model/weight", "dtype"], "float33"),
    "a tensor's hash of a number": (["tensors", "model/weight", "hash"], 7),
    "a tensor's hash too long": (["tensors", "model/weight", "hash"], "0" * 33),
    "a tensor without parts": (["tensors", "model/weight", "parts"], []),
    "parts as an object": (["tensors", "model/weight", "parts"], {"file": "x"}),
    "a part in another folder": ([*PART, "file"], "../rank-00000.safetensors"),
    "a part without a key": ([*PART, "key"], None),
    "a part without a placement": ([*PART, "placement"], None),
    "a part of another tensor": ([*PART, "placement", "shape"], [3, 2]),
    "a part twice": ([*PART, "placement", "cuts"], [[0, [2], 1, 2]]),
    "a part that overlaps": ([*PART, "placement", "cuts"], [[1, [3], 0, 2]]),
    "a part that is all": ([*PART, "placement", "cuts"], []),
    "cuts as an object": ([*PART, "placement", "cuts"], {"dim": 0}),
    "a cut too short": ([*PART, "placement", "cuts"], [[0, [2], 0]]),
    "a cut of text": ([*PART, "placement", "cuts"], ["0202"]),
    "a cut along no dim": ([*PART, "placement", "cuts"], [[2, [2], 0, 2]]),
    "a cut below flat": ([*PART, "placement", "cuts"], [[-2, [2], 0, 2]]),
    "a cut of other blocks": ([*PART, "placement", "cuts"], [[0, [3], 0, 2]]),
    "a cut's part too many": ([*PART, "placement", "cuts"], [[0, [2], 2, 2]]),
    "a cut in no parts": ([*PART, "placement", "cuts"], [[0, [2], 0, 0]]),
    "a cut of a fraction": ([*PART, "placement", "cuts"], [[0, [2], 0.0, 2]]),
    "a config of text": (["config"], "{}"),
    "an optimizer of text": (["optimizer"], "SGD"),
    "an optimizer without a class": (["optimizer", "class"], None),
    "an optimizer's groups as text": (["optimizer", "groups"], "all"),
    "a group without parameters": (["optimizer", "groups", 0, "parameters"], None),
    "a group's parameter as a list": (["optimizer", "groups", 0, "parameters"], [["weight"]]),
    "numbers as a list": (["optimizer", "numbers"], []),
    "a scheduler of text": (["scheduler"], "StepLR"),
    "a version of text": (["version"], str(VERSION)),
    "a billion ranks": (["world_size"], 10**9),
    "a step that no job reaches": (["step"], 10**30),
    "a position of 40 digits": (["position"], 10**40),
    "samples of 40 digits": (["samples"], 10**40),
    "a seed of 100 digits": (["seed"], 10**100),
    "a size of 30 digits": (["files", 0, "bytes"], 10**30),
    "a shape that no file holds": (["tensors", "model/weight"], whole([10**15])),
    "a shape beyond 64 bits": (["tensors", "model/weight"], whole([10**15] * 3)),
    "an empty shape beyond 64 bits": (["tensors", "model/weight"], whole([0, 10**18, 10**18])),
    "a thousand dims": (["tensors", "model/weight"], whole([1] * 1000)),
    "one tensor's bytes twice": (["tensors", "model/twice"], whole([23])),
    "parts in more pieces than elements matter": (["tensors", "model/comb"], combed(2**10)),
    "a name that a file keeps for itself": (["tensors", "model/__metadata__"], whole([1])),
    "a name that is no text": (["tensors", "model/\udcff"], whole([1])),
    "a model's tensor without a name": (["tensors", "model/"], whole([1])),
    "a mesh of a number": (["mesh"], 2),
    "a batch of text": (["batch_size"], "8"),
    "a learning rate of text": (["optimizer", "groups", 0, "lr"], "x"),
    "a learning rate that is none": (["optimizer", "groups", 0, "lr"], math.nan),
    "a learning rate of 400 digits": (["optimizer", "groups", 0, "lr"], 10**299),
    "a count of steps of text": (["optimizer", "numbers"], {"optimizer/step/weight": "x"}),
    "a number of nothing": (["optimizer", "numbers"], {"weight": 3}),
}


@pytest.mark.parametrize("case", MADE_UP)
def test_one_that_was_made_up_is_refused(case, tmp_path):
    way, value = MADE_UP[case]
    manifest = copy.deepcopy(GOOD)
    place = manifest
    for key in way[:-1]:
        place = place[key]
    place[way[-1]] = value
    if value is None:
        del place[way[-1]]
    folder = write(tmp_path, sealed(manifest))
    tracemalloc.start()
    began_s = time.process_time()
    with pytest.raises(CheckpointError) as caught:
        read_manifest(folder)
    took_s, (_, most_bytes) = time.process_time() - began_s, tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(caught.value.found) < 300
    assert took_s < 5
    assert most_bytes < 2**24


@pytest.mark.parametrize("content", ["", "null", "[]", "7", "[" * 100_000, '{"format"', '"\\ud800"'])
def test_one_that_is_no_object_is_refused(content, tmp_path):
    with pytest.raises(CheckpointError):
        read_manifest(write(tmp_path, content))


SETTINGS = {
    "a rate that is no number": {"optimizer": {**GOOD["optimizer"], "groups": [{"parameters": [], "lr": math.nan}]}},
    "a setting of 30 digits": {"optimizer": {**GOOD["optimizer"], "groups": [{"parameters": [], "window": 10**30}]}},
    "a schedule of 30 digits": {"scheduler": {"T_max": 10**30}},
}


@pytest.mark.parametrize("case", SETTINGS)
def test_what_could_not_be_read_back_is_not_written(case, tmp_path):
    partial, folder = tmp_path / ".partial-step-00000005", tmp_path / "step-00000005"
    partial.mkdir()
    with pytest.raises(CheckpointError, match="should be one that can be read back"):
        _publish(partial, folder, {**GOOD, **SETTINGS[case]})
    assert not folder.exists()
    _publish(partial, folder, GOOD)
    assert read_manifest(folder)["step"] == 5
