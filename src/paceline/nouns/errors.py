"""Define the errors that Paceline raises on purpose, as one tree.

    PacelineError
    ├── UsageError        a command or call asks for something that is not there
    ├── MeshError         the mesh does not fit the ranks
    ├── PlanError         the plan contradicts itself or what it is run on
    ├── WorkloadError     the workload lacks a part, or one of its parts does not fit
    ├── LossError         the loss has the wrong form, or is not finite
    ├── DataError         a row or a sample can't be read
    ├── CheckpointError   a checkpoint is missing, torn, altered or of another model
    ├── ReadError         a file, variable or message is not what it should be; a ValueError, too
    ├── CollectiveError   ranks disagreed inside one collective
    └── PeerLostError     another rank has gone; the cause is that rank's, not this one's

A message has three parts, each a line of its own: what is wrong or should be, what was found, what to do:

    [rank 3, step 17] the loss should be a finite number
      found: it is NaN or infinite on rank 3; the parameters were left as they were
      fix: lower the learning rate, or clip with clip_norm=1.0

Any rank can raise one, so `rank` and `step` are fields, set by whoever knows them.
"""

from __future__ import annotations

import difflib
import errno
from collections.abc import Iterable, Mapping

MEETS_NOT = 2  # the exit code of a request that can't be met
_LONGEST, _LONGEST_FOUND = 1000, 4000  # characters of a part; what was read may be in it, and be of any length


class PacelineError(Exception):
    """Catch this to catch everything Paceline raises on purpose.

    Args:
        asked: what should be, or what can't be done: the first line.
        found: what was found instead; it speaks of the first line's subject.
        fix: what to do, as an imperative.
    """

    exit_code = 1

    def __init__(self, asked: str, found: str, fix: str) -> None:
        asked, found, fix = _cut(asked, _LONGEST), _cut(found, _LONGEST_FOUND), _cut(fix, _LONGEST)
        super().__init__(asked, found, fix)
        self.asked, self.found, self.fix = asked, found, fix
        self.rank: int | None = None
        self.step: int | None = None

    def at(self, rank: int | None = None, step: int | None = None) -> PacelineError:
        """Set the rank and step where it happened, and return this error, for `raise error.at(rank=3)`."""
        self.rank = self.rank if rank is None else rank
        self.step = self.step if step is None else step
        return self

    def __str__(self) -> str:
        where = [f"{name} {at}" for name, at in (("rank", self.rank), ("step", self.step)) if at is not None]
        prefix = f"[{', '.join(where)}] " if where else ""
        return f"{prefix}{self.asked}\n  found: {self.found}\n  fix: {self.fix}"


def last_error_of(stderr: str, nothing: str) -> str:
    """Return in one line why a process failed.

    Args:
        stderr: what it wrote. Its last line says why, or the three lines of a PacelineError do.
        nothing: what to return if it wrote nothing.
    """
    lines = stderr.strip().splitlines()
    if not lines:
        return nothing
    has_three_parts = len(lines) >= 3 and lines[-1].startswith("  fix: ") and lines[-2].startswith("  found: ")
    if has_three_parts:
        return f"{lines[-3].strip()}: {lines[-2].removeprefix('  found: ')}"
    return lines[-1]


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 3]}..."


class UsageError(PacelineError):
    """A command or call asks for something that is not there."""

    exit_code = MEETS_NOT


class MeshError(PacelineError):
    """The mesh does not fit the ranks."""

    exit_code = MEETS_NOT


class PlanError(PacelineError):
    """The plan contradicts itself or what it is run on."""

    exit_code = MEETS_NOT


class WorkloadError(PacelineError):
    """The workload lacks a part, or one of its parts does not fit."""

    exit_code = MEETS_NOT


class LossError(PacelineError):
    """The loss has the wrong form, or is not finite."""


class DataError(PacelineError):
    """A row or a sample can't be read."""


class CheckpointError(PacelineError):
    """A checkpoint is missing, torn, altered or of another model."""


class ReadError(PacelineError, ValueError):
    """A file, a variable or a message is not what it should be."""


class CollectiveError(PacelineError):
    """Ranks disagreed inside one collective."""


class PeerLostError(PacelineError):
    """Another rank has gone; the cause is that rank's, not this one's."""


def how_to_write(error: OSError) -> str:
    """Return the fix for a file that can't be written, by the system's reason."""
    reasons = {
        **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "free space there, or name another place with --runs"),
        **dict.fromkeys((errno.EMFILE, errno.ENFILE), "raise the limit on open files (`ulimit -n 4096`)"),
        errno.EFBIG: "raise the limit on the size of a file (`ulimit -f unlimited`)",
    }
    otherwise = "see that you may write there, or name another place with --runs"
    return reasons.get(error.errno or 0, otherwise)


def did_you_mean(word: str, choices: Iterable[str], otherwise: str, same: Mapping[str, str] | None = None) -> str:
    """Return the fix for a misspelt word: the nearest choice, or `otherwise` when none is near.

    Args:
        word: what was written.
        choices: what could have been.
        otherwise: the fix where no choice is near.
        same: choices by other words for the same thing.
    """
    choices = list(choices)
    meant = (same or {}).get(word.lower())
    near = [meant] if meant in choices else difflib.get_close_matches(word, choices, n=3, cutoff=_NEAR)
    # Other digits are another thing, and no misspelling: float16 is not float64.
    near = [choice for choice in near if choice == meant or _digits(choice) == _digits(word)]
    return f"did you mean {near[0]!r}? Write that" if near else otherwise


_NEAR = 0.6  # one other letter of two is 0.5: ep is not pp


def _digits(word: str) -> list[str]:
    return [character for character in word if character.isdecimal()]
