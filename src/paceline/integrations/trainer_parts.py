"""What a Trainer is made of, beside its loop: the model that it takes, its checkpoints, what they keep, its numbers."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import DataCollatorWithPadding, PreTrainedTokenizerBase, default_data_collator
from transformers.trainer_callback import ExportableState

from paceline.checkpoint.manifest import MANIFEST
from paceline.integrations.trainer_loss import inner_model
from paceline.nouns.errors import WorkloadError
from paceline.nouns.parts import shown
from paceline.train.loop_job import LoopJob

if TYPE_CHECKING:
    from paceline.integrations.transformers import Trainer

_CHECKPOINT = re.compile(r"checkpoint-(\d+)")


class KeptState:
    """What checkpoints keep of a Trainer: its logs, the best metric and the states of callbacks."""

    names = ("log_history", "best_metric", "best_global_step", "best_model_checkpoint", "epoch")

    def __init__(self, trainer: Trainer, samples: int) -> None:
        self.trainer = trainer
        self.samples = samples

    def callbacks(self) -> Iterator[tuple[str, Any]]:
        """Yield callbacks with a state, by a name that no other callback has."""
        for number, callback in enumerate(self.trainer.callback_handler.callbacks):
            if isinstance(callback, ExportableState):
                yield f"{number} {type(callback).__name__}", callback

    def state_dict(self) -> dict[str, Any]:
        """Return the state."""
        state = {name: getattr(self.trainer.state, name) for name in self.names}
        return {
            "state": state,
            "callbacks": {name: callback.state()["attributes"] for name, callback in self.callbacks()},
            "samples": self.samples,
        }

    def load_state_dict(self, kept: Mapping[str, Any]) -> None:
        """Take a state back."""
        for name, value in kept["state"].items():
            setattr(self.trainer.state, name, value)
        for name, callback in self.callbacks():
            for attribute, value in kept["callbacks"].get(name, {}).items():
                setattr(callback, attribute, value)
        if kept["samples"] != self.samples and self.trainer.job is not None:
            self.trainer.job.notice(
                f"the checkpoint's steps had {kept['samples']} samples, those of now have {self.samples}: samples of "
                "this pass may be left out or taken twice"
            )


def checked_model(model: object, make: Callable[[], torch.nn.Module] | None) -> torch.nn.Module:
    """Return the model.

    Raises:
        WorkloadError: there is none, or two, or one that can't be trained so.
    """
    if (model is None) == (make is None):
        raise WorkloadError(
            "Trainer needs either model or model_init",
            "there is none" if model is None else "both are given",
            "write Trainer(model=...)",
        )
    made = make() if make is not None else model
    if not isinstance(made, torch.nn.Module):
        raise WorkloadError(
            "Trainer trains a torch.nn.Module", f"the model is {shown(made)}", "hand in the model itself"
        )
    inner = inner_model(made)
    if getattr(inner, "is_quantized", False):
        raise WorkloadError(
            "Trainer trains parameters of floating-point numbers",
            f"{type(inner).__name__} was loaded quantized",
            "load it without quantization_config",
        )
    devices = set((getattr(inner, "hf_device_map", None) or {}).values())
    if len(devices) > 1:
        raise WorkloadError(
            "the ranks share out the model as the plan says",
            f"device_map has put its parts on {len(devices)} devices already",
            "load it without device_map, and write paceline run --plan shard=4 FILE",
        )
    return made


def collator_of(processing_class: object) -> Callable[[list[Any]], Any]:
    """Return what makes a batch of samples where no data_collator is given: with a tokenizer it pads."""
    if isinstance(processing_class, PreTrainedTokenizerBase):
        return DataCollatorWithPadding(processing_class)
    return default_data_collator


def logits_of(outputs: object, ignored: list[str], has_loss: bool) -> Any:
    """Return what a model predicted: all that it returned but the loss and what is ignored."""
    if isinstance(outputs, Mapping):
        logits = tuple(value for name, value in outputs.items() if name not in [*ignored, "loss"])
    elif isinstance(outputs, tuple | list):
        logits = tuple(outputs[1:] if has_loss else outputs)
    else:
        return outputs
    return logits[0] if len(logits) == 1 else logits


def checkpoints(folder: Path) -> list[Path]:
    """Return the whole checkpoints in an output folder, oldest first."""
    found = []
    for path in folder.glob("checkpoint-*"):
        match = _CHECKPOINT.fullmatch(path.name)
        if match and (path / MANIFEST).exists():
            found.append((int(match[1]), path))
    return [path for _, path in sorted(found)]


def as_on_rank_0(job: LoopJob, metrics: dict[str, Any]) -> dict[str, Any]:
    """Return metrics with rank 0's numbers: what is kept and compared must not differ by rounding. Collective."""
    names = [name for name, value in metrics.items() if isinstance(value, float)]
    sent = torch.tensor([metrics[name] for name in names], dtype=torch.float64, device=job.device)
    job.world.broadcast(sent)
    return metrics | dict(zip(names, sent.tolist(), strict=True))


def speed(split: str, seconds: float, samples: int, steps: int) -> dict[str, float]:
    """Return how long something took, by the names that transformers has."""
    seconds = max(seconds, 1e-9)
    return {
        f"{split}_runtime": round(seconds, 4),
        f"{split}_samples_per_second": round(samples / seconds, 3),
        f"{split}_steps_per_second": round(steps / seconds, 3),
    }
