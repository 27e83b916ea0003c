"""Profile a step of a Llama of seven billion parameters, and print the memory that this took."""

from __future__ import annotations

import json
import resource

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import paceline
from paceline.nouns.plan import Plan
from paceline.nouns.profile import PARAMETERS
from paceline.plan.memory import memory_of
from paceline.profile.simulate import simulate

workload = paceline.Workload(
    model=lambda: LlamaForCausalLM(LlamaConfig(use_cache=False)),
    loss=lambda model, batch: (model(input_ids=batch, labels=batch).loss * batch.numel(), batch.numel()),
    optimizer=lambda model: torch.optim.AdamW(model.parameters()),
    data=list(torch.randint(0, 32000, (4, 2048))),
    batch_size=2,
)
memory = memory_of(simulate(workload, Plan()))
resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts in KiB
print(json.dumps({"parameters": memory.between[PARAMETERS], "peak": memory.peak, "resident_bytes": resident}))
