"""The state of an elastic job: committed in memory, and on the disk where the job may be started again."""

from __future__ import annotations

import copy
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from paceline.horovod.common.exceptions import HostsUpdatedInterrupt
from paceline.horovod.torch.elastic.sampler import ElasticSampler
from paceline.horovod.torch.functions import (
    allgather_object,
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)
from paceline.horovod.torch.mpi_ops import rank
from paceline.nouns.reading import regular
from paceline.run.directory import COMMITTED
from paceline.run.plain_values import read_value, write_value
from paceline.train.event_log import Events

_ELASTIC = "HOROVOD_ELASTIC"  # set where the job may be started again
_REMOVED = 2  # Horovod's number for "hosts have gone": hosts that have come are 1, both are 3


class JobStopsInterrupt(HostsUpdatedInterrupt):
    """The ranks are asked to end: the job stops, or goes on with other hosts."""


class State:
    """The base of states.

    Args:
        bcast_object: the function that returns the object of rank 0.
        get_rank: the function that returns the rank.
    """

    def __init__(
        self, bcast_object: Callable[[Any], Any] = broadcast_object, get_rank: Callable[[], int] = rank
    ) -> None:
        self._bcast_object = bcast_object
        self._rank = get_rank
        self._updates: list[tuple[float, int]] = []
        self._updated_at = 0.0
        self._reset_callbacks: list[Callable[[], None]] = []
        self._is_stopping = threading.Event()

    @property
    def is_kept(self) -> bool:
        """Return True if commits are written to the run directory: the job may be started again."""
        return os.environ.get(_ELASTIC, "0") not in ("", "0") and "PACELINE_RUN_DIR" in os.environ

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], None]]) -> None:
        """Add functions that are called after the ranks have joined anew, before the state is synchronized."""
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Call `reset` and the callbacks."""
        self._updates.clear()
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def on_hosts_updated(self, timestamp: float, update_res: int) -> None:
        """Note that hosts have come (1), gone (2) or both (3)."""
        self._updates.append((timestamp, update_res))

    def ask_to_stop(self) -> None:
        """Note that this process was asked to end: the next commit, or look at hosts, ends all ranks."""
        self._is_stopping.set()

    def commit(self) -> None:
        """Save the state, and look whether hosts have changed. Collective.

        Where the job may be started again, rank 0 also writes the state to the run directory.

        Raises:
            HostsUpdatedInterrupt: hosts have changed.
            UsageError: the state can't be written: it is no plain data.
        """
        self.save()
        if self.is_kept:
            self.keep()
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Raise HostsUpdatedInterrupt on all ranks if rank 0 knows that hosts have changed. Collective."""
        newest = before = self._updated_at
        result = 0
        while self._updates:
            timestamp, update = self._updates.pop(0)
            if timestamp > newest:
                newest = timestamp
                result |= update
        before, self._updated_at, result = self._bcast_object((before, newest, result))
        if self.is_kept and any(allgather_object(self._is_stopping.is_set())):  # any rank's: each gets its own signal
            raise JobStopsInterrupt
        if self._updated_at > before:
            raise HostsUpdatedInterrupt(result == _REMOVED)

    def save(self) -> None:
        """Save the state in memory."""
        raise NotImplementedError

    def restore(self) -> None:
        """Take the state that was saved last."""
        raise NotImplementedError

    def sync(self) -> None:
        """Take the state of rank 0. Collective."""
        raise NotImplementedError

    def reset(self) -> None:
        """Change what depends on the number of ranks."""

    def keep(self) -> None:
        """Write the saved state to the run directory. Collective."""
        raise NotImplementedError

    def write_stopped(self) -> None:
        """Tell the supervisor that the state of all ranks is on the disk, and that they end."""
        if self._rank() == 0:
            Events(Path(os.environ["PACELINE_RUN_DIR"])).write({"event": "stopped"})
        self._bcast_object(None)  # no rank ends before that is written


class ObjectState(State):
    """A state of plain attributes.

    Args:
        bcast_object: the function that returns the object of rank 0.
        get_rank: the function that returns the rank.
        kwargs: the attributes and their first values: plain data, as `broadcast_object` takes it.
    """

    def __init__(
        self,
        bcast_object: Callable[[Any], Any] = broadcast_object,
        get_rank: Callable[[], int] = rank,
        **kwargs: Any,
    ) -> None:
        super().__init__(bcast_object, get_rank)
        self._saved_state = kwargs
        self._is_first_sync = True
        self._set_attributes()

    def _set_attributes(self) -> None:
        for name, value in self._saved_state.items():
            setattr(self, name, value)

    def save(self) -> None:
        """Save the attributes in memory."""
        self._saved_state = {name: getattr(self, name) for name in self._saved_state}

    def restore(self) -> None:
        """Take the attributes that were saved last."""
        self._set_attributes()

    def sync(self) -> None:
        """Take rank 0's saved attributes; the first time those of the commit that an earlier start has written."""
        if self._is_first_sync and self.is_kept and self._rank() == 0 and self._path.exists():
            self._load(read_value(self._path))
        self._is_first_sync = False
        if self._saved_state:
            self._saved_state = self._bcast_object(self._saved_state)
            self._set_attributes()

    def keep(self) -> None:
        """Write the saved state to the run directory, by a rename: a reader finds the old or the new one, whole."""
        content = self._content()
        if self._rank() == 0:
            self._path.parent.mkdir(exist_ok=True)
            unfinished = self._path.with_suffix(".unfinished")
            write_value(unfinished, content, "the elastic state")
            with open(unfinished, "rb", opener=regular) as file:
                os.fsync(file.fileno())
            unfinished.replace(self._path)

    @property
    def _path(self) -> Path:
        return Path(os.environ["PACELINE_RUN_DIR"], COMMITTED)

    def _content(self) -> dict[str, Any]:
        return {"attributes": self._saved_state}

    def _load(self, content: dict[str, Any]) -> None:
        self._saved_state |= content["attributes"]


class StateHandler:
    """How a kind of object is saved, restored and synchronized in a TorchState.

    Args:
        value: the object whose state is handled.
    """

    def __init__(self, value: Any) -> None:
        self.value = value

    def save(self) -> None:
        """Save the object's state in memory."""
        raise NotImplementedError

    def restore(self) -> None:
        """Give the object the state that was saved last."""
        raise NotImplementedError

    def sync(self) -> None:
        """Give the object the state of rank 0. Collective."""
        raise NotImplementedError

    def set_value(self, value: Any) -> None:
        """Take another object in its place."""
        self.value = value
        self.save()

    def committed_state(self) -> Any:
        """Return the saved state of all ranks as plain data, which is written to the disk. Collective."""
        raise NotImplementedError(
            f"{type(self).__name__} needs a method `committed_state`, so that commits can be written"
        )

    def load(self, state: Any) -> None:
        """Give the object a state that `committed_state` returned."""
        raise NotImplementedError(f"{type(self).__name__} needs a method `load`, so that commits can be read")


class _StateDictHandler(StateHandler):
    """Objects with `state_dict` and `load_state_dict`."""

    def __init__(self, value: Any) -> None:
        super().__init__(value)
        self.save()

    def save(self) -> None:
        self.saved = copy.deepcopy(self.value.state_dict())

    def restore(self) -> None:
        self.value.load_state_dict(copy.deepcopy(self.saved))

    def committed_state(self) -> Any:
        return self.saved

    def load(self, state: Any) -> None:
        self.saved = state
        self.restore()


class ModelStateHandler(_StateDictHandler):
    """A model."""

    def sync(self) -> None:
        """Give the model the parameters and buffers of rank 0."""
        broadcast_parameters(self.value.state_dict(), root_rank=0)
        self.save()


class OptimizerStateHandler(_StateDictHandler):
    """An optimizer."""

    def sync(self) -> None:
        """Give the optimizer the state and the options of rank 0."""
        broadcast_optimizer_state(self.value, root_rank=0)
        self.save()


class SamplerStateHandler(_StateDictHandler):
    """An ElasticSampler: each rank has processed samples of its own."""

    def sync(self) -> None:
        """Let all ranks' samplers know what any of them has processed."""
        state = {**self.value.state_dict(), "processed_indices": _union(self.value.state_dict())}
        self.value.load_state_dict(broadcast_object(state))
        self.save()

    def committed_state(self) -> Any:
        """Return the saved state, with what any rank has processed."""
        return {**self.saved, "processed_indices": _union(self.saved)}


def _union(state: dict[str, Any]) -> list[int]:
    processed: set[int] = set()
    for indices in allgather_object(sorted(state["processed_indices"])):
        processed.update(indices)
    return sorted(processed)


_Registry = Sequence[tuple[type, Callable[[Any], StateHandler]]]
_registry: list[tuple[type, Callable[[Any], StateHandler]]] = [
    (torch.nn.Module, ModelStateHandler),
    (torch.optim.Optimizer, OptimizerStateHandler),
    (ElasticSampler, SamplerStateHandler),
]


def get_handler_registry() -> list[tuple[type, Callable[[Any], StateHandler]]]:
    """Return the pairs of a type and the class of its handlers, of which the first that fits is taken."""
    return list(_registry)


def set_handler_registry(registry: _Registry) -> None:
    """Replace the pairs of a type and the class of its handlers."""
    _registry[:] = registry


class TorchState(ObjectState):
    """The state of a training: models, optimizers and samplers by their handlers, other attributes as plain data.

    Args:
        model: the model, if any.
        optimizer: the optimizer, if any.
        kwargs: further models, optimizers, samplers and plain attributes, by name.

    Examples:
        >>> state = hvd.elastic.TorchState(model=model, optimizer=optimizer, sampler=sampler, epoch=0)
    """

    _handlers: dict[str, StateHandler]

    def __init__(
        self, model: torch.nn.Module | None = None, optimizer: torch.optim.Optimizer | None = None, **kwargs: Any
    ) -> None:
        handlers: dict[str, StateHandler] = {}
        plain: dict[str, Any] = {}
        for name, value in {**kwargs, "model": model, "optimizer": optimizer}.items():
            make = next((make for kind, make in _registry if isinstance(value, kind)), None)
            if make is not None:
                handlers[name] = make(value)
            elif value is not None or name not in ("model", "optimizer"):
                plain[name] = value
        self.__dict__["_handlers"] = handlers
        self.__dict__.update({"model": model, "optimizer": optimizer})
        for name, handler in handlers.items():
            self.__dict__[name] = handler.value
        super().__init__(**plain)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self._handlers:
            self._handlers[name].set_value(value)
        super().__setattr__(name, value)

    def save(self) -> None:
        """Save all in memory."""
        for handler in self._handlers.values():
            handler.save()
        super().save()

    def restore(self) -> None:
        """Take what was saved last."""
        for handler in self._handlers.values():
            handler.restore()
        super().restore()

    def sync(self) -> None:
        """Take rank 0's state; the first time that of the commit that an earlier start has written."""
        super().sync()
        for handler in self._handlers.values():
            handler.sync()

    def reset(self) -> None:
        """Let samplers share what is left among the present ranks."""
        for handler in self._handlers.values():
            if isinstance(handler.value, ElasticSampler):
                handler.value.reset()

    def _content(self) -> dict[str, Any]:
        handled = {name: handler.committed_state() for name, handler in self._handlers.items()}
        return {**super()._content(), "handled": handled}

    def _load(self, content: dict[str, Any]) -> None:
        super()._load(content)
        for name, state in content["handled"].items():
            if name in self._handlers:
                self._handlers[name].load(state)
