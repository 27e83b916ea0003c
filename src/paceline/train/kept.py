"""The state of a user's own in a job's checkpoints: `job.keep(name, object)`.

It is stored among the tensors that only one rank has (`own/kept/NAME...`): what is equal on all ranks in the file of
rank 0, and what differs in the file of each. A resumed job reads it when it starts, and an object gets it when the loop
hands it to `keep`, which may be much later.
"""

from __future__ import annotations

import collections
import hashlib
import json
import math
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
from paceline.train.python_state import EXTRA_STATE, ExtraState, decode, encode, extra_names
from paceline.train.schedulers import same_number

PREFIX = "kept/"
SETTINGS = "job.settings"  # the name of what `job.keep_settings` keeps
BEST = "_best"  # the name of what `job.save_best` keeps
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


def _handle_of(name: str, target: object) -> _Handle:
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


def _check_name(call: str, name: object) -> None:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        fix = "use up to 100 letters, digits, dots, - and _"
        raise UsageError(f"{call} needs a name for what checkpoints have", f"it is {name!r:.60}", fix)


@dataclass(frozen=True, slots=True)
class _KeptObject:
    target: Any
    handle: _Handle
    per_rank: bool
    is_reported: bool = False  # a difference between ranks is reported, and rank 0's state saved; otherwise refused


class Best:
    """The best metric so far of each folder: `job.save_best`.

    Attributes:
        states: the metric, its mode and its step, by the folder: JSON keeps it.
    """

    def __init__(self) -> None:
        self.states: dict[str, list[Any]] = {}

    def is_better(self, metric: Any, mode: str, path: str, comm: AxisComm) -> bool:
        """True if the metric is better than all before it. Collective.

        Raises:
            UsageError: it is no number, or another on some rank; or `mode` is neither, or another than before.
        """
        if mode not in ("min", "max"):
            raise UsageError(
                "the mode of job.save_best should be 'min' or 'max'", f"it is {mode!r:.60}", "write one of them"
            )
        number = same_number("job.save_best", metric, comm, may_be_nan=True)
        if path not in self.states:
            return not math.isnan(number)
        best, earlier, _ = self.states[path]
        if mode != earlier:
            raise UsageError(
                f"job.save_best should have one mode for {path}",
                f"it is {mode!r} now, and was {earlier!r} before",
                "give the other metric a folder of its own: path=...",
            )
        return bool(number < best if mode == "min" else number > best)

    def record(self, metric: Any, mode: str, path: str, step: int) -> None:
        """Record the metric as the best so far."""
        self.states[path] = [float(metric), mode, step]


class KeptObjects:
    """What the loop has handed to `job.keep`, and what a checkpoint has for it.

    Args:
        comm: the communicator of the ranks that write a checkpoint together.
        notice: a function that prints a line.
    """

    def __init__(self, comm: AxisComm, notice: Callable[[str], None]) -> None:
        self.comm = comm
        self.notice = notice
        self.objects: dict[str, _KeptObject] = {}
        self.averages: dict[str, Average] = {}
        self.waiting_averages: dict[str, Mapping[str, torch.Tensor]] = {}
        self.waiting: dict[str, Any] = {}  # of the checkpoint that was loaded: states that no object has got yet
        self.saved: dict[str, bool] = {}  # what that checkpoint has, and whether each rank has its own
        self.saved_size = 0  # ranks that wrote it; 0: none was loaded
        self.folder = Path()
        self.reported: set[str] = set()  # names of what differs between ranks
        self._best: Best | None = None

    def best(self) -> Best:
        """Return the best metrics so far, which are kept from the first call on."""
        if self._best is None:
            self._best = Best()
            self.add(BEST, self._best.states, per_rank=False)
        return self._best

    def add(self, name: Any, target: Any, per_rank: bool) -> None:
        """Keep an object from now on, and give it its state of the checkpoint that the job began with.

        Raises:
            UsageError: the name is not one, or taken.
            WorkloadError: the object's state can't be kept.
            CheckpointError: the state in the checkpoint does not fit the object.
        """
        _check_name("job.keep", name)
        if name in self.objects:
            found = f"{name!r} is that of {shown(self.objects[name].target)}"
            raise UsageError("each object that the job keeps needs a name of its own", found, "take another name")
        handle = _handle_of(name, target)
        encode(name, handle.read(target), [])  # what can't be kept is refused now, not at the first checkpoint
        kept_object = _KeptObject(target, handle, per_rank)
        if self.saved_size:
            self._restore(name, kept_object)
        self.objects[name] = kept_object

    def add_extra_state(self, model: torch.nn.Module, is_checked: bool) -> None:
        """Keep what the model's modules have beside tensors, unless no module has any.

        Args:
            model: the model whose modules have it.
            is_checked: True if checkpoints will be written, so that what can't be kept is refused now.

        Raises:
            WorkloadError: it can't be kept.
        """
        if not extra_names(model):
            return
        target = ExtraState(model)
        kept_object = _KeptObject(target, _handle_of(EXTRA_STATE, target), per_rank=False, is_reported=True)
        if is_checked:
            encode(_description_of(EXTRA_STATE), kept_object.handle.read(target), [])
        self.objects[EXTRA_STATE] = kept_object

    def _restore(self, name: str, kept_object: _KeptObject) -> None:
        if name not in self.saved:
            if name == EXTRA_STATE:  # up to version 4 only tensors
                return
            self.notice(f"{self.folder.name} has nothing of {name!r}, which job.keep was handed: it stays as it is")
            return
        if self.saved[name] != kept_object.per_rank:
            ways = ("the same on all ranks", "per rank")
            raise CheckpointError(
                f"{name!r} should be kept as {self.folder.name} has it",
                f"it is {ways[self.saved[name]]} there and {ways[kept_object.per_rank]} here",
                f"write job.keep({name!r}, ..., per_rank={self.saved[name]}), or take another name to begin anew",
            )
        if kept_object.per_rank and self.saved_size != self.comm.size:
            raise CheckpointError(
                f"{name!r} is kept per rank, so it should go on on as many ranks",
                f"{self.saved_size} ranks wrote {self.folder.name}, and {self.comm.size} read it",
                f"resume on {self.saved_size} ranks, or keep it under another name to begin anew",
            )
        state = self.waiting.pop(name)
        try:
            kept_object.handle.write(kept_object.target, state)
        except Exception as error:  # of a user's own load_state_dict: anything
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
        for name, kept_object in sorted(self.objects.items()):
            of_state: list[torch.Tensor] = []
            form = encode(_description_of(name), kept_object.handle.read(kept_object.target), of_state)
            text = json.dumps(form).encode()
            if not kept_object.per_rank:
                prints.append(_print_of(text, of_state))
            if kept_object.per_rank or self.comm.rank == 0:
                tensors[f"{PREFIX}{name}"] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
                for number, tensor in enumerate(of_state):
                    tensors[f"{PREFIX}{name}/{number}"] = tensor
        self._check_equal(prints)
        facts: dict[str, Any] = {}
        if self.objects:
            facts["kept"] = {name: kept_object.per_rank for name, kept_object in self.objects.items()}
        return tensors, facts

    def _check_equal(self, prints: list[int]) -> None:
        """Raise WorkloadError if what is to be the same on all ranks is not. Collective."""
        if not self.objects or self.comm.size == 1:
            return
        row = torch.tensor([len(self.objects), len(prints), *prints], dtype=torch.int64)
        rows = self.comm.all_gather(row)
        names = sorted(name for name, kept_object in self.objects.items() if not kept_object.per_rank)
        for rank, row_of_rank in zip(self.comm.peers, rows, strict=True):
            if row_of_rank.tolist()[:2] != row.tolist()[:2]:
                raise WorkloadError(
                    "every rank should keep the same objects",
                    f"rank {self.comm.peers[self.comm.rank]} keeps {len(self.objects)}, rank {rank} keeps "
                    f"{int(row_of_rank[0])}",
                    "call job.keep on every rank, not under `if job.rank == 0`",
                )
            for name, own_print, other_print in zip(names, prints, row_of_rank.tolist()[2:], strict=True):
                if own_print != other_print and self.objects[name].is_reported:
                    self._report_difference(name, rank)
                elif own_print != other_print:
                    raise WorkloadError(
                        f"{name!r}, which job.keep was handed, should be the same on every rank",
                        f"it differs between rank {self.comm.peers[self.comm.rank]} and rank {rank}",
                        f"write job.keep({name!r}, ..., per_rank=True), or change it by numbers that all ranks have, "
                        "such as those of job.evaluate and paceline.all_reduce",
                    )

    def _report_difference(self, name: str, rank: int) -> None:
        if name not in self.reported:
            self.reported.add(name)
            first, second = sorted((rank, self.comm.peers[self.comm.rank]))
            self.notice(
                f"{_description_of(name)} differs between ranks {first} and {second}: checkpoints have rank 0's"
            )

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

    def average_parts(self, shards: Mapping[str, LocalShard]) -> dict[str, LocalTensor]:
        """Return this rank's parts of the averages, as a checkpoint saves them.

        Args:
            shards: the part of each parameter that this rank holds.
        """
        parts: dict[str, LocalTensor] = {}
        for name, average in self.averages.items():
            parts.update(average.parts(name, shards, self.comm.size))
        return parts

    def load(
        self, folder: Path, manifest: Mapping[str, Any], averages: Mapping[str, Mapping[str, torch.Tensor]]
    ) -> None:
        """Take over what a checkpoint has, and put it back in the objects that are kept.

        Args:
            folder: the folder of the checkpoint.
            manifest: the manifest of the checkpoint.
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
        for name, kept_object in self.objects.items():
            self._restore(name, kept_object)
        self.waiting_averages = dict(averages)
        for name, average in self.averages.items():
            self._restore_average(name, average)
        if BEST in self.saved:  # the next checkpoint has it too, though nothing may be better until then
            self.best()


def _description_of(name: str) -> str:
    return "what get_extra_state() of the model's modules returns" if name == EXTRA_STATE else name


def _print_of(text: bytes, tensors: list[torch.Tensor]) -> int:
    digest = hashlib.sha256(text)
    for tensor in tensors:
        plain = tensor.to("cpu").contiguous().reshape(-1)
        digest.update(repr((tuple(tensor.shape), str(tensor.dtype))).encode())
        digest.update(plain.view(torch.uint8).numpy().tobytes())
    return int.from_bytes(digest.digest()[:8], "little", signed=True)


def _read(folder: Path, name: str, tensors_of_rank: Mapping[str, torch.Tensor]) -> Any:
    try:
        text = tensors_of_rank[PREFIX + name].numpy().tobytes().decode()
        begin = f"{PREFIX}{name}/"
        tensors = {
            int(key.removeprefix(begin)): tensors_of_rank[key] for key in tensors_of_rank if key.startswith(begin)
        }
        return decode(parse_json(text, "a kept state"), tensors)
    except (ReadError, ValueError, TypeError, LookupError, RecursionError, AttributeError) as error:
        raise CheckpointError(
            f"the state of {name!r} in {folder} should be whole",
            f"it can't be read: {type(error).__name__}: {error}",
            "use an earlier checkpoint",
        ) from None
