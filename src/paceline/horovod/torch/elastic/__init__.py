"""Horovod's elastic training: `hvd.elastic.run`, `TorchState`, `ElasticSampler`."""

from paceline.horovod.torch.elastic.run_again import run
from paceline.horovod.torch.elastic.sampler import ElasticSampler
from paceline.horovod.torch.elastic.state import (
    ObjectState,
    State,
    StateHandler,
    TorchState,
    get_handler_registry,
    set_handler_registry,
)

__all__ = [
    "ElasticSampler",
    "ObjectState",
    "State",
    "StateHandler",
    "TorchState",
    "get_handler_registry",
    "run",
    "set_handler_registry",
]
