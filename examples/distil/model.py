"""BERT with two heads, for the masked tokens and for the class of the sentence; and how a student begins."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import texts
import torch
import transformers
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers.models.bert.modeling_bert import BertModel, BertOnlyMLMHead, BertPreTrainedModel

from paceline.nouns.errors import PacelineError, UsageError

CLASSES = 2


class Encoder(BertPreTrainedModel):
    """BERT; its weights have the names that transformers' BertForMaskedLM and BertForSequenceClassification give them.

    Args:
        config: a transformers BertConfig.
    """

    _tied_weights_keys = transformers.BertForMaskedLM._tied_weights_keys

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.bert = BertModel(config)
        self.cls = BertOnlyMLMHead(config)
        self.classifier = nn.Linear(config.hidden_size, CLASSES)
        self.post_init()

    def get_output_embeddings(self) -> nn.Module:
        """Return the matrix that is tied to the embeddings."""
        return self.cls.predictions.decoder

    def forward(self, input_ids: Tensor, attention_mask: Tensor, places: Tensor | None = None) -> dict[str, Tensor]:
        """Return `hidden` (batch, length, width), `classes` (batch, 2) and, of `places`, logits `tokens`."""
        made = self.bert(input_ids, attention_mask)
        hidden = made.last_hidden_state
        found = {"hidden": hidden, "classes": self.classifier(made.pooler_output)}
        if places is not None:
            found["tokens"] = self.cls(hidden.gather(1, places[:, :, None].expand(-1, -1, hidden.shape[-1])))
        return found


def small_config(layers: int, width: int, tokens: int, max_length: int) -> Any:
    """Return the configuration of a teacher that is trained from scratch. Dropout is 0: no rank draws."""
    return transformers.BertConfig(
        vocab_size=tokens,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=max(width // 32, 1),
        intermediate_size=4 * width,
        max_position_embeddings=max_length,
        initializer_range=0.1,  # BERT's 0.02 is for 768 values: narrow layers begin to learn the class much later by it
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )


def open_teacher(folder: Path, max_length: int) -> tuple[Encoder, list[str], bool]:
    """Return the BERT of a transformers checkpoint, its vocabulary, and whether it has been fine-tuned already.

    Nothing is downloaded, and no code in the folder is run.

    Raises:
        UsageError: the folder has no such checkpoint.
    """
    if not (folder / "config.json").is_file():
        raise _no_teacher(folder, "it has no config.json" if folder.is_dir() else "there is no such folder")
    if not any((folder / name).is_file() for name in ("model.safetensors", "model.safetensors.index.json")):
        raise _no_teacher(folder, "it has a config.json and no weights, model.safetensors")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        if config.model_type != "bert":
            raise _no_teacher(folder, f"it is a {config.model_type}")
        config.hidden_dropout_prob = config.attention_probs_dropout_prob = 0.0
        model, loaded = Encoder.from_pretrained(
            folder, config=config, local_files_only=True, output_loading_info=True, dtype=torch.get_default_dtype()
        )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise _no_teacher(folder, str(error).strip().splitlines()[0][:160]) from error
    if max_length > config.max_position_embeddings:
        raise UsageError(
            f"--max-length {max_length}",
            f"the teacher has {config.max_position_embeddings} positions",
            f"write --max-length {config.max_position_embeddings} or less",
        )
    names = [name for name in ("vocab.txt", "tokenizer.json") if (folder / name).is_file()]
    vocabulary = texts.read_vocabulary(folder / (names or ["vocab.txt"])[0])
    missing = {name.split(".")[0] for name in loaded["missing_keys"]}
    return model, vocabulary, not missing & {"classifier", "cls"}


def _no_teacher(folder: Path, found: str) -> PacelineError:
    return UsageError(
        f"a BERT of transformers in --teacher {folder}",
        found,
        "name a folder with config.json, model.safetensors and vocab.txt, such as --save-teacher writes; "
        "or leave --teacher out",
    )


def student_of(config: Any) -> Encoder:
    """Return a model with half of the layers of a teacher, with random weights.

    Raises:
        UsageError: the teacher's number of layers is odd.
    """
    if config.num_hidden_layers % 2:
        raise UsageError(
            "a student with half of its teacher's layers",
            f"the teacher has {config.num_hidden_layers}",
            "take a teacher with an even number of layers, such as --layers 4",
        )
    half = copy.deepcopy(config)
    half.num_hidden_layers //= 2
    return Encoder(half)


def begin_as(job: Any, teacher: Encoder, student: Encoder) -> None:
    """Copy the teacher to the student: embeddings, heads and every second layer, the last among them. Collective."""
    for part in ("bert.embeddings", "bert.pooler", "cls", "classifier"):
        job.copy_weights(teacher.get_submodule(part), student.get_submodule(part))
    for number, layer in enumerate(student.bert.encoder.layer):
        job.copy_weights(teacher.bert.encoder.layer[2 * number + 1], layer)
