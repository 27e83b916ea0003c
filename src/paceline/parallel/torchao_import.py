"""Import torchao without what it says of kernels that it does not find: torch's own do what Paceline asks for."""

from __future__ import annotations

import importlib
import logging
import warnings
from types import ModuleType

_LOGGERS = ("torchao", "torch.utils._pytree")


def import_torchao(name: str) -> ModuleType:
    """Return a module of torchao, such as "optim".

    Raises:
        ImportError: it is not installed.
    """
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            importlib.import_module("torchao")
            return importlib.import_module(f"torchao.{name}")
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
