"""Write a rank's place, read from a launcher's variables, as Paceline's own variables."""

from __future__ import annotations

from paceline.rendezvous.launcher_env import LauncherPosition

PROCESS = "PACELINE_RANK_PROCESS"  # the rank's process id


def variables_of(position: LauncherPosition) -> dict[str, str]:
    """Return Paceline's variables for that place, and for where ranks meet unless it is torchrun's store."""
    numbers = {
        "PACELINE_RANK": position.rank,
        "PACELINE_WORLD_SIZE": position.size,
        "PACELINE_LOCAL_RANK": position.local_rank,
        "PACELINE_LOCAL_SIZE": position.local_size,
        "PACELINE_CROSS_RANK": position.cross_rank,
        "PACELINE_CROSS_SIZE": position.cross_size,
    }
    variables = {name: str(number) for name, number in numbers.items()}
    if position.file is not None:
        variables["PACELINE_RENDEZVOUS"] = position.file
    elif position.master is not None and not position.has_own_store:
        variables["PACELINE_MASTER"] = joined_address(*position.master)
    return variables


def joined_address(host: str, port: int) -> str:
    """Return HOST:PORT; an IPv6 address stands in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
