"""Find a model's repeated blocks: each is gathered, used and dropped as one.

A block is an element of an `nn.ModuleList` or `nn.Sequential` whose class occurs there at least twice and
which holds parameters; the outermost such blocks only. What a block shares with the rest of the model (a
tied embedding, a layer that is used in two places) belongs to no block: it stays with the root.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import torch
from torch import nn

from paceline.nouns.errors import WorkloadError
from paceline.parallel.replicate.replicate_strategy import sparse_names

LEAF_BYTES = 2**20  # a lone layer below this is not worth a message of its own: its latency costs more than its bytes


def find_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """Return the blocks by name, in the model's order."""
    blocks: dict[str, nn.Module] = {}
    _visit("", model, _paths(model), blocks)
    return blocks


def kept_whole(model: nn.Module, blocks: dict[str, nn.Module]) -> dict[str, nn.Parameter]:
    """Return parameters that can't be cut by rows with their group: scalars, empty ones, dtypes of a minority.

    A group travels as one message of one dtype; what has another one (a float32 norm among bfloat16
    matrices) stays whole on every rank.
    """
    groups: dict[str, list[tuple[str, nn.Parameter]]] = {}
    for name, parameter in model.named_parameters():
        # Blocks are not nested, so one at most has it; "" is the root's group.
        owner = next((block for block in blocks if name.startswith(f"{block}.")), "")
        groups.setdefault(owner, []).append((name, parameter))
    unsplit: dict[str, nn.Parameter] = {}
    for members in groups.values():
        main = _main_dtype([parameter for _, parameter in members])
        for name, parameter in members:
            is_other = parameter.requires_grad and parameter.dtype != main
            if not parameter.ndim or not parameter.numel() or is_other:
                unsplit[name] = parameter
    return unsplit


def _main_dtype(parameters: list[nn.Parameter]) -> torch.dtype | None:
    """Return the dtype in which most bytes of the trained parameters with dimensions are."""
    num_bytes = Counter[torch.dtype]()
    for parameter in parameters:
        if parameter.requires_grad and parameter.ndim:
            num_bytes[parameter.dtype] += parameter.nbytes
    if not num_bytes:
        return None
    return num_bytes.most_common(1)[0][0]


def check_dense(model: nn.Module) -> None:
    """Raise WorkloadError if a trained parameter has sparse gradients: ranks of `shard` update rows."""
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    sparse = min(sparse_names(model) & trained, default=None)
    if sparse is not None:
        raise WorkloadError(
            "the axis shard sums gradients by rows",
            f"the gradient of {sparse} is sparse",
            "make the embedding with sparse=False, or write replicate in place of shard",
        )


def owners(model: nn.Module) -> dict[nn.Parameter, list[tuple[nn.Module, str]]]:
    """Return the modules and attribute names under which each parameter is registered, the first one first."""
    places: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                places.setdefault(parameter, []).append((module, name))
    return places


def _joined(path: str, name: str) -> str:
    """Return the dotted path of what a module has under a name; the outermost module's path is empty."""
    return f"{path}.{name}" if path else name


def _paths(model: nn.Module) -> dict[int, list[str]]:
    """Return the names under which the model reaches every module and parameter, by identity."""
    paths: dict[int, list[str]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        paths.setdefault(id(module), []).append(path)
        for name, parameter in module._parameters.items():
            if parameter is not None:
                paths.setdefault(id(parameter), []).append(_joined(path, name))
    return paths


def _visit(path: str, module: nn.Module, paths: dict[int, list[str]], blocks: dict[str, nn.Module]) -> None:
    """Add the outermost blocks in a module to `blocks`."""
    for name, candidate in _repeated(path, module).items():
        if _is_block(name, candidate, paths):
            blocks[name] = candidate
    for name, child in module.named_children():
        below = _joined(path, name)
        # Not below a block: FSDP2 would gather an inner group by itself, in a message of its own.
        if below not in blocks:
            _visit(below, child, paths, blocks)


def _repeated(path: str, module: nn.Module) -> dict[str, nn.Module]:
    """Return the elements of a list of modules whose class occurs there at least twice."""
    if not isinstance(module, nn.ModuleList | nn.Sequential):
        return {}
    elements = [(name, child) for name, child in module.named_children() if _has_parameters(child)]
    times = Counter(type(child) for _, child in elements)
    repeated: dict[str, nn.Module] = {}
    for name, child in elements:
        if times[type(child)] > 1:
            repeated.update(_callable(_joined(path, name), child))
    return repeated


def _callable(path: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the module, or where nobody can call it, what is in it."""
    if not is_uncallable(module):
        yield path, module
        return
    for name, child in module.named_children():
        yield from _callable(f"{path}.{name}", child)


def is_uncallable(module: nn.Module) -> bool:
    """True if the module has no forward of its own, as a list of modules has none."""
    return type(module).forward is nn.Module.forward


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _is_block(path: str, module: nn.Module, paths: dict[int, list[str]]) -> bool:
    """True if a module is worth a message of its own and shares nothing with the rest of the model."""
    num_bytes = sum(parameter.nbytes for parameter in module.parameters())
    is_layer = next(module.children(), None) is None
    if not num_bytes or (is_layer and num_bytes < LEAF_BYTES):
        return False
    if paths[id(module)] != [path]:
        return False
    for part in (*module.modules(), *module.parameters()):
        if not all(_is_inside(name, path) for name in paths[id(part)]):
            return False
    return True


def _is_inside(name: str, path: str) -> bool:
    return name == path or name.startswith(f"{path}.")
