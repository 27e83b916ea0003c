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
    ├── PeerLostError     another rank has gone; the cause is that rank's, not this one's
    └── RankFailedError   a rank of `paceline.launch` has failed

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
_LONGEST, _LONGEST_FOUND = 1000, 4000  # characters of a part; it may quote text of any length


class PacelineError(Exception):
    """Catch this to catch everything Paceline raises on purpose.

    Args:
        asked: the expectation, or the action that failed: the first line.
        found: the fact that was found instead, about the first line's subject.
        fix: the advice to the user, as an imperative.
        settings: the names of the settings that the error is about.

    Attributes:
        settings (tuple[str, ...]): the names of the settings that the error is about, such as ("image",): a command
            adds where their values come from, such as a flag or the cluster file.
        rank (int | None): the rank where it happened, from 0; None where no rank is known.
        step (int | None): the optimizer step in which it happened, from 1; None outside of a step.
        exit_code (int): the status with which the `paceline` command ends: 1, or 2 for a request that can't be met.

    Examples:
        Write why a run failed where another program reads it:

        >>> import json
        >>> try:
        ...     paceline.distribute(workload).load("runs/yesterday")
        ... except paceline.PacelineError as error:
        ...     print(json.dumps({"what": error.asked, "found": error.found, "fix": error.fix}, indent=1))
        {
         "what": "a checkpoint in runs/yesterday",
         "found": "there is none",
         "fix": "name another run or checkpoint"
        }
    """

    exit_code = 1

    def __init__(self, asked: str, found: str, fix: str, settings: tuple[str, ...] = ()) -> None:
        asked, found, fix = _cut(asked, _LONGEST), _cut(found, _LONGEST_FOUND), _cut(fix, _LONGEST)
        super().__init__(asked, found, fix)
        self.asked, self.found, self.fix = asked, found, fix
        self.settings = settings
        self.rank: int | None = None
        self.step: int | None = None

    def at(self, rank: int | None = None, step: int | None = None) -> PacelineError:
        """Set the rank and step where it happened, and return this error, for `raise error.at(rank=3)`.

        Args:
            rank: the rank, from 0; None leaves the present one.
            step: the step, from 1; None leaves the present one.

        Returns:
            This error, so that it can be raised.

        Examples:
            >>> from paceline.nouns.errors import DataError
            >>> error = DataError("a line of the table should have 3 columns", "line 7 has 2", "mend the file")
            >>> print(error.at(rank=0))
            [rank 0] a line of the table should have 3 columns
              found: line 7 has 2
              fix: mend the file
        """
        self.rank = self.rank if rank is None else rank
        self.step = self.step if step is None else step
        return self

    def __str__(self) -> str:
        location = [f"{name} {at}" for name, at in (("rank", self.rank), ("step", self.step)) if at is not None]
        prefix = f"[{', '.join(location)}] " if location else ""
        return f"{prefix}{self.asked}\n  found: {self.found}\n  fix: {self.fix}"


def last_error_of(stderr: str, nothing: str) -> str:
    """Return the reason why a process failed, in one line.

    Args:
        stderr: the text of its standard error; its last line has the reason, or the three lines of a PacelineError.
        nothing: the text to return if it printed nothing.
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
    """A command or call asks for something that is not there.

    Examples:
        >>> from paceline.nouns.errors import UsageError
        >>> paceline.init()
        >>> try:
        ...     paceline.all_reduce(torch.ones(2), op="average")
        ... except UsageError as error:
        ...     print(error)
        the reduction 'average' is unknown
          found: the choices are sum, mean, min, max, product
          fix: write 'mean'
    """

    exit_code = MEETS_NOT


class MeshError(PacelineError):
    """The mesh does not fit the ranks.

    Examples:
        >>> from paceline.nouns.errors import MeshError
        >>> from paceline.nouns.plan import Plan
        >>> try:
        ...     Plan.parse("tensors=2")
        ... except MeshError as error:
        ...     print(error.fix)
        did you mean 'tensor'? Write that
    """

    exit_code = MEETS_NOT


class PlanError(PacelineError):
    """The plan contradicts itself or what it is run on.

    Examples:
        >>> from paceline.nouns.errors import PlanError
        >>> from paceline.nouns.plan import Plan
        >>> try:
        ...     Plan.parse("replicate=2,schedule=gpipe")
        ... except PlanError as error:
        ...     print(error)
        the plan's schedule=gpipe
          found: it changes nothing without the axis pipeline, and the plan does not name it
          fix: add pipeline=N to the plan, such as pipeline=2, or leave schedule out
    """

    exit_code = MEETS_NOT


class WorkloadError(PacelineError):
    """The workload lacks a part, or one of its parts does not fit.

    Examples:
        >>> import dataclasses
        >>> from paceline.nouns.errors import WorkloadError
        >>> try:
        ...     dataclasses.replace(workload, precision="fp32")
        ... except WorkloadError as error:
        ...     print(error)
        the workload's precision is 'fp32'
          found: the choices are float32, bf16, fp16, float64
          fix: did you mean 'float32'? Write that
    """

    exit_code = MEETS_NOT


class LossError(PacelineError):
    """The loss has the wrong form, or is not finite.

    A step that raises it leaves the parameters as they were.

    Examples:
        >>> import dataclasses
        >>> from paceline.nouns.errors import LossError
        >>> def mean_loss(model, batch):
        ...     inputs, targets = batch
        ...     return torch.nn.functional.mse_loss(model(inputs), targets)
        >>> job = paceline.distribute(dataclasses.replace(workload, loss=mean_loss))
        >>> try:
        ...     job.step(next(job.batches()))
        ... except LossError as error:
        ...     print(error.fix)
        return the losses added up and their number: cross_entropy(..., reduction='sum'), labels.numel()
    """


class DataError(PacelineError):
    """A row or a sample can't be read.

    Examples:
        Raise it in a data set, so that the message has the form of all others:

        >>> from paceline.nouns.errors import DataError
        >>> def read_line(number, line):
        ...     columns = line.split(",")
        ...     if len(columns) != 3:
        ...         found = f"line {number} has {len(columns)}"
        ...         raise DataError("a line of the table should have 3 columns", found, "mend the file")
        ...     return [float(column) for column in columns]
        >>> read_line(7, "1.0,2.0,0")
        [1.0, 2.0, 0.0]
        >>> read_line(8, "1.0,2.0")
        Traceback (most recent call last):
        paceline.nouns.errors.DataError: a line of the table should have 3 columns
          found: line 8 has 2
          fix: mend the file
    """


class CheckpointError(PacelineError):
    """A checkpoint is missing, torn, altered or of another model.

    Attributes:
        saved_to (str | None): the place where a job's last step was saved, if its run directory could not take it.

    Examples:
        Continue from a checkpoint if there is one:

        >>> from paceline.nouns.errors import CheckpointError
        >>> job = paceline.distribute(workload)
        >>> try:
        ...     job.load("checkpoints/best")
        ... except CheckpointError as error:
        ...     print("training starts at step 0:", error.found)
        training starts at step 0: there is none
    """

    saved_to: str | None = None


class ReadError(PacelineError, ValueError):
    """A file, a variable or a message is not what it should be.

    It is a ValueError, too.

    Examples:
        >>> import pathlib
        >>> from paceline.nouns.errors import ReadError
        >>> from paceline.nouns.reading import read_json
        >>> _ = pathlib.Path("settings.json").write_text('{"rate": 0.1')
        >>> try:
        ...     read_json(pathlib.Path("settings.json"))
        ... except ReadError as error:
        ...     print(error.found)
        it is not JSON (line 1, column 13: Expecting ',' delimiter)
    """


class CollectiveError(PacelineError):
    """Ranks disagreed inside one collective.

    A rank called another collective, or had another shape or dtype. The ranks can't go on together: let the job end.

    Examples:
        Say which tensor it was before the job ends:

        >>> from paceline.nouns.errors import CollectiveError
        >>> paceline.init()
        >>> hidden = torch.ones(2, 3)
        >>> try:
        ...     total = paceline.all_reduce(hidden)
        ... except CollectiveError:
        ...     print("hidden:", hidden.shape, hidden.dtype)
        ...     raise
    """


class PeerLostError(PacelineError):
    """Another rank has gone; the cause is that rank's, not this one's.

    `paceline run` ends all ranks and prints the first cause, so a loop rarely catches it.

    Examples:
        Let a rank that only lost its peer end without writing a crash report of its own:

        >>> from paceline.nouns.errors import PeerLostError
        >>> def write_crash_report(error):
        ...     print("crashed:", error)
        >>> job = paceline.distribute(workload)
        >>> try:
        ...     for batch in job.batches():
        ...         mean = job.step(batch)
        ... except PeerLostError:
        ...     raise
        ... except Exception as error:
        ...     write_crash_report(error)
        ...     raise
    """


class RankFailedError(PacelineError):
    """A rank of `paceline.launch` has failed, and the others were ended.

    It has the error of the rank that failed first. Notebooks show only that rank's traceback, with the lines of the
    cell; elsewhere the traceback is a note of this error.

    Attributes:
        shown (str): the rank's error as notebooks show it.

    Examples:
        >>> from paceline.nouns.errors import RankFailedError
        >>> def train():
        ...     raise KeyError("rate")
        >>> try:
        ...     paceline.launch(train)
        ... except RankFailedError as error:
        ...     print(error)
        [rank 0] train should run to its end on every rank
          found: KeyError: 'rate'
          fix: look at the rank's traceback
    """

    shown: str = ""

    def _render_traceback_(self) -> list[str]:
        # IPython asks for it: its own would show the frames above the ranks, which say nothing.
        return (self.shown or str(self)).splitlines()


def how_to_write(error: OSError, place: str = "with --runs") -> str:
    """Return the fix for a file that can't be written, by the system's reason.

    Args:
        error: the error that the system returned.
        place: the words that name another place, such as a flag; "": there is no other.
    """
    elsewhere = f", or name another place {place}" if place else ""
    reasons = {
        **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), f"free space there{elsewhere}"),
        **dict.fromkeys((errno.EMFILE, errno.ENFILE), "raise the limit on open files (`ulimit -n 4096`)"),
        **dict.fromkeys((errno.EINVAL, errno.EISDIR), "move away what has that name"),  # see `reading.regular`
        errno.EFBIG: "raise the limit on the size of a file (`ulimit -f unlimited`)",
        errno.EROFS: f"mount that file system so that it can be written{elsewhere}",
        errno.EIO: f"look at that disk (`dmesg` says what failed){elsewhere}",
    }
    return reasons.get(error.errno or 0, f"see that you may write there{elsewhere}")


def did_you_mean(word: str, choices: Iterable[str], otherwise: str, same: Mapping[str, str] | None = None) -> str:
    """Return the fix for a misspelt word: the nearest choice, or `otherwise` when none is near.

    Args:
        word: the word that the user wrote.
        choices: the words that are allowed.
        otherwise: the fix where no choice is near.
        same: the choices by other words for the same thing.
    """
    choices = list(choices)
    meant = (same or {}).get(word.lower())
    in_other_case = [choice for choice in choices if choice.lower() == word.lower()]
    near = [meant] if meant in choices else difflib.get_close_matches(word, choices, n=3, cutoff=_NEAR)
    near = in_other_case or near
    # Other digits are another thing, and no misspelling: float16 is not float64.
    near = [choice for choice in near if choice == meant or _digits(choice) == _digits(word)]
    return f"did you mean {near[0]!r}? Write that" if near else otherwise


_NEAR = 0.6  # one other letter of two is 0.5: ep is not pp


def _digits(word: str) -> list[str]:
    return [character for character in word if character.isdecimal()]
