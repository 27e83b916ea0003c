"""A LightningModule on any number of ranks, by Lightning's own Trainer. What is new is marked."""

import lightning
import torch
from lightning.pytorch.callbacks import EarlyStopping
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from paceline.integrations.lightning import Strategy  # new


class Classifier(lightning.LightningModule):
    def __init__(self, width=32):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(20, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, 5))

    def training_step(self, batch, batch_idx):
        inputs, labels = batch
        loss = F.cross_entropy(self.net(inputs), labels)
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch, batch_idx):
        inputs, labels = batch
        scores = self.net(inputs)
        self.log("val_loss", F.cross_entropy(scores, labels), sync_dist=True)
        self.log("val_accuracy", (scores.argmax(1) == labels).float().mean(), sync_dist=True)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=1)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"}}


torch.manual_seed(0)
inputs = torch.randn(600, 20)
labels = inputs[:, :5].argmax(dim=1)
train = DataLoader(TensorDataset(inputs[:500], labels[:500]), batch_size=64, shuffle=True)
held_out = DataLoader(TensorDataset(inputs[500:], labels[500:]), batch_size=64)

callbacks = [EarlyStopping("val_loss")]
trainer = lightning.Trainer(
    strategy=Strategy(),  # new
    accelerator="cpu",
    max_epochs=4,
    gradient_clip_val=1.0,
    callbacks=callbacks,
    enable_progress_bar=False,
)
trainer.fit(Classifier(), train, held_out)
if trainer.is_global_zero:
    print(f"accuracy {trainer.callback_metrics['val_accuracy']:.2f}")
