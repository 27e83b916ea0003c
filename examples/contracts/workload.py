"""Reentrancy in Solidity: a transformer that scores chunks of contracts, cross-validated, and tried on other sets.

    python workload.py
    paceline run -n 2 workload.py --data solidity --linear --picture figure.png
    paceline run --plan shard=2 workload.py --data solidity --fold 0
    paceline verify -n 2 workload.py

A model for each fold learns from the other folds, all side by side in one job. Near duplicates are in one fold, and no
model judges a contract of which it has seen a near duplicate. Without --data the contracts are made up.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import contracts
import model as models
import numpy as np
import scores
import solidity
import torch
from torch.utils.data import DataLoader

import paceline
from paceline.nouns.errors import UsageError
from paceline.nouns.picture_file import check_picture

EPOCHS = 6
AT_ONCE = 64  # chunks, where nothing is learned


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Learn reentrancy from Solidity contracts, and test what was learned.")
    add = parser.add_argument
    add("--data", type=Path, metavar="DIR", help="folder of the two data sets; else contracts are made up")
    add("--folds", type=int, default=5, metavar="N", help="of the cross-validation (default 5)")
    add("--fold", type=int, metavar="K", help="train and test only the model of fold K, from 0")
    add("--groups", default="near", choices=("near", "exact"), help="what is never on both sides (default near)")
    add("--epochs", type=int, help="passes over the training set (default 6)")
    add("--steps", type=int, help="optimizer steps, instead of --epochs")
    add("--batch-size", type=int, default=16, help="contracts, of all ranks together (default 16)")
    add("--lr", type=float, default=2e-3, help="peak learning rate (default 2e-3)")
    add("--length", type=int, default=128, help="tokens of a chunk (default 128)")
    add("--chunks", type=int, default=6, help="of a contract that a training step sees (default 6)")
    add("--width", type=int, default=64, help="of a model (default 64)")
    add("--layers", type=int, default=1, help="of a model (default 1)")
    add("--hidden", type=float, default=0.1, help="share of tokens that training hides (default 0.1)")
    add("--precision", default="float32", choices=("float32", "float64"))
    add("--seed", type=int, default=0)
    add("--linear", action="store_true", help="fit the linear reference too (needs scikit-learn)")
    add("--output", type=Path, metavar="FILE", help="write the result as JSON")
    add("--picture", type=Path, metavar="FILE", help="draw a contract's lines and the ROC curves (needs matplotlib)")
    return parser.parse_args()


def check_arguments(arguments: argparse.Namespace) -> None:
    """Raise UsageError for what would else be found only after the training."""
    least = {"folds": 2, "fold": 0, "epochs": 1, "steps": 1, "batch_size": 1, "length": 8, "chunks": 1, "layers": 1}
    for name, lowest in least.items():
        value = getattr(arguments, name)
        if value is not None and value < lowest:
            flag = f"--{name.replace('_', '-')}"
            raise UsageError(f"{flag} {value}", f"it should be at least {lowest}", f"write {flag} {lowest} or more")
    if arguments.epochs is not None and arguments.steps is not None:
        raise UsageError("--epochs and --steps", "both say when training ends", "leave one of them out")
    if (arguments.fold or 0) >= arguments.folds:
        found = f"there are {arguments.folds} folds"
        raise UsageError(f"--fold {arguments.fold}", found, f"write 0 to {arguments.folds - 1}")
    if arguments.width < 4 or arguments.width % 4:
        raise UsageError(f"--width {arguments.width}", "it is divided among 4 heads", "write a multiple of 4")
    if not 0 <= arguments.hidden < 1:
        raise UsageError(f"--hidden {arguments.hidden}", "it is a share of the tokens", "write a number from 0 to 0.9")
    if not 0 < arguments.lr < float("inf"):
        raise UsageError(f"--lr {arguments.lr}", "it should be a number above 0", "write --lr 2e-3")
    if arguments.groups == "exact" and arguments.data is None:
        found = "made-up contracts are in groups by their templates"
        raise UsageError("--groups exact", found, "leave it out, or hand in --data DIR")
    if arguments.linear:
        scores.linear_parts()
    check_folders(arguments)
    check_picture(arguments.picture)


def check_folders(arguments: argparse.Namespace) -> None:
    """Raise UsageError where what is to be written has no folder to be in."""
    for flag in ("output", "picture"):
        path = getattr(arguments, flag)
        if path is not None and not path.parent.is_dir():
            raise UsageError(f"--{flag} {path}", f"there is no folder {path.parent}", "make the folder first")


class Setting(NamedTuple):
    """The contracts, the fold of each that is trained on, and the folds whose models are trained."""

    data: contracts.Data
    folds: list[int]
    chosen: list[int]
    encoders: list[models.Encoder]
    train: models.Contracts

    @property
    def rows(self) -> list[contracts.Contract]:
        """Return every contract that is judged."""
        return [*self.data.train, *(row for rows in self.data.tests.values() for row in rows)]


def prepare(arguments: argparse.Namespace) -> Setting:
    """Read and check the contracts, and make the models."""
    torch.set_default_dtype(getattr(torch, arguments.precision))
    data = contracts.load(arguments.data, seed=0, exact=arguments.groups == "exact")
    if len(data.train) < arguments.batch_size:
        found = f"there are {len(data.train)} training contracts"
        raise UsageError(f"--batch-size {arguments.batch_size}", found, "choose a smaller batch")
    folds = contracts.folds_of(data.train, arguments.folds)
    chosen = list(range(arguments.folds)) if arguments.fold is None else [arguments.fold]
    weights = models.weights_of(data.train, folds, chosen)
    train = models.Contracts(data.train, weights, arguments.length, arguments.chunks, arguments.hidden)
    torch.manual_seed(arguments.seed)
    encoders = [models.Encoder(arguments.length, arguments.width, arguments.layers) for _ in chosen]
    return Setting(data, folds, chosen, encoders, train)


def train(setting: Setting, arguments: argparse.Namespace) -> tuple[Any, list[torch.nn.Module], float]:
    """Train the models of all folds on the same batches. Return the job, the models and the seconds."""
    # Without a short last batch: a rank without a contract would take part with one that does not count.
    loader = DataLoader(
        setting.train, batch_size=arguments.batch_size, shuffle=True, drop_last=True, collate_fn=models.collate
    )
    steps = arguments.steps or (arguments.epochs or EPOCHS) * len(loader)
    passes = -(-steps // len(loader))
    optimizer = torch.optim.AdamW(
        (parameter for encoder in setting.encoders for parameter in encoder.parameters()),
        lr=arguments.lr,
        weight_decay=0.01,
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / (0.1 * steps + 1), 1.02 - step / steps)
    )
    job, *encoders, optimizer, loader, schedule = paceline.prepare(
        *setting.encoders, optimizer, loader, schedule, seed=arguments.seed
    )
    if arguments.batch_size < job.data_size:
        found = f"{job.data_size} ranks share it, and each needs a contract of its own"
        raise UsageError(f"--batch-size {arguments.batch_size}", found, f"write {job.data_size} or more")
    job.keep_settings(
        data=contracts.digest_of(setting.data.train),
        groups=arguments.groups,
        folds=arguments.folds,
        fold=arguments.fold,
        length=arguments.length,
        chunks=arguments.chunks,
    )
    began_s = time.monotonic()
    for _ in job.epochs(passes):
        for batch in loader:
            loss = models.loss_of(encoders, batch)
            optimizer.zero_grad()
            job.backward(loss)
            optimizer.step()
            schedule.step()
            if job.step_number == steps:
                break
    return job, encoders, time.monotonic() - began_s


def score_chunks(job: Any, encoders: Sequence[torch.nn.Module], chunks: torch.Tensor) -> np.ndarray:
    """Return the logits (chunks, models). Each rank scores a part, in equally many calls. Call it on every rank."""
    each = AT_ONCE * -(-len(chunks) // (AT_ONCE * job.data_size))
    chunks_padded = torch.full((each * job.data_size, chunks.shape[1]), solidity.UNKNOWN)
    chunks_padded[: len(chunks)] = chunks
    own = chunks_padded[job.data_rank * each : (job.data_rank + 1) * each].to(job.device)
    with torch.no_grad():
        logits = torch.stack([torch.cat([encoder(part) for part in own.split(AT_ONCE)]) for encoder in encoders], 1)
    return job.all_gather(logits)[: len(chunks)].cpu().double().numpy()


def score_contracts(
    job: Any, encoders: Sequence[torch.nn.Module], rows: Sequence[contracts.Contract], length: int
) -> np.ndarray:
    """Return the logits (contracts, models) of all chunks of each contract. Call it on every rank."""
    chunks = [models.tensor_of(models.chunks_of(row, length), length) for row in rows]
    owners = np.repeat(np.arange(len(rows)), [len(each) for each in chunks])
    logits = score_chunks(job, encoders, torch.cat(chunks))
    return np.stack([np.logaddexp.reduce(logits[owners == at], axis=0) for at in range(len(rows))])


def judge(setting: Setting, logits: np.ndarray) -> dict[str, scores.Scored]:
    """Return the scores of each set, by the models that may judge."""
    fold_of_group = {row.group: fold for row, fold in zip(setting.data.train, setting.folds, strict=True)}
    found, at = {}, 0
    for name, rows in {setting.data.name: setting.data.train, **setting.data.tests}.items():
        found[name] = scores.held_out(rows, logits[at : at + len(rows)], fold_of_group, setting.chosen)
        at += len(rows)
    return found


def mean_f1(setting: Setting, logits: np.ndarray) -> float:
    """Return the mean of the folds' F1."""
    labels = np.array([row.is_reentrant for row in setting.data.train])
    folds = np.array(setting.folds)
    found = []
    for column, fold in enumerate(setting.chosen):
        rows = np.flatnonzero(folds == fold)
        found.append(scores.quality(scores.Scored(labels[rows], logits[rows, column], rows)).f1)
    return float(np.mean(found))


def report(setting: Setting, arguments: argparse.Namespace, logits: dict[str, np.ndarray]) -> dict[str, Any]:
    """Print every set's measures, and return the scores of the result."""
    judged = {name: judge(setting, each) for name, each in logits.items()}
    found: dict[str, Any] = {"scores": {}, "intervals": {}, "judged": {}}
    print(
        f"{'':<22} {'accuracy':>9} {'precision':>9} {'recall':>9} {'F1':>9}  {'95 %':<12} {'ROC area':>9}  {'95 %':<12}"
    )
    for of_set in judged["transformer"]:
        own = judged["transformer"][of_set]
        print(f"{of_set}: {int(own.labels.sum())} reentrant of {len(own)}, {len(np.unique(own.groups))} groups")
        found["judged"][of_set] = len(own)
        for name in logits:
            scored = judged[name][of_set]
            one, spread = scores.quality(scored), scores.intervals(scored)
            print(
                f"  {name:<20} {one.accuracy:>9.3f} {one.precision:>9.3f} {one.recall:>9.3f} {one.f1:>9.3f}"
                f"  {spread['f1'][0]:.2f} - {spread['f1'][1]:.2f}  {one.auc:>9.3f}  {spread['auc'][0]:.2f} - "
                f"{spread['auc'][1]:.2f}"
            )
            where = (f", {of_set}" if of_set != setting.data.name else "") + (
                f", {name}" if name != "transformer" else ""
            )
            found["scores"] |= {f"{measure}{where}": value for measure, value in vars(one).items()}
            found["intervals"] |= {f"{measure}{where}": value for measure, value in spread.items()}
    for name, each in logits.items():
        found["scores"]["mean f1" + (f", {name}" if name != "transformer" else "")] = mean_f1(setting, each)
        print(f"mean F1 of {len(setting.chosen)} folds, {name}: {mean_f1(setting, each):.3f}")
    return found


def main() -> None:
    """Train, judge and report."""
    arguments = parse_arguments()
    check_arguments(arguments)
    setting = prepare(arguments)
    job, encoders, train_s = train(setting, arguments)
    rows = setting.rows
    logits = {"transformer": score_contracts(job, encoders, rows, arguments.length)}
    shown = None
    if arguments.picture:
        import picture

        shown = picture.choose(setting, logits["transformer"], arguments.length)
        shown = picture.occlude(shown, lambda chunks: score_chunks(job, encoders, chunks), arguments.length)
    if job.rank != 0:
        return
    name, count = setting.data.name, len(setting.data.train)
    print(
        f"{name}, {count} contracts: {job.step_number} steps on {job.size} rank{'s' * (job.size > 1)}, {train_s:.1f} s"
    )
    logits["rule: has .call"] = scores.rule_logits(rows, len(setting.chosen))
    if arguments.linear:
        logits["logistic regression"] = scores.linear_logits(setting.data, setting.folds, setting.chosen, rows)
    found = report(setting, arguments, logits)
    if arguments.picture:
        picture.draw(arguments.picture, shown, judge(setting, logits["transformer"]))
    if arguments.output:
        size = sum(
            parameter.numel()
            for parameter in models.Encoder(arguments.length, arguments.width, arguments.layers).parameters()
        )
        groups = len({row.group for row in setting.data.train})
        kind = {"near": "near duplicates", "exact": "copies"}[arguments.groups]
        result = {
            "data": f"{name}, {count} contracts in {groups} groups of {kind}",
            "size": f"{len(setting.chosen)} models of {size:,} parameters",
            **found,
            "seconds": round(train_s, 1),
            "steps": job.step_number,
        }
        arguments.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
