"""The interface of a gang scheduler: what a file in `schedulers/` tells the rest of the package."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from paceline.launch.kubernetes.objects import PodSet
from paceline.launch.kubernetes.pods import Manifest

if TYPE_CHECKING:
    from paceline.launch.kubernetes.kubernetes_job import KubernetesJob

# Servers and workers of kind=job are several Jobs.
EACH_JOB_ALONE = "it admits each Job by itself, so that one may hold nodes and wait for the other for ever"


class GangScheduler:
    """A scheduler that starts all pods of a job or none. A subclass sets attributes and overrides methods.

    Attributes:
        name: of `--gang`, and of its file.
        queue: pattern of its queues' names; None: it has no queues.
        queue_example: a queue's name that matches.
        needs_queue: a job without a queue is refused.
        impossible: kinds of job that it can't schedule, and why.
        impossible_with_servers: the same, for jobs with parameter servers.
        is_gang: False for the default scheduler, which starts pods one by one.
        changes_pods: `attach` changes pod templates, so the runtime of somebody else's TrainJob can't be used.
        allows_strict_anti_affinity: workers may be barred from each other's nodes; False makes it a preference.
    """

    name: str
    queue: re.Pattern[str] | None = None
    queue_example: str = "ml"
    needs_queue: bool = False
    impossible: Mapping[str, str] = {}
    impossible_with_servers: Mapping[str, str] = {}
    is_gang: bool = True
    changes_pods: bool = True
    allows_strict_anti_affinity: bool = True

    def attach(self, job: KubernetesJob, manifests: list[Manifest]) -> list[Manifest]:
        """Add to the manifests what makes their pods a gang; return objects of its own, which are sent first."""
        raise NotImplementedError

    def notes(self, job: KubernetesJob) -> Iterator[str]:
        """Yield what a user should know of this job, and its manifests don't say."""
        yield from ()

    def problems(self, manifests: Sequence[Manifest], sets: Sequence[PodSet]) -> Iterator[str]:
        """Yield why this scheduler would not start the pods as a gang; nothing for manifests that don't use it.

        Args:
            manifests: all of a job, of any scheduler; a user may have edited them.
            sets: the pods in them.
        """
        yield from ()
