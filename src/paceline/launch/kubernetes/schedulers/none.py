"""No gang: the cluster's default scheduler starts each pod as soon as a node has room for it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from paceline.launch.kubernetes.gang_scheduler import GangScheduler
from paceline.launch.kubernetes.pods import Manifest

if TYPE_CHECKING:
    from paceline.launch.kubernetes.kubernetes_job import KubernetesJob


class NoGang(GangScheduler):
    """The default scheduler."""

    name = "none"
    is_gang = False
    changes_pods = False

    def attach(self, job: KubernetesJob, manifests: list[Manifest]) -> list[Manifest]:
        """Leave the manifests as they are."""
        return []

    def notes(self, job: KubernetesJob) -> Iterator[str]:
        """Yield that pods start one by one."""
        if job.nodes + job.servers > 1:
            yield "no gang: some pods may start and wait while others find no room; see --gang"


SCHEDULER = NoGang()
