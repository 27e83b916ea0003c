"""Find the failure that came first, and tell it once, with its traceback, the others as a count."""

from __future__ import annotations

import signal
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from paceline.checkpoint.manifest import try_writing
from paceline.launch.rank_command import STALLED_CODE
from paceline.nouns.errors import PacelineError, ReadError
from paceline.nouns.reading import COUNT, Whole, parse_json, parse_whole, read_json

# Of what a rank writes down: see `run/rank/worker.py`. Checked, since a full disk or a crash may have cut it off.
_FORM = {
    "rank": (COUNT, None),
    "step": (COUNT, None),
    "at": float,
    "type": str,
    "message": str,
    "is_peer_loss": bool,
    "is_paceline": bool,
    "where": (str, None),
    "traceback": str,
    "exit_code": Whole(0, 255),
    "parts?": ([str], None),
    "saved_to?": (str, None),
}
SUPERVISED = "PACELINE_SUPERVISED"  # a variable of ranks whose output a supervisor of ours reads
UNWRITTEN = "paceline failure "  # how a rank's line begins that has what it could not write down, for its supervisor


def signal_name(number: int) -> str:
    """Return a signal's name; of one without a name, its number, as a status from another host may have."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


_FOUND = "  found: "  # how the second line of an error of ours begins
STALLED = "Stalled"  # the type of a failure for want of progress
EXITED_EARLY = 256  # a status beside the exit codes: the process ended with 0 in the middle of its file, by os._exit(0)


def silent_death(rank: int, status: int, at: float, who: str = "", run_dir: Path | None = None) -> dict[str, Any]:
    """Return the failure of a rank whose process ended without a word.

    Args:
        rank: the number of the rank.
        status: the exit code, or EXITED_EARLY; below 0 the signal that ended the process.
        at: the time when the supervisor heard of it, in seconds since the epoch.
        who: the name of the process in the message; "": rank N.
        run_dir: the run directory where it would have written down an error; None: it is known that it had none.
    """
    who = who or f"rank {rank}"
    if status < 0:
        name = signal_name(-status)
        fix = {
            "SIGKILL": "was it the kernel for want of memory (see `dmesg`), or somebody's kill -9?",
            "SIGSEGV": "native code crashed; PYTHONFAULTHANDLER=1 shows where",
        }.get(name, "look at its last output above")
        message = f"{who}'s process was ended by {name}: {fix}"
    elif status == EXITED_EARLY:
        message = f"{who}'s process ended with exit code 0 before the end of its file; did the file call os._exit(0)?"
    elif run_dir is not None and (reason := _why_unwritten(run_dir / "failures")):
        found = f"could not write down why in {run_dir / 'failures'} ({reason}): its last lines say it"
        message = f"{who}'s process ended with exit code {status}, and {found}"
    else:
        message = f"{who}'s process ended with exit code {status} without an error; did the file call os._exit?"
    return _died(rank, at, message)


def _why_unwritten(folder: Path) -> str:
    try:
        try_writing(folder, "failure")
    except OSError as error:
        return error.strerror or str(error)
    return ""


def left_early(
    rank: int, at: float, found: str = "its process ended with exit code 0 while others were still training"
) -> dict[str, Any]:
    """Return the failure of a rank that ended well while the others were still training, and lost it.

    Args:
        rank: the number of the rank that left.
        at: the time when the supervisor heard of it, in seconds since the epoch.
        found: the second line of the error.
    """
    error = PacelineError(
        f"rank {rank} should take as many steps as the other ranks",
        found,
        "look where the file calls sys.exit, makes its job, or leaves its loop, on some ranks only",
    )
    return _of_error(error, at, rank=rank)


def never_ended(rank: int, at: float, run_dir: Path) -> dict[str, Any]:
    """Return the failure of a job whose rank 0 has ended well, where nothing says how another rank did.

    Args:
        rank: the number of the rank whose end is unknown.
        at: the time when rank 0 gave up, in seconds since the epoch.
        run_dir: the run directory where the rank should have written down its end.
    """
    error = PacelineError(
        f"rank {rank} should write down its end in {run_dir}",
        "rank 0 found none there",
        "see that all hosts share that folder (`paceline doctor -H ...` looks), and whether something ended that rank",
    )
    return _of_error(error, at, rank=rank)


def made_no_progress(
    limit_s: float, at: float, place: tuple[int | None, int | None], found: str, fix: str
) -> dict[str, Any]:
    """Return the failure of a job whose ranks made no progress for so long that it was ended.

    Args:
        limit_s: the seconds without progress after which the job was ended.
        at: the time when it was ended, in seconds since the epoch.
        place: the rank that the others wait for, and its step; None where there is none, or several.
        found: the reason, and the position of each rank.
        fix: the advice to the user.
    """
    rank, step = place
    error = PacelineError(f"the job should make progress within {limit_s:g} s (--stall-timeout)", found, fix)
    return _of_error(error.at(rank, step), at, rank=rank, step=step, type=STALLED, exit_code=STALLED_CODE)


def lost_server(status: int, at: float) -> dict[str, Any]:
    """Return the failure of a fork server that ended before its ranks, which the kernel then ends with it.

    Args:
        status: the exit code; below 0 the signal that ended it.
        at: the time when the supervisor heard of it, in seconds since the epoch.
    """
    if status < 0:
        reason = f"it was ended by {signal_name(-status)}"
        fix = "see `dmesg` whether the kernel ended it for want of memory, and go on with --resume"
    else:
        reason = f"it ended with exit code {status}"
        fix = "look at its output above"
    return _of_error(PacelineError("the fork server should live as long as its ranks", reason, fix), at)


def failed_launcher(program: str, status: int, last_words: str, at: float) -> dict[str, Any]:
    """Return the failure of a program that had started the ranks, where no rank wrote down its own.

    Args:
        program: the name of the program.
        status: the exit code; below 0 the signal that ended it.
        last_words: the last line that the program printed.
        at: the time when the supervisor heard of it, in seconds since the epoch.
    """
    reason = f"it ended with exit code {status}"
    if last_words:
        reason += f": {last_words}"
    fix = "look at its output above; go on with --resume once that is mended"
    return _of_error(PacelineError(f"{program} should run the ranks to their end", reason, fix), at)


def lost_host(host: str, last_words: str, at: float) -> dict[str, Any]:
    """Return the failure of a host to which the connection ended, and whose ranks end with it.

    Args:
        host: the name of the host.
        last_words: the last line that ssh or the agent printed; "" where there is none.
        at: the time when the supervisor heard of it, in seconds since the epoch.
    """
    reason = f"the connection to {host} ended"
    if last_words:
        reason += f" ({last_words})"
    error = PacelineError(f"the host {host} should be there to the end", reason, "go on with --resume")
    return _of_error(error, at, host=host)


def refusal(error: PacelineError, at: float) -> dict[str, Any]:
    """Return the failure of a job that the supervisor itself could not go on with.

    Args:
        error: the error that the supervisor raised.
        at: the time of the error, in seconds since the epoch.
    """
    return _of_error(error, at, type=type(error).__name__, exit_code=error.exit_code)


def _of_error(error: PacelineError, at: float, rank: int | None = None, **more: Any) -> dict[str, Any]:
    return {**_died(rank, at, str(error)), "is_paceline": True, **more}


def _died(rank: int | None, at: float, message: str) -> dict[str, Any]:
    return {
        "rank": rank,
        "step": None,
        "at": at,
        "type": "ProcessDied",
        "message": message,
        "is_peer_loss": False,
        "is_paceline": False,
        "where": None,
        "traceback": "",
        "exit_code": 1,
    }


def read_failures(folder: Path) -> dict[int, dict[str, Any]]:
    """Return the failures that the ranks wrote down before they ended, by rank."""
    failures = {}
    for path in (folder / "failures").glob("*.json"):
        rank = parse_whole(path.stem)
        if rank is not None:
            failures[rank] = _read_failure(path, rank)
    return failures


def unwritten_failure(line: str) -> dict[str, Any] | None:
    """Return the failure in a line that a rank printed because it could not write it down; None: it is another line."""
    if not line.startswith(UNWRITTEN):
        return None
    try:
        return dict(parse_json(line.removeprefix(UNWRITTEN), "a rank's failure", _FORM))
    except ReadError:
        return None


def _read_failure(path: Path, rank: int) -> dict[str, Any]:
    try:
        return dict(read_json(path, _FORM))
    except ReadError as error:  # such as of a disk that was full
        at = path.stat().st_mtime if path.exists() else 0.0
        return _died(rank, at, f"rank {rank} failed, and what it wrote to {path} does not say how: {error.found}")


def first_cause(failures: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Return the failure that the others follow from: the earliest that is not the loss of a peer.

    If all failures are losses of peers, the earliest. Times are the writers' clocks: between hosts they may be off.
    """
    return min(failures, key=lambda failure: (failure["is_peer_loss"], failure["at"]))


def in_one_line(cause: Mapping[str, Any]) -> str:
    """Return a failure's message in one line; "" where it has none, as of a bare `assert`.

    Of an error of ours these are the first two of its lines: what should be, and what was found.
    """
    lines = str(cause["message"]).splitlines() or [""]
    if len(lines) > 1 and lines[1].startswith(_FOUND):
        return f"{lines[0]}: {lines[1].removeprefix(_FOUND)}"
    return lines[0]


def format_failure(cause: Mapping[str, Any], peer_count: int, word: str = "failed first") -> str:
    """Return the failure in the form that users read. An error that says what to do needs no traceback of ours.

    Args:
        cause: the failure's record.
        peer_count: the number of ranks that ended with it.
        word: the verb of the sentence about its rank; "failed" where other ranks may have failed before.
    """
    lines = []
    # Three kinds: an error of ours has its three lines, an exception of the file its traceback and a line with rank and
    # step, a silent death its sentence.
    if cause["traceback"] and not cause["is_paceline"]:
        lines.append(cause["traceback"].rstrip())
    if cause["is_paceline"]:
        lines.append(cause["message"])
        if cause["where"]:
            lines.append(f"  At: {cause['where']}")
    elif cause["traceback"]:
        lines.append(format_failure_briefly(cause, word))
    else:
        step = "" if cause["step"] is None else f" (step {cause['step']})"
        lines.append(f"{cause['message']}{step}")
    if peer_count:
        noun = "rank" if peer_count == 1 else "ranks"
        lines.append(f"  (and {peer_count} {noun} that ended with it)")
    return "\n".join(lines)


def format_failure_briefly(cause: Mapping[str, Any], word: str) -> str:
    """Return the failure in a line."""
    kind = cause["type"] if cause["traceback"] else ""
    description = ": ".join(part for part in (kind, in_one_line(cause)) if part)
    step = "" if cause["step"] is None else f", step {cause['step']}"
    if cause["rank"] is None:  # such as of a host that was lost
        return f"the job failed{step}: {description}"
    return f"rank {cause['rank']}{step} {word}: {description}"
