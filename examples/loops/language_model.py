"""A model of transformers with its own `.loss`, a mean over the labels that count: their number is the weight."""

import torch
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel

import paceline

torch.manual_seed(0)
config = GPT2Config(vocab_size=50, n_positions=16, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0  # dropout draws different numbers on every rank
model = GPT2LMHeadModel(config)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)


def pad(texts):
    """Pad to the longest text; what is padded does not count in the loss."""
    tokens = torch.nn.utils.rnn.pad_sequence(texts, batch_first=True)
    labels = torch.nn.utils.rnn.pad_sequence(texts, batch_first=True, padding_value=-100)
    return {"input_ids": tokens, "attention_mask": (labels != -100).long(), "labels": labels}


texts = [torch.randint(1, 50, (int(length),)) for length in torch.randint(4, 16, (120,))]
loader = DataLoader(texts, batch_size=16, shuffle=True, collate_fn=pad)
job, model, optimizer, loader = paceline.prepare(model, optimizer, loader)

for _ in job.epochs(2):
    for batch in loader:
        optimizer.zero_grad()
        loss = model(**batch).loss
        # The model predicts each token from those before it: the first label of a text has no prediction.
        job.backward(loss, weight=(batch["labels"][:, 1:] != -100).sum())
        job.clip(1.0)
        optimizer.step()
