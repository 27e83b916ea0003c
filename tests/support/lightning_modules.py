"""LightningModules and their data for tests: each trains alike by lightning.Trainer and by Paceline's."""

from __future__ import annotations

import importlib
import warnings
from contextlib import contextmanager

import lightning
import torch
from lightning.pytorch.callbacks import Callback, EarlyStopping
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, TensorDataset

SAMPLES, HELD_OUT, BATCH = 37, 17, 8  # the last batches have 5 and 1 samples


def numbers(count, seed):
    x = torch.randn(count, 6, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return TensorDataset(x, x[:, :1].sin() + 0.1 * x[:, 1:2])


class Stream(IterableDataset):
    """Nobody knows which batch is the last one."""

    def __iter__(self):
        data = numbers(SAMPLES, 0)
        return iter([data[index] for index in range(SAMPLES)])


def training_loader():
    data = numbers(SAMPLES, 0)
    # A generator of its own: both trainers take the samples in its order.
    return DataLoader(data, BATCH, sampler=RandomSampler(data, generator=torch.Generator().manual_seed(1)))


def held_out_loader(seed=2):
    return DataLoader(numbers(HELD_OUT, seed), BATCH)


class Regression(lightning.LightningModule):
    """Calls itself; keeps what callback_metrics were after each epoch and each validation."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))
        self.history = []

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, index):
        loss = F.mse_loss(self(batch[0]), batch[1])
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.log("largest", batch[0].abs().max(), on_epoch=True, reduce_fx="max")
        return loss

    def validation_step(self, batch, index):
        error = self(batch[0]) - batch[1]
        self.log("val_loss", error.square().mean())
        self.log("samples", float(len(error)), reduce_fx="sum")
        self.log_dict({"lowest": error.min(), "nearest": error.abs().min()}, reduce_fx="min")

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)

    def remember(self):
        self.history.append({name: float(value) for name, value in sorted(self.trainer.callback_metrics.items())})

    def on_validation_epoch_end(self):
        if not self.trainer.sanity_checking:
            self.remember()

    def on_train_epoch_end(self):
        self.log("epoch_number", float(self.current_epoch))
        self.remember()


class Parts(Regression):
    """Calls its parts: in a list, with batch norm, beside a parameter of its own."""

    def __init__(self):
        super().__init__()
        self.net = nn.ModuleList([nn.Linear(6, 16), nn.Sequential(nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 16))])
        self.head = nn.Linear(16, 1)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x):
        for layer in self.net:
            x = layer(x)
        return self.scale * self.head(x)

    def configure_optimizers(self):  # Adam would take the rounding of a bias before batch norm for a gradient
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Scheduled(Regression):
    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        by_step = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97)
        by_epoch = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
        return [optimizer], [{"scheduler": by_step, "interval": "step", "frequency": 2}, by_epoch]


class Plateau(Regression):
    interval = "epoch"

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.3)
        config = {"scheduler": scheduler, "monitor": "val_loss", "interval": self.interval, "strict": False}
        return {"optimizer": optimizer, "lr_scheduler": config}


class PlateauBySteps(Plateau):
    interval = "step"


class OneCycle(Regression):
    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        steps = int(self.trainer.estimated_stepping_batches)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=steps)
        return ({"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}},)


class Adversarial(Regression):
    """Two optimizers that training_step steps; the noise is in the data."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))
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
        with self.toggled_optimizer(judged):
            fake = self(noise).detach()
            critic_loss = F.softplus(-self.critic(real)).mean() + F.softplus(self.critic(fake)).mean()
            judged.zero_grad()
            self.manual_backward(critic_loss)
            judged.step()
        self.log_dict({"made": loss, "judged": critic_loss}, on_step=False, on_epoch=True)

    def on_train_epoch_end(self):
        for scheduler in self.lr_schedulers():
            scheduler.step()
        self.remember()

    def configure_optimizers(self):
        made = torch.optim.Adam(self.net.parameters(), lr=1e-2)
        judged = torch.optim.SGD(self.critic.parameters(), lr=5e-2)
        return [made, judged], [torch.optim.lr_scheduler.StepLR(each, 1, 0.8) for each in (made, judged)]


class Measured(Regression):
    """Logs a torchmetrics Metric, and metrics of two loaders."""

    def __init__(self):
        super().__init__()
        import torchmetrics

        self.spread = torchmetrics.MeanSquaredError()
        self.explained = torchmetrics.ExplainedVariance()

    def training_step(self, batch, index):
        predicted = self(batch[0])
        self.spread(predicted, batch[1])
        self.log("spread", self.spread, on_step=True, on_epoch=True)
        return {"loss": F.mse_loss(predicted, batch[1]), "other": 1}

    def validation_step(self, batch, index, dataloader_idx=0):
        predicted = self(batch[0])
        self.explained.update(predicted, batch[1])
        self.log("val_loss", F.mse_loss(predicted, batch[1]))

    def on_validation_epoch_end(self):
        if not self.trainer.sanity_checking:
            self.log("explained", self.explained)
            self.remember()


class Watched(Regression):
    """Looks at gradients, and changes them."""

    def on_after_backward(self):
        self.log("after", self.net[0].weight.grad.norm(), on_step=True)

    def on_before_optimizer_step(self, optimizer):
        weight = self.net[0].weight
        self.log("norm", weight.grad.norm(), on_step=True)
        weight.grad.mul_(0.5)

    def optimizer_zero_grad(self, epoch, index, optimizer):
        optimizer.zero_grad(set_to_none=False)


class Halved(Regression):
    """Changes gradients before the update alone."""

    def on_before_optimizer_step(self, optimizer):
        weight = self.net[0].weight
        self.log("norm", weight.grad.norm(), on_step=True)
        weight.grad.mul_(0.5)


class Single(Regression):
    """Trains in float64 on what comes as float32."""

    def training_step(self, batch, index):
        assert batch[0].dtype == torch.float64
        return super().training_step(batch, index)


def data(cell):
    train, held_out = training_loader(), held_out_loader()
    if cell == "stream":
        train = DataLoader(Stream(), BATCH)
    return train, [held_out, held_out_loader(3)] if cell == "metrics" else held_out


CELLS = {
    "plain": (Regression, {"max_epochs": 3, "num_sanity_val_steps": 1}),
    "parts": (Parts, {"max_epochs": 3, "check_val_every_n_epoch": 2}),
    "clipped": (Regression, {"max_epochs": 3, "gradient_clip_val": 0.1, "accumulate_grad_batches": 2}),
    "by value": (Regression, {"max_epochs": 2, "gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}),
    "scheduled": (Scheduled, {"max_epochs": 3, "accumulate_grad_batches": 2}),
    "plateau": (Plateau, {"max_epochs": 4}),
    "plateau by steps": (PlateauBySteps, {"max_epochs": 3, "val_check_interval": 2}),
    "one cycle": (OneCycle, {"max_steps": 12}),
    "adversarial": (Adversarial, {"max_epochs": 3}),
    "metrics": (Measured, {"max_epochs": 2}),
    "limits": (
        Regression,
        {"max_epochs": 4, "limit_train_batches": 0.7, "limit_val_batches": 2, "val_check_interval": 0.4},
    ),
    "over epochs": (Regression, {"max_epochs": 3, "val_check_interval": 4, "check_val_every_n_epoch": None}),
    "64-true": (Single, {"max_epochs": 2, "precision": "64-true"}),
    "quick": (Regression, {"fast_dev_run": 2}),
    "stopped": (Regression, {"max_epochs": 9, "min_epochs": 2}),
    "stream": (Plateau, {"max_epochs": 3}),
    "watched": (Watched, {"max_epochs": 2}),
    "halved": (Halved, {"max_epochs": 2, "accumulate_grad_batches": 3}),
}
NOT_UNDER_TENSOR = ("watched", "halved")  # a rank has pieces of the gradients


class Saves(Callback):
    """Saves the job before the batch that follows so many updates."""

    def __init__(self, folder, after):
        self.folder = folder
        self.after = after

    def on_train_batch_start(self, trainer, module, batch, index):
        if trainer.global_step == self.after:
            trainer.save_checkpoint(self.folder)


class Loads(Callback):
    """Goes on from a folder."""

    def __init__(self, folder):
        self.folder = folder

    def on_fit_start(self, trainer, module):
        trainer.job.load(self.folder)


def callbacks(cell):
    if cell == "stopped":
        return [EarlyStopping("val_loss", min_delta=0.2, patience=1)]
    return []


@contextmanager
def in_float64(cell):
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32 if cell == "64-true" else torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def made(cell):
    kind, _ = CELLS[cell]
    torch.manual_seed(5)
    return kind()


def rest_of(trainer, module):
    """What a training leaves besides parameters."""
    rates = [group["lr"] for optimizer in trainer.optimizers for group in optimizer.param_groups]
    return module.history, (trainer.global_step, trainer.current_epoch), rates


def by_lightning(cell, library="lightning.pytorch"):
    """What lightning.Trainer makes of a cell in one process."""
    trainers = importlib.import_module(library)
    with in_float64(cell), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = trainers.Trainer(
            accelerator="cpu",
            devices=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=callbacks(cell),
            **CELLS[cell][1],
        )
        module = made(cell)
        train, held_out = data(cell)
        trainer.fit(module, train, held_out)
    state = {name: value.detach().double() for name, value in module.state_dict().items()}
    return state, rest_of(trainer, module)
