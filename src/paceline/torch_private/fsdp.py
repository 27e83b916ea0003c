"""FSDP2's classes and state, where its public functions end.

`fully_shard`, the setters of `FSDPModule` and `unshard` are public, and used as such in `paceline.comm.fully_shard`.
`set_custom_all_gather` and `set_custom_reduce_scatter` are public, too, but not the classes of what they take.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

from paceline.nouns.patching import patched

__all__ = [
    "AllGather",
    "FSDPParam",
    "ReduceScatter",
    "before_backward",
    "copies_from_host",
    "keep_gathered_in_state_dicts",
    "limit_backward_hooks",
    "make_root",
]


def make_root(module: FSDPModule) -> None:
    """Make a module the root of those that it contains; otherwise the first one that is called becomes a root."""
    module._get_fsdp_state()._lazy_init()


def keep_gathered_in_state_dicts(modules: Sequence[FSDPModule]) -> None:
    """Have `state_dict()` return gathered parameters where they are gathered: FSDP2's hook would reshard them first."""
    for module in modules:
        for param_group in module._get_fsdp_state()._fsdp_param_groups:
            for handle in param_group._module_to_pre_save_state_dict_hook_handle.values():
                handle.remove()


def before_backward(module: FSDPModule) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return the hook that FSDP2 puts on a module's outputs: it begins the module's backward pass.

    A loss may be computed from no output of the module, and FSDP2 registers the hook on nothing else.
    """
    hook: Callable[[torch.Tensor], torch.Tensor] = module._get_fsdp_state()._pre_backward
    return hook


def limit_backward_hooks(module: FSDPModule, is_forward: Callable[[], bool], note_gradient: Callable[[], None]) -> None:
    """Limit FSDP2's backward hooks to gathering while a forward pass takes a gradient (`torch.autograd.grad`).

    FSDP2's own hooks would begin a backward pass, whose end reduces gradients, reshards parameters that the outer
    backward pass still needs, and ends the forward pass that is running. No public setter keeps it from the last of
    these, so two methods are replaced on its objects: it looks them up there, one when a forward pass registers it, one
    at each call.

    Args:
        module: with parameters of its own groups.
        is_forward: says whether a forward pass runs.
        note_gradient: called where one takes a gradient.
    """
    state = module._get_fsdp_state()
    begin = state._pre_backward

    def gather_only(gradient: torch.Tensor) -> torch.Tensor:
        if not is_forward():
            return begin(gradient)
        note_gradient()
        for param_group in state._fsdp_param_groups:
            param_group.unshard()
            # `unshard` may return before the parameters are gathered.
            param_group.wait_for_unshard()
        return gradient

    state._pre_backward = gather_only  # type: ignore[method-assign, assignment]
    for param_group in state._fsdp_param_groups:
        param_group.post_backward = _unless(is_forward, param_group.post_backward)  # type: ignore[method-assign]


def _unless(is_forward: Callable[[], bool], after_backward: Callable[..., None]) -> Callable[..., None]:
    def call(*unused: object) -> None:
        if not is_forward():
            after_backward(*unused)

    return call


@contextmanager
def copies_from_host() -> Iterator[None]:
    """Copy parts in the host's memory before they are gathered, also where there is no GPU to copy them to.

    With a GPU, an offloaded shard is copied to the device before it is gathered. A trial without a GPU makes the same
    copy, so that its memory is counted.
    """
    read = FSDPParam.all_gather_inputs.fget  # type: ignore[attr-defined]

    def copied(parameter: FSDPParam) -> list[torch.Tensor]:
        return [part.clone() for part in read(parameter)]

    with patched(FSDPParam, all_gather_inputs=property(copied)):
        yield
