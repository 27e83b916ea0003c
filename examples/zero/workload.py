"""Self-play in the manner of Absolute Zero: one model proposes tasks and solves them, and an executor checks both.

    python workload.py
    paceline run -n 2 workload.py --output result.json --picture figure.png
    paceline run -n 2 --resume workload.py --output result.json --picture figure.png
    paceline run --plan shard=2 workload.py
    paceline run -n 2 workload.py --model DIR --data azr_seeds
    paceline verify -n 2 workload.py --steps 3 -- --warm-up 1

Without --model it is a small model of characters and a tiny language, of which it knows the identity function. With it,
a causal language model of transformers in a folder, and Python.
"""

from __future__ import annotations

import argparse
import json
import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from digits import Digits
from executor import Executor, Limits
from model import Decoder
from progress import Progress
from selfplay import Buffer, Player, Round, Sizes
from tasks import KINDS, PROPOSE, SOLVE, Language, Row, Task

import paceline
from paceline.nouns.errors import UsageError
from paceline.nouns.picture_file import check_picture

RISE = 20  # steps in which the learning rate rises
# A proposal has far more tokens than a solution, and most of them are its form, which has to stay.
PROPOSERS_SHARE, PROPOSERS_ENTROPY = 0.2, 0.05  # of the solver's
WARM_UP_ROWS = 64  # pairs of a proposal and a solution


def parse_arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the command line, checked."""
    parser = argparse.ArgumentParser(description="Train a model by tasks that it proposes and solves itself.")
    add = parser.add_argument
    add("--model", type=Path, metavar="DIR", help="a causal model of transformers on this disk; else a small one")
    add("--data", type=Path, metavar="DIR", help="with --model: seeds of Absolute Zero; else the identity function")
    add("--seeds", default="7b_coder", metavar="NAME", help="with --data: whose (default 7b_coder)")
    add("--steps", type=int, metavar="N", help="of self-play (default 1000; with --model 100)")
    add("--warm-up", type=int, metavar="N", help="steps that show the form of tasks (default 150; with --model 0)")
    add("--batch-size", type=int, metavar="N", help="proposals of a step (default 48), a multiple of 3")
    add("--attempts", type=int, default=4, metavar="N", help="at each task (default 4)")
    add("--operations", type=int, default=2, metavar="N", help="the most of a program of the tiny language (default 2)")
    add("--layers", type=int, default=2, help="of the small model (default 2)")
    add("--width", type=int, default=64, help="of the small model (default 64)")
    add("--max-tokens", type=int, default=200, metavar="N", help="with --model: of an answer (default 200)")
    add("--lr", type=float, help="default 1e-3, with --model 1e-6")
    add("--entropy", type=float, help="weight of the entropy of the answers (default 0.2, with --model 0)")
    add("--precision", default="float32", choices=("float32", "float64"))
    add("--seed", type=int, default=0)
    add("--output", type=Path, metavar="FILE", help="write the result as JSON")
    add("--picture", type=Path, metavar="FILE", help="draw the solve rates, and tasks that were proposed")
    arguments = parser.parse_args(words)
    check_arguments(arguments)
    usual = {"steps": 100, "warm_up": 0, "batch_size": 12, "lr": 1e-6, "entropy": 0.0}
    if arguments.model is None:
        usual = {"steps": 1000, "warm_up": 150, "batch_size": 48, "lr": 1e-3, "entropy": 0.2}
    for name, value in usual.items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, value)
    return arguments


def check_arguments(arguments: argparse.Namespace) -> None:
    """Raise UsageError for what would else be found only in the training, or never."""
    least_of = {"steps": 1, "warm_up": 0, "batch_size": 3, "attempts": 2, "operations": 1, "layers": 1, "width": 4}
    for name, least in {**least_of, "max_tokens": 8}.items():
        value = getattr(arguments, name)
        if value is not None and value < least:
            flag = flag_of(name)
            raise UsageError(f"{flag} {value}", f"it should be at least {least}", f"write {flag} {least} or more")
    if arguments.lr is not None and not 0 < arguments.lr < math.inf:
        raise UsageError(f"--lr {arguments.lr}", "it should be a number above 0", "write --lr 0.001")
    if arguments.entropy is not None and not 0 <= arguments.entropy < math.inf:
        raise UsageError(f"--entropy {arguments.entropy}", "it should be a number, 0 or more", "write --entropy 0.2")
    if arguments.batch_size is not None and arguments.batch_size % len(KINDS):
        found = "each of three kinds of task has a third of them"
        raise UsageError(f"--batch-size {arguments.batch_size}", found, "write a multiple of 3")
    if arguments.width % 4:
        raise UsageError(f"--width {arguments.width}", "it is shared by 4 heads", "write a multiple of 4")
    check_belongs(arguments)
    for name in ("output", "picture"):
        path = getattr(arguments, name)
        if path is not None and not path.resolve().parent.is_dir():
            raise UsageError(f"--{name} {path}", f"there is no folder {path.parent}", "make the folder first")
    check_picture(arguments.picture)


def check_belongs(arguments: argparse.Namespace) -> None:
    """Raise UsageError where a flag has no effect with the model that is asked for."""
    of_python = {"data": None, "seeds": "7b_coder", "max_tokens": 200}
    of_digits = {"operations": 2, "layers": 2, "width": 64}
    for name, unset in (of_python if arguments.model is None else of_digits).items():
        if getattr(arguments, name) != unset:
            where = "without" if arguments.model is None else "with"
            found = "the tiny language makes its own tasks" if where == "without" else "it is of the small model"
            raise UsageError(f"{flag_of(name)} {where} --model", found, f"leave {flag_of(name)} out")
    if arguments.seeds != "7b_coder" and arguments.data is None:
        raise UsageError("--seeds without --data", "there are no files to choose from", "write --data DIR too")


def flag_of(name: str) -> str:
    """Return a flag as it is written."""
    return f"--{name.replace('_', '-')}"


class Setting(NamedTuple):
    """What plays, in which language."""

    language: Language
    model: torch.nn.Module
    sizes: Sizes
    held_out: list[Task]
    size: int  # parameters, before a plan cuts them


def prepare(arguments: argparse.Namespace) -> Setting:
    """Read the files and make the model."""
    torch.manual_seed(arguments.seed)
    if arguments.precision == "float64":
        torch.set_default_dtype(torch.float64)
    sizes = Sizes(arguments.batch_size // 3, arguments.attempts, 1 if arguments.model is None else 2)
    if arguments.model is not None:
        import python_tasks

        language, model = python_tasks.open_language(
            arguments.model, arguments.data, arguments.seeds, arguments.max_tokens
        )
    else:
        language = Digits(arguments.operations)
        size = len(language.characters), language.positions
        model = Decoder(*size, layers=arguments.layers, width=arguments.width)
    held_out = [task for kind in KINDS for task in language.held_out[kind]]
    return Setting(language, model, sizes, held_out, sum(parameter.numel() for parameter in model.parameters()))


def train(setting: Setting, arguments: argparse.Namespace, executor: Executor) -> tuple[Any, dict[str, Any]]:
    """Show the form, and then play. Return the job, and what is known of its progress."""
    model, language = setting.model, setting.language
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.lr, betas=(0.9, 0.98), weight_decay=0.01)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min((step + 1) / RISE, 1.0))
    job, model, optimizer, scheduler = paceline.prepare(model, optimizer, scheduler, seed=arguments.seed)
    job.keep_settings(
        language=language.name,
        operations=arguments.operations,
        warm_up=arguments.warm_up,
        batch_size=arguments.batch_size,
        attempts=arguments.attempts,
    )
    player = Player(job, language, executor, arguments.seed)
    # In checkpoints: a resumed job plays on with the tasks that were accepted before, and its curve goes on.
    buffer = Buffer(job.keep("buffer", {}), player.with_outputs(language.seeds))
    progress = Progress(job, job.keep("progress", {}), player, setting.held_out, arguments)
    while job.step_number < arguments.warm_up + arguments.steps:
        number = job.step_number
        played: Round | None = None
        if number < arguments.warm_up:
            rows = language.warm_up(random.Random(f"{arguments.seed}/warm-up/{number}"), WARM_UP_ROWS)
            advantages, entropy = [1.0] * len(rows), 0.0
        else:
            progress.begin(buffer)
            played = player.play(number, buffer, setting.sizes)
            rows, entropy = played.rows, arguments.entropy
            shares = [PROPOSERS_SHARE if row.role == PROPOSE else 1.0 for row in rows]
            advantages = [share * each for share, each in zip(shares, played.advantages, strict=True)]
        loss, tokens = loss_of(job, model, language, rows, Weights(advantages, entropy))
        optimizer.zero_grad()
        # The checkpoint of the step before is written here. What it keeps is changed below, after the update.
        job.backward(loss, weight=tokens)
        job.clip(1.0)
        optimizer.step()
        scheduler.step()
        if played is not None:
            buffer.add(played.accepted)
            progress.add(played, buffer)
    return job, progress.state


class Weights(NamedTuple):
    """What the rows of an update count."""

    advantages: Sequence[float]
    entropy: float


def loss_of(
    job: Any, model: torch.nn.Module, language: Language, rows: Sequence[Row], weighed: Weights
) -> tuple[torch.Tensor, int]:
    """Return REINFORCE's loss of this rank's rows, a mean over the tokens of their answers, and how many these are.

    There is one update for each round, so the ratio of PPO is 1 and its clipping has nothing to do.
    """
    groups: dict[str, list[int]] = {}
    for place, row in enumerate(rows):
        groups.setdefault(language.group(row.role, row.kind), []).append(place)
    total = torch.zeros((), device=job.device)
    tokens = 0
    for name, places in groups.items():
        encoded = {place: language.encode(rows[place]) for place in places}
        longest = language.padded(name, max(len(prompt) + len(answer) for prompt, answer in encoded.values()))
        # A rank without a row of this group computes one all the same, with the weight 0: ranks call the model alike.
        own = places[job.data_rank :: job.data_size]
        computed = own or places[:1]
        inputs = torch.zeros(len(computed), longest, dtype=torch.int64)
        weights = torch.zeros(len(computed), longest - 1)
        is_answer = torch.zeros(len(computed), longest - 1)
        for number, place in enumerate(computed):
            prompt, answer = encoded[place]
            inputs[number, : len(prompt) + len(answer)] = torch.tensor([*prompt, *answer])
            if own:
                answered = slice(len(prompt) - 1, len(prompt) + len(answer) - 1)
                weights[number, answered] = weighed.advantages[place]
                is_answer[number, answered] = 1
                tokens += len(answer)
        inputs, weights, is_answer = (each.to(job.device) for each in (inputs, weights, is_answer))
        logits = model(inputs[:, :-1])
        chances = getattr(logits, "logits", logits).log_softmax(-1)
        chosen = chances.gather(-1, inputs[:, 1:, None])[..., 0]
        total = total - (chosen * weights).sum()
        if weighed.entropy:
            share = 1.0 if rows[places[0]].role == SOLVE else PROPOSERS_ENTROPY
            total = total + share * weighed.entropy * ((chances.exp() * chances).sum(-1) * is_answer).sum()
    return total / max(tokens, 1), tokens


def report(setting: Setting, arguments: argparse.Namespace, job: Any, progress: dict[str, Any]) -> dict[str, Any]:
    """Return the result, the same on every rank."""
    first, last = progress["curve"][0], progress["curve"][-1]
    scores = {kind: last["held_out"][kind] for kind in last["held_out"]}
    scores.update({f"{kind} before": rate for kind, rate in first["held_out"].items()})
    accepted = [counts.get("accepted", 0) for counts in last["proposals"].values()]
    proposed = [sum(counts.values()) for counts in last["proposals"].values()]
    scores["valid proposals"] = sum(accepted) / max(sum(proposed), 1)
    return {
        "data": setting.language.name,
        "size": f"{setting.size / 1e6:.2f} million parameters",
        "scores": scores,
        "seconds": round(progress["seconds"], 1),
        "steps": job.step_number,
        "curve": progress["curve"],
    }


def main() -> None:
    """Train, measure and report."""
    arguments = parse_arguments()
    setting = prepare(arguments)
    with Executor(Limits(), setting.language.mode, setting.language.operations) as executor:
        job, progress = train(setting, arguments, executor)
    result = report(setting, arguments, job, progress)
    if job.rank != 0:
        return
    print(f"{result['data']}; {result['size']}; {result['steps']} steps in {result['seconds']} s")
    for name, score in result["scores"].items():
        print(f"{name:20} {score:.3f}")
    if arguments.output:
        arguments.output.write_text(json.dumps(result, indent=1) + "\n")
    if arguments.picture:
        import picture

        picture.draw(result, arguments.picture)


if __name__ == "__main__":
    main()
