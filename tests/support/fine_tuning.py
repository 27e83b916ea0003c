"""Small models of transformers, and data for them, for tests of Trainer: float64, no dropout, nothing downloaded."""

from __future__ import annotations

import torch
from torch.nn import functional as F
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertForTokenClassification,
    LlamaConfig,
    LlamaForCausalLM,
    TrainingArguments,
)

LENGTH, SAMPLES, CLASSES, VOCABULARY = 8, 22, 3, 32


def exact_loss(logits, labels, vocab_size=None, num_items_in_batch=None, **named):
    """The loss of a causal language model, in the logits' own precision: transformers' is in float32."""
    logits, labels = logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    total = F.cross_entropy(logits, labels, reduction="sum")
    return total / (labels.ne(-100).sum() if num_items_in_batch is None else num_items_in_batch)


def llama(**config):
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, **{**sizes, **tokens, **config})).double()
    model.loss_function = exact_loss
    return model


def bert(kind=BertForSequenceClassification, **config):
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    settings = {"vocab_size": VOCABULARY, "num_labels": CLASSES, "max_position_embeddings": 16}
    return kind(BertConfig(**{**settings, **sizes, **dropout, **config})).double()


def token_classifier():
    return bert(BertForTokenClassification)


def texts(count=SAMPLES):
    """Rows of one length, of which more or less is padding: one shape, so `tensor` captures one graph."""
    random = torch.Generator().manual_seed(3)
    rows = []
    for _ in range(count):
        ids = torch.randint(3, VOCABULARY, (LENGTH,), generator=random)
        kept = torch.arange(LENGTH) < int(torch.randint(3, LENGTH + 1, (), generator=random))
        rows.append(
            {
                "input_ids": torch.where(kept, ids, 0),
                "attention_mask": kept.long(),
                "labels": torch.where(kept, ids, -100),
                "unused": torch.ones(1),
            }
        )
    return rows


def classes(count=SAMPLES):
    random = torch.Generator().manual_seed(4)
    rows = []
    for _ in range(count):
        ids = torch.randint(3, VOCABULARY, (LENGTH,), generator=random)
        rows.append({"input_ids": ids, "label": int(ids[0]) % CLASSES})
    return rows


def tagged(count=SAMPLES):
    """Rows with a class for each token, and none for those that are padding."""
    rows = []
    for row in texts(count):
        kept = row["attention_mask"].bool()
        rows.append({**row, "labels": torch.where(kept, row["input_ids"] % CLASSES, -100)})
    return rows


def arguments(folder, **changes):
    settings = {
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 4,
        "num_train_epochs": 2,
        "learning_rate": 1e-2,
        "weight_decay": 0.1,
        "use_cpu": True,
        "report_to": "none",
        "disable_tqdm": True,
        "save_strategy": "no",
        "logging_steps": 2,
        "accelerator_config": {"split_batches": True},
    }
    return TrainingArguments(output_dir=str(folder), **{**settings, **changes})
