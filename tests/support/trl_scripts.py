"""Training scripts for TRL's SFTTrainer and DPOTrainer: a tiny model and tokenizer, nothing downloaded.

Each takes the class of the trainer, and a folder, and returns the trainer when it has trained.
"""

from __future__ import annotations

import datasets
import trl
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from support.fine_tuning import VOCABULARY, llama

SPECIAL = ["<pad>", "<s>", "</s>", "<unk>"]


def tokenizer():
    """A tokenizer of words w0, w1 and so on."""
    words = [*SPECIAL, *(f"w{number}" for number in range(VOCABULARY - len(SPECIAL)))]
    plain = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    names = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=plain, **names)


def words(first, step, count):
    return " ".join(f"w{(first + step * place) % (VOCABULARY - len(SPECIAL))}" for place in range(count))


def settings(folder, **changes):
    common = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 4,
        "num_train_epochs": 2,
        "learning_rate": 1e-2,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "report_to": "none",
        "disable_tqdm": True,
        "logging_steps": 2,
        "save_strategy": "no",
    }
    return {**common, **changes}


def sft(kind, folder, **changes):
    """Fine-tune on texts."""
    rows = [{"text": words(number, 1, 8)} for number in range(24)]
    args = trl.SFTConfig(**settings(folder, max_length=10, **changes))
    data = datasets.Dataset.from_list(rows)
    trainer = kind(model=llama().float(), args=args, train_dataset=data, processing_class=tokenizer())
    trainer.train()
    return trainer


def dpo(kind, folder, **changes):
    """Prefer some texts to others."""
    rows = []
    for number in range(24):
        texts = {"chosen": words(number, 1, 4), "rejected": words(number, number, 4)}
        rows.append({"prompt": words(number, 0, 1), **texts})
    args = trl.DPOConfig(**settings(folder, **changes))
    data = datasets.Dataset.from_list(rows)
    trainer = kind(
        model=llama().float(), ref_model=llama().float(), args=args, train_dataset=data, processing_class=tokenizer()
    )
    trainer.train()
    return trainer


SCRIPTS = {"sft": sft, "dpo": dpo}
