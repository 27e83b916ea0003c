"""A moving average of the weights, under every plan that trains by collectives: `job.ema(decay)`.

Each rank averages what it has of the parameters, so nothing is sent. A checkpoint has the average as it has the
parameters (`average/NAME/PARAMETER`), cut as they are: any mesh reads what another wrote.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch

from paceline.checkpoint.manifest import AVERAGE
from paceline.checkpoint.reshard import LocalTensor, take
from paceline.nouns.errors import UsageError
from paceline.nouns.shard_spec import LocalShard
from paceline.torch_private.optim import foreach_lerp_
from paceline.train.snapshot import local_part, shard_of_parameter

Shards = Callable[[], Mapping[str, LocalShard]]
Parameters = Callable[[], Mapping[str, torch.nn.Parameter]]


class Average:
    """A moving average of the trained parameters, of which this rank has the part that it has of them.

    `job.ema` makes it.

    Args:
        parameters: a function that returns the model's parameters that are on this rank, by name.
        shards: a function that returns the part of each parameter that this rank holds.
        decay: the share of the average that stays with each update, from 0 to below 1.

    Attributes:
        values (dict[str, torch.Tensor]): the average of this rank's part of each parameter, by the parameter's name.

    Examples:
        >>> job = paceline.distribute(workload)
        >>> ema = job.ema(0.99)
        >>> list(ema.values)
        ['weight', 'bias']
    """

    def __init__(self, parameters: Parameters, shards: Shards, decay: float) -> None:
        self.parameters = parameters
        self.shards = shards
        self.decay = _checked(decay)
        self.is_applied = False
        self.values: dict[str, torch.Tensor] = {}
        for name, parameter in parameters().items():
            if parameter.requires_grad:
                self.values[name] = local_part(parameter).clone()

    def update(self, decay: float | None = None) -> None:
        """Move the average towards the parameters: decay times the average, and the rest of them.

        Args:
            decay: the decay of this update; that of the average where None.

        Raises:
            UsageError: the averages stand in the model, or `decay` is not from 0 to below 1.

        Examples:
            A decay that grows with the number of updates, for an average that soon forgets the beginning:

            >>> job = paceline.distribute(workload)
            >>> ema = job.ema(0.999)
            >>> for batch in job.batches():
            ...     mean = job.step(batch)
            ...     ema.update(min(0.999, job.step_number / (job.step_number + 9)))
            >>> len(ema.values)
            2
        """
        if self.is_applied:
            raise UsageError(
                "ema.update moves the average towards the trained parameters",
                "the average is in their place",
                "call it outside of `with ema.applied()`",
            )
        share = 1 - (self.decay if decay is None else _checked(decay))
        parts = list(self._in_model().values())
        if not parts:
            return  # a stage without parameters
        with torch.no_grad():
            foreach_lerp_(list(self.values.values()), parts, share)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Have the averages in the place of the parameters inside the `with`: to evaluate, to generate or to save.

        `job.save` writes a checkpoint whose model is the average, as `paceline export` then exports it.

        Yields:
            Nothing: the `with` has no value.

        Raises:
            UsageError: they are in it already.

        Examples:
            >>> job = paceline.distribute(workload)
            >>> ema = job.ema(0.5)
            >>> for batch in job.batches():
            ...     mean = job.step(batch)
            ...     ema.update()
            >>> with ema.applied():
            ...     averaged = job.evaluate(workload.data)["loss"]
            >>> averaged > job.evaluate(workload.data)["loss"]  # of a model that gets better with each step
            True
        """
        if self.is_applied:
            raise UsageError(
                "the averages can take the parameters' place once",
                "they have it",
                "leave the other `with ema.applied()` first",
            )
        self._swap()
        self.is_applied = True
        try:
            yield
        finally:
            self._swap()
            self.is_applied = False

    def _swap(self) -> None:
        with torch.no_grad():
            for name, part in self._in_model().items():
                value = self.values[name]
                trained = part.clone()
                part.copy_(value)
                value.copy_(trained)

    def _in_model(self) -> dict[str, torch.Tensor]:
        """Return the parts of the parameters that are averaged, which are the model's memory."""
        parameters = self.parameters()
        parts = {name: local_part(parameters[name]) for name in self.values}
        for name, part in parts.items():
            if part.shape != self.values[name].shape:
                self._cut(name, part)
        return parts

    def _cut(self, name: str, part: torch.Tensor) -> None:
        """Leave of a whole average what is here of the parameter: a loop's model is split when it is first called."""
        full = self.values[name]
        shard = self.shards().get(name)
        if shard is None or shard.shard_spec.shape != full.shape or shard.shard_spec.local_shape != part.shape:
            raise UsageError(
                "the average needs the parameters in parts, as the plan leaves them between calls of the model",
                f"{name} has the shape {tuple(part.shape)} now, its average {tuple(full.shape)}",
                "call ema.update and ema.applied outside of `with job.gathered()`, after optimizer.step()",
            )
        self.values[name] = take(full, shard.shard_spec)

    def parts(self, name: str, shards: Mapping[str, LocalShard], size: int) -> dict[str, LocalTensor]:
        """Return this rank's parts of the average, as a checkpoint saves them.

        Args:
            name: the name of the average.
            shards: the part of each parameter that this rank holds.
            size: the number of ranks of the world.
        """
        parameters = self.parameters()
        in_model = self._in_model()
        averages = self.values
        if self.is_applied:  # the checkpoint of the averaged model has the average as well
            averages = in_model
        parts = {}
        for parameter, value in averages.items():
            shard = shard_of_parameter(parameter, parameters[parameter], shards, size)
            parts[f"{AVERAGE}{name}/{parameter}"] = LocalTensor(value, shard)
        return parts

    def restore(self, saved: Mapping[str, torch.Tensor]) -> list[str]:
        """Put back what `parts` gave, by the parameter's name; return the names that were not saved."""
        missing = []
        with torch.no_grad():
            for parameter, value in self.values.items():
                if parameter in saved:
                    value.copy_(saved[parameter])
                else:
                    missing.append(parameter)
        return missing


def _checked(decay: float) -> float:
    if isinstance(decay, bool) or not isinstance(decay, int | float) or not 0 <= decay < 1:
        raise UsageError(
            "the decay of an average should be a number from 0 to below 1",
            f"it is {decay!r:.60}",
            "write e.g. job.ema(0.999): each update keeps 99.9 % of the average",
        )
    return float(decay)
