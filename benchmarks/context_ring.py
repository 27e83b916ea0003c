"""Time ring attention against torch's experimental context parallelism, on the ranks of this host.

torch's has no kernel for CPUs registered; its ring itself (`_templated_ring_attention`, forward and backward, with its
load balancing) is called with the CPU's fused kernel. Both run forward and backward on the same pieces, in turn.

    python benchmarks/context_ring.py --ranks 2 --positions 2048 --rounds 20
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from paceline.comm.collectives import AxisComm
from paceline.comm.differentiable import take_piece
from paceline.comm.ledger import Ledger
from paceline.graph.context.context_exchanges import AttentionSplit, SequenceExchanges

aten = torch.ops.aten


def main() -> int:
    """Start the ranks; print the median times, their ratio, and that results agree."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--positions", type=int, default=2048, help="of the whole sequence")
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--width", type=int, default=64, help="of a head")
    parser.add_argument("--rounds", type=int, default=20)
    arguments = parser.parse_args()
    if arguments.positions % (2 * arguments.ranks):
        parser.error(f"torch's load balancing needs positions that divide by {2 * arguments.ranks}")
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_rank, (arguments, f"{folder}/store"), arguments.ranks)  # type: ignore[no-untyped-call]
    return 0


def _rank(rank: int, arguments: argparse.Namespace, store: str) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    ranks = arguments.ranks
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    comm = AxisComm("context", rank, tuple(range(ranks)), None, Ledger())
    half = arguments.positions // 2
    blocks = (half, -half)
    generator = torch.Generator().manual_seed(0)
    shape = (1, arguments.heads, arguments.positions, arguments.width)
    whole = [torch.randn(shape, generator=generator) for _ in range(4)]
    pieces = [take_piece(tensor, (2, blocks), rank, ranks) for tensor in whole]
    exchanges = SequenceExchanges(comm)
    split = AttentionSplit(blocks, blocks, 1)

    def paceline(query: Any, key: Any, value: Any) -> Any:
        return exchanges.attention(query, key, value, None, True, None, split)

    def torchs(query: Any, key: Any, value: Any) -> Any:
        return _TorchRing.apply(query, key, value)  # type: ignore[no-untyped-call]

    times: dict[str, list[float]] = {"paceline": [], "torch": []}
    made: dict[str, list[torch.Tensor]] = {}
    for number in range(arguments.rounds + 2):
        for name, function in (("paceline", paceline), ("torch", torchs)):
            leaves = [piece.clone().requires_grad_() for piece in pieces[:3]]
            dist.barrier()
            start = time.perf_counter()
            out = function(*leaves)
            out.backward(pieces[3])
            dist.barrier()
            if number >= 2:  # the first ones open connections
                times[name].append(time.perf_counter() - start)
            made[name] = [out.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]
    off = max(float((a - b).abs().max()) for a, b in zip(made["paceline"], made["torch"], strict=True))
    if rank == 0:
        ratios = [theirs / ours for ours, theirs in zip(times["paceline"], times["torch"], strict=True)]
        for name, seconds in times.items():
            print(f"{name:<10} {statistics.median(seconds) * 1e3:8.1f} ms a pass, median of {len(seconds)}")
        print(f"torch takes {statistics.median(ratios):.3f} times as long; results differ by at most {off:.1e}")
    dist.destroy_process_group()


class _TorchRing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        from torch.distributed.tensor.experimental._context_parallel import _attention

        def kernel(q: Any, k: Any, v: Any, is_causal: bool) -> Any:
            return aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, is_causal)

        group = dist.group.WORLD
        out, sums = _attention._templated_ring_attention(group, 2, kernel, query, key, value, is_causal=True)  # type: ignore[arg-type]
        ctx.save_for_backward(query, key, value, out, sums)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        from torch.distributed.tensor.experimental._context_parallel import _attention

        def kernel(is_causal: bool, **tensors: Any) -> Any:
            names = ("grad_out", "query", "key", "value", "out", "logsumexp")
            arguments = [tensors[name] for name in names]
            return aten._scaled_dot_product_flash_attention_for_cpu_backward(*arguments, 0.0, is_causal)

        query, key, value, out, sums = ctx.saved_tensors
        group = dist.group.WORLD
        found = _attention._templated_ring_attention_backward(
            group, 2, kernel, gradients[0], "grad_out", query, key, value, out, sums, True
        )  # type: ignore[arg-type]
        return found[:3]


if __name__ == "__main__":
    sys.exit(main())
