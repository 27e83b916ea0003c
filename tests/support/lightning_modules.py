"""LightningModules and their data for tests: each trains alike under DDP and under Paceline's Strategy."""

from __future__ import annotations

import lightning
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


def numbers(count=40, seed=0):
    x = torch.randn(count, 6, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return TensorDataset(x, x[:, :1].sin() + 0.1 * x[:, 1:2])


def loader(shuffle=True):
    return DataLoader(numbers(), 4, shuffle=shuffle)


class Regression(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 4))
        self.head = nn.Linear(4, 1)

    def forward(self, x):
        return self.head(self.net(x))

    def training_step(self, batch, index):
        loss = F.mse_loss(self(batch[0]), batch[1])
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch, index):
        self.log("val_loss", F.mse_loss(self(batch[0]), batch[1]), sync_dist=True)

    def test_step(self, batch, index):
        self.log("test_loss", F.mse_loss(self(batch[0]), batch[1]), sync_dist=True)

    def predict_step(self, batch, index):
        return self(batch[0])

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.8)]


class Adversarial(Regression):
    """Two optimizers that training_step steps."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.critic = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1))

    def training_step(self, batch, index):
        noise, real = batch
        made, judged = self.optimizers()
        self.toggle_optimizer(made)
        loss = F.softplus(-self.critic(self(noise))).mean()
        made.zero_grad()
        self.manual_backward(loss)
        self.clip_gradients(made, 0.05, "norm")
        made.step()
        self.untoggle_optimizer(made)
        self.toggle_optimizer(judged)
        fake = self(noise).detach()
        critic_loss = F.softplus(-self.critic(real)).mean() + F.softplus(self.critic(fake)).mean()
        judged.zero_grad()
        self.manual_backward(critic_loss)
        judged.step()
        self.untoggle_optimizer(judged)
        self.log_dict({"made": loss, "judged": critic_loss}, on_epoch=True, sync_dist=True)

    def configure_optimizers(self):
        own = [*self.net.parameters(), *self.head.parameters()]
        return [torch.optim.Adam(own, lr=1e-2), torch.optim.SGD(self.critic.parameters(), lr=5e-2)]


CELLS = {
    "plain": (Regression, {}),
    "clipped": (Regression, {"gradient_clip_val": 0.1, "accumulate_grad_batches": 2}),
    "by value": (Regression, {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}),
    "adversarial": (Adversarial, {}),
}


def made(kind):
    torch.manual_seed(5)
    return kind()


def quiet(**settings):
    return {
        "accelerator": "cpu",
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        **settings,
    }
