"""Hooks that models of transformers put on their modules in their first forward pass, installed before it.

With them a model records what it is asked to return (routers' scores, attention weights, hidden states). A capture
would take the installation for state that the model carries from batch to batch.
"""

from __future__ import annotations

import sys

from torch import nn

_MODULE = "transformers.utils.output_capturing"


def install_recording_hooks(model: nn.Module) -> None:
    """Install these hooks in `model` and its parts, where transformers made them; a second call does nothing."""
    capturing = sys.modules.get(_MODULE)
    if capturing is None:
        return
    for part in model.modules():
        if capturing._CAN_RECORD_REGISTRY.get(part):
            capturing.maybe_install_capturing_hooks(part)
