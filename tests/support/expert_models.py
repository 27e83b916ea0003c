"""Small mixtures of experts, written by hand and as transformers has them: what `expert` spreads over ranks."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import paceline

from support.rank_comparisons import two_steps

WORDS, WIDTH, LENGTH, BATCH, EXPERTS = 40, 16, 8, 4, 4


class Mixture(nn.Module):
    """Experts by argsort, gather and scatter_add, as titan-like code has them; a router with a bias for its choice."""

    top, experts = 2, EXPERTS

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(WIDTH, self.experts, bias=False)
        self.up = nn.Parameter(torch.randn(self.experts, WIDTH, 24) / 4)
        self.gate = nn.Parameter(torch.randn(self.experts, WIDTH, 24) / 4)
        self.down = nn.Parameter(torch.randn(self.experts, 24, WIDTH) / 4)
        self.shared = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("choice_bias", torch.linspace(-1, 1, self.experts))

    def forward(self, x):
        shape = x.shape
        x = x.reshape(-1, shape[-1])
        scores = torch.sigmoid(self.router(x))
        chosen = torch.topk(scores + self.choice_bias, self.top, dim=1).indices
        weights = scores.gather(1, chosen)
        weights = weights / weights.sum(-1, keepdim=True)
        order = torch.argsort(chosen.view(-1), stable=True)
        counts = torch.histc(chosen.view(-1)[order].float(), bins=self.experts, min=0, max=self.experts - 1)
        ends = counts.cumsum(0).to(torch.int32)
        token = (order // self.top).reshape(-1, 1).expand(-1, shape[-1])
        rows = torch.gather(x, 0, token)
        made = F.silu(F.grouped_mm(rows, self.gate, offs=ends)) * F.grouped_mm(rows, self.up, offs=ends)
        made = F.grouped_mm(made, self.down, offs=ends)
        made = made * weights.view(-1)[order].unsqueeze(-1)
        return self.shared(x).scatter_add(0, token, made).view(shape)


class Lonely(Mixture):
    """Everything goes to two of eight experts: the others have no row."""

    top, experts = 1, 8

    def __init__(self):
        super().__init__()
        self.choice_bias.fill_(-9.0)
        self.choice_bias[2:4] = 9.0


class Counted(Mixture):
    """A mixture as people write it: sorted ids, a bias per expert, index_add, and a router's loss of what was counted.

    Rows are counted before they are sorted, or after it.
    """

    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.randn(self.experts, 24) / 4)

    def forward(self, x):
        tokens = x.flatten(0, 1)
        scores = self.router(tokens).softmax(-1)
        weights, chosen = scores.topk(self.top)
        expert, order = chosen.flatten().sort(stable=True)
        counts = self.count(chosen.flatten(), expert)
        ends = counts.cumsum(0).to(torch.int32)
        token = order // self.top
        made = F.gelu(F.grouped_mm(tokens.index_select(0, token), self.up, offs=ends) + self.bias[expert])
        made = F.grouped_mm(made, self.down, offs=ends) * weights.flatten()[order, None]
        share = counts.to(scores.dtype) / len(order)
        return torch.zeros_like(tokens).index_add(0, token, made).view_as(x), (share * scores.mean(0)).sum()

    def count(self, chosen, expert):
        return F.one_hot(chosen, self.experts).sum(0)


class CountedAfter(Counted):
    def count(self, chosen, expert):
        return torch.histc(expert.float(), self.experts, 0, self.experts - 1)


class Binned(Counted):
    def count(self, chosen, expert):
        return torch.bincount(chosen, minlength=self.experts)


class BinnedAfter(Counted):
    def count(self, chosen, expert):
        return expert.bincount(None, self.experts)


class Looped(nn.Module):
    """Experts of two layers in lists, called in a loop over those that are chosen; two choices, and a shared expert.

    It returns the router's scores too.
    """

    top, experts = 2, 5

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(WIDTH, self.experts)
        self.up = nn.ModuleList([nn.Linear(WIDTH, 24) for _ in range(self.experts)])
        self.down = nn.ModuleList([nn.Linear(24, WIDTH) for _ in range(self.experts)])
        self.shared = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        rows = x.flatten(0, 1)
        scores = self.router(rows)
        weights, chosen = scores.softmax(-1).topk(self.top)
        made = torch.zeros_like(rows)
        for expert in chosen.unique().tolist():
            where, slot = torch.where(chosen == expert)
            one = self.down[expert](F.gelu(self.up[expert](rows[where])))
            made.index_add_(0, where, one * weights[where, slot, None])
        balance = scores.softmax(-1).mean(0).square().sum()
        return self.shared(x) + made.view_as(x), balance


class Even(Mixture):
    """Every expert gets as many rows, whatever the router says: what a planner takes for granted."""

    def forward(self, x):
        shape = x.shape
        x = x.reshape(-1, shape[-1])
        chosen = (torch.arange(len(x))[:, None] + torch.arange(self.top)) % self.experts
        weights = torch.sigmoid(self.router(x)).gather(1, chosen)
        ids, order = torch.sort(chosen.view(-1))
        ends = torch.histc(ids.float(), self.experts, 0, self.experts - 1).cumsum(0).to(torch.int32)
        made = F.grouped_mm(F.silu(F.grouped_mm(x[order // self.top], self.up, offs=ends)), self.down, offs=ends)
        made = made * weights.view(-1)[order].unsqueeze(-1)
        back = torch.empty_like(chosen.view(-1)).scatter(0, order, torch.arange(len(order)))
        return made[back].view(len(x), self.top, -1).sum(1).view(shape)


class Reader(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.norm, self.last = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mixture = kind()
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, ids):
        x = self.words(ids)
        query, key, value = (
            part.view(*part.shape[:2], 4, -1).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1)
        )
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        made = self.mixture(self.last(x))
        if isinstance(made, tuple):
            made, self.balance = made
        return self.head(x + made)


def word_loss(model, batch):
    scores = model(batch["ids"])
    return F.cross_entropy(scores.flatten(0, 1), batch["labels"].flatten(), reduction="sum"), batch["labels"].numel()


class Balanced(Reader):
    """It returns the router's loss beside its scores."""

    def forward(self, ids):
        scores = Reader.forward(self, ids)
        return scores, self.__dict__.pop("balance")


def balanced_loss(model, batch):
    scores, balance = model(batch["ids"])
    mean = F.cross_entropy(scores.flatten(0, 1), batch["labels"].flatten()) + 0.1 * balance
    return mean * len(scores), len(scores)


def language_loss(model, batch):
    """A mean over words, with the router's own loss where the model adds it."""
    count = len(batch["ids"])
    return model(input_ids=batch["ids"], labels=batch["labels"], use_cache=False).loss * count, count


def _config(name: str, **parts: Any) -> Any:
    import transformers

    sizes = {"vocab_size": WORDS, "hidden_size": WIDTH, "intermediate_size": 24, "num_hidden_layers": 1,
             "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32, **parts}  # fmt: skip
    return getattr(transformers, name)(**sizes)


def _language_model(name: str, **parts: Any) -> nn.Module:
    import transformers

    model: nn.Module = transformers.AutoModelForCausalLM.from_config(_config(name, **parts))
    return model


def _of_transformers(name: str, **parts: Any) -> tuple[Callable[[], nn.Module], Callable[[Any, Any], Any]]:
    return functools.partial(_language_model, name, num_experts_per_tok=2, **parts), language_loss


def _switch() -> nn.Module:
    """Experts in a loop, some of whose rows are more than an expert takes."""
    import transformers

    config = transformers.SwitchTransformersConfig(
        vocab_size=WORDS, d_model=WIDTH, d_kv=4, d_ff=24, num_layers=2, num_sparse_encoder_layers=1, num_heads=4,
        num_decoder_layers=2, num_sparse_decoder_layers=1, num_experts=EXPERTS, expert_capacity=2, dropout_rate=0.0,
        router_jitter_noise=0.0, decoder_start_token_id=0, pad_token_id=0,
    )  # fmt: skip
    return transformers.SwitchTransformersForConditionalGeneration(config)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[Any, Any], Any]]] = {
    "mixture": (functools.partial(Reader, Mixture), word_loss),
    "lonely": (functools.partial(Reader, Lonely), word_loss),
    "counted": (functools.partial(Balanced, Counted), balanced_loss),
    "counted_after": (functools.partial(Balanced, CountedAfter), balanced_loss),
    "binned": (functools.partial(Balanced, Binned), balanced_loss),
    "binned_after": (functools.partial(Balanced, BinnedAfter), balanced_loss),
    "mixtral": _of_transformers("MixtralConfig", num_local_experts=EXPERTS, output_router_logits=True),
    "qwen3_moe": _of_transformers("Qwen3MoeConfig", num_experts=EXPERTS, moe_intermediate_size=24, head_dim=4),
    "olmoe": _of_transformers("OlmoeConfig", num_experts=EXPERTS, output_router_logits=True),
    "deepseek_v3": _of_transformers(
        "DeepseekV3Config", n_routed_experts=EXPERTS, moe_intermediate_size=24, n_group=2, topk_group=2,
        num_key_value_heads=4, first_k_dense_replace=0, q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=4,
        v_head_dim=4, qk_nope_head_dim=4, n_shared_experts=1,
    ),
    "looped": (functools.partial(Balanced, Looped), balanced_loss),
    "switch": (_switch, language_loss),
    "gpt_oss": _of_transformers("GptOssConfig", num_local_experts=EXPERTS, head_dim=4),
}  # fmt: skip


def rows(count: int = 2 * BATCH, length: int = LENGTH) -> list[dict[str, Any]]:
    random = torch.Generator().manual_seed(5)
    made = []
    for _ in range(count):
        ids = torch.randint(3, WORDS, (length,), generator=random)
        made.append({"ids": ids, "labels": ids})
    return made


def workload(name: str, **parts: Any) -> paceline.Workload:
    model, loss = MODELS[name]
    return two_steps(**{"model": model, "loss": loss, "data": rows(), "batch_size": BATCH, **parts})


def long_workload(name: str, **parts: Any) -> paceline.Workload:
    """Even use of experts, in float32, on more tokens than parameters."""
    even = {"model": functools.partial(Reader, Even), "loss": word_loss}
    return workload("mixture", **{**even, "data": rows(length=1024), "precision": "float32", **parts})
