"""Twelve small models, unmodified, as Workloads: what every plan is compared on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import paceline

BATCH, LENGTH, WORDS = 8, 8, 96
STORIES = Path(__file__).parents[3] / "shared" / "data" / "stories260K"
SMALL = {"vocab_size": WORDS, "hidden_size": 32, "num_attention_heads": 4}
STILL = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def bert(layers: int = 4) -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(
        BertConfig(**SMALL, **STILL, num_hidden_layers=layers, intermediate_size=64, max_position_embeddings=32)
    )


def distilbert(layers: int = 4) -> nn.Module:
    from transformers import DistilBertConfig, DistilBertForMaskedLM

    sizes = {"vocab_size": WORDS, "dim": 32, "n_layers": layers, "n_heads": 4, "hidden_dim": 64}
    return DistilBertForMaskedLM(
        DistilBertConfig(**sizes, dropout=0.0, attention_dropout=0.0, max_position_embeddings=32)
    )


def roberta(layers: int = 4) -> nn.Module:
    from transformers import RobertaConfig, RobertaForMaskedLM

    return RobertaForMaskedLM(
        RobertaConfig(**SMALL, **STILL, num_hidden_layers=layers, intermediate_size=64, max_position_embeddings=40)
    )


def gpt2(layers: int = 4) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"vocab_size": WORDS, "n_embd": 32, "n_layer": layers, "n_head": 4, "n_positions": 32}
    still = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(GPT2Config(**sizes, **still, bos_token_id=1, eos_token_id=2))


def llama(layers: int = 4) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {**SMALL, "num_hidden_layers": layers, "num_key_value_heads": 2, "intermediate_size": 64}
    return LlamaForCausalLM(LlamaConfig(**sizes, max_position_embeddings=32))


def qwen2(layers: int = 4) -> nn.Module:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    sizes = {**SMALL, "num_hidden_layers": layers, "num_key_value_heads": 2, "intermediate_size": 64}
    return Qwen2ForCausalLM(Qwen2Config(**sizes, max_position_embeddings=32, tie_word_embeddings=True))


def t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"vocab_size": WORDS, "d_model": 32, "d_kv": 8, "num_layers": 2, "num_decoder_layers": 2}
    more = {"num_heads": 4, "d_ff": 64, "dropout_rate": 0.0}
    return T5ForConditionalGeneration(T5Config(**sizes, **more, decoder_start_token_id=0, pad_token_id=0))


def vit(layers: int = 4) -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    sizes = {"hidden_size": 32, "num_hidden_layers": layers, "num_attention_heads": 4, "intermediate_size": 64}
    return ViTForImageClassification(ViTConfig(**sizes, **STILL, image_size=16, patch_size=4, num_labels=10))


class Encoder(nn.Module):
    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 32)
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers)
        self.head = nn.Linear(32, WORDS)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(self.words(ids)))


class Block(nn.Module):
    def __init__(self, before: int, after: int, stride: int, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.first = nn.Conv2d(before, after, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(after, after, 3, 1, 1, bias=False)
        self.norms = nn.ModuleList([norm(after), norm(after)])
        same = stride == 1 and before == after
        self.down = nn.Identity() if same else nn.Sequential(nn.Conv2d(before, after, 1, stride), norm(after))

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        hidden = F.relu(self.norms[0](self.first(image)), inplace=True)
        return F.relu(self.norms[1](self.second(hidden)) + self.down(image))


class ResNet(nn.Module):
    def __init__(self, norm: Callable[[int], nn.Module] = nn.BatchNorm2d) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, 1, 1), norm(8), nn.ReLU(inplace=True))
        self.layers = nn.Sequential(*(Block(a, b, s, norm) for a, b, s in ((8, 8, 1), (8, 16, 2), (16, 32, 2))))
        self.head = nn.Linear(32, 10)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return self.head(F.adaptive_avg_pool2d(self.layers(self.stem(image)), 1).flatten(1))


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 48), nn.Tanh(), nn.Linear(48, 10)
    )


def stories(layers: int = 5) -> nn.Module:
    """The stories260K Llama, or its first layers, with its real weights."""
    from transformers import LlamaForCausalLM

    return LlamaForCausalLM.from_pretrained(STORIES, num_hidden_layers=layers)


def _sum(scores: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, int]:
    flat = F.cross_entropy(scores.reshape(-1, scores.shape[-1]), labels.reshape(-1), reduction="sum")
    return flat, labels.numel()


def text_loss(model: Any, batch: Any) -> Any:
    return _sum(model(input_ids=batch["ids"], attention_mask=batch["mask"]).logits, batch["labels"])


def pair_loss(model: Any, batch: Any) -> Any:
    both = model(input_ids=batch["ids"], attention_mask=batch["mask"], labels=batch["labels"])
    return _sum(both.logits, batch["labels"])


def image_loss(model: Any, batch: Any) -> Any:
    scores = model(batch["image"])
    return _sum(getattr(scores, "logits", scores), batch["label"])


def plain_loss(model: Any, batch: Any) -> Any:
    return _sum(model(batch["ids"]), batch["labels"])


def vector_loss(model: Any, batch: Any) -> Any:
    return _sum(model(batch["vector"]), batch["label"])


def _rows(words: int = WORDS) -> list[dict[str, torch.Tensor]]:
    random = torch.Generator().manual_seed(5)
    rows = []
    for index in range(24):
        ids = torch.randint(3, words, (LENGTH,), generator=random)
        mask = torch.ones(LENGTH, dtype=torch.long)
        mask[LENGTH - index % 3 :] = 0
        rows.append({"ids": ids, "mask": mask, "labels": torch.randint(3, words, (LENGTH,), generator=random)})
    return rows


def _images() -> list[dict[str, torch.Tensor]]:
    random = torch.Generator().manual_seed(6)
    return [
        {
            "image": torch.randn(3, 16, 16, generator=random),
            "vector": torch.randn(32, generator=random),
            "label": torch.randint(0, 10, (), generator=random),
        }
        for _ in range(24)
    ]


MODELS: dict[str, tuple[Callable[..., nn.Module], Callable[[Any, Any], Any], Callable[[], Any]]] = {
    "bert": (bert, text_loss, _rows),
    "distilbert": (distilbert, text_loss, _rows),
    "roberta": (roberta, text_loss, _rows),
    "gpt2": (gpt2, text_loss, _rows),
    "llama": (llama, text_loss, _rows),
    "qwen2": (qwen2, text_loss, _rows),
    "t5": (t5, pair_loss, _rows),
    "vit": (vit, image_loss, _images),
    "encoder": (Encoder, plain_loss, _rows),
    "resnet": (ResNet, image_loss, _images),
    "mlp": (mlp, vector_loss, _images),
    "stories": (stories, text_loss, _rows),
}


def workload(name: str, **parts: Any) -> paceline.Workload:
    """Three steps of AdamW in float64 on batches of eight."""
    make, loss, data = MODELS[name]
    return paceline.Workload(
        **{
            "model": make,
            "loss": loss,
            "optimizer": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3),
            "data": data(),
            "batch_size": BATCH,
            "steps": 3,
            "precision": "float64",
            **parts,
        }
    )
