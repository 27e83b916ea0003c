"""The hooks of a LightningModule, a LightningDataModule and a Callback: which are called, and which are refused."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping
from typing import Any

from paceline.nouns.errors import UsageError, WorkloadError
from paceline.nouns.parts import shown

_PACKAGES = ("lightning.pytorch.", "pytorch_lightning.")

# In the order of a run.
CALLED = (
    "configure_callbacks",
    "prepare_data",
    "setup",
    "configure_model",
    "train_dataloader",
    "val_dataloader",
    "test_dataloader",
    "configure_optimizers",
    "on_load_checkpoint",
    "on_fit_start",
    "on_train_start",
    "on_train_epoch_start",
    "on_after_batch_transfer",
    "on_train_batch_start",
    "training_step",
    "on_before_zero_grad",
    "optimizer_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "lr_scheduler_step",
    "on_train_batch_end",
    "on_validation_model_zero_grad",
    "on_validation_model_eval",
    "on_validation_start",
    "on_validation_epoch_start",
    "on_validation_batch_start",
    "validation_step",
    "on_validation_batch_end",
    "on_validation_epoch_end",
    "on_validation_end",
    "on_validation_model_train",
    "on_train_epoch_end",
    "on_save_checkpoint",
    "on_train_end",
    "on_fit_end",
    "on_test_model_eval",
    "on_test_start",
    "on_test_epoch_start",
    "on_test_batch_start",
    "test_step",
    "on_test_batch_end",
    "on_test_epoch_end",
    "on_test_end",
    "on_test_model_train",
    "teardown",
)
# Trainer.predict is refused when it is called.
OF_PREDICT = (
    "predict_step",
    "predict_dataloader",
    "on_predict_start",
    "on_predict_end",
    "on_predict_batch_start",
    "on_predict_batch_end",
    "on_predict_epoch_start",
    "on_predict_epoch_end",
    "on_predict_model_eval",
)
_ON_DEVICE = (
    "batches come on the rank's device: change them in on_after_batch_transfer, or in the data set or collate_fn"
)
REFUSED = {
    "backward": "take the backward pass yourself: self.automatic_optimization = False and self.manual_backward(loss)",
    "optimizer_step": "step yourself: self.automatic_optimization = False and self.optimizers().step()",
    "configure_gradient_clipping": "write Trainer(gradient_clip_val=1.0), or change gradients in "
    "on_before_optimizer_step, where they are those of the whole batch",
    "clip_gradients": "change gradients in on_before_optimizer_step, where they are those of the whole batch",
    "configure_sharded_model": "make the layers in configure_model or __init__; the plan is in the command",
    "on_before_batch_transfer": _ON_DEVICE,
    "transfer_batch_to_device": _ON_DEVICE,
    "log": "give the function another name, and have it call self.log",
}
# What a module calls, and the trainer does not. `log` is the trainer's own.
OFFERED = (
    "all_gather",
    "forward",
    "freeze",
    "load_from_checkpoint",
    "log_dict",
    "lr_schedulers",
    "manual_backward",
    "optimizers",
    "print",
    "to_onnx",
    "to_tensorrt",
    "to_torchscript",
    "toggle_optimizer",
    "toggled_optimizer",
    "unfreeze",
    "untoggle_optimizer",
)
CALLED_OF_DATA = (
    "prepare_data",
    "setup",
    "train_dataloader",
    "val_dataloader",
    "test_dataloader",
    "on_after_batch_transfer",
    "state_dict",
    "load_state_dict",
    "on_exception",
    "teardown",
)
REFUSED_OF_DATA = {name: _ON_DEVICE for name in ("on_before_batch_transfer", "transfer_batch_to_device")}
CALLED_OF_CALLBACKS = (
    "setup",
    "state_dict",
    "load_state_dict",
    "on_load_checkpoint",
    "on_fit_start",
    "on_sanity_check_start",
    "on_sanity_check_end",
    "on_train_start",
    "on_train_epoch_start",
    "on_train_batch_start",
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_train_batch_end",
    "on_validation_start",
    "on_validation_epoch_start",
    "on_validation_batch_start",
    "on_validation_batch_end",
    "on_validation_epoch_end",
    "on_validation_end",
    "on_train_epoch_end",
    "on_save_checkpoint",
    "on_train_end",
    "on_fit_end",
    "on_test_start",
    "on_test_epoch_start",
    "on_test_batch_start",
    "on_test_batch_end",
    "on_test_epoch_end",
    "on_test_end",
    "on_exception",
    "teardown",
)


def base_of(value: Any, name: str) -> type | None:
    """Return the class of Lightning's that an object is one of, such as "LightningModule"; None if it is none."""
    for kind in type(value).__mro__:
        if kind.__name__ == name and kind.__module__.startswith(_PACKAGES):
            return kind
    return None


def package_of(base: type) -> str:
    """Return the package that has the trainer of a class: lightning.pytorch or pytorch_lightning."""
    return next(each.rstrip(".") for each in _PACKAGES if base.__module__.startswith(each))


def part_of(base: type, path: str) -> Any:
    """Return a module of the package that has a class; it is loaded already."""
    return sys.modules[f"{package_of(base)}.{path}"]


def overrides(value: Any, name: str, base: type) -> bool:
    """True if an object has a function of its own in place of that of its base."""
    if name in vars(value):
        return True
    return getattr(type(value), name, None) is not getattr(base, name, None)


def check_hooks(value: Any, base: type, refused: Mapping[str, str]) -> None:
    """Raise UsageError if an object overrides what is never called."""
    for name, fix in refused.items():
        if overrides(value, name, base):
            raise UsageError(f"Trainer does not call {name}", f"the {type(value).__name__} overrides it", fix)


def checked_module(module: Any) -> type:
    """Return the LightningModule that a module is one of.

    Raises:
        WorkloadError: it is none, or lacks what training needs.
        UsageError: it overrides what is never called.
    """
    base = base_of(module, "LightningModule")
    if base is None:
        raise WorkloadError(
            "Trainer needs a LightningModule, of lightning or pytorch_lightning",
            f"it is {shown(module)}",
            "for other modules: job, model, optimizer, loader = paceline.prepare(model, optimizer, loader)",
        )
    check_hooks(module, base, REFUSED)
    for name in ("training_step", "validation_step", "test_step"):
        if "dataloader_iter" in parameters_of(getattr(module, name)):
            raise UsageError(
                f"{name} takes a batch",
                "it takes dataloader_iter",
                f"write {name}(self, batch, batch_idx)",
            )
    return base


def parameters_of(function: Any) -> list[str]:
    """Return the names of a function's positional parameters; of `*names` three."""
    found = []
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind is parameter.VAR_POSITIONAL:
            found += [name] * 3
        elif parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            found.append(name)
    return found
