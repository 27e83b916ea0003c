"""Three causal language models, as workloads: GPT-2 and Llama of transformers, and one of plain torch with a cache."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import paceline

WORDS, LENGTH = 48, 32


class Block(nn.Module):
    def __init__(self, width, heads, dropout):
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.inner = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Dropout(dropout), nn.Linear(4 * width, width)
        )

    def split(self, x):
        return x.view(x.shape[0], x.shape[1], self.heads, -1).transpose(1, 2)

    def forward(self, hidden, cache):
        x = self.first(hidden)
        query, key, value = self.split(self.query(x)), self.split(self.key(x)), self.split(self.value(x))
        is_first = True
        if cache is not None:
            if self in cache:
                is_first = False
                key, value = torch.cat([cache[self][0], key], 2), torch.cat([cache[self][1], value], 2)
            cache[self] = (key, value)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=is_first)
        hidden = hidden + self.out(mixed.transpose(1, 2).reshape(hidden.shape))
        return hidden + self.inner(self.second(hidden))


class Decoder(nn.Module):
    """Two blocks of plain torch; `cache` keeps the keys and values of each, and how many there are."""

    def __init__(self, dropout=0.0, width=32, heads=4):
        super().__init__()
        self.words = nn.Embedding(WORDS, width)
        self.places = nn.Embedding(LENGTH, width)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(2))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, WORDS, bias=False)

    def forward(self, tokens, cache=None):
        begin = 0
        if cache is not None:
            begin = cache.get("length", 0)
            cache["length"] = begin + tokens.shape[1]
        hidden = self.words(tokens) + self.places(torch.arange(begin, begin + tokens.shape[1]))
        for block in self.blocks:
            hidden = block(hidden, cache)
        return self.head(self.norm(hidden))


def gpt2():
    sizes = {"vocab_size": WORDS, "n_positions": LENGTH, "n_embd": 32, "n_layer": 2, "n_head": 4}
    drops = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    return GPT2LMHeadModel(GPT2Config(**sizes, **drops, bos_token_id=0, eos_token_id=0))


def llama():
    sizes = {"vocab_size": WORDS, "max_position_embeddings": LENGTH, "hidden_size": 32, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 64}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, bos_token_id=0, eos_token_id=0))


DECODERS = {"plain": Decoder, "gpt2": gpt2, "llama": llama}


def loss(model, batch):
    result = model(batch)
    logits = getattr(result, "logits", result)
    total = F.cross_entropy(logits[:, :-1].flatten(0, 1), batch[:, 1:].flatten(), reduction="sum")
    return total, batch[:, 1:].numel()


def samples():
    """Rows that count up by their own number, so that there is something to learn."""
    rows = torch.arange(24)[:, None] + torch.arange(10) * (1 + torch.arange(24)[:, None] % 3)
    return list(rows % WORDS)


def model_of(name):
    torch.manual_seed(3)
    return DECODERS[name]()


def workload(name, **parts):
    """Six steps in float64."""
    usual = {
        "model": lambda: model_of(name),
        "loss": loss,
        "optimizer": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2),
        "data": samples(),
        "batch_size": 8,
        "steps": 6,
        "precision": "float64",
    }
    return paceline.Workload(**{**usual, **parts})
