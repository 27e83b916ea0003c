"""A small CLIP: digits and captions, the typographic attack on it, and a defence.

    paceline run -n 2 workload.py
    paceline run -n 2 workload.py --data usps --picture figure.png

Two models learn side by side from the same captions: the second one's digits have random words written under them.
Each contrastive loss is over the global batch. Then a wrong word is written on the test digits.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any, NamedTuple

import captions
import digits
import figure
import pictures
import torch
import towers
from torch.nn import functional as F
from torch.utils.data import DataLoader

import paceline
from paceline.nouns.errors import UsageError


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Train a small CLIP on digits, attack it with words, and defend it.")
    add = parser.add_argument
    add("--data", type=Path, metavar="DIR", help="folder with USPS's or MNIST's files; else digits are generated")
    add("--epochs", type=int, default=10)
    add("--steps", type=int, help="optimizer steps, instead of --epochs")
    add("--batch-size", type=int, default=128, help="of all ranks together (default 128)")
    add("--lr", type=float, default=3e-3, help="peak learning rate (default 3e-3)")
    add("--width", type=int, default=16, help="channels of the first convolution (default 16)")
    add("--embedding", type=int, default=64, help="numbers of an embedding (default 64)")
    add("--temperature", type=float, default=0.07, help="at the beginning (default 0.07); it is learned")
    add("--random-words", type=float, default=0.7, help="the defence's share of digits with a word (default 0.7)")
    add("--font-size", type=int, default=10, help="of the words (default 10)")
    add("--precision", default="float32", choices=("float32", "float64"))
    add("--seed", type=int, default=0)
    add("--output", type=Path, metavar="FILE", help="write the result as JSON")
    add("--picture", type=Path, metavar="FILE", help="draw digits, words and what the models say")
    return parser.parse_args()


def check_arguments(arguments: argparse.Namespace) -> None:
    """Raise UsageError for what would else be found only after the training."""
    least = {"epochs": 1, "steps": 1, "width": 1, "embedding": 2, "font_size": 4}
    for flag, lowest in least.items():
        value = getattr(arguments, flag)
        if value is not None and value < lowest:
            name = f"--{flag.replace('_', '-')}"
            raise UsageError(f"{name} {value}", f"it should be at least {lowest}", f"write {name} {lowest} or more")
    if arguments.batch_size < 2:
        asked = f"--batch-size {arguments.batch_size}"
        raise UsageError(asked, "a contrastive loss compares a sample with others", "write --batch-size 2 or more")
    if not arguments.temperature > 0:
        found = "similarities are divided by it, so it should be above 0"
        raise UsageError(f"--temperature {arguments.temperature}", found, "write --temperature 0.07")
    if not arguments.lr > 0:
        raise UsageError(f"--lr {arguments.lr}", "it should be above 0", "write --lr 3e-3")
    if not 0 <= arguments.random_words <= 1:
        asked = f"--random-words {arguments.random_words}"
        raise UsageError(asked, "it is a share of the pictures", "write a number from 0 to 1")
    for flag in ("output", "picture"):
        path = getattr(arguments, flag)
        if path is not None and not path.parent.is_dir():
            raise UsageError(f"--{flag} {path}", f"there is no folder {path.parent}", "make the folder first")
    pictures.check_words(arguments.font_size)


class Clip(NamedTuple):
    """One model: two towers and a temperature."""

    image: torch.nn.Module
    text: torch.nn.Module
    temperature: torch.nn.Module


def make_clip(arguments: argparse.Namespace) -> Clip:
    """The same parameters at each call."""
    torch.manual_seed(arguments.seed)
    return Clip(
        towers.ImageTower(arguments.width, arguments.embedding),
        towers.TextTower(64, arguments.embedding),
        towers.Temperature(arguments.temperature),
    )


def contrastive_loss(job: Any, clip: Clip, seen: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """CLIP's: each picture finds its caption among those of the global batch, and each caption its picture."""
    images, texts = clip.image(seen), clip.text(tokens)
    all_images, all_texts = job.all_gather(torch.cat([images, texts], dim=1), grad=True).chunk(2, dim=1)
    counts = job.all_gather(torch.tensor([len(images)], device=images.device))
    # This rank's samples stand together among all of them.
    labels = torch.arange(len(images), device=images.device) + counts[: job.data_rank].sum()
    to_texts = F.cross_entropy(clip.temperature(images @ all_texts.T), labels)
    to_images = F.cross_entropy(clip.temperature(texts @ all_images.T), labels)
    return (to_texts + to_images) / 2


def classify(clip: Clip, seen: torch.Tensor) -> torch.Tensor:
    """The digit whose prompts are nearest to each picture (N, 1, 32, 32): zero-shot, as CLIP's."""
    tokens = captions.prompts().to(seen.device)
    texts = F.normalize(clip.text(tokens.flatten(0, 1)).unflatten(0, tokens.shape[:2]).mean(1), dim=1)
    return (clip.image(seen) @ texts.T).argmax(1)


def evaluate(job: Any, clip: Clip, tests: pictures.Tests) -> dict[str, float]:
    """Accuracy on clean digits, and what a written wrong word does, over all ranks."""

    def score(model: Any, batch: Any) -> dict[str, tuple[torch.Tensor, int]]:
        seen, labels, written = batch
        guesses = classify(clip, seen.flatten(0, 1)).unflatten(0, seen.shape[:2])
        clean, attacked, other_font, alone = guesses.unbind(1)
        hits = {
            "accuracy": clean == labels,
            "attacked accuracy": attacked == labels,
            "attack success": attacked == written,
            "attacked accuracy, other font": other_font == labels,
            "attack success, other font": other_font == written,
            "words read": alone == written,
        }
        return {name: (hit.sum(), len(labels)) for name, hit in hits.items()}

    return job.evaluate(tests, score)


def show(job: Any, models: dict[str, Clip], tests: pictures.Tests) -> tuple[Any, dict[str, torch.Tensor]]:
    """A test digit of each kind, and what the models say to it. Call it on every rank: some plans cut the models."""
    rows = [int((tests.labels == digit).nonzero()[0]) for digit in range(10) if (tests.labels == digit).any()]
    seen, labels, written = torch.utils.data.default_collate([tests[row] for row in rows])
    with torch.no_grad():
        there = seen.to(job.device)
        guesses = {
            name: classify(clip, there.flatten(0, 1)).unflatten(0, seen.shape[:2]).cpu()
            for name, clip in models.items()
        }
    return ((seen, labels, written), guesses)


def main() -> None:
    """Train both models, then attack them."""
    arguments = parse_arguments()
    check_arguments(arguments)
    torch.set_default_dtype(getattr(torch, arguments.precision))
    source = digits.read_digits(arguments.data)
    data = pictures.Training(source.train, arguments.font_size, arguments.random_words)
    tests = pictures.Tests(source.test, arguments.font_size)
    if len(data) < arguments.batch_size:
        found = f"there are {len(data)} training digits"
        raise UsageError(f"--batch-size {arguments.batch_size}", found, "choose a smaller batch")
    a_pass = len(data) // arguments.batch_size
    steps = arguments.steps or arguments.epochs * a_pass

    plain, defended = make_clip(arguments), make_clip(arguments)
    both = torch.nn.ModuleList([*plain, *defended])
    size = sum(parameter.numel() for parameter in both.parameters())
    optimizer = torch.optim.AdamW(both.parameters(), lr=arguments.lr, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / 20, max(0.02, (steps - step) / (steps - steps // 3)))
    )
    # Without a short last batch: a rank without a sample would take part with one that does not count.
    loader = DataLoader(data, batch_size=arguments.batch_size, shuffle=True, drop_last=True)
    job, *parts = paceline.prepare(*plain, *defended, optimizer, loader, schedule, seed=arguments.seed)
    plain, defended, (optimizer, loader, schedule) = Clip(*parts[:3]), Clip(*parts[3:6]), parts[6:]
    if arguments.batch_size < job.data_size:
        found = f"{job.data_size} ranks share it, and each needs a sample of its own"
        raise UsageError(f"--batch-size {arguments.batch_size}", found, f"write {job.data_size} or more")

    began_s = time.monotonic()
    for _ in job.epochs(-(-steps // a_pass)):
        for seen, guarded, tokens in loader:
            loss = contrastive_loss(job, plain, seen, tokens) + contrastive_loss(job, defended, guarded, tokens)
            optimizer.zero_grad()
            job.backward(loss)
            optimizer.step()
            schedule.step()
            if job.step_number == steps:
                break
    train_s = time.monotonic() - began_s
    models = {"no defence": plain, "random words": defended}
    scores = {name: evaluate(job, clip, tests) for name, clip in models.items()}
    shown = show(job, models, tests) if arguments.picture else None
    if job.rank != 0:
        return
    print(f"{source.name}: {steps} steps on {job.size} rank{'s' * (job.size > 1)}, {train_s:.1f} s")
    print(f"{'':<28}" + "".join(f"{name:>14}" for name in models))
    for name in scores["no defence"]:
        print(f"{name:<28}" + "".join(f"{100 * of_model[name]:>12.1f} %" for of_model in scores.values()))
    if arguments.picture:
        figure.draw(arguments.picture, source.name, *shown, scores)
    if arguments.output:
        result = {
            "data": f"{source.name}, {len(data):,} training and {len(tests):,} test digits",
            "size": f"two models of {size / 2e6:.2f} million parameters",
            "scores": {f"{score}, {name}": value for name, those in scores.items() for score, value in those.items()},
            "seconds": round(train_s, 3),
            "steps": steps,
        }
        arguments.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
