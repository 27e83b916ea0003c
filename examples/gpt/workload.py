"""A GPT on characters or byte pairs, from scratch or from a checkpoint, which then continues a prompt.

    paceline run -n 2 workload.py
    paceline run --plan tensor=2 workload.py --steps 100 --prompt "The "

Without --data it learns the text of Python's help(). --data tinyshakespeare is nanoGPT's setting for CPUs.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import blocks
import decoder
import figure
import numpy as np
import recipe
import texts
import torch
import vocabulary

import paceline
from paceline.checkpoint.export import check_may_export, plan_export, write_export
from paceline.nouns.errors import UsageError
from paceline.nouns.workload import PRECISIONS

LAYERS, HEADS, WIDTH, BLOCK = 4, 4, 128, 64  # nanoGPT's setting for CPUs
LONGEST_BLOCK = 512  # of a checkpoint's own positions, where --block is not given
LOOKS = 10  # at held-out text during the training
LOOKED_AT = 200  # blocks of it; all of them at the end


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Train a GPT on a text, and have it continue a prompt.")
    add = parser.add_argument
    add("--data", type=Path, metavar="DIR", help="input.txt, or train.txt and valid.txt; also a text file itself")
    add("--tokenizer", metavar="WORD", help="characters, bpe, or a folder with a vocabulary (default: by the data)")
    add("--vocabulary", type=int, metavar="N", help="tokens of --tokenizer bpe (default 2048)")
    add("--model", type=Path, metavar="DIR", help="a checkpoint of transformers on this disk; else from scratch")
    add("--save", type=Path, metavar="DIR", help="write model and tokenizer as transformers load them; a new folder")
    add("--layers", type=int, help="default 4")
    add("--heads", type=int, help="default 4")
    add("--width", type=int, help="default 128")
    add("--block", type=int, help="tokens that the model sees (default 64; of --model its own, at most 512)")
    add("--steps", type=int, default=1200, help="0 only evaluates and generates (default 1200)")
    add("--batch-size", type=int, default=12, help="blocks of all ranks together (default 12)")
    add("--lr", type=float, help="peak learning rate (default 4e-3; 3e-5 with --model)")
    add("--warmup", type=int, help="steps (default: a twentieth)")
    add("--dropout", type=float, default=0.0, help="default 0: then the result does not depend on the ranks")
    add("--precision", default="float32", help=f"{', '.join(PRECISIONS)} (default float32)")
    add("--seed", type=int, default=0)
    add("--prompt", help="what is continued (default: a new line; of stories, their usual beginning)")
    add("--tokens", type=int, default=300, help="that are generated, 0 for none (default 300)")
    add("--temperature", type=float, default=0.8, help="0 takes the likeliest token (default 0.8)")
    add("--top-k", type=int, default=0, help="draw among so many (default: all)")
    add("--output", type=Path, metavar="FILE", help="write the result as JSON")
    add("--picture", type=Path, metavar="FILE", help="draw the losses and the text")
    return parser.parse_args()


def check_arguments(arguments: argparse.Namespace) -> None:
    """Raise UsageError for what would else be found only after the training, or would have no effect."""
    least = dict.fromkeys(("layers", "heads", "width", "batch_size"), 1)
    least |= {"block": 2, "vocabulary": 257, "steps": 0, "warmup": 0, "tokens": 0, "seed": 0, "top_k": 0}
    for name, lowest in least.items():
        value = getattr(arguments, name)
        if value is not None and value < lowest:
            flag = f"--{name.replace('_', '-')}"
            raise UsageError(f"{flag} {value}", f"it should be at least {lowest}", f"write {flag} {lowest} or more")
    for flag, is_right, wanted, example in (
        ("lr", arguments.lr is None or 0 < arguments.lr < math.inf, "above 0", 1e-3),
        ("dropout", 0 <= arguments.dropout < 1, "0 or more, and below 1", 0.1),
        ("temperature", 0 <= arguments.temperature < math.inf, "0 or more", 0.8),
    ):
        if not is_right:
            found = f"it should be {wanted}"
            raise UsageError(f"--{flag} {getattr(arguments, flag)}", found, f"write e.g. --{flag} {example}")
    check_together(arguments)
    for flag in ("output", "picture", "save"):
        path = getattr(arguments, flag)
        if path is not None and not path.parent.is_dir():
            raise UsageError(f"--{flag} {path}", f"there is no folder {path.parent}", "make the folder first")
    if arguments.save is not None:
        check_may_export(arguments.save)


def check_together(arguments: argparse.Namespace) -> None:
    """Raise UsageError for flags of which one leaves the other without an effect, or that do not fit."""
    if arguments.top_k and not arguments.temperature:
        found = "--temperature 0 takes the likeliest token, and draws none"
        raise UsageError(f"--top-k {arguments.top_k}", found, "write a temperature above 0, or leave --top-k out")
    for flag in ("layers", "heads", "width"):
        if arguments.model is not None and getattr(arguments, flag) is not None:
            raise UsageError(f"--{flag} with --model", "a checkpoint has its own sizes", f"leave --{flag} out")
    width, heads = arguments.width or WIDTH, arguments.heads or HEADS
    if width % heads:
        raise UsageError(f"--width {width}", f"it can't be shared by {heads} heads", "write a multiple of --heads")
    if arguments.vocabulary is not None and (arguments.tokenizer or vocabulary.BPE) != vocabulary.BPE:
        raise UsageError("--vocabulary", f"--tokenizer {arguments.tokenizer} has its own size", "leave it out")
    if arguments.vocabulary is not None and arguments.model is not None:
        raise UsageError("--vocabulary with --model", "a checkpoint has its own vocabulary", "leave it out")


@dataclass(frozen=True, slots=True)
class Task:
    """What the command line asks for, read and checked."""

    text: texts.Text
    tokenizer: Any
    config: Any
    block: int
    begin: int | None  # the token before a story, and after its end
    train: Any
    held_out: Any
    looked_at: Any  # a part of what is held out, during the training
    tokens_of_a_word: float  # a line's end is a word


def read_task(arguments: argparse.Namespace) -> Task:
    """Read text, vocabulary and configuration, and see that they fit each other.

    Raises:
        UsageError, DataError: they do not.
    """
    config = decoder.open_config(arguments.model) if arguments.model else None
    text = texts.read_text(arguments.data)
    tokenizer = choose_tokenizer(arguments, text)
    size = tokenizer.get_vocab_size()
    if config is None:
        block = arguments.block or BLOCK
        sizes = (arguments.layers or LAYERS, arguments.heads or HEADS, arguments.width or WIDTH)
        config = decoder.small_config(size, block, *sizes)
    else:
        positions = getattr(config, "max_position_embeddings", None) or LONGEST_BLOCK
        block = arguments.block or min(positions, LONGEST_BLOCK)
        if block > positions:
            raise UsageError(f"--block {block}", f"the model has {positions} positions", f"write at most {positions}")
        if size > config.vocab_size:
            found = f"the model knows {config.vocab_size}"
            raise UsageError(f"a vocabulary of {size} tokens", found, "take the one that the model was trained with")
    decoder.set_dropout(config, arguments.dropout)
    if arguments.prompt is not None:
        vocabulary.check_knows(tokenizer, arguments.prompt)
    begin = config.bos_token_id if text.are_stories else None
    train, held_out = ([vocabulary.encode(tokenizer, piece) for piece in part] for part in (text.train, text.held_out))
    words = sum(len(piece.split()) + piece.count("\n") for piece in text.held_out)
    tokens_of_a_word = sum(map(len, held_out)) / max(words, 1)
    if begin is None:
        train = blocks.Blocks(np.concatenate(train), block, what="the text")
        held_out = blocks.Blocks(np.concatenate(held_out), block, stride=block, what="the held-out text")
    else:
        train, held_out = (blocks.Stories(part, begin, block) for part in (train, held_out))
    looked_at = range(0, len(held_out), -(-len(held_out) // LOOKED_AT))
    return Task(
        text=text,
        tokenizer=tokenizer,
        config=config,
        block=block,
        begin=begin,
        train=train,
        held_out=held_out,
        looked_at=torch.utils.data.Subset(held_out, looked_at),
        tokens_of_a_word=tokens_of_a_word,
    )


def choose_tokenizer(arguments: argparse.Namespace, text: texts.Text) -> Any:
    """The tokenizer that is asked for; else the checkpoint's, a BPE for texts with a file of their own held out."""
    asked = arguments.tokenizer
    has_own_file = (
        arguments.data is not None and arguments.data.is_dir() and texts.find_file(arguments.data, "valid.txt")
    )
    if asked is None and arguments.model is None:
        asked = vocabulary.BPE if has_own_file or arguments.vocabulary else vocabulary.CHARACTERS
    if asked == vocabulary.CHARACTERS:
        return vocabulary.characters_of([*text.train, *text.held_out])
    if asked == vocabulary.BPE:
        return vocabulary.train_bpe(text.train, arguments.vocabulary or 2048)
    return vocabulary.open_folder(Path(asked) if asked else arguments.model)


def make_workload(arguments: argparse.Namespace, task: Task) -> paceline.Workload:
    """What is trained."""
    warmup = arguments.steps // 20 if arguments.warmup is None else arguments.warmup
    peak = arguments.lr or (3e-5 if arguments.model else 4e-3)
    return paceline.Workload(
        model=lambda: decoder.make_model(task.config, arguments.model),
        loss=blocks.loss_of(are_padded=task.begin is not None),
        optimizer=lambda model: recipe.make_optimizer(model, peak),
        scheduler=lambda optimizer: recipe.make_schedule(optimizer, arguments.steps, warmup),
        data=task.train,
        evaluation=task.held_out,
        collate=None if task.begin is None else blocks.pad_up_to(task.block),
        batch_size=arguments.batch_size,
        steps=max(arguments.steps, 1),
        precision=arguments.precision,
        clip_norm=1.0,
        seed=arguments.seed,
    )


def train(job: Any, task: Task, steps: int) -> tuple[dict[str, Any], float]:
    """Train; the losses on the way, which a resumed job goes on with, and the seconds of this process's steps."""
    every = max(steps // LOOKS, 1)
    curves: dict[str, Any] = {"training": [], "held out": [], "sum": 0.0, "count": 0}
    if not job.plan.server:  # workers of servers are at steps of their own, and a resumed job has the losses from there
        curves = job.keep("curves", curves)
    seconds = 0.0
    if not curves["held out"]:
        curves["held out"].append((0, job.evaluate(task.looked_at)["loss"]))
    began_s = time.monotonic()
    for batch in job.batches() if steps else ():
        curves["sum"] += job.step(batch)
        curves["count"] += 1
        if job.step_number % every == 0 or job.step_number == job.total_steps:
            seconds += time.monotonic() - began_s
            curves["training"].append((job.step_number, curves["sum"] / curves["count"]))
            curves["held out"].append((job.step_number, job.evaluate(task.looked_at)["loss"]))
            curves["sum"], curves["count"] = 0.0, 0
            began_s = time.monotonic()
    return curves, seconds


def generate(job: Any, task: Task, arguments: argparse.Namespace) -> str:
    """The prompt and its continuation; the same on every rank.

    The model sees a block at most. Where it is full, the newer half is kept, and generation goes on from there.
    """
    if not arguments.tokens:
        return ""
    prompt = arguments.prompt or ("Once upon a time" if task.begin is not None else "\n")
    row = vocabulary.encode(task.tokenizer, prompt).tolist()
    if task.begin is not None:
        row.insert(0, task.begin)
    wanted, end, seed = len(row) + arguments.tokens, task.config.eos_token_id, arguments.seed
    while len(row) < wanted:
        seen = row if len(row) < task.block else row[-(task.block // 2) :]
        # Always up to the block: under tensor and pipeline the same shape is not captured again.
        drawn = {"temperature": arguments.temperature, "top_k": arguments.top_k, "seed": seed}
        (longer,) = job.generate([seen], task.block - len(seen), end=end, **(drawn if arguments.temperature else {}))
        row += longer.tolist()[len(seen) :]
        seed += 1
        if row[-1] == end:
            break
    return str(task.tokenizer.decode([token for token in row[:wanted] if token not in (task.begin, end)]))


def save(job: Any, task: Task, folder: Path) -> None:
    """Write model and tokenizer as transformers load them, from all ranks' parts. Call it on every rank."""
    checkpoint = folder.parent / f".{folder.name}.checkpoint"
    job.save(checkpoint)
    if job.rank == 0:
        write_export(plan_export(checkpoint, "hf", print), folder)
        vocabulary.save(task.tokenizer, folder, task.block, task.config.eos_token_id)
        shutil.rmtree(checkpoint)


def main(arguments: argparse.Namespace, task: Task, workload: paceline.Workload) -> None:
    """Train, evaluate, generate, and write what is asked for."""
    job = paceline.distribute(workload)
    parameters = decoder.count(task.config)
    curves, seconds = train(job, task, arguments.steps)
    is_known = len(task.looked_at) == len(task.held_out)  # the last look was at all of it
    loss = curves["held out"][-1][1] if is_known else job.evaluate()["loss"]
    sample = generate(job, task, arguments)
    if arguments.save:
        save(job, task, arguments.save)
    if job.rank != 0:
        return
    scores = {"validation loss": loss, "first loss": curves["held out"][0][1]}
    if not vocabulary.are_characters(task.tokenizer):
        scores["word perplexity"] = math.exp(min(loss * task.tokens_of_a_word, 700.0))
    result = {
        "data": str(task.text),
        "size": f"{parameters / 1e6:.2f} million parameters",
        "scores": {name: round(score, 6) for name, score in scores.items()},
        "seconds": round(seconds, 3),
        "steps": job.step_number,
        "ranks": job.size,
        "curves": {name: curves[name] for name in ("training", "held out")},
        "text": sample,
    }
    print(f"{result['data']}; {result['size']}; {job.step_number} steps on {job.size} ranks, {seconds:.1f} s")
    for name, score in scores.items():
        print(f"{name:<16}{score:>10.4f}")
    print(sample)
    if arguments.output:
        arguments.output.write_text(json.dumps(result, indent=1) + "\n")
    if arguments.picture:
        is_shakespeare = "of 1,115,394 characters" in str(task.text) and task.tokenizer.get_vocab_size() == 65
        figure.draw(result["curves"], task.text.name, sample, is_shakespeare, arguments.picture)


# At the top level, so that `paceline verify` and `paceline plan` find the workload too.
arguments = parse_arguments()
check_arguments(arguments)
task = read_task(arguments)
workload = make_workload(arguments, task)
if __name__ == "__main__":
    main(arguments, task, workload)
