"""The state of a person's own in a job's checkpoints: `job.keep(name, object)`.

It lies among what each rank has alone (`own/kept/NAME...`): what is equal on all ranks in the file of rank 0, and what
differs in the file of each. A resumed job reads it when it starts, and an object gets it when the loop hands it to
`keep`, which may be much later.
"""

from __future__ import annotations

import collections
import hashlib
import json
import random
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from paceline.checkpoint.load import read_own
from paceline.checkpoint.reshard import LocalTensor
from paceline.comm.collectives import AxisComm
from paceline.nouns.errors import CheckpointError, ReadError, UsageError, WorkloadError
from paceline.nouns.parts import shown
from paceline.nouns.reading import parse_json
from paceline.nouns.shard_spec import LocalShard
from paceline.train.average import Average
from paceline.train.extra_state import EXTRA_STATE, ExtraState, extra_names
from paceline.train.kept_values import decode, encode

PREFIX = "kept/"
SETTINGS = "job.settings"  # the name of what `job.keep_settings` keeps
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,100}")


@dataclass(frozen=True, slots=True)
class _Handle:
    """How to read and write the state of one kind of object."""

    read: Callable[[Any], Any]
    write: Callable[[Any, Any], None]


def _write_list(target: Any, state: Any) -> None:
    target[:] = state


def _write_dict(target: Any, state: Any) -> None:
    target.clear()
    target.update(state)


def _write_deque(target: Any, state: Any) -> None:
    target.clear()
    target.extend(state)


def _write_tensor(target: Any, state: Any) -> None:
    if not isinstance(state, torch.Tensor) or state.shape != target.shape:
        found = tuple(getattr(state, "shape", ()))
        raise ValueError(f"it is a tensor of shape {found}, not {tuple(target.shape)}")
    with torch.no_grad():
        target.copy_(state)


def _write_array(target: Any, state: Any) -> None:
    if getattr(state, "shape", None) != target.shape:
        raise ValueError(f"an array of shape {getattr(state, 'shape', ())} is not of shape {target.shape}")
    target[...] = state


def _write_generator(target: Any, state: Any) -> None:
    target.set_state(state)


def _write_random(target: Any, state: Any) -> None:
    target.setstate(state)


def _write_numpy_generator(target: Any, state: Any) -> None:
    target.bit_generator.state = state


_HANDLES: tuple[tuple[type, _Handle], ...] = (
    (dict, _Handle(dict, _write_dict)),
    (list, _Handle(list, _write_list)),
    (collections.deque, _Handle(lambda target: target, _write_deque)),
    (torch.Tensor, _Handle(lambda target: target, _write_tensor)),
    (torch.Generator, _Handle(lambda target: target.get_state(), _write_generator)),
    (random.Random, _Handle(lambda target: target.getstate(), _write_random)),
)


def _handle_of(name: str, target: Any) -> _Handle:
    if callable(getattr(target, "state_dict", None)) and callable(getattr(target, "load_state_dict", None)):
        return _Handle(lambda target: target.state_dict(), lambda target, state: target.load_state_dict(state))
    for kind, handle in _HANDLES:
        if isinstance(target, kind):
            return handle
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None and isinstance(target, numpy.ndarray):
        return _Handle(lambda target: target, _write_array)
    if numpy is not None and isinstance(target, numpy.random.Generator):
        return _Handle(lambda target: target.bit_generator.state, _write_numpy_generator)
    raise WorkloadError(
        f"job.keep({name!r}, ...) needs an object whose state can be read and put back",
        f"it is {shown(target)}",
        "give it state_dict() and load_state_dict(state), or keep a dict or a list and change what is in it",
    )


def _check_name(call: str, name: Any) -> None:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        fix = "use up to 100 letters, digits, dots, - and _"
        raise UsageError(f"{call} needs a name for what checkpoints have", f"it is {name!r:.60}", fix)


@dataclass(frozen=True, slots=True)
class _Kept:
    target: Any
    handle: _Handle
    per_rank: bool
    is_told: bool = False  # where ranks differ it is said, and rank 0's is saved; otherwise refused


class KeptObjects:
    """What the loop has handed to `job.keep`, and what a checkpoint has for it.

    Args:
        comm: all ranks that write a checkpoint together.
        notice: prints a line.
    """

    def __init__(self, comm: AxisComm, notice: Callable[[str], None]) -> None:
        self.comm = comm
        self.notice = notice
        self.kept: dict[str, _Kept] = {}
        self.averages: dict[str, Average] = {}
        self.waiting_averages: dict[str, Mapping[str, torch.Tensor]] = {}
        self.waiting: dict[str, Any] = {}  # of the checkpoint that was loaded: states that no object has got yet
        self.saved: dict[str, bool] = {}  # what that checkpoint has, and whether each rank has its own
        self.saved_size = 0  # ranks that wrote it; 0: none was loaded
        self.folder = Path()
        self.told: set[str] = set()  # names of what differs between ranks

    def add(self, name: Any, target: Any, per_rank: bool) -> None:
        """Keep an object from now on, and give it its state of the checkpoint that the job began with.

        Raises:
            UsageError: the name is not one, or taken.
            WorkloadError: the object's state can't be kept.
            CheckpointError: the state in the checkpoint does not fit the object.
        """
        _check_name("job.keep", name)
        if name in self.kept:
            found = f"{name!r} is that of {shown(self.kept[name].target)}"
            raise UsageError("each object that the job keeps needs a name of its own", found, "take another name")
        handle = _handle_of(name, target)
        encode(name, handle.read(target), [])  # what can't be kept is refused now, not at the first checkpoint
        kept = _Kept(target, handle, per_rank)
        if self.saved_size:
            self._restore(name, kept)
        self.kept[name] = kept

    def add_extra_state(self, model: torch.nn.Module, is_checked: bool) -> None:
        """Keep what the model's modules have beside tensors, unless no module has any.

        Args:
            model: whose.
            is_checked: whether checkpoints will be written, so that what can't be kept is refused now.

        Raises:
            WorkloadError: it can't be kept.
        """
        if not extra_names(model):
            return
        target = ExtraState(model)
        kept = _Kept(target, _handle_of(EXTRA_STATE, target), per_rank=False, is_told=True)
        if is_checked:
            encode(_what(EXTRA_STATE), kept.handle.read(target), [])
        self.kept[EXTRA_STATE] = kept

    def _restore(self, name: str, kept: _Kept) -> None:
        if name not in self.saved:
            if name == EXTRA_STATE:  # up to version 4 tensors alone
                return
            self.notice(f"{self.folder.name} has nothing of {name!r}, which job.keep was handed: it stays as it is")
            return
        if self.saved[name] != kept.per_rank:
            ways = ("the same on all ranks", "per rank")
            raise CheckpointError(
                f"{name!r} should be kept as {self.folder.name} has it",
                f"it is {ways[self.saved[name]]} there and {ways[kept.per_rank]} here",
                f"write job.keep({name!r}, ..., per_rank={self.saved[name]}), or take another name to begin anew",
            )
        if kept.per_rank and self.saved_size != self.comm.size:
            raise CheckpointError(
                f"{name!r} is kept per rank, so it should go on on as many ranks",
                f"{self.saved_size} ranks wrote {self.folder.name}, and {self.comm.size} read it",
                f"resume on {self.saved_size} ranks, or keep it under another name to begin anew",
            )
        state = self.waiting.pop(name)
        try:
            kept.handle.write(kept.target, state)
        except Exception as error:  # of a person's own load_state_dict: anything
            raise CheckpointError(
                f"the state of {name!r} in {self.folder} should fit the object",
                f"{type(error).__name__}: {error}",
                "make the object as it was when the checkpoint was saved, or keep it under another name",
            ) from error

    def state(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """Return this rank's tensors of all objects by name, and what the manifest says of them. Collective.

        Raises:
            WorkloadError: a state can't be kept, or differs between ranks and is not kept per rank.
        """
        lost = [*self.waiting, *self.waiting_averages]
        if lost:
            names = ", ".join(map(repr, lost))
            self.notice(f"{self.folder.name} has {names}, which the file keeps no more: the next checkpoint is without")
            for name in self.waiting:
                del self.saved[name]
            self.waiting.clear()
            self.waiting_averages.clear()
        tensors: dict[str, torch.Tensor] = {}
        prints = []
        for name, kept in sorted(self.kept.items()):
            of_state: list[torch.Tensor] = []
            form = encode(_what(name), kept.handle.read(kept.target), of_state)
            text = json.dumps(form).encode()
            if not kept.per_rank:
                prints.append(_print_of(text, of_state))
            if kept.per_rank or self.comm.rank == 0:
                tensors[f"{PREFIX}{name}"] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
                for number, tensor in enumerate(of_state):
                    tensors[f"{PREFIX}{name}/{number}"] = tensor
        self._check_equal(prints)
        facts: dict[str, Any] = {}
        if self.kept:
            facts["kept"] = {name: kept.per_rank for name, kept in self.kept.items()}
        return tensors, facts

    def _check_equal(self, prints: list[int]) -> None:
        """Raise WorkloadError if what is to be the same on all ranks is not. Collective."""
        if not self.kept or self.comm.size == 1:
            return
        row = torch.tensor([len(self.kept), len(prints), *prints], dtype=torch.int64)
        rows = self.comm.all_gather(row)
        names = sorted(name for name, kept in self.kept.items() if not kept.per_rank)
        for rank, other in zip(self.comm.peers, rows, strict=True):
            if other.tolist()[:2] != row.tolist()[:2]:
                raise WorkloadError(
                    "every rank should keep the same objects",
                    f"rank {self.comm.peers[self.comm.rank]} keeps {len(self.kept)}, rank {rank} keeps {int(other[0])}",
                    "call job.keep on every rank, not under `if job.rank == 0`",
                )
            for name, here, there in zip(names, prints, other.tolist()[2:], strict=True):
                if here != there and self.kept[name].is_told:
                    self._tell_difference(name, rank)
                elif here != there:
                    raise WorkloadError(
                        f"{name!r}, which job.keep was handed, should be the same on every rank",
                        f"it differs between rank {self.comm.peers[self.comm.rank]} and rank {rank}",
                        f"write job.keep({name!r}, ..., per_rank=True), or change it by numbers that all ranks have, "
                        "such as those of job.evaluate and paceline.all_reduce",
                    )

    def _tell_difference(self, name: str, rank: int) -> None:
        if name not in self.told:
            self.told.add(name)
            first, second = sorted((rank, self.comm.peers[self.comm.rank]))
            self.notice(f"{_what(name)} differs between ranks {first} and {second}: checkpoints have rank 0's")

    def add_average(self, name: str, average: Average) -> None:
        """Save an average of the parameters from now on, and give it its state of the checkpoint, if there is one.

        Raises:
            UsageError: the name is none, or taken.
        """
        _check_name("job.ema", name)
        if name in self.averages:
            found = f"there is one of the name {name!r}"
            raise UsageError("each average needs a name of its own", found, 'write job.ema(decay, name="other")')
        if self.saved_size:
            self._restore_average(name, average)
        self.averages[name] = average

    def _restore_average(self, name: str, average: Average) -> None:
        missing = average.restore(self.waiting_averages.pop(name, {}))
        if missing and len(missing) == len(average.values):
            self.notice(f"{self.folder.name} has no average {name!r}: it begins with the weights of this step")
        elif missing:
            some = f"{len(missing)} parameters, such as {missing[0]}"
            self.notice(f"{self.folder.name} has the average {name!r} without {some}: they begin with this step")

    def average_parts(self, held: Mapping[str, LocalShard]) -> dict[str, LocalTensor]:
        """Return what a checkpoint saves of the averages.

        Args:
            held: which part of a parameter is here.
        """
        parts: dict[str, LocalTensor] = {}
        for name, average in self.averages.items():
            parts.update(average.parts(name, held, self.comm.size))
        return parts

    def load(
        self, folder: Path, manifest: Mapping[str, Any], averages: Mapping[str, Mapping[str, torch.Tensor]]
    ) -> None:
        """Take over what a checkpoint has, and put it back in the objects that are kept.

        Args:
            folder: the checkpoint.
            manifest: its manifest.
            averages: this rank's parts of the averages of the parameters, as they were read.

        Raises:
            CheckpointError: it is damaged, or does not fit an object.
        """
        self.folder = folder
        self.saved_size = manifest["world_size"]
        self.saved = dict(manifest.get("kept", {}))
        self.waiting = {}
        if self.saved:
            files = {False: read_own(folder, manifest, 0), True: {}}
            if any(self.saved.values()):
                files[True] = read_own(folder, manifest, self.comm.rank)
            for name, per_rank in self.saved.items():
                # A rank that was not there then has no state of its own: it is told when it asks for it.
                is_there = not per_rank or self.comm.rank < self.saved_size
                self.waiting[name] = _read(folder, name, files[per_rank]) if is_there else None
        for name, kept in self.kept.items():
            self._restore(name, kept)
        self.waiting_averages = dict(averages)
        for name, average in self.averages.items():
            self._restore_average(name, average)


def _what(name: str) -> str:
    return "what get_extra_state() of the model's modules returns" if name == EXTRA_STATE else name


def _print_of(text: bytes, tensors: list[torch.Tensor]) -> int:
    digest = hashlib.sha256(text)
    for tensor in tensors:
        plain = tensor.to("cpu").contiguous().reshape(-1)
        digest.update(repr((tuple(tensor.shape), str(tensor.dtype))).encode())
        digest.update(plain.view(torch.uint8).numpy().tobytes())
    return int.from_bytes(digest.digest()[:8], "little", signed=True)


def _read(folder: Path, name: str, own: Mapping[str, torch.Tensor]) -> Any:
    try:
        text = own[PREFIX + name].numpy().tobytes().decode()
        begin = f"{PREFIX}{name}/"
        tensors = {int(key.removeprefix(begin)): own[key] for key in own if key.startswith(begin)}
        return decode(parse_json(text, "a kept state"), tensors)
    except (ReadError, ValueError, TypeError, LookupError, RecursionError, AttributeError) as error:
        raise CheckpointError(
            f"the state of {name!r} in {folder} should be whole",
            f"it can't be read: {type(error).__name__}: {error}",
            "use an earlier checkpoint",
        ) from None
