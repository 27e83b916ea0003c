"""The same training as lightning_before.py: paceline run -n 2 lightning_trainer.py."""

import lightning
import torch
from torch.utils.data import DataLoader, TensorDataset

from paceline.integrations.lightning import Strategy

torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
x = torch.randn(16, 6)
y = x[:, :1].sin()
model = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))


class Regression(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = model

    def training_step(self, batch, index):
        inputs, targets = batch
        return torch.nn.functional.mse_loss(self.model(inputs), targets)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


trainer = lightning.Trainer(
    strategy=Strategy(),
    accelerator="cpu",
    precision="64-true",
    max_epochs=10,
    gradient_clip_val=0.5,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
)
trainer.fit(Regression(), DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True))
if trainer.is_global_zero:
    print("result", float(sum(parameter.detach().abs().sum() for parameter in model.parameters())))
