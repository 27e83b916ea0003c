"""Copy what a rank's steps make, and write it down: this rank's part of each tensor, as the reference names them."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from paceline.checkpoint.manifest import OPTIMIZER
from paceline.comm.dtensor_parts import local
from paceline.parallel.optimizer_parts import parts_of
from paceline.parallel.replicate.bucket import local_gradient
from paceline.train.base_job import BaseJob
from paceline.verify.judge.compare import split_key, take
from paceline.verify.ranks.reference_step import dense_copy, save_tensors

_BY_STEP = ("losses", "norms", "weights", "draws", "masks", "kept", "drawn", "ledger", "rates")


class RankRecord:
    """The tensors, under STEP/KIND/NAME, and the facts of some steps of a rank.

    Args:
        job: the job of the rank.
    """

    def __init__(self, job: BaseJob) -> None:
        self.job = job
        self.tensors: dict[str, torch.Tensor] = {}
        self.facts: dict[str, Any] = {name: [] for name in _BY_STEP}

    def enter_values(self, step: int, parameters: Mapping[str, torch.Tensor]) -> None:
        """Copy parameters, and the model's buffers."""
        for name, parameter in parameters.items():
            if not parameter.is_meta:  # else not on this rank
                self.tensors[f"{step}/parameter/{name}"] = dense_copy(local(parameter))
        for name, buffer in self.job.model.named_buffers():
            if not buffer.is_meta:
                self.tensors[f"{step}/buffer/{name}"] = dense_copy(buffer)

    def enter_gradients(self, step: int, parameters: Mapping[str, torch.nn.Parameter]) -> None:
        """Copy the parameters' gradients."""
        for name, parameter in parameters.items():
            gradient = local_gradient(parameter)
            if gradient is not None:
                self.tensors[f"{step}/gradient/{name}"] = dense_copy(gradient)

    def enter_states(
        self, step: int, parameters: Mapping[str, torch.nn.Parameter], optimizers: list[torch.optim.Optimizer]
    ) -> None:
        """Copy the optimizers' states, of whole parameters those that are on this rank."""
        shards = self.job.parallel.local_shards()
        parts = list(itertools.chain.from_iterable(map(parts_of, optimizers)))
        for name, parameter in parameters.items():
            is_cut = name in shards and OPTIMIZER + name not in shards
            items: list[tuple[str, Any]] = []
            for part in parts:
                items += part.state.get(parameter, {}).items()
            for state, value in items:
                tensor = _as_tensor(value)
                # A count of steps has no shards; what else has another shape than its cut parameter can't be placed.
                if tensor is not None and (not is_cut or tensor.dim() == 0 or tensor.shape == local(parameter).shape):
                    self.tensors[f"{step}/state/{state}/{name}"] = dense_copy(tensor)

    def write(self, path: Path) -> None:
        """Write PATH.safetensors and PATH.json."""
        shards = self.job.parallel.local_shards()
        cuts = {name: shard.shard_spec for name, shard in shards.items() if not name.startswith(OPTIMIZER)}
        states = {name.removeprefix(OPTIMIZER): bool(shards[name].holders) for name in shards.keys() - cuts.keys()}
        for key, tensor in self.tensors.items():
            _, kind, name, _ = split_key(key)
            # Before the first call of a model that `tensor` splits its parameters are whole; that may be any step.
            is_cut = name in cuts and not (kind == "state" and name in states)
            if is_cut and tensor.shape == cuts[name].shape:
                self.tensors[key] = torch.from_numpy(take(tensor.numpy(), cuts[name])).contiguous()
        facts = {
            "has_gradient": {},
            **self.facts,
            "placements": {name: shard.shard_spec.to_json() for name, shard in shards.items()},
            "whole_states": states,
            "coordinate": self.job.mesh.coordinate(self.job.rank),
            "data_part": self.job.mesh.data_part(self.job.rank),
        }
        save_tensors(self.tensors, path.with_suffix(".safetensors"))
        path.with_suffix(".json").write_text(json.dumps(facts))


def _as_tensor(value: Any) -> torch.Tensor | None:
    if isinstance(value, torch.Tensor):
        return local(value)
    return torch.tensor(float(value), dtype=torch.float64) if isinstance(value, int | float) else None
