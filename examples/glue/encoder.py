"""From sentences to logits: the tokenizer, the padded batches and the model."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import BertWordPieceTokenizer
from torch import Tensor

from paceline.nouns.errors import PacelineError, UsageError

SMALL = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 512}
# What transformers' configurations call dropout: BERT and RoBERTa the first three, DistilBERT the others.
_DROPOUT = (
    "hidden_dropout_prob",
    "attention_probs_dropout_prob",
    "classifier_dropout",
    "dropout",
    "attention_dropout",
    "seq_classif_dropout",
)


class Encoded(torch.utils.data.Dataset[dict[str, Any]]):
    """Examples as token numbers, made once, up front."""

    def __init__(self, tokenizer: Any, texts: Sequence[tuple[str, ...]], labels: Sequence[int | float]) -> None:
        pieces = tokenizer.encode_batch([text if len(text) > 1 else text[0] for text in texts])
        self.ids = [torch.tensor(piece.ids) for piece in pieces]
        self.segments = [torch.tensor(piece.type_ids) for piece in pieces]
        self.labels = torch.tensor(labels)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, row: int) -> dict[str, Any]:
        return {"row": row, "input_ids": self.ids[row], "token_type_ids": self.segments[row], "label": self.labels[row]}


def pad_with(pad_id: int, has_segments: bool) -> Callable[[list[dict[str, Any]]], dict[str, Any]]:
    """A collate that pads to the longest sample of the batch; the attention mask hides the padding."""

    def collate(samples: list[dict[str, Any]]) -> dict[str, Any]:
        ids = [sample["input_ids"] for sample in samples]
        pad = torch.nn.utils.rnn.pad_sequence
        inputs = {
            "input_ids": pad(ids, batch_first=True, padding_value=pad_id),
            "attention_mask": pad([torch.ones_like(one) for one in ids], batch_first=True),
        }
        if has_segments:
            inputs["token_type_ids"] = pad([sample["token_type_ids"] for sample in samples], batch_first=True)
        rows = torch.tensor([sample["row"] for sample in samples])
        return {"inputs": inputs, "labels": torch.stack([sample["label"] for sample in samples]), "rows": rows}

    return collate


def check_checkpoint(folder: Path) -> None:
    """Raise UsageError unless `folder` looks like a Hugging Face checkpoint."""
    if not (folder / "config.json").is_file():
        raise no_model(folder, "it has no config.json" if folder.is_dir() else "there is no such folder")


def open_config(folder: Path | None, outputs: int, dropout: float, vocabulary: int) -> Any:
    """The configuration of the checkpoint in `folder`, or of a small BERT.

    Args:
        folder: a Hugging Face checkpoint on this disk.
        outputs: classes, or 1 for a regression.
        dropout: takes the place of every dropout probability of the model.
        vocabulary: the small BERT's number of tokens.

    Raises:
        UsageError: the configuration can't be read.
    """
    if folder is None:
        config = transformers.BertConfig(vocab_size=vocabulary, **SMALL)
    else:
        try:
            config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        except (OSError, ValueError) as error:
            raise no_model(folder, first_line(error)) from error
    for name in _DROPOUT:
        if hasattr(config, name):
            setattr(config, name, dropout)
    config.num_labels = outputs
    return config


def make_model(folder: Path | None, config: Any) -> torch.nn.Module:
    """The model: random weights, or those in `folder` under a new head.

    Raises:
        UsageError: the weights can't be read.
    """
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    kind = transformers.AutoModelForSequenceClassification
    if folder is None:
        return kind.from_config(config)
    try:
        return kind.from_pretrained(folder, config=config, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, RuntimeError) as error:
        raise no_model(folder, first_line(error)) from error


def open_tokenizer(vocabulary: Path | None, folder: Path | None, max_length: int) -> Any:
    """A `tokenizers` tokenizer that cuts at `max_length`: of a WordPiece vocabulary file, else the checkpoint's own.

    Raises:
        UsageError: there is none.
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    if vocabulary is None and folder is None:
        raise UsageError(
            "a tokenizer", "neither --tokenizer nor --model is given", "pass --tokenizer vocab.txt, or --model DIR"
        )
    tokenizer = _wordpiece(vocabulary) if vocabulary is not None else _own(folder)
    tokenizer.no_padding()
    tokenizer.enable_truncation(max_length)
    return tokenizer


def check_fits(config: Any, tokenizer: Any, max_length: int) -> None:
    """Raise UsageError when the model has too few positions or too small a vocabulary for the tokenizer."""
    positions = getattr(config, "max_position_embeddings", max_length)
    if max_length > positions:
        raise UsageError(
            f"--max-length {max_length}",
            f"the model has {positions} positions",
            f"write --max-length {positions} or less",
        )
    if tokenizer.get_vocab_size() > config.vocab_size:
        raise UsageError(
            f"a tokenizer of {tokenizer.get_vocab_size()} tokens",
            f"the model knows {config.vocab_size}",
            "pass the vocabulary that the model was trained with, or leave --tokenizer out",
        )


def logits_of(model: torch.nn.Module, batch: dict[str, Any]) -> Tensor:
    """(batch, classes); (batch,) for a regression."""
    logits: Tensor = model(**batch["inputs"]).logits
    return logits.squeeze(-1) if logits.shape[-1] == 1 else logits


def no_model(folder: Path, found: str) -> PacelineError:
    """The error of a folder that holds no checkpoint we can read."""
    return UsageError(
        f"a Hugging Face checkpoint in --model {folder}",
        found,
        "name a folder with config.json and model.safetensors; nothing is downloaded, no code in it is run",
    )


def first_line(error: Exception) -> str:
    """What an error says first, short enough to be quoted."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")[:160]


def _wordpiece(path: Path) -> Any:
    if not path.is_file():
        raise UsageError(f"--tokenizer {path}", "there is no such file", "name a BERT WordPiece vocab.txt")
    try:
        vocabulary = {token: number for number, token in enumerate(path.read_text(encoding="utf-8").splitlines())}
    except UnicodeDecodeError:
        vocabulary = {}
    missing = [token for token in ("[PAD]", "[UNK]", "[CLS]", "[SEP]") if token not in vocabulary]
    if missing:
        raise UsageError(
            f"a WordPiece vocabulary in --tokenizer {path}",
            f"it lacks {', '.join(missing)}",
            "name a vocab.txt with one token a line, such as bert-base-uncased has",
        )
    return BertWordPieceTokenizer(str(path), lowercase=True)


def _own(folder: Path) -> Any:
    has_own = any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json"))
    if not has_own and (folder / "vocab.txt").is_file():
        return _wordpiece(folder / "vocab.txt")
    try:
        loaded = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        return loaded.backend_tokenizer
    except (OSError, ValueError, AttributeError, ImportError) as error:
        raise UsageError(
            f"the tokenizer of --model {folder}", first_line(error), "pass its vocabulary with --tokenizer vocab.txt"
        ) from error
