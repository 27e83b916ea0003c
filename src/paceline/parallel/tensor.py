"""Tensor parallelism: every weight that pays is split, and ranks compute pieces of the same samples.

The layout is derived from the captured graph (`graph/layout.py`), for any model. Blocks of a transformer come out
as Shoeybi et al. 2019 have them: columns, then rows, one all_reduce forward and one backward for each; embeddings
and the loss by vocabulary; with `sequence=on` norms and dropout along the sequence (Korthikanti et al. 2022).

Needs: a model whose path depends on shapes alone. Sizes that don't divide are split unevenly where that is right,
else left whole; nothing to split at all is refused.
Promises: losses, gradients and parameters are those of one rank, up to rounding; dropout too, on CPUs. Attention that
drops and is split is computed step by step: torch's fused one draws its mask inside.
Traffic per micro-batch: what the graph says, counted by a dry run on fake tensors.
"""

from __future__ import annotations

from typing import Any

from paceline.parallel.graph_model import Function, SplitModel


def run_whole(split: SplitModel, key: str, function: Function, batch: Any, tensors: list[Any], training: bool) -> Any:
    """Run a function of the split model on one batch where there is one stage; return its result, rebuilt."""
    program = split.program(key, function, batch, training)
    (stage,) = program.stages
    return program.captured.rebuild(stage(tensors))
