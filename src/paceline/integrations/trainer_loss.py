"""The loss of a Trainer's micro-batch, and of how many labels it is the mean.

transformers divides sums by `num_items_in_batch`, the labels of a whole step. Here each rank takes the mean over its
own labels, and `job.backward` weighs the ranks' means by the labels' numbers, which is the same.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.trainer_pt_utils import LabelSmoother, find_batch_size

from paceline.nouns.errors import LossError, WorkloadError

IGNORED = -100  # the label that does not count, by torch's and transformers' convention


def inner_model(model: torch.nn.Module) -> torch.nn.Module:
    """Return the model that an adapter of peft is around, or the model itself."""
    base = getattr(model, "get_base_model", None)
    if callable(base) and hasattr(model, "peft_config"):
        found: torch.nn.Module = base()
        return found
    return model


def shifts_labels(model: torch.nn.Module) -> bool:
    """True for a causal language model, which predicts each token from those before it: first labels don't count."""
    inner = inner_model(model)
    if getattr(getattr(inner, "config", None), "is_encoder_decoder", False):
        return False
    kind = type(inner).__name__.removeprefix("FSDP")  # fully_shard gives the class another name
    is_causal = kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
    return is_causal or LOSS_MAPPING.get(str(getattr(inner, "loss_type", None))) is ForCausalLMLoss


class TrainerLoss:
    """The loss of one micro-batch.

    Args:
        model: that is trained.
        own: `compute_loss_func`, or None: the model's own loss.
        smoothing: `label_smoothing_factor`.

    Raises:
        WorkloadError: the options contradict each other, or the model has no loss.
    """

    def __init__(self, model: torch.nn.Module, own: Callable[..., Any] | None, smoothing: float) -> None:
        self.own = own
        self.shifts = shifts_labels(model)
        self.smoother = LabelSmoother(epsilon=smoothing) if smoothing else None
        problem = getattr(getattr(inner_model(model), "config", None), "problem_type", None)
        if own is not None and self.smoother is not None:
            raise WorkloadError(
                "the loss is either compute_loss_func's or that of label smoothing",
                "both are given",
                "smooth the labels in compute_loss_func, and leave label_smoothing_factor out",
            )
        if self.smoother is not None and problem == "multi_label_classification":
            raise WorkloadError(
                "label smoothing is for labels of which one is right",
                "the model's problem_type is multi_label_classification",
                "leave label_smoothing_factor out",
            )
        if own is not None:
            self.wants_count = _takes(own, "num_items_in_batch")

    def __call__(self, model: Any, inputs: dict[str, Any], items: Any) -> tuple[torch.Tensor, object]:
        """Return the mean loss of a micro-batch, and what the model returned.

        Args:
            model: is called.
            inputs: its arguments.
            items: over how many the mean is.

        Raises:
            LossError: the model returns no loss.
        """
        labels = None
        if (self.own is not None or self.smoother is not None) and "labels" in inputs:
            labels = inputs["labels"]
            inputs = {name: value for name, value in inputs.items() if name != "labels"}
        outputs = model(**inputs)
        if self.own is not None:
            named = {"num_items_in_batch": items} if self.wants_count else {}
            return self.own(outputs, labels, **named), outputs
        if labels is not None and self.smoother is not None:
            return self.smoother(outputs, labels, shift_labels=self.shifts), outputs
        return _own_loss(model, outputs, inputs), outputs

    def items(self, inputs: Mapping[str, Any]) -> Any:
        """Return over how many the loss of a micro-batch is a mean: the labels that count, or the samples."""
        labels = inputs.get("shift_labels")
        if labels is None:
            labels = inputs.get("labels")
            if self.shifts and isinstance(labels, torch.Tensor) and labels.dim() > 1:
                labels = labels[..., 1:]
        if isinstance(labels, torch.Tensor):
            return labels.ne(IGNORED).sum()
        return find_batch_size(dict(inputs)) or 1


def _takes(function: Callable[..., object], name: str) -> bool:
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return True
    has_any = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values())
    return has_any or name in parameters


def _own_loss(model: object, outputs: object, inputs: Mapping[str, object]) -> torch.Tensor:
    loss = None
    if isinstance(outputs, Mapping):
        loss = outputs.get("loss")
    elif isinstance(outputs, tuple | list) and outputs:
        loss = outputs[0]
    else:
        loss = getattr(outputs, "loss", None)
    if not isinstance(loss, torch.Tensor):
        raise LossError(
            "the model should return its loss: as .loss, or first",
            f"{type(model).__name__} returned none, called with {', '.join(map(str, inputs)) or 'nothing'}",
            "have the data set or data_collator give labels, or write Trainer(compute_loss_func=...), a function of "
            "outputs, labels and num_items_in_batch",
        )
    return loss
