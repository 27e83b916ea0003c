"""The model: a GPT-2 of transformers from scratch, or a checkpoint in a folder, loaded by transformers' own classes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL

from paceline.nouns.errors import PacelineError, UsageError

_DROPOUT = ("resid_pdrop", "embd_pdrop", "attn_pdrop", "attention_dropout", "dropout")


def small_config(vocabulary: int, block: int, layers: int, heads: int, width: int) -> Any:
    """A GPT-2 of these sizes, with the exact GELU, which is one operation."""
    return transformers.GPT2Config(
        vocab_size=vocabulary,
        n_positions=block,
        n_layer=layers,
        n_head=heads,
        n_embd=width,
        activation_function="gelu",
        bos_token_id=None,
        eos_token_id=None,
    )


def open_config(folder: Path) -> Any:
    """The configuration of a checkpoint.

    Raises:
        UsageError: there is none, or its model has no head that predicts the next token.
    """
    if not folder.is_dir():
        raise _no_model(folder, "there is no such folder")
    if not (folder / "config.json").is_file():
        raise _no_model(folder, "it has no config.json")
    try:
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise _no_model(folder, _first_line(error)) from error
    named = getattr(config, "architectures", None) or [CAUSAL.get(config.model_type, type(config).__name__)]
    if not {*named} & {*CAUSAL.values()}:
        raise _no_model(folder, f"{', '.join(named)} has no language-model head")
    return config


def set_dropout(config: Any, dropout: float) -> None:
    """Set every dropout probability."""
    for name in _DROPOUT:
        if hasattr(config, name):
            setattr(config, name, dropout)


def make_model(config: Any, folder: Path | None) -> torch.nn.Module:
    """The model: random weights, or those in `folder`.

    Raises:
        UsageError: the weights can't be read, or some are missing.
    """
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    kind = transformers.AutoModelForCausalLM
    if folder is None:
        return kind.from_config(config)  # type: ignore[no-any-return]
    try:
        model, found = kind.from_pretrained(
            folder,
            config=config,
            dtype=torch.float32,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    except (OSError, ValueError, RuntimeError) as error:
        raise _no_model(folder, _first_line(error)) from error
    if missing := sorted(found["missing_keys"]):
        raise _no_model(folder, f"its weights lack {', '.join(missing[:3])}{' and more' * (len(missing) > 3)}")
    return model  # type: ignore[no-any-return]


def count(config: Any) -> int:
    """The parameters of a model, a tied one once; nothing is allocated."""
    with torch.device("meta"):
        return int(transformers.AutoModelForCausalLM.from_config(config).num_parameters())


def _no_model(folder: Path, found: str) -> PacelineError:
    return UsageError(
        f"a causal language model of transformers in --model {folder}",
        found,
        "name a folder with config.json and model.safetensors, such as GPT2LMHeadModel.save_pretrained writes; "
        "nothing is downloaded, no code in it is run",
    )


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")[:160]
