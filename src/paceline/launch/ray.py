"""Describe a job as Ray's actors in one placement group, as an object that can be printed before it is sent."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from paceline.launch.rank_command import RankCommand, shown
from paceline.nouns import module_names
from paceline.nouns.errors import UsageError

STRATEGIES = ("PACK", "STRICT_PACK", "SPREAD", "STRICT_SPREAD")


@dataclass(frozen=True, slots=True)
class RayOptions:
    """The cluster, the resources and the placement that Ray is asked for.

    Args:
        address: the address of a cluster, HOST:PORT, or "auto" for the one that this host is in; "local": a cluster
            only for this job.
        cpus_per_rank, gpus_per_rank: the number of CPUs and GPUs of each bundle.
        strategy: the strategy of the placement group: on which nodes its bundles may be.
        wait_s: the seconds to wait for the whole group; a part of it is never started.
    """

    address: str = "local"
    cpus_per_rank: float = 1
    gpus_per_rank: float = 0
    strategy: str = "PACK"
    wait_s: float = 600

    def __post_init__(self) -> None:
        if self.strategy not in STRATEGIES:
            found = f"Ray has {', '.join(STRATEGIES)}"
            raise UsageError(f"the strategy {self.strategy!r}", found, "write one of these", settings=("strategy",))
        resources = {"cpus_per_rank": self.cpus_per_rank, "gpus_per_rank": self.gpus_per_rank}
        below_zero = tuple(name for name, amount in resources.items() if amount < 0)
        if below_zero or not any(resources.values()):
            asked = "a rank under Ray needs resources"
            raise UsageError(asked, "it has none", "give it a CPU or a GPU", below_zero or tuple(resources))


@dataclass(frozen=True, slots=True)
class RayJob:
    """A placement group, an actor in each of its bundles, and the program that they run."""

    address: str
    bundles: list[dict[str, float]]
    strategy: str
    wait_s: float
    program: list[str]
    environment: dict[str, str]
    working_folder: str

    def request(self) -> bytes:
        """Return the job for the driver's standard input."""
        return json.dumps(asdict(self)).encode()

    def text(self) -> str:
        """Return the job for the user, without secrets."""
        return json.dumps({**asdict(self), "environment": shown(self.environment)}, indent=1)


def ray_job(rank: RankCommand, options: RayOptions, folder: str) -> RayJob:
    """Return the job that the driver runs on Ray.

    Args:
        rank: the command of a rank.
        options: the options of Ray.
        folder: the folder in which the ranks run.
    """
    resources = {"CPU": float(options.cpus_per_rank), "GPU": float(options.gpus_per_rank)}
    bundle = {name: amount for name, amount in resources.items() if amount}
    bundles = [dict(bundle) for _ in range(rank.plan.world_size)]
    program = [rank.python, "-m", module_names.EXTERNAL_RANK, str(rank.file.resolve()), *rank.arguments]
    return RayJob(options.address, bundles, options.strategy, options.wait_s, program, dict(rank.environment), folder)
