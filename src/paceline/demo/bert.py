"""Define BERT for masked language modelling (Devlin et al. 2019), as a plain torch module.

Parameter names and numerics are those of transformers' BertForMaskedLM, so weights that are trained here
load there; a test compares the two. The head runs only on masked positions, as Google's original does.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True, slots=True)
class BertConfig:
    """Sizes, named as transformers names them. The defaults are the benchmarks'; the demo's BERT is smaller."""

    vocab_size: int = 4096
    hidden_size: int = 256
    num_hidden_layers: int = 4
    num_attention_heads: int = 4
    intermediate_size: int = 1024
    max_position_embeddings: int = 128
    type_vocab_size: int = 2
    layer_norm_eps: float = 1e-12
    initializer_range: float = 0.02


class Embeddings(nn.Module):
    """Token, position and segment embeddings, added and normalised: (batch, length) to (batch, length, hidden)."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.position_embeddings = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.token_type_embeddings = nn.Embedding(config.type_vocab_size, config.hidden_size)
        self.LayerNorm = nn.LayerNorm(config.hidden_size, config.layer_norm_eps)

    def forward(self, input_ids: Tensor) -> Tensor:
        """Embed one segment: (batch, length) to (batch, length, hidden)."""
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)
        embedded = self.word_embeddings(input_ids) + self.position_embeddings(positions)
        # Only one segment: every token has the first type, as transformers does without token_type_ids.
        return self.LayerNorm(embedded + self.token_type_embeddings.weight[0])  # type: ignore[no-any-return]


class SelfAttention(nn.Module):
    """Multi-head attention over the whole sequence."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.heads = config.num_attention_heads
        self.query = nn.Linear(config.hidden_size, config.hidden_size)
        self.key = nn.Linear(config.hidden_size, config.hidden_size)
        self.value = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, hidden: Tensor) -> Tensor:
        """Map (batch, length, hidden) to the same shape."""
        batch, length, _ = hidden.shape
        # Each (batch, heads, length, hidden / heads).
        query = self.query(hidden).view(batch, length, self.heads, -1).transpose(1, 2)
        key = self.key(hidden).view(batch, length, self.heads, -1).transpose(1, 2)
        value = self.value(hidden).view(batch, length, self.heads, -1).transpose(1, 2)
        attended = F.scaled_dot_product_attention(query, key, value)
        return attended.transpose(1, 2).reshape(batch, length, -1)


class Output(nn.Module):
    """A linear layer, the residual, and the norm after it."""

    def __init__(self, config: BertConfig, width: int) -> None:
        super().__init__()
        self.dense = nn.Linear(width, config.hidden_size)
        self.LayerNorm = nn.LayerNorm(config.hidden_size, config.layer_norm_eps)

    def forward(self, hidden: Tensor, residual: Tensor) -> Tensor:
        """Map (batch, length, width) and (batch, length, hidden) to the latter's shape."""
        return self.LayerNorm(self.dense(hidden) + residual)  # type: ignore[no-any-return]


class Layer(nn.Module):
    """One encoder layer: attention, then two linear layers."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.attention = nn.ModuleDict({"self": SelfAttention(config), "output": Output(config, config.hidden_size)})
        self.intermediate = nn.ModuleDict({"dense": nn.Linear(config.hidden_size, config.intermediate_size)})
        self.output = Output(config, config.intermediate_size)

    def forward(self, hidden: Tensor) -> Tensor:
        """Map (batch, length, hidden) to the same shape."""
        attended = self.attention["output"](self.attention["self"](hidden), hidden)
        return self.output(F.gelu(self.intermediate["dense"](attended)), attended)  # type: ignore[no-any-return]


class Transform(nn.Module):
    """The head's own layer before the vocabulary."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.LayerNorm = nn.LayerNorm(config.hidden_size, config.layer_norm_eps)

    def forward(self, hidden: Tensor) -> Tensor:
        """Map (positions, hidden) to the same shape."""
        return self.LayerNorm(F.gelu(self.dense(hidden)))  # type: ignore[no-any-return]


class Predictions(nn.Module):
    """Scores over the vocabulary by the token embeddings themselves (tied)."""

    def __init__(self, config: BertConfig, embeddings: nn.Embedding) -> None:
        super().__init__()
        self.transform = Transform(config)
        self.decoder = nn.Linear(config.hidden_size, config.vocab_size)
        self.decoder.weight = embeddings.weight
        self.bias = self.decoder.bias  # transformers has it under both names

    def forward(self, hidden: Tensor) -> Tensor:
        """Map (positions, hidden) to (positions, vocabulary)."""
        return self.decoder(self.transform(hidden))  # type: ignore[no-any-return]


class Bert(nn.Module):
    """BERT with its masked-language-modelling head."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        layers = nn.ModuleList([Layer(config) for _ in range(config.num_hidden_layers)])
        embeddings = Embeddings(config)
        self.config = config
        self.bert = nn.ModuleDict({"embeddings": embeddings, "encoder": nn.ModuleDict({"layer": layers})})
        self.cls = nn.ModuleDict({"predictions": Predictions(config, embeddings.word_embeddings)})
        self.apply(self._initialise)

    def forward(self, input_ids: Tensor, chosen: Tensor | None = None) -> Tensor:
        """Return scores over the vocabulary.

        Args:
            input_ids: the token numbers, of shape (batch, length).
            chosen: the positions that scores are made for: (batch, k) numbers of positions, or (batch, length) bool;
                all where None. With numbers no shape depends on values, as tensor and pipeline need.

        Returns:
            The scores, of shape (positions, vocabulary), sequence by sequence.
        """
        hidden = self.bert["embeddings"](input_ids)
        for layer in self.bert["encoder"]["layer"]:  # type: ignore[index]
            hidden = layer(hidden)
        return self.cls["predictions"](_picked(hidden, chosen))  # type: ignore[no-any-return]

    def _initialise(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=self.config.initializer_range)
        if isinstance(module, nn.Linear):
            nn.init.zeros_(module.bias)
        if isinstance(module, Embeddings):  # after its parts: `apply` comes to a module's children first
            with torch.no_grad():
                module.position_embeddings.weight.copy_(self._positions())
        if isinstance(module, SelfAttention):
            # A token first attends to its like, by content and position. From unrelated values a small model takes
            # thousands of steps to find its neighbours.
            with torch.no_grad():
                module.key.weight.copy_(module.query.weight)

    def _positions(self) -> Tensor:
        """Return sinusoids (Vaswani et al. 2017), as large as the other embeddings: near positions are alike."""
        config = self.config
        columns = torch.arange(config.hidden_size)
        rates = 10_000.0 ** -(columns // 2 * 2 / config.hidden_size)
        angles = torch.arange(config.max_position_embeddings).unsqueeze(-1) * rates + torch.pi / 2 * (columns % 2)
        return 2**0.5 * config.initializer_range * torch.sin(angles)


def _picked(hidden: Tensor, chosen: Tensor | None) -> Tensor:
    if chosen is None:
        return hidden.flatten(0, 1)
    if chosen.dtype == torch.bool:
        return hidden[chosen]
    indices = chosen.unsqueeze(-1).expand(-1, -1, hidden.shape[-1])  # (batch, k, hidden)
    return hidden.gather(1, indices).flatten(0, 1)
