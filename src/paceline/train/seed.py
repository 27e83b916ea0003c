"""Seed random numbers for the start and for each sample, and save their state for a checkpoint."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from paceline.nouns.data_order import mix
from paceline.nouns.errors import CheckpointError


def seed_everything(*numbers: int) -> None:
    """Seed torch (all devices), Python's random and, where it is in use, numpy."""
    seed = mix(*numbers)
    torch.manual_seed(seed)
    random.seed(seed)
    if "numpy" in sys.modules:
        # numpy takes 32 bits.
        sys.modules["numpy"].random.seed(seed & 0xFFFFFFFF)


def seed_sample(*numbers: int) -> None:
    """Seed what a data set draws from while it makes one sample: as above, but only on the CPU.

    `torch.manual_seed` would also queue a call for every GPU each time, at a hundred times the price.
    """
    seed = mix(*numbers)
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed & 0xFFFFFFFF)


class CpuRandomState(NamedTuple):
    """The states of the CPU's random generators: torch's, Python's and, where it is in use, numpy's."""

    torch: torch.Tensor
    python: tuple[Any, ...] | None
    numpy: Any


def cpu_random_state(draws_by_torch: bool = False) -> CpuRandomState:
    """Return the states as they are now.

    Args:
        draws_by_torch: True if the following code draws only from torch's generator, so its state is enough. To copy
            numpy's takes most of the time.
    """
    if draws_by_torch:
        return CpuRandomState(torch.get_rng_state(), None, None)
    # Not imported here: where nothing else has, nothing draws from it.
    numpy: Any = sys.modules.get("numpy")
    return CpuRandomState(torch.get_rng_state(), random.getstate(), numpy.random.get_state() if numpy else None)


def set_cpu_random_state(state: CpuRandomState) -> None:
    """Go back to an earlier state."""
    torch.set_rng_state(state.torch)
    if state.python is not None:
        random.setstate(state.python)
    if state.numpy is not None:
        sys.modules["numpy"].random.set_state(state.numpy)


@contextmanager
def kept_random_state(draws_by_torch: bool = False) -> Iterator[None]:
    """Leave the CPU's random generators as they were found; only torch's where nothing else is drawn from."""
    state = cpu_random_state(draws_by_torch)
    try:
        yield
    finally:
        set_cpu_random_state(state)


def random_state(device: torch.device) -> dict[str, torch.Tensor]:
    """Return the random generators' states as tensors, for a checkpoint."""
    state = {"torch": torch.get_rng_state().clone(), "python": torch.tensor(random.getstate()[1])}  # 625 numbers
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    if "numpy" in sys.modules:
        _, keys, place, *_ = sys.modules["numpy"].random.get_state()
        state["numpy"] = torch.tensor([*keys.tolist(), place])
    return state


def restore_random_state(state: dict[str, torch.Tensor], device: torch.device) -> None:
    """Put back what `random_state` took.

    Raises:
        CheckpointError: a state is missing, or is not one of its generator.
    """
    try:
        _restore(state, device)
    except (KeyError, IndexError, TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise CheckpointError(
            "can't restore the random generators' states of a checkpoint",
            f"one is missing or of another form ({type(error).__name__}: {str(error).splitlines()[0]})",
            "use an earlier checkpoint",
        ) from None


def _restore(state: dict[str, torch.Tensor], device: torch.device) -> None:
    torch.set_rng_state(state["torch"])
    # None, and 0 for numpy below: a second Gaussian number that the generator had in store is not kept.
    random.setstate((3, tuple(state["python"].tolist()), None))  # 3: the version of Python's format
    if "cuda" in state and device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"], device)
    if "numpy" in state:
        import numpy as np

        *keys, place = state["numpy"].tolist()
        np.random.set_state(("MT19937", np.array(keys, dtype=np.uint32), place, 0, 0.0))
