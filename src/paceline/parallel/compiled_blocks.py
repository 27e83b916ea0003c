"""Compile each repeated block of a model that runs by its own code, in place (compile=blocks).

The compiler keeps what it made by the code of a block's forward pass, and takes a block's parameters for arguments. So
blocks that are alike share one compiled function, and a model of 48 blocks compiles as long as one of two. Only the
forward function is replaced: names of parameters stay, and hooks, such as those that gather parameters under `shard`,
run around the compiled function.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch

from paceline.nouns.errors import PlanError
from paceline.parallel.recompute import fill_no_cache, is_kept_from_compiler
from paceline.parallel.shard.blocks import find_blocks

_OTHER_COMPILATIONS = 8  # that a block needs for other reasons, such as a last batch of fewer samples

Forwards = Mapping[torch.nn.Module, Callable[..., Any]]


def forwards_of_blocks(model: torch.nn.Module) -> Forwards:
    """Return the model's blocks with their own forward functions, before anything is put around these.

    A model of transformers keeps no cache from then on.

    Raises:
        PlanError: there are none.
    """
    blocks = find_blocks(model).values()
    if not blocks:
        raise PlanError(
            "the plan has compile=blocks, which compiles a model's repeated blocks",
            "it has no repeated blocks: modules of one class in one ModuleList or Sequential",
            "write compile=on, which compiles the model as a whole, or leave compile out",
        )
    fill_no_cache(model)  # each block would write at its own place in it, and so be compiled by itself
    return {block: block.forward for block in blocks}


def compile_blocks(forwards: Forwards) -> int:
    """Compile each block's forward, recomputation included; return the number of compiled blocks.

    Args:
        forwards: the blocks, which are changed in place, with the forward functions that they had at first.
    """
    # A block that reads its own number, say, is like no other: it is compiled by itself, in training and in evaluation.
    # By default the compiler gives up after 8, and runs the others as they are.
    config = torch.compiler.config
    config.recompile_limit = max(config.recompile_limit, _OTHER_COMPILATIONS + 2 * len(forwards))
    blocks = [block for block in forwards if not is_kept_from_compiler(block.forward)]
    for block in blocks:
        compiled = torch.compile(block.forward)
        # What copies the model looks there for the block's own function.
        block.forward = functools.update_wrapper(compiled, forwards[block], updated=())
    return len(blocks)


def nothing_compiled(checkpointing: str) -> str:
    """Return the notice for a plan under which all blocks run as they are."""
    return f"compile=blocks changes nothing: under checkpointing={checkpointing}, blocks with buffers run as they are"
