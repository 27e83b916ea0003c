"""Seven models of some size, and what a real step of them holds at most: measured by torch's profiler."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

import paceline
from paceline.comm import words
from paceline.train.job import Job

BATCH, LENGTH, WORDS = 8, 48, 800
SIZES = {"vocab_size": WORDS, "hidden_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4}


def bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(BertConfig(**SIZES, intermediate_size=384, max_position_embeddings=64))


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"vocab_size": WORDS, "n_embd": 96, "n_layer": 4, "n_head": 4, "n_positions": 64}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=1, eos_token_id=2, use_cache=False))


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    more = {"num_key_value_heads": 2, "intermediate_size": 256, "max_position_embeddings": 64, "use_cache": False}
    return LlamaForCausalLM(LlamaConfig(**SIZES, **more))


def t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"vocab_size": WORDS, "d_model": 96, "d_kv": 24, "d_ff": 256, "num_layers": 3, "num_heads": 4}
    config = T5Config(**sizes, decoder_start_token_id=0, use_cache=False)
    return T5ForConditionalGeneration(config)


def vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    sizes = {name: value for name, value in SIZES.items() if name != "vocab_size"}
    config = ViTConfig(**sizes, intermediate_size=384, image_size=32, patch_size=8, num_labels=10)
    return ViTForImageClassification(config)


class Block(nn.Module):
    """Two convolutions and a way past them."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(channels, channels, 3, padding=1) for _ in range(2))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return images + self.second(F.relu(self.first(F.relu(images))))


def cnn() -> nn.Module:
    blocks = [Block(48) for _ in range(3)]
    return nn.Sequential(
        nn.Conv2d(3, 48, 3, padding=1), *blocks, nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(768, 10)
    )


def mlp() -> nn.Module:
    blocks = [nn.Sequential(nn.Linear(384, 384), nn.GELU()) for _ in range(4)]
    return nn.Sequential(nn.Linear(192, 384), *blocks, nn.Linear(384, 10))


MODELS = {one.__name__: one for one in (bert, gpt2, llama, t5, vit, cnn, mlp)}
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
    scores = getattr(scores, "logits", scores)
    return F.cross_entropy(scores, labels, reduction="sum"), len(labels)


def workload(name: str, optimizer: str = "adamw", **parts: Any) -> paceline.Workload:
    """A model with data that fit it."""
    draws = torch.Generator().manual_seed(0)
    if name in ("vit", "cnn", "mlp"):
        shape = (192,) if name == "mlp" else (3, 32, 32)
        data: Any = [(torch.randn(shape, generator=draws), number % 10) for number in range(4 * BATCH)]
        loss = _image_loss
    else:
        data = list(torch.randint(0, WORDS, (4 * BATCH, LENGTH), generator=draws))
        loss = _pair_loss if name == "t5" else _text_loss
    usual = {"model": MODELS[name], "loss": loss, "optimizer": OPTIMIZERS[optimizer], "data": data}
    return paceline.Workload(**{**usual, "batch_size": BATCH, "steps": 3, **parts})


def measured(rank: int, plan: Any, name: str, parts: dict[str, Any]) -> tuple[int, int, list[dict[str, Any]]]:
    """Of this rank: the most live bytes in the last step, the bytes at its end, and the ledger's rows of that step.

    The profiler hears only the threads that it was started in. Gloo lets go of what it has sent in a thread of its
    own; so after each collective there is time for that before this thread lets go.
    """
    words.init()
    made = workload(name, **parts)  # its data are no part of the job
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        job = Job(made, plan)
        began = 0
        for batch in job.batches():
            began = time.time_ns()
            job.ledger.calls.clear()
            job.ledger.payload_bytes.clear()
            job.step(batch)
        rows = job.ledger.rows()
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        if event.start_ns() >= began:
            peak = max(peak, live)
    return peak, live, rows


def with_time_to_let_go() -> None:
    """See `measured`."""
    from torch._C._distributed_c10d import Work

    wait = Work.wait

    def slowly(self: Any, *arguments: Any) -> Any:
        result = wait(self, *arguments)
        time.sleep(0.01)
        return result

    if wait.__name__ != "slowly":
        Work.wait = slowly  # type: ignore[method-assign]
