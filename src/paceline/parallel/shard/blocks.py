"""Which modules of a model are its repeated blocks: each is gathered, used and dropped as one.

A block is an element of an `nn.ModuleList` or `nn.Sequential` whose class occurs there at least twice and
which holds parameters; the outermost such blocks only. What a block shares with the rest of the model (a
tied embedding, a layer that is used in two places) belongs to no block: it stays with the root.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import torch
from torch import nn

from paceline.parallel.replicate.strategy import sparse_names

LEAF_BYTES = 2**20  # a lone layer below this is not worth a message of its own: its latency costs more than its bytes


def find_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """The blocks by name, in the model's order."""
    paths = _paths(model)
    found: dict[str, nn.Module] = {}
    _visit("", model, paths, found)
    return found


def kept_whole(model: nn.Module, blocks: dict[str, nn.Module]) -> dict[str, nn.Parameter]:
    """Parameters that can't be cut by rows with their group: scalars, empty ones, dtypes of a minority.

    A group travels as one message of one dtype; what has another one (a float32 norm among bfloat16
    matrices) stays whole on every rank.
    """
    groups: dict[str, list[tuple[str, nn.Parameter]]] = {}
    for name, parameter in model.named_parameters():
        owner = next((block for block in blocks if name.startswith(f"{block}.")), "")
        groups.setdefault(owner, []).append((name, parameter))
    whole: dict[str, nn.Parameter] = {}
    for members in groups.values():
        held = Counter[torch.dtype]()
        for _, parameter in members:
            if parameter.requires_grad and parameter.ndim:
                held[parameter.dtype] += parameter.nbytes
        main = held.most_common(1)[0][0] if held else None
        for name, parameter in members:
            is_other = parameter.requires_grad and parameter.dtype != main
            if not parameter.ndim or not parameter.numel() or is_other:
                whole[name] = parameter
    return whole


def first_sparse(model: nn.Module) -> str | None:
    """The first trained parameter whose gradients are sparse, by name."""
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    return min(sparse_names(model) & trained, default=None)


def owners(model: nn.Module) -> dict[nn.Parameter, list[tuple[nn.Module, str]]]:
    """Where each parameter is registered: modules and attribute names, the first one first."""
    places: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                places.setdefault(parameter, []).append((module, name))
    return places


def _paths(model: nn.Module) -> dict[int, list[str]]:
    """Of every module and parameter, by identity, the names under which the model reaches it."""
    paths: dict[int, list[str]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        paths.setdefault(id(module), []).append(path)
        for name, parameter in module._parameters.items():
            if parameter is not None:
                paths.setdefault(id(parameter), []).append(f"{path}.{name}" if path else name)
    return paths


def _visit(path: str, module: nn.Module, paths: dict[int, list[str]], found: dict[str, nn.Module]) -> None:
    repeated: dict[str, nn.Module] = {}
    if isinstance(module, nn.ModuleList | nn.Sequential):
        elements = [(name, child) for name, child in module.named_children() if _has_parameters(child)]
        times = Counter(type(child) for _, child in elements)
        for name, child in elements:
            if times[type(child)] > 1:
                repeated.update(_callable(f"{path}.{name}" if path else name, child))
    blocks = {name: block for name, block in repeated.items() if _is_block(name, block, paths)}
    found.update(blocks)
    for name, child in module.named_children():
        below = f"{path}.{name}" if path else name
        if below not in found:
            _visit(below, child, paths, found)


def _callable(path: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The module, or where nobody can call it, what is in it."""
    if not is_uncallable(module):
        yield path, module
        return
    for name, child in module.named_children():
        yield from _callable(f"{path}.{name}", child)


def is_uncallable(module: nn.Module) -> bool:
    """Whether the module has no forward of its own, as a list of modules has none."""
    return type(module).forward is nn.Module.forward


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _is_block(path: str, module: nn.Module, paths: dict[int, list[str]]) -> bool:
    held = sum(parameter.nbytes for parameter in module.parameters())
    if not held or (next(module.children(), None) is None and held < LEAF_BYTES):
        return False
    inside = [*module.modules(), *module.parameters()]
    is_alone = all(name == path or name.startswith(f"{path}.") for part in inside for name in paths[id(part)])
    return is_alone and paths[id(module)] == [path]
