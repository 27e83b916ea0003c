"""LoRA by peft in a plain loop: the base stays frozen, and `save_adapter` writes what peft loads, under any plan.

python lora.py
paceline run -n 2 lora.py
paceline run --plan tensor=2 lora.py
"""

import peft
import torch
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

import paceline
from paceline.integrations.peft import save_adapter

torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=50, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, pad_token_id=0
)
base = LlamaForCausalLM(config)  # or LlamaForCausalLM.from_pretrained(...)
model = peft.get_peft_model(base, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-2)
texts = torch.randint(1, 50, (64, 1)) + torch.arange(12)  # each token is one more than the one before
loader = DataLoader(texts % 50, batch_size=16, shuffle=True)
job, model, optimizer, loader = paceline.prepare(model, optimizer, loader)

for _ in job.epochs(4):
    for tokens in loader:
        optimizer.zero_grad()
        job.backward(model(input_ids=tokens, labels=tokens).loss)
        job.clip(1.0)
        optimizer.step()
save_adapter(job, model, "adapter")
