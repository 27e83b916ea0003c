"""Distils a BERT into a student with half of its layers, as DistilBERT was made, beside a student without a teacher.

    python workload.py
    paceline run -n 2 workload.py --data SST-2 --output result.json --picture figure.png
    paceline run -n 2 --resume workload.py --data SST-2 --output result.json --picture figure.png
    paceline run --plan shard=2 workload.py --teacher teacher
    paceline verify -n 2 workload.py --steps 3 -- --teacher-steps 1

One job in two phases: the teacher is trained, or taken from --teacher; then it is frozen, the student begins as every
second of its layers, and both students see the same batches. Without --data the sentences are made up.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import losses
import model as models
import texts
import torch
from torch import nn

import paceline
from paceline.integrations.saving import save_model
from paceline.nouns.errors import UsageError

POINTS = 10  # of the curve, in each phase
ROUNDS = 5  # of the measurement of speed


def parse_arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the command line, checked."""
    parser = argparse.ArgumentParser(description="Distil a BERT into a student with half of its layers.")
    add = parser.add_argument
    add("--data", type=Path, metavar="DIR", help="SST-2's train.tsv and dev.tsv, or .xz; else sentences are made up")
    add("--limit-train", type=int, metavar="N", help="only the first N training rows")
    add("--teacher", type=Path, metavar="DIR", help="a BERT of transformers on this disk; else one is trained")
    add("--teacher-steps", type=int, metavar="N", help="default 1500; none with a --teacher that is fine-tuned already")
    add("--steps", type=int, default=600, metavar="N", help="of the students (default 600)")
    add("--batch-size", type=int, default=32, metavar="N", help="of all ranks together (default 32)")
    add("--lr", type=float, help="peak learning rate (default 1e-3, with --teacher 1e-4)")
    add("--layers", type=int, default=4, help="of a teacher that is trained here (default 4)")
    add("--width", type=int, default=64, help="of it (default 64)")
    add("--tokens", type=int, default=4000, metavar="N", help="of a vocabulary that is made here (default 4000)")
    add("--vocabulary", type=Path, metavar="FILE", help="a BERT vocab.txt; else one is made of the training text")
    add("--max-length", type=int, default=48, metavar="N", help="tokens at which a sentence is cut (default 48)")
    add("--temperature", type=float, default=2.0, help="of the soft targets (default 2)")
    add("--weights", type=float, nargs=3, default=[5.0, 2.0, 1.0], metavar=("SOFT", "HARD", "COSINE"))
    add("--no-baseline", action="store_true", help="train no student without a teacher")
    add("--seed", type=int, default=0)
    add("--save-teacher", type=Path, metavar="DIR", help="write the teacher, for --teacher")
    add("--save-student", type=Path, metavar="DIR", help="write the student, as transformers reads it")
    add("--output", type=Path, metavar="FILE", help="write the result as JSON")
    add("--picture", type=Path, metavar="FILE", help="draw accuracy against steps, and the speeds")
    arguments = parser.parse_args(words)
    check_arguments(arguments)
    return arguments


def check_arguments(arguments: argparse.Namespace) -> None:
    """Raise UsageError for what would else be found only after the training, or never."""
    least_of = {"limit_train": 1, "steps": 1, "batch_size": 1, "layers": 2, "width": 8, "tokens": 100, "max_length": 8}
    for name, least in {**least_of, "teacher_steps": 0 if arguments.teacher else 1}.items():
        value = getattr(arguments, name)
        if value is not None and value < least:
            flag = flag_of(name)
            raise UsageError(f"{flag} {value}", f"it should be at least {least}", f"write {flag} {least} or more")
    for name, usual in (("temperature", 2), ("lr", 0.001)):
        value = getattr(arguments, name)
        if value is not None and not 0 < value < math.inf:
            raise UsageError(f"--{name} {value}", "it should be a number above 0", f"write e.g. --{name} {usual}")
    if not (min(arguments.weights) >= 0 and 0 < sum(arguments.weights) < math.inf):
        raise UsageError(
            f"--weights {' '.join(map(str, arguments.weights))}",
            "they should be 0 or more, and one of them above 0",
            "write the weights of soft targets, the teacher's own losses and hidden states, such as --weights 5 2 1",
        )
    if arguments.width > 32 and arguments.width % 32:
        raise UsageError(
            f"--width {arguments.width}", "a head of attention is 32 wide", "write a multiple of 32, or less than 32"
        )
    check_teachers_own(arguments)
    check_folders(arguments)


def check_teachers_own(arguments: argparse.Namespace) -> None:
    """Raise UsageError where a flag asks for what --teacher has itself."""
    if arguments.teacher is None:
        return
    for name, unset in (("layers", 4), ("width", 64), ("tokens", 4000), ("vocabulary", None)):
        if getattr(arguments, name) != unset:
            raise UsageError(f"--{name} with --teacher", "the teacher has its own", f"leave --{name} or --teacher out")


def check_folders(arguments: argparse.Namespace) -> None:
    """Raise UsageError where what is to be written has no folder to be in."""
    for name in ("output", "picture", "save_teacher", "save_student"):
        path = getattr(arguments, name)
        if path is not None and not path.resolve().parent.is_dir():
            raise UsageError(f"{flag_of(name)} {path}", f"there is no folder {path.parent}", "make the folder first")


def flag_of(name: str) -> str:
    """Return a flag as it is written."""
    return f"--{name.replace('_', '-')}"


class Setting(NamedTuple):
    """What is trained, on what: read, made and checked before any process waits for another."""

    data: str
    train: texts.Sentences
    dev: texts.Sentences
    vocabulary: list[str]
    teacher: models.Encoder
    students: dict[str, models.Encoder]
    teacher_steps: int
    is_frozen: bool


def prepare(arguments: argparse.Namespace) -> Setting:
    """Read the sentences and make the models."""
    torch.manual_seed(arguments.seed)
    rows, dev, name = texts.read(arguments.data, arguments.limit_train)
    is_tuned = False
    if arguments.teacher is not None:
        teacher, vocabulary, is_tuned = models.open_teacher(arguments.teacher, arguments.max_length)
    else:
        vocabulary = texts.make_vocabulary(rows.texts, arguments.tokens)
        if arguments.vocabulary is not None:
            vocabulary = texts.read_vocabulary(arguments.vocabulary)
        size = arguments.layers, arguments.width, len(vocabulary), arguments.max_length
        teacher = models.Encoder(models.small_config(*size))
    names = ["student"] if arguments.no_baseline else ["student", "alone"]
    tokenizer = texts.open_tokenizer(vocabulary, arguments.max_length)
    train = texts.Sentences(rows, tokenizer, texts.MASKED)
    steps = arguments.teacher_steps
    if steps is None:
        steps = 0 if is_tuned else 1500
    return Setting(
        data=f"{name}, {len(train):,} rows",
        train=train,
        dev=texts.Sentences(dev, tokenizer, masked=0),
        vocabulary=vocabulary,
        teacher=teacher,
        students={name: models.student_of(teacher.config) for name in names},
        teacher_steps=steps,
        is_frozen=steps == 0,
    )


def train(setting: Setting, arguments: argparse.Namespace) -> tuple[Any, dict[str, Any]]:
    """Train the teacher, then the students. Return the job and what is known of its progress."""
    teacher, students = setting.teacher, setting.students
    if setting.is_frozen:
        teacher.requires_grad_(False).eval()
    trained = [*([] if setting.is_frozen else [teacher]), *students.values()]
    peak = arguments.lr or (1e-4 if arguments.teacher else 1e-3)
    # BERT's eps: the gradient of a key's bias is 0 but for rounding, which a smaller one would make an update of.
    optimizers = [torch.optim.AdamW(each.parameters(), lr=peak, eps=1e-6, weight_decay=0.01) for each in trained]
    lengths = [setting.teacher_steps] * (not setting.is_frozen) + [arguments.steps] * len(students)
    schedulers = [schedule(optimizer, steps) for optimizer, steps in zip(optimizers, lengths, strict=True)]
    total = setting.teacher_steps + arguments.steps
    batches = texts.Buckets(setting.train.lengths, arguments.batch_size, total)
    loader = torch.utils.data.DataLoader(setting.train, batch_sampler=batches, collate_fn=texts.pad)
    # A teacher that is frozen from the beginning is in parts: each rank keeps some, and gathers a layer to compute it.
    job, *_, loader = paceline.prepare(
        teacher,
        *students.values(),
        *optimizers,
        *schedulers,
        loader,
        seed=arguments.seed,
        shard_frozen=setting.is_frozen,
    )
    # In checkpoints: a resumed job knows in which phase it is, and its curve goes on.
    progress = job.keep("progress", {"students_began": False, "seconds": 0.0, "curve": []})
    watch = Stopwatch(progress["seconds"])
    weights = losses.Weights(*arguments.weights)
    for _ in job.epochs(1):
        for batch in loader:
            is_teaching = job.step_number < setting.teacher_steps
            if is_teaching:
                loss = losses.hard_loss(teacher(**inputs_of(batch)), batch)
            else:
                if not progress["students_began"]:
                    models.begin_as(job, teacher, students["student"])
                    progress["students_began"] = True
                teacher.requires_grad_(False).eval()
                loss = loss_of_students(teacher, students, batch, weights, arguments.temperature)
            own = slice(0, 1) if is_teaching else slice(-len(students), None)
            for optimizer in optimizers[own]:
                optimizer.zero_grad()
            job.backward(loss)
            for optimizer, scheduler in zip(optimizers[own], schedulers[own], strict=True):
                job.clip(1.0, optimizer)
                optimizer.step()
                scheduler.step()
            done = job.step_number - (0 if is_teaching else setting.teacher_steps)
            if is_point(done, setting.teacher_steps if is_teaching else arguments.steps):
                # What checkpoints keep has to be the same number on every rank.
                progress["seconds"] = float(paceline.broadcast(torch.tensor(watch.pause(), dtype=torch.float64), 0))
                scores = evaluate(job, setting.dev, {"teacher": teacher} if is_teaching else students)
                progress["curve"].append({"step": job.step_number, "seconds": progress["seconds"], **scores})
                watch.go_on()
    return job, progress


def inputs_of(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return what the models are called with."""
    return {name: batch[name] for name in ("input_ids", "attention_mask", "places")}


def loss_of_students(
    teacher: nn.Module,
    students: dict[str, models.Encoder],
    batch: dict[str, torch.Tensor],
    weights: losses.Weights,
    temperature: float,
) -> torch.Tensor:
    """Return the losses of the students of one batch, added up: no parameter is in two of them."""
    with torch.no_grad():
        wanted = teacher(**inputs_of(batch))
    loss = losses.student_loss(students["student"](**inputs_of(batch)), wanted, batch, weights, temperature)
    if "alone" in students:
        loss = loss + losses.hard_loss(students["alone"](**inputs_of(batch)), batch)
    return loss


def schedule(optimizer: torch.optim.Optimizer, steps: int) -> torch.optim.lr_scheduler.LambdaLR:
    """Return a schedule that rises over a tenth of the steps and falls to 0."""
    warm = max(steps // 10, 1)
    return torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warm, max(steps - step, 0) / max(steps - warm, 1))
    )


def is_point(done: int, steps: int) -> bool:
    """Return whether the curve has a point after so many steps of a phase: ten, the last one among them."""
    return done * POINTS // steps > (done - 1) * POINTS // steps


class Stopwatch:
    """Seconds of training, those before a resume included."""

    def __init__(self, before: float) -> None:
        self.seconds = before
        self.began = time.monotonic()

    def pause(self) -> float:
        """Stop, and return the seconds."""
        self.seconds += time.monotonic() - self.began
        return self.seconds

    def go_on(self) -> None:
        """Run again."""
        self.began = time.monotonic()


def evaluate(job: Any, dev: texts.Sentences, candidates: dict[str, nn.Module]) -> dict[str, float]:
    """Return the accuracy of each model over all ranks. Call it on every rank."""

    def score(_: Any, batch: dict[str, torch.Tensor]) -> dict[str, tuple[torch.Tensor, int]]:
        found = {}
        for name, candidate in candidates.items():
            classes = candidate(batch["input_ids"], batch["attention_mask"])["classes"]
            found[name] = ((classes.argmax(1) == batch["labels"]).sum(), len(batch["labels"]))
        return found

    return {name: float(value) for name, value in job.evaluate(dev, score).items()}


def measure_speeds(job: Any, dev: texts.Sentences, candidates: dict[str, nn.Module]) -> dict[str, float]:
    """Return how many sentences of the dev set a model classifies in a second on one rank: the median of rounds."""
    order = dev.lengths.argsort(stable=True)  # little is padded
    batches = [texts.pad([dev[int(index)] for index in part]) for part in order.split(64)]
    batches = [{name: value.to(job.device) for name, value in batch.items()} for batch in batches]
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    with torch.no_grad():
        for number in range(ROUNDS + 1):
            for name, candidate in candidates.items():
                candidate.eval()
                began = time.perf_counter()
                for batch in batches:
                    candidate(batch["input_ids"], batch["attention_mask"])["classes"].sum().item()
                if number:  # the first round warms up
                    seconds[name].append(time.perf_counter() - began)
    return {name: len(dev) / statistics.median(each) for name, each in seconds.items()}


def report(setting: Setting, arguments: argparse.Namespace, job: Any, progress: dict[str, Any]) -> dict[str, Any]:
    """Return the result, the same on every rank but for the speeds. Call it on every rank."""
    candidates = {"teacher": setting.teacher, **setting.students}
    scores = evaluate(job, setting.dev, candidates)
    speeds = measure_speeds(job, setting.dev, {name: candidates[name] for name in ("teacher", "student")})
    used = min((setting.teacher_steps + arguments.steps) * arguments.batch_size, len(setting.train))
    sizes = {name: sum(each.numel() for each in candidate.parameters()) for name, candidate in candidates.items()}
    name, _, rows = setting.data.partition(", ")
    return {
        "data": f"{name}, {used:,} of {rows}",
        "size": f"{sizes['teacher'] / 1e6:.2f} million parameters; the student {sizes['student'] / 1e6:.2f}",
        "scores": {"accuracy": scores["student"], **scores},
        "sentences_per_s": {name: round(speed) for name, speed in speeds.items()},
        "faster": round(speeds["student"] / speeds["teacher"], 2),
        "seconds": round(progress["seconds"], 1),
        "steps": job.step_number,
        "teacher_steps": setting.teacher_steps,
        "curve": progress["curve"],
    }


def show(result: dict[str, Any]) -> None:
    """Print the result."""
    print(f"{result['data']}; {result['steps']} steps in {result['seconds']} s; {result['size']}")
    for name, accuracy in result["scores"].items():
        speed = result["sentences_per_s"].get(name)
        if name != "accuracy":
            label = {"alone": "student without a teacher"}.get(name, name)
            print(f"{label:26} accuracy {accuracy:.4f}" + (f"  {speed:6,} sentences/s on a rank" if speed else ""))
    lost = 100 * (result["scores"]["teacher"] - result["scores"]["student"])
    side = "below" if lost >= 0 else "above"
    print(f"the student is {abs(lost):.1f} points {side} its teacher, and {result['faster']} times as fast")


def main() -> None:
    """Train, measure and report."""
    arguments = parse_arguments()
    setting = prepare(arguments)
    job, progress = train(setting, arguments)
    result = report(setting, arguments, job, progress)
    for model, folder in (
        (setting.teacher, arguments.save_teacher),
        (setting.students["student"], arguments.save_student),
    ):
        if folder is not None:
            save_model(
                job, model, folder, lambda path: (path / "vocab.txt").write_text("\n".join(setting.vocabulary) + "\n")
            )
    if job.rank != 0:
        return
    show(result)
    if arguments.output:
        arguments.output.write_text(json.dumps(result, indent=1) + "\n")
    if arguments.picture:
        import picture

        picture.draw(result, arguments.picture)


if __name__ == "__main__":
    main()
