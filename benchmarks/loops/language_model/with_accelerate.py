"""A causal language model of transformers with its own `.loss`, on texts of different lengths."""

import torch
from accelerate import Accelerator
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

EPOCHS = 2
torch.manual_seed(0)
texts = [torch.randint(1, 50, (int(length),)) for length in torch.randint(4, 16, (75,))]


def pad(texts):
    """Pad to the longest text; what is padded does not count in the loss."""
    labels = pad_sequence(texts, batch_first=True, padding_value=-100)
    return {"input_ids": labels.clamp(min=0), "attention_mask": (labels != -100).long(), "labels": labels}


model = LlamaForCausalLM(
    LlamaConfig(vocab_size=50, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2)
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loader = DataLoader(texts, batch_size=10, shuffle=True, collate_fn=pad)
accelerator = Accelerator()
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

for _ in range(EPOCHS):
    for batch in loader:
        optimizer.zero_grad()
        loss = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
