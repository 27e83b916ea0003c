"""Describe a job as Ray's actors in one placement group, as an object that can be printed before it is sent."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from paceline.launch.command import RankCommand, shown
from paceline.nouns import module_names
from paceline.nouns.errors import UsageError

STRATEGIES = ("PACK", "STRICT_PACK", "SPREAD", "STRICT_SPREAD")


@dataclass(frozen=True, slots=True)
class RayOptions:
    """The cluster, the resources and the placement that Ray is asked for.

    Args:
        address: of a cluster, HOST:PORT or "auto" for the one that this host is in; "local": one for this job alone.
        cpus_per_rank, gpus_per_rank: of each bundle.
        strategy: of the placement group: where its bundles may lie.
        wait_s: for the whole group at once; a part of it is never started.
    """

    address: str = "local"
    cpus_per_rank: float = 1
    gpus_per_rank: float = 0
    strategy: str = "PACK"
    wait_s: float = 600

    def __post_init__(self) -> None:
        if self.strategy not in STRATEGIES:
            raise UsageError(
                f"the strategy {self.strategy!r}", f"Ray has {', '.join(STRATEGIES)}", "write one of these"
            )
        if self.cpus_per_rank < 0 or self.gpus_per_rank < 0 or not self.cpus_per_rank + self.gpus_per_rank:
            raise UsageError("a rank under Ray needs resources", "it has none", "give it a CPU or a GPU")


@dataclass(frozen=True, slots=True)
class RayJob:
    """A placement group, an actor in each of its bundles, and what they run."""

    address: str
    bundles: list[dict[str, float]]
    strategy: str
    wait_s: float
    program: list[str]
    environment: dict[str, str]
    working_folder: str

    def request(self) -> bytes:
        """Return it for the driver's standard input."""
        return json.dumps(asdict(self)).encode()

    def text(self) -> str:
        """Return it for people, without secrets."""
        return json.dumps({**asdict(self), "environment": shown(self.environment)}, indent=1)


def ray_job(rank: RankCommand, options: RayOptions, folder: str) -> RayJob:
    """Return what the driver asks of Ray.

    Args:
        rank: a rank's command.
        options: of Ray.
        folder: where it runs.
    """
    resources = {"CPU": float(options.cpus_per_rank), "GPU": float(options.gpus_per_rank)}
    bundle = {name: amount for name, amount in resources.items() if amount}
    bundles = [dict(bundle) for _ in range(rank.plan.world_size)]
    program = [rank.python, "-m", module_names.EXTERNAL_RANK, str(rank.file.resolve()), *rank.arguments]
    return RayJob(options.address, bundles, options.strategy, options.wait_s, program, dict(rank.environment), folder)
