"""Send parameters, optimizer states and plain objects from one rank to all."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from safetensors.torch import load, save

from paceline.horovod.common.process_sets import ProcessSet, global_process_set
from paceline.horovod.torch.mpi_ops import (
    allgather,
    broadcast_,
    broadcast_async_,
    rank,
    synchronize,
)
from paceline.nouns.errors import UsageError
from paceline.run.plain_values import check_value, value_of

_NOT_PLAIN = "send plain data: None, numbers, texts, bytes, lists, tuples, dicts, tensors or arrays"


def broadcast_parameters(params: Any, root_rank: int) -> None:
    """Replace parameters by those of rank `root_rank`.

    Args:
        params: a dict of tensors by name, such as `model.state_dict()`, or an iterable of tensors or of pairs of name
            and tensor, such as `model.named_parameters()`.
        root_rank: the rank that sends.

    Raises:
        ValueError: `params` is something else.
        HorovodInternalError: ranks disagree, or one has gone.
    """
    handles = []
    for name, tensor in _named(params):
        if isinstance(tensor, torch.Tensor):
            handles.append((tensor, *_begin(tensor, root_rank, name)))
    for tensor, sent, handle in handles:
        synchronize(handle)
        if sent is not tensor:
            with torch.no_grad():
                tensor.copy_(sent)


def _begin(tensor: torch.Tensor, root_rank: int, name: str) -> tuple[torch.Tensor, int]:
    sent = tensor.detach()
    # A view where it can be one: what is not contiguous is sent as a copy.
    sent = tensor if sent.is_contiguous() else sent.contiguous()
    return sent, broadcast_async_(sent, root_rank, f"parameter.{name}")


def _named(params: Any) -> list[tuple[str, Any]]:
    if isinstance(params, Mapping):
        return sorted(params.items())
    if not isinstance(params, Iterable) or isinstance(params, (str, bytes, torch.Tensor)):
        raise ValueError(f"invalid params of type: {type(params)}; hand in model.state_dict() or named_parameters()")
    pairs = []
    for index, item in enumerate(params):
        if isinstance(item, torch.Tensor):
            pairs.append((str(index), item))
        elif isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], str):
            pairs.append(item)
        else:
            raise ValueError(f"invalid params: item {index} is a {type(item).__name__}, no tensor and no named one")
    return pairs


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer, root_rank: int, model: torch.nn.Module | None = None
) -> None:
    """Replace an optimizer's options and states by those of rank `root_rank`, which may have none yet.

    Args:
        optimizer: any optimizer of torch but LBFGS, with the same parameters on every rank.
        root_rank: the rank that sends.
        model: Horovod's argument; it is not needed, as no step is taken to make a state.

    Raises:
        ValueError: the optimizer is LBFGS.
        HorovodInternalError: ranks disagree, or one has gone.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError("cannot broadcast torch.optim.LBFGS state: it is no dict of tensors for each parameter")
    state = optimizer.state_dict()
    tensors: list[tuple[Any, str, torch.Tensor]] = []
    plain: list[tuple[Any, str, Any]] = []
    for number, values in state["state"].items():
        for name, value in values.items():
            found = tensors if isinstance(value, torch.Tensor) else plain
            found.append((number, name, value))
    # Ranks may have states of other parameters, or none: the root's says what there is.
    forms = [(number, name, _form(tensor)) for number, name, tensor in tensors]
    options = [_options(group) for group in state["param_groups"]]
    forms, plain, options = broadcast_object((forms, plain, options), root_rank)
    if rank() != root_rank:
        tensors = [(number, name, _empty(form)) for number, name, form in forms]
    broadcast_parameters([(f"{number}.{name}", tensor) for number, name, tensor in tensors], root_rank)
    state["state"] = {}
    for number, name, value in [*tensors, *plain]:
        state["state"].setdefault(number, {})[name] = value
    for group, received in zip(state["param_groups"], options, strict=True):
        group.update(received)
    optimizer.load_state_dict(state)


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != "params"}


def _form(tensor: torch.Tensor) -> tuple[list[int], str, str]:
    return list(tensor.shape), str(tensor.dtype).removeprefix("torch."), tensor.device.type


def _empty(form: tuple[list[int], str, str]) -> torch.Tensor:
    shape, dtype, device = form
    return torch.empty(shape, dtype=getattr(torch, dtype), device=device)


def broadcast_object(
    obj: Any, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Return the object of rank `root_rank`.

    Args:
        obj: the plain data to send: None, numbers, texts, bytes, lists, tuples, dicts, tensors or arrays. Nothing is
            pickled.
        root_rank: the rank that sends: its number in the job.
        name: the name by which calls are matched; None: calls are matched by their order.
        process_set: the ranks that take part.

    Raises:
        ValueError: the object is no plain data.
        HorovodInternalError: ranks disagree, or one has gone.
    """
    content = torch.empty(0, dtype=torch.uint8)
    if rank() == root_rank:
        content = _packed(obj)
    length = torch.tensor([content.numel()])
    broadcast_(length, root_rank, None if name is None else f"{name}.length", process_set)
    if rank() != root_rank:
        content = torch.empty(int(length), dtype=torch.uint8)
    broadcast_(content, root_rank, None if name is None else f"{name}.content", process_set)
    return obj if rank() == root_rank else _unpacked(content)


def broadcast_object_fn(
    root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Return a function that calls `broadcast_object` with these arguments."""

    def broadcast_this(obj: Any) -> Any:
        return broadcast_object(obj, root_rank, name, process_set)

    return broadcast_this


def allgather_object(obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> list[Any]:
    """Return the objects of all ranks of the set, in rank order.

    Args:
        obj: plain data, as `broadcast_object` takes it.
        name: the name by which calls are matched; None: calls are matched by their order.
        process_set: the ranks that take part.

    Raises:
        ValueError: the object is no plain data.
        HorovodInternalError: ranks disagree, or one has gone.
    """
    content = _packed(obj)
    length = torch.tensor([content.numel()])
    lengths = allgather(length, None if name is None else f"{name}.length", process_set)
    contents = allgather(content, None if name is None else f"{name}.content", process_set)
    return [_unpacked(part) for part in contents.split(lengths.tolist())]


def _packed(value: Any) -> torch.Tensor:
    """Return plain data as bytes: the length of a JSON text, the text, and its tensors as safetensors."""
    try:
        text, tensors = check_value(value, "the call")
    except UsageError as error:
        raise ValueError(f"can't send the object: {error.found.replace('returned', 'has')}; {_NOT_PLAIN}") from None
    content = {key: tensor.detach().cpu().clone().contiguous() for key, tensor in tensors.items()}
    head = text.encode()
    packed = len(head).to_bytes(8, "little") + head + save(content)
    return torch.frombuffer(bytearray(packed), dtype=torch.uint8)


def _unpacked(content: torch.Tensor) -> Any:
    packed = content.numpy().tobytes()
    end = 8 + int.from_bytes(packed[:8], "little")
    return value_of(packed[8:end].decode(), load(packed[end:]), "an object that another rank has sent")
