"""Define seven models whose memory is predicted and measured: small for CPUs, and as large as people use for GPUs."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import paceline

# Of the small models.
BATCH = 8
LENGTH = 48  # tokens
VOCABULARY = 800
SMALL: dict[str, Any] = {"vocab_size": VOCABULARY, "hidden_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4}


def bert(is_full: bool = False) -> nn.Module:
    """Return BERT with its masked-language head; in full BERT-Base."""
    from transformers import BertConfig, BertForMaskedLM

    sizes: dict[str, Any] = {} if is_full else {**SMALL, "intermediate_size": 384, "max_position_embeddings": 64}
    return BertForMaskedLM(BertConfig(**sizes))


def gpt2(is_full: bool = False) -> nn.Module:
    """Return GPT-2; in full the one of 124 million parameters."""
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes: dict[str, Any] = {"vocab_size": VOCABULARY, "n_embd": 96, "n_layer": 4, "n_head": 4, "n_positions": 64}
    sizes |= {"bos_token_id": 1, "eos_token_id": 2}
    return GPT2LMHeadModel(GPT2Config(**({} if is_full else sizes), use_cache=False))


def llama(is_full: bool = False) -> nn.Module:
    """Return a Llama; in full with the shapes of TinyLlama and half of its layers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {**SMALL, "num_key_value_heads": 2, "intermediate_size": 256, "max_position_embeddings": 64}
    full: dict[str, Any] = {
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 11,
        "num_key_value_heads": 4,
    }
    return LlamaForCausalLM(LlamaConfig(**(full if is_full else sizes), use_cache=False))


def t5(is_full: bool = False) -> nn.Module:
    """Return T5, which has an encoder and a decoder; in full T5-base."""
    from transformers import T5Config, T5ForConditionalGeneration

    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "d_model": 96,
        "d_kv": 24,
        "d_ff": 256,
        "num_layers": 3,
        "num_heads": 4,
    }
    full: dict[str, Any] = {"d_model": 768, "d_ff": 3072, "num_layers": 12, "num_heads": 12}
    more: dict[str, Any] = {"decoder_start_token_id": 0, "use_cache": False}
    return T5ForConditionalGeneration(T5Config(**(full if is_full else sizes), **more))


def vit(is_full: bool = False) -> nn.Module:
    """Return a vision transformer; in full ViT-Base."""
    from transformers import ViTConfig, ViTForImageClassification

    sizes: dict[str, Any] = {name: value for name, value in SMALL.items() if name != "vocab_size"}
    sizes |= {"intermediate_size": 384, "image_size": 32, "patch_size": 8}
    more: dict[str, Any] = {"num_labels": 10}
    return ViTForImageClassification(ViTConfig(**({} if is_full else sizes), **more))


class ResidualBlock(nn.Module):
    """Two convolutions and a residual connection."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1)
        self.second = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return images of the same shape, (batch, channels, height, width)."""
        return images + self.second(F.relu(self.first(F.relu(images))))  # type: ignore[no-any-return]


def cnn(is_full: bool = False) -> nn.Module:
    """Return a residual network of convolutions."""
    channels, count = (256, 8) if is_full else (48, 3)
    blocks = [ResidualBlock(channels) for _ in range(count)]
    first = nn.Conv2d(3, channels, 3, padding=1)
    last = nn.Linear(16 * channels, 10)  # 4 x 4 places of each channel
    return nn.Sequential(first, *blocks, nn.AdaptiveAvgPool2d(4), nn.Flatten(), last)


def mlp(is_full: bool = False) -> nn.Module:
    """Return a multilayer perceptron of linear layers and GELUs."""
    width = 8192 if is_full else 384
    blocks = [nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(4)]
    return nn.Sequential(nn.Linear(192, width), *blocks, nn.Linear(width, 10))


MODELS = {model.__name__: model for model in (bert, gpt2, llama, t5, vit, cnn, mlp)}
OPTIMIZERS = {
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3),
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9),
}


def _text_loss(model: Any, batch: Any) -> Any:
    scores = model(input_ids=batch).logits
    return F.cross_entropy(scores.flatten(0, 1), batch.flatten(), reduction="sum"), batch.numel()


def _pair_loss(model: Any, batch: Any) -> Any:
    scores = model(input_ids=batch, labels=batch).logits
    return F.cross_entropy(scores.flatten(0, 1), batch.flatten(), reduction="sum"), batch.numel()


def _image_loss(model: Any, batch: Any) -> Any:
    images, labels = batch
    scores = model(images)
    scores = getattr(scores, "logits", scores)  # transformers' models return an object
    return F.cross_entropy(scores, labels, reduction="sum"), len(labels)


def workload(name: str, optimizer: str = "adamw", **parts: Any) -> paceline.Workload:
    """Return the workload of a small model, with made-up data.

    Args:
        name: of `MODELS`.
        optimizer: of `OPTIMIZERS`.
        parts: of the Workload, where they differ from the usual.
    """
    return _workload(name, optimizer, (False, LENGTH, 32), {"batch_size": BATCH, **parts})


def full_workload(name: str, batch: int, length: int, **parts: Any) -> paceline.Workload:
    """Return the workload of a model of the size that people use, with made-up data.

    Args:
        name: of `MODELS`.
        batch: samples in a step.
        length: words of a text, or pixels of an image's side.
        parts: of the Workload, where they differ from the usual.
    """
    return _workload(name, "adamw", (True, length, length), {"batch_size": batch, **parts})


def _workload(name: str, optimizer: str, sizes: tuple[bool, int, int], parts: dict[str, Any]) -> paceline.Workload:
    generator = torch.Generator().manual_seed(0)
    is_full, length, pixels = sizes
    samples = 4 * parts["batch_size"]  # more than the three steps take
    if name in ("vit", "cnn", "mlp"):
        shape = (192,) if name == "mlp" else (3, pixels, pixels)
        data: Any = [(torch.randn(shape, generator=generator), number % 10) for number in range(samples)]
        loss = _image_loss
    else:
        data = list(torch.randint(0, VOCABULARY, (samples, length), generator=generator))
        loss = _pair_loss if name == "t5" else _text_loss
    make = MODELS[name]
    usual = {"model": lambda: make(is_full), "loss": loss, "optimizer": OPTIMIZERS[optimizer], "data": data}
    return paceline.Workload(**{**usual, "steps": 3, **parts})
