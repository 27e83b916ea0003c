"""Train a GPT-2 or a Llama on one GPU with Paceline and with what else there is, in turn; print what each step takes.

Measured of each: the time of a step, the share of the GPU's arithmetic that the model's uses (MFU), the largest memory
that torch's allocator handed out, and how often in a step the host waits for the device. Beside the memory of a
Workload stands what `paceline plan` predicts of it. The contestants are plain torch, Paceline in two ways, Accelerate,
Lightning Fabric, transformers' Trainer and FSDP2 by hand. All compute the same steps: the losses of the last one are
printed. First the steps of a small model on the GPU are held against those on the CPU, in float64.

    python benchmarks/gpu/run.py --json result.json      # two minutes on an H100
    python benchmarks/gpu/run.py --size llama --clip --fused --only "raw torch" "Paceline, Workload"
    python benchmarks/gpu/run.py --device cpu --tiny     # that the script works

It needs transformers, accelerate and lightning: `pip install -e '.[transformers,lightning]'`.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import gc
import json
import statistics
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.utils.data import DataLoader

import paceline
from paceline.comm import api
from paceline.nouns.errors import PacelineError
from paceline.nouns.plan import Plan
from paceline.parallel.shard.blocks import find_blocks
from paceline.plan.memory import memory_of
from paceline.profile.simulate import simulate
from paceline.train.job import Job

PEAK_FLOPS = {"H100 80GB HBM3": 989e12, "H200": 989e12, "A100": 312e12}  # dense bf16, of the vendor's data sheets
# Layers, width, heads, words, tokens of a sample, samples of a step, a Llama's inner width.
SIZES = {
    "tiny": (2, 64, 4, 256, 32, 4, 0),
    "small": (12, 256, 4, 8192, 256, 8, 0),  # the host takes longer for a step than the device
    "gpt2": (12, 768, 12, 50257, 1024, 16, 0),  # 124 million parameters
    "llama": (16, 2048, 32, 32000, 1024, 8, 8192),  # 1.1 billion
}
WARM_UP = 5  # steps before the timed ones


@dataclass(frozen=True)
class Task:
    """What is trained: a model's sizes, tokens of a sample, samples of a step, steps of a turn, and how."""

    layers: int
    width: int
    heads: int
    words: int
    length: int
    batch: int
    steps: int
    device: torch.device
    inner: int = 0  # of a Llama's feed-forward layers; 0 for a GPT-2
    clip: float = 0.0  # the largest norm of the gradient; 0: any
    fused: bool = False

    def model(self) -> Any:
        """Return the model, made from the same random numbers each time; a large one on its device, as that is fast."""
        from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

        torch.manual_seed(0)
        if self.inner:
            llama = LlamaConfig(
                vocab_size=self.words, hidden_size=self.width, intermediate_size=self.inner, use_cache=False,
                num_hidden_layers=self.layers, num_attention_heads=self.heads, num_key_value_heads=self.heads // 4,
                max_position_embeddings=self.length, attn_implementation="sdpa",
            )  # fmt: skip
            with self.device:
                return LlamaForCausalLM(llama)
        sizes = {"n_layer": self.layers, "n_embd": self.width, "n_head": self.heads, "n_positions": self.length}
        none = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        config = GPT2Config(vocab_size=self.words, use_cache=False, bos_token_id=1, eos_token_id=1, **sizes, **none)
        return GPT2LMHeadModel(config)

    def data(self) -> torch.Tensor:
        """Return (samples, tokens)."""
        random = torch.Generator().manual_seed(1)
        return torch.randint(self.words, (self.batch * self.steps, self.length), generator=random)

    def loader(self) -> DataLoader[Any]:
        """Return the samples in their order."""
        return DataLoader(self.data(), batch_size=self.batch, pin_memory=self.device.type == "cuda")  # type: ignore[arg-type]

    @property
    def step_flops(self) -> float:
        """Return what forward and backward passes of a step compute (Chowdhery et al. 2022, PaLM, appendix B)."""
        layer = 12 * self.width**2
        if self.inner:  # a quarter as many heads of keys and values, and three matrices in the feed-forward part
            layer = 2.5 * self.width**2 + 3 * self.width * self.inner
        parameters = self.layers * layer + self.words * self.width
        per_token = 6 * parameters + 12 * self.layers * self.width * self.length
        return float(per_token * self.batch * self.length)

    def optimizer(self, model: Any) -> torch.optim.Optimizer:
        """Return the optimizer of all contestants."""
        return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=self.fused or None)


class Clock:
    """Takes the time of steps: `tick` after each. Only the last one waits for the device."""

    def __init__(self, device: torch.device, count_waits: bool) -> None:
        self.device = device
        self.count_waits = count_waits and device.type == "cuda"
        self.times: list[float] = []
        self.waits: collections.Counter[str] = collections.Counter()
        self.counted = 0
        self._stack = contextlib.ExitStack()

    def tick(self) -> None:
        """Note that a step has been handed to the device."""
        self.times.append(time.perf_counter())
        if self.count_waits and len(self.times) == WARM_UP:
            self._stack.enter_context(_waits_into(self.waits))
        self.counted += self.count_waits and len(self.times) > WARM_UP

    def stop(self) -> None:
        """Wait for the device: the time of the last step is that of its end."""
        self.close()
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        self.times[-1] = time.perf_counter()

    def close(self) -> None:
        """Count no more waits."""
        self._stack.close()

    @property
    def step_s(self) -> float:
        """Return the mean time of a step after the first ones: a single one's is when it was handed over."""
        timed = self.times[WARM_UP - 1 :]
        return (timed[-1] - timed[0]) / (len(timed) - 1)


@contextlib.contextmanager
def _waits_into(waits: collections.Counter[str]) -> Iterator[None]:
    """Count where the host waits for the device, as torch's debug mode sees it."""
    torch.cuda.set_sync_debug_mode("warn")
    kept = warnings.showwarning

    def show(message: Any, *others: Any, **named: Any) -> None:
        if "synchroniz" in str(message):
            frame = [frame for frame in traceback.extract_stack()[:-1] if "warnings" not in frame.filename][-1]
            waits[f"{Path(frame.filename).name}:{frame.name}"] += 1

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = show
        try:
            yield
        finally:
            warnings.showwarning = kept
            torch.cuda.set_sync_debug_mode("default")


def loss_sum(model: Any, ids: Any) -> Any:
    """Return the sum of the next words' losses, and how many there are."""
    scores = model(input_ids=ids).logits
    labels = ids[:, 1:]
    return F.cross_entropy(scores[:, :-1].flatten(0, 1).float(), labels.flatten(), reduction="sum"), labels.numel()


def mean_loss(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Return the mean loss."""
    total, count = loss_sum(model, ids)
    return total / count  # type: ignore[no-any-return]


def raw_torch(task: Task, clock: Clock, wrap: Callable[[Any], Any]) -> float:
    """Train by a loop of plain torch."""
    return plain_steps(task, clock, wrap(task.model().to(task.device)), has_autocast=True)


def plain_steps(task: Task, clock: Clock, model: Any, has_autocast: bool) -> float:
    """Take the steps of a loop of plain torch."""
    optimizer = task.optimizer(model)
    loss = torch.zeros(())
    for batch in task.loader():
        ids = batch.to(task.device, non_blocking=True)
        optimizer.zero_grad()
        with torch.autocast(task.device.type, torch.bfloat16, enabled=has_autocast):
            loss = mean_loss(model, ids)
        loss.backward()
        if task.clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), task.clip)
        optimizer.step()
        clock.tick()
    return float(loss.detach())


def workload_of(task: Task, wrap: Callable[[Any], Any], **parts: Any) -> paceline.Workload:
    """Return the task as a Workload, whose batches the loop makes unless `parts` has data."""
    own = {"data": None, "steps": task.steps, "epochs": 1, **parts}
    return paceline.Workload(
        model=lambda: wrap(task.model()), loss=loss_sum, optimizer=task.optimizer, precision="bf16",
        clip_norm=task.clip or None, **own,
    )  # fmt: skip


def predicted_mib(task: Task) -> int | None:
    """Return what `paceline plan` predicts as the largest memory of the Workload's step; None where it can't."""
    # Made on the CPU, where tensors without values are, whatever device is asked about.
    made = dataclasses.replace(task, device=torch.device("cpu"))
    workload = workload_of(made, as_it_is, data=made.data(), batch_size=made.batch)
    try:
        profile = simulate(workload, Plan(), device=task.device.type, is_brief=True)
    except PacelineError as error:
        print(f"no prediction: {error}", file=sys.stderr)
        return None
    return round(memory_of(profile).peak / 2**20)


def paceline_job(task: Task, clock: Clock, wrap: Callable[[Any], Any]) -> float:
    """Train a Workload."""
    job = Job(workload_of(task, wrap), Plan())
    mean = 0.0
    for batch in task.loader():
        mean = job.step(batch)
        clock.tick()
    job.close()
    return mean


def paceline_loop(task: Task, clock: Clock, wrap: Callable[[Any], Any]) -> float:
    """Train by a loop of one's own."""
    model = wrap(task.model())
    job, model, optimizer, loader = paceline.prepare(model, task.optimizer(model), task.loader())
    loss = torch.zeros(())
    for batch in loader:
        optimizer.zero_grad()
        with torch.autocast(task.device.type, torch.bfloat16):
            loss = mean_loss(model, batch)
        job.backward(loss)
        if task.clip:
            job.clip(task.clip)
        optimizer.step()
        clock.tick()
    job.close()
    return float(loss.detach())


def accelerate(task: Task, clock: Clock, wrap: Callable[[Any], Any]) -> float:
    """Train with Hugging Face Accelerate."""
    from accelerate import Accelerator

    accelerator = Accelerator(mixed_precision="bf16", cpu=task.device.type == "cpu")
    made = wrap(task.model())
    model, optimizer, loader = accelerator.prepare(made, task.optimizer(made), task.loader())
    loss = torch.zeros(())
    for batch in loader:
        optimizer.zero_grad()
        loss = mean_loss(model, batch)
        accelerator.backward(loss)
        if task.clip:
            accelerator.clip_grad_norm_(model.parameters(), task.clip)
        optimizer.step()
        clock.tick()
    accelerator.free_memory()
    return float(loss.detach())


def fabric(task: Task, clock: Clock, wrap: Callable[[Any], Any]) -> float:
    """Train with Lightning Fabric."""
    from lightning.fabric import Fabric

    made = Fabric(accelerator=task.device.type, devices=1, precision="bf16-mixed")
    plain = wrap(task.model())
    model, optimizer = made.setup(plain, task.optimizer(plain))
    loader = made.setup_dataloaders(task.loader())
    loss = torch.zeros(())
    for batch in loader:
        optimizer.zero_grad()
        loss = mean_loss(model, batch)
        made.backward(loss)
        if task.clip:
            made.clip_gradients(model, optimizer, max_norm=task.clip)
        optimizer.step()
        clock.tick()
    return float(loss.detach())


def trainer(task: Task, clock: Clock, wrap: Callable[[Any], Any]) -> float:
    """Train with transformers' Trainer."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Tick(TrainerCallback):  # type: ignore[misc]
        """Ticks after each step."""

        def on_step_end(self, *arguments: Any, **named: Any) -> None:
            """Note the step."""
            clock.tick()

    class Ordered(Trainer):  # type: ignore[misc]
        """Takes the samples in their order, and the loss of all contestants; keeps the last one."""

        last = torch.zeros(())

        def get_train_dataloader(self) -> DataLoader[Any]:
            """Return the samples in their order."""
            return self.accelerator.prepare(self.own_loader())  # type: ignore[no-any-return]

        def own_loader(self) -> DataLoader[Any]:
            """Return the task's loader, whose batches are dicts here."""
            made = task.loader()
            pinned = made.pin_memory
            return DataLoader(made.dataset, batch_size=task.batch, pin_memory=pinned, collate_fn=_as_dict)

        def compute_loss(self, model: Any, inputs: Any, *arguments: Any, **named: Any) -> torch.Tensor:
            """Return the mean loss."""
            self.last = mean_loss(model, inputs["input_ids"])
            return self.last

    model = wrap(task.model())
    optimizer = task.optimizer(model.to(task.device))
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, bf16=True, use_cpu=task.device.type == "cpu", num_train_epochs=1, max_grad_norm=task.clip,
            per_device_train_batch_size=task.batch, lr_scheduler_type="constant", logging_strategy="no",
            logging_nan_inf_filter=False, save_strategy="no", eval_strategy="no", report_to="none", disable_tqdm=True,
            remove_unused_columns=False, seed=0,
        )  # fmt: skip
        made = Ordered(model, arguments, optimizers=(optimizer, None), train_dataset=task.data(), callbacks=[Tick()])
        made.train()
        return float(made.last.detach())


def _as_dict(samples: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return samples as Trainer takes them."""
    return {"input_ids": torch.stack(samples)}


def fsdp2(task: Task, clock: Clock, wrap: Callable[[Any], Any]) -> float:
    """Train by a loop of plain torch with FSDP2, in a process group of one rank."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    backend = "nccl" if task.device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh(task.device.type, (1,))
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        model = task.model().to(task.device)
        for block in find_blocks(model).values():
            fully_shard(block, mesh=mesh, mp_policy=policy)
        model = wrap(fully_shard(model, mesh=mesh, mp_policy=policy))
        return plain_steps(task, clock, model, has_autocast=False)  # the policy casts
    finally:
        dist.destroy_process_group()


CONTESTANTS: dict[str, Callable[[Task, Clock, Callable[[Any], Any]], float]] = {
    "raw torch": raw_torch,
    "Paceline, Workload": paceline_job,
    "Paceline, own loop": paceline_loop,
    "Accelerate": accelerate,
    "Lightning Fabric": fabric,
    "transformers Trainer": trainer,
    "FSDP2 by hand": fsdp2,
}


def as_it_is(model: Any) -> Any:
    """Return the model."""
    return model


def time_steps(task: Task, names: Sequence[str], rounds: int, wrap: Callable[[Any], Any]) -> list[dict[str, Any]]:
    """Let the contestants train in turn; return a row for each."""
    rows: dict[str, dict[str, Any]] = {name: {"name": name, "step_ms": []} for name in names}
    for number in range(rounds):
        for name in names:
            train = CONTESTANTS[name]
            gc.collect()
            if task.device.type == "cuda":
                torch.cuda.empty_cache()
                _check_is_free(name, torch.cuda.memory_allocated())
                torch.cuda.reset_peak_memory_stats()
            counts_waits = number == rounds - 1  # which the time of the others is free of
            clock = Clock(task.device, counts_waits)
            row = rows[name]
            try:
                row["loss"] = train(task, clock, wrap)
            except Exception as error:
                row["failed"] = f"{type(error).__name__}: {error}".splitlines()[0]
                continue
            finally:
                clock.close()
            clock.stop()
            if counts_waits and task.device.type == "cuda":
                row["waits"] = round(clock.waits.total() / max(clock.counted, 1), 2)
                row["waits_at"] = dict(clock.waits)
            else:
                row["step_ms"].append(round(1000 * clock.step_s, 3))
            if task.device.type == "cuda":
                row["peak_mib"] = round(torch.cuda.max_memory_allocated() / 2**20)
    return list(rows.values())


def _check_is_free(name: str, left: int) -> None:
    """Say where an earlier contestant still holds memory, which would count as this one's."""
    if left > 64 * 2**20:  # more than the workspaces of the GPU's libraries
        print(f"{name}: its peak counts {left >> 20} MiB that were there before it", file=sys.stderr)


_Case = tuple[torch.device, dict[str, Any], Plan]  # where, with which parts of the workload, under which plan


def same_as_cpu(device: torch.device) -> list[dict[str, Any]]:
    """Train small models with several options, on the device and otherwise; return the differences.

    In float64 on the device and on the CPU. On a GPU also: batches that worker processes make, which come before they
    are asked for, in float32 beside those of the process itself; and activations that wait in the host's memory.
    """
    small = Task(2, 32, 4, 64, 16, 4, 5, device)
    larger = Task(3, 64, 4, 64, 64, 8, 5, device)  # small tensors stay on the device
    cpu = torch.device("cpu")
    wide = {"precision": "float64"}
    pairs: dict[str, tuple[_Case, _Case]] = {
        "plain": ((device, wide, Plan()), (cpu, wide, Plan())),
        "clip_norm": ((device, {**wide, "clip_norm": 0.5}, Plan()), (cpu, {**wide, "clip_norm": 0.5}, Plan())),
        "micro-batches": ((device, {**wide, "micro_batch_size": 1}, Plan()), (cpu, wide, Plan())),
        "checkpointing": ((device, wide, Plan(checkpointing="full")), (cpu, wide, Plan())),
    }
    if device.type != "cpu":
        pairs["offload"] = (device, wide, Plan(checkpointing="offload")), (cpu, wide, Plan())
        pairs["batches ahead"] = (device, {"loader_workers": 2}, Plan()), (device, {}, Plan())
    found = []
    for name, pair in pairs.items():
        losses = []
        task = larger if name == "offload" else small
        for where, parts, plan in pair:
            workload = paceline.Workload(
                model=task.model, loss=_wide_loss, optimizer=task.optimizer, data=task.data(),
                batch_size=task.batch, epochs=1, **parts,
            )  # fmt: skip
            with _ranks_on(where):
                job = Job(workload, plan)
                losses.append([job.step(batch) for batch in job.batches()])
                job.close()
        worst = max(abs(one - other) / abs(other) for one, other in zip(*losses, strict=True))
        found.append({"option": name, "steps": task.steps, "largest_difference": worst, "equal": worst < 1e-10})
    return found


def _wide_loss(model: Any, ids: torch.Tensor) -> Any:
    scores = model(input_ids=ids).logits
    return F.cross_entropy(scores.flatten(0, 1), ids.flatten(), reduction="sum"), ids.numel()


@contextlib.contextmanager
def _ranks_on(device: torch.device) -> Iterator[None]:
    """Have ranks compute on the CPU where `device` is one, also where there are GPUs."""
    kept = torch.cuda.is_available
    if device.type == "cpu":
        torch.cuda.is_available = lambda: False
    try:
        yield
    finally:
        torch.cuda.is_available = kept


def table(rows: list[dict[str, Any]], task: Task, peak_flops: float | None) -> str:
    """Return aligned lines: a row for each contestant, its time as a ratio to that of the first that worked."""
    base = next((statistics.median(row["step_ms"]) for row in rows if "failed" not in row), 0.0)
    memory = f"{'peak MiB':>9} {'predicted MiB':>13}"
    lines = [f"{'':20} {'ms/step':>9} {'ratio':>7} {'MFU':>6} {memory} {'waits/step':>10} {'last loss':>10}"]
    for row in rows:
        if "failed" in row:
            lines.append(f"{row['name']:20} failed: {row['failed'][:90]}")
            continue
        median = statistics.median(row["step_ms"])
        share = "-" if peak_flops is None else f"{task.step_flops / (median / 1000) / peak_flops:.1%}"
        lines.append(
            f"{row['name']:20} {median:9.2f} {median / base:7.3f} {share:>6} {row.get('peak_mib', '-'):>9} "
            f"{row.get('predicted_mib', '-'):>13} {row.get('waits', '-'):>10} {row['loss']:10.5f}"
        )
    return "\n".join(lines)


def main() -> int:
    """Run all; print tables; exit with 1 where something is not equal or failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--size", choices=SIZES, default="gpt2", help="of the model (default gpt2, of 124 million)")
    parser.add_argument("--tiny", action="store_true", help="the same as --size tiny")
    parser.add_argument("--clip", action="store_true", help="clip the gradient's norm to 1")
    parser.add_argument("--fused", action="store_true", help="AdamW with fused=True")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each; on a GPU the last one counts waits")
    parser.add_argument("--steps", type=int, default=25, help="of each turn")
    parser.add_argument("--compile", action="store_true", help="also with torch.compile in each contestant")
    parser.add_argument("--only", nargs="+", choices=CONTESTANTS, default=list(CONTESTANTS), help="leave out others")
    parser.add_argument("--json", type=Path, help="write everything that was measured to a file")
    arguments = parser.parse_args()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("there is no GPU here; --device cpu --tiny shows that the script works")
    if arguments.rounds < 2 or arguments.steps < WARM_UP + 2:
        parser.error(f"needs at least 2 rounds of {WARM_UP + 2} steps")
    device = torch.device(arguments.device, 0) if arguments.device == "cuda" else torch.device("cpu")
    size = "tiny" if arguments.tiny else arguments.size
    *sizes, inner = SIZES[size]
    task = Task(*sizes, arguments.steps, device, inner, 1.0 if arguments.clip else 0.0, arguments.fused)
    api.init()
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    peak = next((flops for part, flops in PEAK_FLOPS.items() if part in name), None)
    result: dict[str, Any] = {"device": name, "torch": torch.__version__, "task": {**vars(task), "device": str(device)}}
    print(f"{name}, torch {torch.__version__}: {size}, bf16, {task.batch} x {task.length} tokens", flush=True)
    result["same_as_cpu"] = same_as_cpu(device)
    for row in result["same_as_cpu"]:
        other = "batches asked for" if row["option"] == "batches ahead" else "float64 on the CPU"
        differs = f"differs from {other} by {row['largest_difference']:.1e} in {row['steps']} steps"
        print(f"  {row['option']:14} {differs}")
    result["steps"] = time_steps(task, arguments.only, arguments.rounds, as_it_is)
    for row in result["steps"]:
        if CONTESTANTS[row["name"]] is paceline_job:
            row["predicted_mib"] = predicted_mib(task)
    print(table(result["steps"], task, peak), flush=True)
    if arguments.compile:
        result["compiled"] = time_steps(task, arguments.only, arguments.rounds, torch.compile)
        print("with torch.compile\n" + table(result["compiled"], task, peak), flush=True)
    rows = [*result["steps"], *result.get("compiled", [])]
    for row in rows:
        for where, count in row.get("waits_at", {}).items():
            print(f"  {row['name']}: waits at {where}, {count} times")
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    failed = [row["name"] for row in rows if "failed" in row]
    unequal = [row["option"] for row in result["same_as_cpu"] if not row["equal"]]
    return 1 if failed or unequal else 0


if __name__ == "__main__":
    sys.exit(main())
