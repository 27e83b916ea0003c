"""Training scripts in the idioms of Accelerate's published examples: tiny models, float64, nothing downloaded.

Each takes the class of the accelerator, and a folder, and returns the numbers that it would print. The import of
`Accelerator` is the one line that differs in a script.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.tracking import GeneralTracker, on_main_process
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from transformers import get_linear_schedule_with_warmup

from support.fine_tuning import bert, classes


def forget():
    """Forget what Accelerate knows of the process, as a new process would."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def join_by_torch(rank):
    """Join the ranks of a test as torchrun has them joined, without Paceline; do nothing if there is one."""
    size = int(os.environ["PACELINE_WORLD_SIZE"])
    os.environ["OMP_NUM_THREADS"] = "1"
    PartialState.destroy_process_group = lambda state, group=None: None  # the next script wants it
    if size > 1:
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(size))
        place = f"file://{os.environ['PACELINE_RENDEZVOUS']}"
        torch.distributed.init_process_group("gloo", init_method=place, rank=rank, world_size=size)


def _rows(count=50, width=6):
    inputs = torch.randn(count, width, dtype=torch.float64)
    return TensorDataset(inputs, inputs.sum(1, keepdim=True))


def _layers(width=6):
    hidden = torch.nn.Linear(width, 16), torch.nn.Tanh(), torch.nn.Dropout(0.1)
    return torch.nn.Sequential(*hidden, torch.nn.Linear(16, 1)).double()


def _collate(rows):
    ids = torch.stack([row["input_ids"] for row in rows])
    return {"input_ids": ids, "labels": torch.tensor([row["label"] for row in rows])}


def nlp(kind, folder, **options):
    """`nlp_example.py`: a classifier of texts, with a scheduler, and accuracy over all samples."""
    accelerator = kind(cpu=True, **options)
    set_seed(42)
    model = bert()
    loader = DataLoader(classes(), shuffle=True, collate_fn=_collate, batch_size=4, drop_last=True)
    evaluated = DataLoader(classes(21), shuffle=False, collate_fn=_collate, batch_size=4)
    optimizer = torch.optim.AdamW(params=model.parameters(), lr=1e-2)
    scheduler = get_linear_schedule_with_warmup(optimizer, num_warmup_steps=2, num_training_steps=len(loader) * 2)
    model, optimizer, loader, evaluated, scheduler = accelerator.prepare(model, optimizer, loader, evaluated, scheduler)
    found = []
    for _ in range(2):
        model.train()
        for batch in loader:
            outputs = model(**batch)
            accelerator.backward(outputs.loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            found.append(accelerator.gather(outputs.loss.detach().reshape(1)).mean().item())
        model.eval()
        right = total = 0
        for batch in evaluated:
            with torch.no_grad():
                outputs = model(**batch)
            answers, labels = accelerator.gather_for_metrics((outputs.logits.argmax(dim=-1), batch["labels"]))
            right += int((answers == labels).sum())
            total += len(labels)
        found.extend((right, total))
    return accelerator, model, found


def diffusion(kind, folder, **options):
    """diffusers' `train_unconditional.py`: a tiny UNet learns the noise of images, with an average of its weights."""
    from diffusers import DDPMScheduler, UNet2DModel
    from diffusers.training_utils import EMAModel

    accelerator = kind(cpu=True, gradient_accumulation_steps=2, **options)
    set_seed(42)
    blocks = {"down_block_types": ("DownBlock2D", "AttnDownBlock2D"), "up_block_types": ("AttnUpBlock2D", "UpBlock2D")}
    sizes = {"sample_size": 8, "in_channels": 1, "out_channels": 1, "layers_per_block": 1}
    model = UNet2DModel(
        **sizes, **blocks, block_out_channels=(8, 16), norm_num_groups=4, attention_head_dim=4, dropout=0.0
    ).double()
    images = TensorDataset(torch.randn(24, 1, 8, 8, dtype=torch.float64))
    loader = DataLoader(images, batch_size=4, shuffle=True)
    noises = DDPMScheduler(num_train_timesteps=20)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=1e-2)
    scheduler = get_linear_schedule_with_warmup(optimizer, num_warmup_steps=2, num_training_steps=len(loader) * 2)
    average = None if getattr(accelerator, "is_cut", False) else EMAModel(model.parameters(), decay=0.9)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    found = []
    for _ in range(2):
        model.train()
        for (clean,) in loader:
            noise = torch.randn_like(clean)
            times = torch.randint(0, noises.config.num_train_timesteps, (len(clean),))
            with accelerator.accumulate(model):
                loss = F.mse_loss(model(noises.add_noise(clean, noise, times), times).sample, noise)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients and average is not None:
                average.step(model.parameters())
            found.append(accelerator.gather(loss.detach().reshape(1)).mean().item())
    accelerator.save_model(model, folder)
    return accelerator, model, found


def cv(kind, folder, **options):
    """`cv_example.py`: a convolution with batch norm, one cycle of the learning rate, gradients clipped by value."""
    accelerator = kind(cpu=True, **options)
    set_seed(42)
    body = torch.nn.Conv2d(3, 8, 3, padding=1), torch.nn.BatchNorm2d(8), torch.nn.ReLU()
    model = torch.nn.Sequential(
        *body, torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(8, 4)
    ).double()
    images = TensorDataset(torch.randn(40, 3, 8, 8, dtype=torch.float64), torch.arange(40) % 4)
    loader = DataLoader(images, shuffle=True, batch_size=4)
    optimizer = torch.optim.Adam(params=model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, epochs=2, steps_per_epoch=len(loader))
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    found = []
    for _ in range(2):
        model.train()
        for inputs, labels in loader:
            loss = F.cross_entropy(model((inputs - 0.1) / 0.9), labels)
            accelerator.backward(loss)
            accelerator.clip_grad_value_(model.parameters(), 0.05)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            found.append(accelerator.reduce(loss.detach(), "mean").item())
    return accelerator, model, found


def accumulation(kind, folder, **options):
    """`gradient_accumulation.py`: the last group of a pass is a shorter one."""
    accelerator = kind(cpu=True, gradient_accumulation_steps=3, **options)
    set_seed(42)
    model = _layers()
    loader = DataLoader(_rows(), shuffle=True, batch_size=4)
    optimizer = torch.optim.AdamW(params=model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    found = []
    for _ in range(2):
        for inputs, targets in loader:
            with accelerator.accumulate(model):
                loss = F.mse_loss(model(inputs), targets)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    found.append(float(accelerator.clip_grad_norm_(model.parameters(), 1.0)))
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            found.append(accelerator.reduce(loss.detach(), "mean").item())
    return accelerator, model, found


class Lines(GeneralTracker):
    """A tracker that writes a line of JSON for each log."""

    name = "lines"
    requires_logging_directory = False
    main_process_only = True

    def __init__(self, path):
        super().__init__()
        self.path = path

    @property
    def tracker(self):
        return self.path

    @on_main_process
    def log(self, values, step=None, **named):
        with Path(self.path).open("a") as file:
            file.write(json.dumps({**values, "step": step}) + "\n")


class Counter:
    """What a script registers for checkpoints."""

    def __init__(self):
        self.count = 0

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]


def checkpointing(kind, folder, stop=None, resume=None, **options):
    """`complete_nlp_example.py`: a checkpoint every three steps, and a start in the middle of a pass from one."""
    order = DataLoaderConfiguration(use_seedable_sampler=True)  # or a resumed pass would have another order
    tracker = Lines(Path(folder, "lines.jsonl"))
    accelerator = kind(cpu=True, log_with=tracker, project_dir=str(folder), dataloader_config=order, **options)
    set_seed(42)
    model = _layers().eval()  # a resumed pass draws other dropout, with Accelerate too
    loader = DataLoader(_rows(), shuffle=True, batch_size=4)
    optimizer = torch.optim.AdamW(params=model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.5)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    counter = Counter()
    accelerator.register_for_checkpointing(counter)
    accelerator.init_trackers("example", {"lr": 1e-2})
    first = 0
    if resume is not None:
        accelerator.load_state(str(Path(folder, f"step_{resume}")))
        first = resume
        assert counter.count == resume
    found = []
    step = first
    for epoch in range(first // len(loader), 2):
        if hasattr(loader, "set_epoch"):
            loader.set_epoch(epoch)
        active = loader
        if epoch == first // len(loader) and first % len(loader):
            active = accelerator.skip_first_batches(loader, first % len(loader))
        for inputs, targets in active:
            loss = F.mse_loss(model(inputs), targets)
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            step += 1
            counter.count += 1
            mean = accelerator.reduce(loss.detach(), "mean").item()
            accelerator.log({"loss": mean}, step=step)
            found.append(mean)
            if resume is None and step % 3 == 0:
                accelerator.save_state(str(Path(folder, f"step_{step}")))
            if step == stop:
                break
        if step == stop:
            break
    accelerator.end_training()
    return accelerator, model, found


def early_stopping(kind, folder, **options):
    """`early_stopping.py`: one process asks all of them to stop; the inputs are split between them by hand."""
    accelerator = kind(cpu=True, **options)
    set_seed(42)
    model = _layers()
    loader = DataLoader(_rows(), shuffle=True, batch_size=4)
    optimizer = torch.optim.SGD(params=model.parameters(), lr=1e-2, momentum=0.9)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    found = []
    is_stopped = False
    for _ in range(4):
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = F.mse_loss(model(inputs), targets)
            accelerator.backward(loss)
            optimizer.step()
            found.append(accelerator.reduce(loss.detach(), "mean").item())
            if len(found) == 9 and accelerator.is_main_process:
                accelerator.set_trigger()
            is_stopped = accelerator.check_trigger()
            if is_stopped:
                break
        if is_stopped:
            break
    with accelerator.main_process_first():
        rows = list(range(7))
    with accelerator.split_between_processes(rows) as part:
        found.append(sum(accelerator.gather(torch.tensor([len(part)])).tolist()))
    return accelerator, model, found


SCRIPTS = {
    "diffusion": diffusion,
    "nlp": nlp,
    "cv": cv,
    "accumulation": accumulation,
    "checkpointing": checkpointing,
    "early stopping": early_stopping,
}
