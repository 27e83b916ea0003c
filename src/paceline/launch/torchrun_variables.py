"""The variables by which torchrun tells a process its rank, for scripts that make their process group themselves.

torchrun's agent holds the store at which the ranks meet, and here the fork server of rank 0's host does
(`run/rank/forkserver.py`). torch's own store would listen on all interfaces.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from paceline.launch.local import RankSettings
from paceline.rendezvous.interfaces import address_towards, interface_of

# For a rank: its file distributes its training itself. The value is WITH_VARIABLES, or the option for the local rank
# that the file also takes, or ALONE: it is one process, without a rank.
AS_TORCHRUN = "PACELINE_AS_TORCHRUN"
WITH_VARIABLES = "1"
ALONE = "0"
MAX_RESTARTS = "TORCHELASTIC_MAX_RESTARTS"
_RESTART = "PACELINE_RESTART"  # see run/supervise/restarts.py
_ROLE = "default"  # torchrun's own name for it


def has_rank(environment: dict[str, str]) -> bool:
    """Return True if ranks with these variables have torchrun's too."""
    return environment.get(AS_TORCHRUN, ALONE) != ALONE


def torchrun_variables(rank: int, settings: RankSettings) -> dict[str, str]:
    """Return the variables that torchrun sets for a rank (torch 2.13: elastic/agent/server/local_elastic_agent.py)."""
    host_ranks = settings.host_ranks
    address, _, port = settings.rendezvous.master.rpartition(":")
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(settings.world_size),
        "LOCAL_RANK": str(rank - host_ranks.first),
        "LOCAL_WORLD_SIZE": str(host_ranks.count),
        "GROUP_RANK": str(host_ranks.cross_rank),
        "GROUP_WORLD_SIZE": str(host_ranks.cross_size),
        "ROLE_RANK": str(rank),
        "ROLE_WORLD_SIZE": str(settings.world_size),
        "ROLE_NAME": _ROLE,
        "MASTER_ADDR": address.strip("[]"),
        "MASTER_PORT": port,
        "TORCHELASTIC_RUN_ID": Path(settings.run_dir).name,
        "TORCHELASTIC_RESTART_COUNT": settings.environment.get(_RESTART, "0"),
        MAX_RESTARTS: settings.environment.get(MAX_RESTARTS, "0"),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
        **_interfaces(settings),
    }


def _interfaces(settings: RankSettings) -> dict[str, str]:
    """Return the variables that bind the sockets of Gloo and NCCL to one interface, where the user names none."""
    interface: str | None = settings.rendezvous.interface
    if settings.host_ranks.cross_size == 1:
        interface = "lo0" if sys.platform == "darwin" else "lo"
    elif not interface:
        interface = interface_of(address_towards(settings.rendezvous.master.rpartition(":")[0].strip("[]")))
    variables = {}
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        is_named = name in settings.environment or name in os.environ
        if interface and not is_named:
            variables[name] = interface
    return variables
