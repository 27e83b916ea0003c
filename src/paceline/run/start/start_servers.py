"""What starting a job needs for its parameter servers, where the plan has any."""

from __future__ import annotations

import os

from paceline.nouns.errors import UsageError
from paceline.nouns.plan import Plan
from paceline.server.coordinator.absences import silence_s
from paceline.server.transport.credentials import check_can_make

# By place, why no servers are started there, and what to do.
_ELSEWHERE = "write --on ssh, or see docs/parameter-server.md for servers that are started by hand"
_NO_SERVERS = {
    "mpi": ("can't run a plan with servers --on mpi", "it starts ranks alone", _ELSEWHERE),
    "ray": ("can't run a plan with servers --on ray", "it starts ranks alone", _ELSEWHERE),
    "slurm": ("can't run a plan with servers under Slurm", "it starts ranks alone", _ELSEWHERE),
    "elastic": (
        "can't move parameter servers between hosts that come and go",
        "they stay where they are",
        "leave server out",
    ),
}


def check_servers(plan: Plan, place: str) -> None:
    """Raise UsageError where the plan has servers and they can't be started, or their settings are wrong.

    Args:
        plan: with or without servers.
        place: local, ssh, mpi, ray, slurm or elastic.
    """
    if not plan.server:
        return
    if place in _NO_SERVERS:
        raise UsageError(*_NO_SERVERS[place])
    silence_s(os.environ)


def check_server_credentials(plan: Plan) -> None:
    """Raise UsageError where servers on several hosts need certificates that can't be made."""
    if plan.server:
        check_can_make()
