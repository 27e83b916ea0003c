"""Gang scheduling of a job's pods: the schedulers, one per file in `schedulers/`, found by their files.

A gang is placed as a whole or not at all: half a job holds its nodes and waits for the other half for ever.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from paceline.launch.kubernetes import mpi_policy, schedulers
from paceline.launch.kubernetes.gang_scheduler import GangScheduler
from paceline.launch.kubernetes.objects import pod_sets
from paceline.launch.kubernetes.pods import Manifest

if TYPE_CHECKING:
    from paceline.launch.kubernetes.job import KubernetesJob

NO_GANG = "none"


def _find_schedulers() -> dict[str, GangScheduler]:
    """Import every file in `schedulers/`; return their objects `SCHEDULER` by name, the default first."""
    found: dict[str, GangScheduler] = {}
    for module in pkgutil.iter_modules(schedulers.__path__, f"{schedulers.__name__}."):
        scheduler = importlib.import_module(module.name).SCHEDULER
        found[scheduler.name] = scheduler
    return {NO_GANG: found.pop(NO_GANG), **found}


SCHEDULERS = _find_schedulers()


def attach(job: KubernetesJob, manifests: list[Manifest]) -> list[Manifest]:
    """Add what the job's gang scheduler wants to the manifests, and put its own objects before them."""
    before = SCHEDULERS[job.gang].attach(job, manifests)
    if job.scheduler:
        for pod_set in pod_sets(manifests):
            pod_set.template["spec"]["schedulerName"] = job.scheduler
    return [*before, *manifests]


def problems(manifests: Sequence[Manifest]) -> Iterator[str]:
    """Yield why a gang scheduler would not place these pods as a whole."""
    sets = pod_sets(manifests)
    for scheduler in SCHEDULERS.values():
        yield from scheduler.problems(manifests, sets)
    yield from mpi_policy.problems(manifests, sets)
