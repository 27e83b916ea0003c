"""A job of a script that distributes its training without Paceline: its ranks are started as torchrun starts them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from paceline.launch.plain_script import PlainScript
from paceline.launch.torchrun_variables import ALONE, AS_TORCHRUN, MAX_RESTARTS, WITH_VARIABLES
from paceline.nouns.errors import UsageError
from paceline.run.job_settings import NEED_JOB, RANK
from paceline.run.request import RunRequest

_PLACES = ("local", "ssh")  # places whose ranks the fork server starts, which holds their store


def plain_request(
    request: RunRequest, path: Path, script: PlainScript | None, ranks: int, notice: Callable[[str], None]
) -> RunRequest:
    """Return the request with what the script's ranks need; as it is where the script is none of these.

    Args:
        request: the request for the job.
        path: the path of the user's file.
        script: what the file does to distribute its training without Paceline; None: nothing that is known.
        ranks: the number of ranks of the job.
        notice: a function that is called with the line for the user about what Paceline could do.

    Raises:
        UsageError: a flag is about a job of Paceline's, or such ranks can't be started there.
    """
    if script is None:
        return request
    check_flags(request, path, script)
    if request.place not in _PLACES:
        raise UsageError(
            f"{path} can't run under {_name_of(request)}",
            f"it {script.found}, and its ranks would have no store to meet at (MASTER_ADDR, MASTER_PORT)",
            "write --on ssh -H h1:4,h2:4, or start it by torchrun on each host",
        )
    script.check_ranks(str(path), ranks)
    if not request.is_json:
        notice(script.note(str(path)))
    value = ALONE
    if script.needs_variables(ranks):
        value = script.rank_option or WITH_VARIABLES
    environment = {**request.environment, AS_TORCHRUN: value, MAX_RESTARTS: str(request.max_restarts)}
    return replace(request, environment=environment, stall_notice_s=0.0)


def check_flags(request: RunRequest, path: Path, script: PlainScript) -> None:
    """Raise UsageError where a flag was given that only a job of Paceline's can follow."""
    for name, flag in request.flags.items():
        if name in NEED_JOB:
            raise UsageError(
                f"{flag} does not apply to {path}",
                f"it {script.found}, and makes no job of Paceline's",
                f"leave {flag} out, or train by paceline.prepare: see docs/migrate.md",
            )


def plain_rank(request: RunRequest, path: Path, script: PlainScript | None, is_torchruns: bool) -> dict[str, str]:
    """Return the variables that a rank of another launcher needs beside the launcher's own.

    Args:
        request: the request of the rank.
        path, script: as of `plain_request`.
        is_torchruns: True where torchrun started the rank, and holds the store.

    Raises:
        UsageError: a flag is about a job of Paceline's, or the launcher sets no variables for such a script.
    """
    if script is None:
        return {}
    check_flags(request, path, script)
    if request.place == RANK:  # this process becomes the file, with its launcher's variables
        return {}
    if not is_torchruns:
        raise UsageError(
            f"{path} can't run under {_name_of(request)} with --job",
            f"it {script.found}, and this launcher does not set the variables of torchrun",
            "start it by torchrun, or by `paceline run -n N` without another launcher",
        )
    return {AS_TORCHRUN: WITH_VARIABLES}


def _name_of(request: RunRequest) -> str:
    if request.launcher is not None:
        return request.launcher.source
    return f"--on {request.place}"
