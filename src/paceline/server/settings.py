"""Hold the settings of a job with servers, from its plan and from its workers, as one JSON object."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from paceline.nouns.errors import PlanError
from paceline.nouns.mesh import MOST_RANKS
from paceline.nouns.plan import Plan
from paceline.nouns.reading import COUNT, NUMBER, Whole, parse_json, reason_of
from paceline.server.protocol.admission import Mode

# What the workers add to what the plan says, as JSON has it.
OF_WORKERS = {"steps": COUNT, "clip_norm": (NUMBER, None), "implementation": dict, "is_strict": bool}
_FORM = {
    "servers": Whole(1, MOST_RANKS),
    "workers": Whole(1, MOST_RANKS),
    "replicas": Whole(1, MOST_RANKS),
    "mode": str,
    "quorum": COUNT,
    "staleness": COUNT,
    "deadline": float,
    **OF_WORKERS,
}


@dataclass(frozen=True, slots=True)
class JobSettings:
    """The settings that coordinator, servers and workers share.

    Args:
        servers, workers: the numbers of servers and of workers.
        replicas: the number of replicas of every range of parameters.
        mode, quorum, staleness, deadline: the rules of when gradients become an update: see `admission.Mode`.
        steps: that every worker takes.
        clip_norm: largest norm of the whole gradient.
        implementation: of the optimizer, as torch names it.
        is_strict: rounds are gated, and wait for the one that takes a lost worker's place.
    """

    servers: int
    workers: int
    replicas: int = 2
    mode: str = "sync"
    quorum: int = 0
    staleness: int = 0
    deadline: float = 0.0
    steps: int = 0
    clip_norm: float | None = None
    implementation: dict[str, Any] = field(default_factory=dict)
    is_strict: bool = True

    @classmethod
    def of(cls, plan: Plan) -> JobSettings:
        """Return the settings of a plan; the workers add their part."""
        return cls(
            servers=plan.server,
            workers=plan.world_size,
            replicas=min(plan.replicas, plan.server),
            mode=plan.mode,
            quorum=plan.quorum,
            staleness=plan.staleness,
            deadline=plan.deadline,
        )

    def admission(self) -> Mode:
        """Return when gradients become an update."""
        return Mode(self.mode, quorum=self.quorum, staleness=self.staleness, deadline_s=self.deadline)

    def gates(self, ranges: int) -> int:
        """Return `ranges` if all wait for each other's rounds, 0 if every segment goes on by itself."""
        is_gated = self.is_strict or self.clip_norm is not None
        if self.admission().is_by_rounds and is_gated:
            return ranges
        return 0

    def to_json(self) -> str:
        """Return it as text, which `of_json` reads."""
        return json.dumps(asdict(self))

    @classmethod
    def of_json(cls, text: str) -> JobSettings:
        """Read settings that came over a wire.

        Raises:
            PlanError: they are none.
        """
        try:
            values: Mapping[str, Any] = parse_json(text, "a job's settings", _FORM)
            if values.keys() != {item.name for item in fields(cls)}:
                raise ValueError("they have other parts")
            return cls(**values)
        except ValueError as error:
            found = f"they can't be read ({reason_of(error)})"
            raise PlanError("can't read a job's settings", found, "use one version everywhere") from None
