"""A fine-tuning script for transformers' Trainer: one import is another, and it trains on any number of ranks.

python finetune.py
paceline run -n 2 finetune.py
paceline run --plan shard=2 finetune.py
"""

import torch
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

from paceline.integrations.transformers import Trainer  # from transformers import Trainer

LETTERS = "abcdefghijklmnopqrstuvwxyz"
START, PADDING = len(LETTERS), len(LETTERS) + 1


def rows(count, seed):
    """Draw texts to learn: pieces of the alphabet. What is padded has the label -100, and does not count."""
    random = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(count):
        first, length = torch.randint(0, 26, (2,), generator=random).tolist()
        tokens = [START, *[(first + place) % 26 for place in range(4 + length % 12)]]
        padded = 16 - len(tokens)
        found.append(
            {
                "input_ids": tokens + [PADDING] * padded,
                "attention_mask": [1] * len(tokens) + [0] * padded,
                "labels": tokens + [-100] * padded,
            }
        )
    return found


torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=28,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=2,
    max_position_embeddings=16,
    pad_token_id=PADDING,
    bos_token_id=START,
    eos_token_id=None,
)
model = LlamaForCausalLM(config)  # or LlamaForCausalLM.from_pretrained(...)
args = TrainingArguments(
    output_dir="out",
    per_device_train_batch_size=16,
    accelerator_config={"split_batches": True},  # 16 on all ranks together
    gradient_accumulation_steps=2,
    num_train_epochs=4,
    learning_rate=1e-2,
    lr_scheduler_type="cosine",
    warmup_steps=5,
    weight_decay=0.01,
    eval_strategy="epoch",
    logging_steps=10,
    save_steps=20,
    report_to="none",
    disable_tqdm=True,
)
trainer = Trainer(model=model, args=args, train_dataset=rows(320, 1), eval_dataset=rows(64, 2))
trainer.train()
trainer.save_model("model")
