"""A workload of one architecture of transformers, built small from its configuration alone, or of a family.

    paceline verify --plan tensor=2 benchmarks/trials/small_architecture.py -- mixtral

The class is the first of a causal, masked, sequence-to-sequence, image, audio, CTC or speech model that transformers
has of the name, else the base model. Its loss is the model's own, times the number of samples; without one, the mean
square of its first output.
"""

from __future__ import annotations

import inspect
import logging
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from torch.utils._pytree import tree_leaves, tree_map
from transformers import AutoConfig
from transformers.models.auto import modeling_auto

import paceline

sys.path.insert(0, str(Path(__file__).parent))
from small_families import FAMILIES

logging.disable(logging.WARNING)
warnings.filterwarnings("ignore")
BATCH, LENGTH = 4, 16
VOCABULARY = 128
MOST_PARAMETERS = 20_000_000
MOST_S = 3.0  # of a core, for a forward pass: a larger model would show nothing more
_SIZES: dict[int, tuple[str, ...]] = {
    32: (
        "hidden_size", "d_model", "n_embd", "embed_dim", "dim", "emb_dim", "embedding_size", "hidden_dim", "model_dim",
        "projection_dim", "d_embed", "moe_intermediate_size", "expert_ffn_hidden_size",
        "shared_expert_intermediate_size", "image_size",
    ),
    64: (
        "intermediate_size", "encoder_ffn_dim", "decoder_ffn_dim", "ffn_dim", "d_ff", "n_inner", "d_inner",
        "ffn_hidden_size", "ffn_hidden_dim", "max_position_embeddings", "n_positions", "n_ctx", "max_seq_len",
        "max_source_positions", "max_target_positions",
    ),
    4: (
        "num_attention_heads", "n_head", "n_heads", "encoder_attention_heads", "decoder_attention_heads", "num_heads",
        "num_key_value_heads", "n_kv_heads", "num_kv_heads", "attention_heads", "num_experts", "num_local_experts",
        "n_routed_experts", "moe_num_experts",
    ),
    2: (
        "num_hidden_layers", "n_layer", "n_layers", "encoder_layers", "decoder_layers", "num_layers",
        "num_decoder_layers", "num_encoder_layers", "depth", "num_experts_per_tok", "moe_topk", "moe_top_k",
        "num_experts_per_token", "n_group", "topk_group", "type_vocab_size",
    ),
    8: (
        "head_dim", "d_kv", "d_head", "attention_head_dim", "kv_channels", "qk_rope_head_dim", "qk_nope_head_dim",
        "v_head_dim", "patch_size", "attention_window", "local_attention_window", "sliding_window", "window_size",
        "state_size", "num_buckets",
    ),
    16: ("q_lora_rank", "kv_lora_rank"),
    VOCABULARY: ("vocab_size", "n_vocab"),
}  # fmt: skip
_SMALL = {name: size for size, names in _SIZES.items() for name in names}
_TOKENS = {
    "pad_token_id": 0, "bos_token_id": 1, "cls_token_id": 1, "decoder_start_token_id": 1, "eos_token_id": 2,
    "sep_token_id": 2,
}  # fmt: skip
_KINDS = (
    ("causal", modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES),
    ("masked", modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES),
    ("seq2seq", modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES),
    ("image", modeling_auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES),
    ("audio", modeling_auto.MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES),
    ("ctc", modeling_auto.MODEL_FOR_CTC_MAPPING_NAMES),
    ("speech", modeling_auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES),
    ("base", modeling_auto.MODEL_MAPPING_NAMES),
)


class NotBuiltError(Exception):
    """An architecture that its configuration alone does not build small."""


def small_config(name: str) -> Any:
    """Return the configuration of an architecture with small sizes."""
    return _shrunk(AutoConfig.for_model(name))


def _shrunk(config: Any) -> Any:
    for value in list(vars(config).values()):
        if isinstance(value, transformers.PretrainedConfig):
            _shrunk(value)
    for name in sorted({*vars(config), *getattr(config, "attribute_map", {})}):
        old = getattr(config, name, None)
        if name in _TOKENS and (old is None or type(old) is int):
            _set(config, name, _TOKENS[name])
        elif name in _SMALL and type(old) is int and old > _SMALL[name]:
            _set(config, name, _SMALL[name])
        elif name == "image_size" and isinstance(old, list | tuple):
            _set(config, name, type(old)(_SMALL[name] for _ in old))
    if getattr(config, "layer_types", None):
        layers = getattr(config, "num_hidden_layers", 2)
        config.layer_types = (list(config.layer_types) * layers)[:layers]
    config.use_cache = False
    return config


def _set(config: Any, name: str, value: Any) -> None:
    try:
        setattr(config, name, value)
    except (AttributeError, NotImplementedError, ValueError):
        return  # derived from others


def classes_of(name: str) -> Iterator[tuple[str, type[torch.nn.Module]]]:
    """Yield the kinds and classes of models that transformers has of a name."""
    for kind, classes in _KINDS:
        found = classes.get(name)
        if isinstance(found, list | tuple):
            found = found[0]
        if found and hasattr(transformers, found):
            yield kind, getattr(transformers, found)


def _batch(kind: str, config: Any, model: Any) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    arguments = inspect.signature(model.forward).parameters
    main = model.main_input_name
    batch = {}
    if main == "input_ids" or "input_ids" in arguments:
        batch |= _text(kind, "decoder_input_ids" in arguments, generator)
    if main == "pixel_values" or ("pixel_values" in arguments and kind == "base"):
        batch |= _pictures(kind, config, generator)
    if main in ("input_values", "input_features"):
        batch |= _sound(kind, main, config, generator)
    if not batch:
        raise NotBuiltError(f"no input is known for {main}")
    return batch


def _tokens(generator: torch.Generator) -> torch.Tensor:
    return torch.randint(3, VOCABULARY - 8, (BATCH, LENGTH), generator=generator)


def _classes() -> torch.Tensor:
    return torch.arange(BATCH) % 2


def _text(kind: str, has_decoder: bool, generator: torch.Generator) -> dict[str, torch.Tensor]:
    tokens = _tokens(generator)
    batch = {"input_ids": tokens}
    if has_decoder and kind == "base":
        batch["decoder_input_ids"] = tokens
    if kind in ("causal", "masked", "seq2seq"):
        batch["labels"] = tokens.clone()
    return batch


def _pictures(kind: str, config: Any, generator: torch.Generator) -> dict[str, torch.Tensor]:
    vision = getattr(config, "vision_config", config)
    size = getattr(vision, "image_size", 32)
    size = size[0] if isinstance(size, list | tuple) else size
    channels = getattr(vision, "num_channels", 3) or 3
    batch = {"pixel_values": torch.randn(BATCH, channels, size, size, generator=generator)}
    return {**batch, "labels": _classes()} if kind == "image" else batch


def _sound(kind: str, name: str, config: Any, generator: torch.Generator) -> dict[str, torch.Tensor]:
    labels = {"audio": _classes(), "ctc": _tokens(generator)[:, :2], "speech": _tokens(generator)}
    if name == "input_values":
        values = torch.randn(BATCH, 1600, generator=generator)
    else:
        bins, positions = getattr(config, "num_mel_bins", 80), getattr(config, "max_source_positions", 64)
        values = torch.randn(BATCH, bins, 2 * positions, generator=generator)
    return {name: values, "labels": labels[kind].clone()} if kind in labels else {name: values}


def loss(model: Any, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
    """Return the model's loss over the samples, and their number."""
    made = model(**batch)
    samples = len(next(iter(batch.values())))
    if getattr(made, "loss", None) is not None:
        return made.loss * samples, samples
    first = next(value for value in made.values() if isinstance(value, torch.Tensor) and value.is_floating_point())
    return first.pow(2).flatten(1).mean(1).sum(), samples


def build(name: str) -> tuple[str, Callable[[], torch.nn.Module], dict[str, torch.Tensor]]:
    """Return the class's name, a factory and a batch of an architecture.

    Raises:
        NotBuiltError: it does not come from a configuration alone, is too large, or does not train on these inputs.
    """
    reason = "transformers has no model of that name"
    for kind, found in classes_of(name):

        def factory(found: Any = found) -> torch.nn.Module:
            torch.manual_seed(0)
            model: torch.nn.Module = found(small_config(name))
            return model

        try:
            batch = _tried(kind, factory, name)
        except Exception as error:
            reason = f"{found.__name__}: {type(error).__name__}: {str(error).strip().splitlines()[:1]}"
            continue
        return found.__name__, factory, batch
    raise NotBuiltError(reason)


def _tried(kind: str, factory: Callable[[], torch.nn.Module], name: str) -> dict[str, torch.Tensor]:
    """Take a step; return its batch."""
    model = factory().train()
    if sum(parameter.numel() for parameter in model.parameters()) > MOST_PARAMETERS:
        raise NotBuiltError("it stays too large")
    batch = _batch(kind, small_config(name), model)
    began_s = time.process_time()  # the choice must not depend on what else the machine does
    value, _ = loss(model, batch)
    if time.process_time() - began_s > MOST_S:
        raise NotBuiltError("it stays too slow")
    value.backward()
    if not torch.isfinite(value):
        raise NotBuiltError("its loss is not finite")
    return batch


class Repeated(torch.utils.data.Dataset):
    """A batch, over and over."""

    def __init__(self, batch: Any) -> None:
        self.batch = batch
        self.samples = len(tree_leaves(batch)[0])

    def __len__(self) -> int:
        return 4 * self.samples

    def __getitem__(self, index: int) -> Any:
        return tree_map(lambda values: values[index % self.samples], self.batch)


def workload_of(name: str) -> paceline.Workload:
    """Return the workload of a family or an architecture."""
    if name in FAMILIES:
        factory, of_family, batch = FAMILIES[name]
    else:
        of_family = loss
        _, factory, batch = build(name)
    return paceline.Workload(
        model=factory,
        loss=of_family,
        data=Repeated(batch),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=1e-3),
        batch_size=len(tree_leaves(batch)[0]),
    )


if len(sys.argv) > 1 and __name__ != "small_architecture":
    workload = workload_of(sys.argv[1])
