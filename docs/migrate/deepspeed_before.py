"""DeepSpeed: deepspeed --num_gpus 2 deepspeed_before.py."""

import deepspeed
import torch
from torch.utils.data import TensorDataset

CONFIG = {
    "train_batch_size": 16,
    "train_micro_batch_size_per_gpu": 8,
    "gradient_clipping": 0.5,
    "zero_optimization": {"stage": 2},
}
torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
x = torch.randn(16, 6)
y = x[:, :1].sin()
model = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
engine, optimizer, loader, _ = deepspeed.initialize(
    model=model, optimizer=optimizer, training_data=TensorDataset(x, y), config=CONFIG
)
for _ in range(10):
    for inputs, targets in loader:
        loss = torch.nn.functional.mse_loss(engine(inputs.to(engine.device)), targets.to(engine.device))
        engine.backward(loss)
        engine.step()
if engine.global_rank == 0:
    print("result", float(sum(parameter.detach().abs().sum() for parameter in model.parameters())))
