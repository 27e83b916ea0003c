"""A rank's place, found in a launcher's variables, said again in Paceline's own."""

from __future__ import annotations

from paceline.rendezvous.launcher_env import LauncherPosition


def said(position: LauncherPosition) -> dict[str, str]:
    """Paceline's variables for that place; where ranks meet, too, unless it is torchrun's store."""
    names = {
        "PACELINE_RANK": position.rank,
        "PACELINE_WORLD_SIZE": position.size,
        "PACELINE_LOCAL_RANK": position.local_rank,
        "PACELINE_LOCAL_SIZE": position.local_size,
        "PACELINE_CROSS_RANK": position.cross_rank,
        "PACELINE_CROSS_SIZE": position.cross_size,
    }
    told = {name: str(value) for name, value in names.items()}
    if position.file is not None:
        told["PACELINE_RENDEZVOUS"] = position.file
    elif position.master is not None and not position.has_own_store:
        told["PACELINE_MASTER"] = joined_address(*position.master)
    return told


def joined_address(host: str, port: int) -> str:
    """HOST:PORT; an IPv6 address stands in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
