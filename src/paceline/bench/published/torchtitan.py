"""Llama as torchtitan trains it (FSDP2, bf16 parameters in the step, float32 kept), tried out without a GPU.

Published for it are reserved bytes and what fits: see `shared/data/published_measurements.csv`. Its rotary positions
are plain operations, and so was its norm by the end of 2024. The tables of mid-2024 are taken to be made with its fused
norm, which keeps what enters it and one number a row; that is an assumption: with the plain one Llama-2-13B would need
81.8 GiB of the 78 that there are, and it did run.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from paceline.comm.fake_world import fake_world
from paceline.nouns.profile import INPUTS, PARAMETERS, Recording
from paceline.train.allocations import Allocations
from paceline.train.as_on_gpu import as_on_gpu

aten = torch.ops.aten
_SAVED = (aten.mm.default, aten._scaled_dot_product_flash_attention.default)


@dataclass(frozen=True)
class Sizes:
    """Of a Llama."""

    width: int
    layers: int
    heads: int
    key_heads: int
    inner: int
    words: int


LLAMA = {
    "Llama-3.1-8B": Sizes(4096, 32, 32, 8, 14336, 128256),
    "Llama-2-13B": Sizes(5120, 40, 40, 40, 13824, 32000),
    "Llama-2-70B": Sizes(8192, 80, 64, 8, 28672, 32000),
    "Llama-3-70B": Sizes(8192, 80, 64, 8, 28672, 128256),
}


FUSED = ("4d88a8a44", "395a52627")  # the table's revisions of mid-2024


class Norm(nn.Module):
    def __init__(self, width: int, is_fused: bool) -> None:
        super().__init__()
        self.weight, self.is_fused = nn.Parameter(torch.ones(width)), is_fused

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.is_fused:
            return F.layer_norm(x, (x.shape[-1],), self.weight)  # it keeps the same
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).type_as(x) * self.weight


def turned(x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * turns[: x.shape[1]].view(1, x.shape[1], 1, -1)).flatten(3).type_as(x)


class Block(nn.Module):
    def __init__(self, sizes: Sizes, is_fused: bool) -> None:
        super().__init__()
        self.sizes, width, head = sizes, sizes.width, sizes.width // sizes.heads
        self.query, self.key, self.value, self.output = (
            nn.Linear(width, heads * head, bias=False)
            for heads in (sizes.heads, sizes.key_heads, sizes.key_heads, sizes.heads)
        )
        self.gate, self.up = (nn.Linear(width, sizes.inner, bias=False) for _ in range(2))
        self.down = nn.Linear(sizes.inner, width, bias=False)
        self.norms = nn.ModuleList([Norm(width, is_fused), Norm(width, is_fused)])

    def forward(self, x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
        x = x + self.attend(self.norms[0](x), turns)
        y = self.norms[1](x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))

    def attend(self, x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
        batch, length, sizes = *x.shape[:2], self.sizes
        head, times = sizes.width // sizes.heads, sizes.heads // sizes.key_heads
        query, key, value = (layer(x).view(batch, length, -1, head) for layer in (self.query, self.key, self.value))
        query, key = turned(query, turns), turned(key, turns)

        def repeated(one: torch.Tensor) -> torch.Tensor:
            wide = one[:, :, :, None, :].expand(batch, length, sizes.key_heads, times, head)
            return wide.reshape(batch, length, sizes.heads, head)

        parts = [one.transpose(1, 2) for one in (query, repeated(key), repeated(value))]
        mixed = F.scaled_dot_product_attention(*parts, is_causal=True)
        return self.output(mixed.transpose(1, 2).contiguous().view(batch, length, -1))


class Llama(nn.Module):
    def __init__(self, sizes: Sizes, length: int, is_fused: bool) -> None:
        super().__init__()
        self.words = nn.Embedding(sizes.words, sizes.width)
        self.layers = nn.ModuleList(Block(sizes, is_fused) for _ in range(sizes.layers))
        self.norm, self.scores = Norm(sizes.width, is_fused), nn.Linear(sizes.width, sizes.words, bias=False)
        half = sizes.width // sizes.heads // 2
        self.register_buffer("turns", torch.empty(length, half, dtype=torch.complex64))

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.words(words)
        for layer in self.layers:
            x = layer(x, self.turns)
        return self.scores(self.norm(x))


def every_second_product() -> Any:
    """Selective recomputation by operation: attention and every second matrix product are kept."""
    products: Counter[bool] = Counter()

    def policy(context: Any, operation: Any, *arguments: Any, **named: Any) -> CheckpointPolicy:
        is_product = operation is aten.mm.default
        products[context.is_recompute] += is_product
        is_kept = operation in _SAVED and not (is_product and products[context.is_recompute] % 2 == 0)
        return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def recompute(model: Llama, how: str) -> None:
    for number, layer in enumerate(model.layers):
        if how == "selective op":
            wrapped = checkpoint_wrapper(layer, preserve_rng_state=False, context_fn=every_second_product)
        elif how == "full" or (how == "selective layer" and number % 2 == 0):
            wrapped = checkpoint_wrapper(layer, preserve_rng_state=False)
        else:
            continue
        model.layers[number] = wrapped


def shard(model: Llama, mesh: Any) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for number, layer in enumerate(model.layers):
        is_last = number == len(model.layers) - 1
        fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=not is_last)
    fully_shard(model, mesh=mesh, mp_policy=policy)


def recorded(row: dict[str, str]) -> Recording:
    """Two steps of rank 0, as a row of the table describes them."""
    name, ranks, how = row["model"], int(row["gpus"]), row["act_ckpt"]
    batch, length, is_fused = int(row["micro_batch"]), int(row["seq_len"]), row["rev"] in FUSED
    sizes, recorder = LLAMA[name], Allocations()
    recorder.sees_scratch = False
    propagate = ShardingPropagator._propagate_tensor_meta_non_cached

    def unseen(*arguments: Any, **named: Any) -> Any:
        """DTensor asks for shapes with tensors that nobody will have."""
        mode, recorder.fake_mode = recorder.fake_mode, None
        try:
            return propagate(*arguments, **named)
        finally:
            recorder.fake_mode = mode

    with fake_world(0, ranks), mock.patch.object(ShardingPropagator, propagate.__name__, unseen):
        mesh = init_device_mesh("cpu", (ranks,))
        recorder.fake_mode = FakeTensorMode(allow_non_fake_inputs=True)
        with as_on_gpu("cuda", recorder), recorder.fake_mode:
            model = Llama(sizes, length, is_fused)
            recompute(model, how)
            shard(model, mesh)
            optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
            words, labels = (torch.randint(0, sizes.words, (batch, length)) for _ in range(2))
            recorder.note_all(model.named_parameters(), PARAMETERS)
            recorder.note_all((("batch", one) for one in (*model.buffers(), words, labels)), INPUTS)
            with recorder.watching():
                for _ in range(2):
                    recorder.recording.last_step = len(recorder.recording.events)
                    step(model, optimizer, words, labels, recorder)
        recorder.has_ended = True
    return recorder.recording


def step(model: Llama, optimizer: Any, words: torch.Tensor, labels: torch.Tensor, recorder: Allocations) -> None:
    recorder.phase = "forward"
    scores = model(words)
    loss = F.cross_entropy(scores.flatten(0, 1).float(), labels.flatten())
    del scores
    loss.backward()
    recorder.phase = "update"
    nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
    optimizer.step()
    optimizer.zero_grad()
