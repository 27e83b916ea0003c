"""Generate with a job's model: choose the model, the kind of step, and the rows of each rank."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from paceline.comm.batch_norm import without_sync
from paceline.comm.dtypes import widen
from paceline.nouns.decoding import Decoding
from paceline.nouns.errors import WorkloadError
from paceline.nouns.parts import shown
from paceline.train import snapshot
from paceline.train.generate import (
    CachedStep,
    Evaluating,
    Ranks,
    Step,
    WholeStep,
    can_cache,
    check_generates,
    check_same_prompts,
    checked_prompts,
    generate,
    whole_copy,
)
from paceline.train.precision import autocast

if TYPE_CHECKING:
    from paceline.train.base_job import BaseJob


def generate_with(job: BaseJob, prompts: Any, max_new_tokens: Any, options: dict[str, Any]) -> list[torch.Tensor]:
    """Do what `job.generate` says. Collective, but for workers of servers, which each do all of it."""
    decoding_options = dict(options)
    asked = decoding_options.pop("model", None)
    decoding = Decoding.of(max_new_tokens, decoding_options)
    rows = checked_prompts(prompts)
    chosen = _chosen(job, asked)
    longest = max(len(tokens) for tokens in rows.values()) + decoding.max_new_tokens
    described = _described(job) if chosen is None else chosen
    check_generates(described, longest)
    ranks = _ranks(job)
    if ranks.world.size > 1:
        check_same_prompts(rows, decoding, ranks.world)
    decoding = _with_cache(decoding, described, job)
    context = autocast(job.workload.precision, job.device.type)
    with Evaluating(job.model), context:
        return generate(rows, decoding, _step(job, chosen, decoding), ranks)


def _chosen(job: BaseJob, asked: Any) -> nn.Module | None:
    """Return the model of a loop that has several; None: the job's one."""
    models = job.models
    if asked is None:
        if len(models) > 1:
            raise WorkloadError(
                "job.generate needs to know which model",
                f"paceline.prepare was handed {len(models)}",
                "write job.generate(..., model=...) with one of them",
            )
        return None
    if not any(asked is model for model in models):
        raise WorkloadError(
            "the model of job.generate should be one of the job's", f"it is {shown(asked)}", "hand in one of them"
        )
    return asked if len(models) > 1 else None


def _described(job: BaseJob) -> nn.Module:
    """Return the model as its authors made it: where it is captured, the module whose code became graphs."""
    placed: Any = job.parallel.placed
    form: nn.Module = placed.split.form if placed.is_captured else job.model
    return form


def _runs_as_graphs(job: BaseJob) -> bool:
    """True for the models of a loop under tensor, context or expert, whose calls run graphs."""
    return job.mesh.places > 1 and not job.parallel.placed.is_captured


def _with_cache(decoding: Decoding, model: nn.Module, job: BaseJob) -> Decoding:
    """Return the decoding with `cache` set to True or False.

    Raises:
        WorkloadError: a cache is asked for that there can't be.
    """
    has_cache = can_cache(model)
    is_cut = job.parallel.placed.is_captured or _runs_as_graphs(job)
    if decoding.cache and not has_cache:
        raise WorkloadError(
            "job.generate(cache=True) goes on from the keys and values of the tokens before",
            f"{type(model).__name__} is no model of transformers, and its forward takes no `cache`",
            "have forward(tokens, cache=None) keep keys and values in the dict that it is handed, or leave cache out",
        )
    if decoding.cache and _runs_as_graphs(job):
        raise WorkloadError(
            "job.generate(cache=True) calls the model's own code",
            "under tensor the models of a loop run as graphs, which have no cache",
            "leave cache out, or train by replicate or shard",
        )
    return dataclasses.replace(decoding, cache=has_cache and not is_cut if decoding.cache is None else decoding.cache)


def _step(job: BaseJob, chosen: nn.Module | None, decoding: Decoding) -> Step:
    def choose(model: Any) -> Any:
        return model if chosen is None else chosen

    evaluate: Callable[[str, Any, Any], Any] = job.parallel.evaluate
    if not decoding.cache:
        return WholeStep(evaluate, choose, job.device)
    if job.parallel.placed.is_captured:
        full_model = whole_model(job, "job.generate(cache=True)", "make it in the function, or leave cache out")

        def evaluate(name: str, function: Any, batch: Any) -> Any:
            return function(full_model, batch)

    return CachedStep(evaluate, choose, job.device)


def whole_model(job: BaseJob, asked: str, fix: str) -> nn.Module:
    """Return a copy of a workload's model, whole on this rank, in evaluation mode. Collective.

    Args:
        job: the job, under any plan.
        asked: the call that needs the copy, for an error.
        fix: the advice of the error where the workload does not make a new model.
    """
    parts = snapshot.model_parts(job.model, job.parallel.local_shards(), job.comms.step.size)
    return whole_copy(lambda: _new_model(job, asked, fix), parts, snapshot.names_of_state(job.model), job.comms.step)


def _new_model(job: BaseJob, asked: str, fix: str) -> nn.Module:
    model: nn.Module = job.workload.model()
    if model is job.model or any(parameter.is_meta for parameter in model.parameters()):
        raise WorkloadError(
            f"{asked} makes the whole model anew on each rank",
            "the workload's `model` returns one and the same model each time",
            f"write model=lambda: Model(...): {fix}",
        )
    without_sync(model)
    model = model.to(job.device)
    return widen(model) if job.workload.precision == "float64" else model


def _ranks(job: BaseJob) -> Ranks:
    part, parts = job.steps.evaluation_part
    gathers = job.mesh.size("shard") > 1
    return Ranks(
        part=part,
        parts=parts,
        alike=job.comms.axes["tensor"] if job.parallel.placed.is_captured else job.comms.same_samples,
        together=job.comms.step if gathers else None,
        world=job.comms.step,
    )
