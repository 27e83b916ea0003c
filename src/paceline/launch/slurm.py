"""Write an sbatch script for Slurm that starts a rank a task, and send it.

The script asks for a signal before the time limit, so that the ranks save, and goes back to the queue by itself: after
such a stop always, after a rank's death by a signal and after --stall-timeout a few times. A rank's own error ends the
job.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass

from paceline.launch import sbatch_options
from paceline.launch.host_choice import check_accelerators
from paceline.launch.rank_command import STALLED_CODE, STOPPED_CODE, RankCommand, export_lines, quoted
from paceline.nouns.errors import UsageError
from paceline.nouns.names import check_name, is_name
from paceline.nouns.reading import shown

_TIME = re.compile(r"((?P<days>[0-9]{1,9})-)?(?P<fields>[0-9]{1,9}(:[0-9]{1,2}){0,2})")
_MOST_SIGNAL_S = 65535  # sbatch's limit
_EARLY_S = 60  # Slurm may send the signal so much before it is due: see sbatch's --signal
# Anywhere in a line, these begin another job for older versions of sbatch, and for slurmctld's burst buffers.
_OTHER_JOB = re.compile("hetjob|packjob", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class SlurmOptions:
    """The options of an sbatch script.

    Args:
        partition, account, qos, time: the options of the same names of sbatch; "": the cluster's own.
        gpus_per_node: the number of GPUs of a node; 0: the option is not written.
        cpus_per_task: the number of cores of a rank; 0: the cluster's own.
        signal_s: the seconds before the time limit at which ranks are asked to save.
        max_restarts: the number of restarts after deaths by a signal.
        more: the user's own lines, such as `--exclusive`.
        program: the sbatch program to call.
    """

    partition: str = ""
    account: str = ""
    qos: str = ""
    time: str = ""
    gpus_per_node: int = 0
    cpus_per_task: int = 0
    signal_s: int = 120
    max_restarts: int = 3
    more: tuple[str, ...] = ()
    program: str = "sbatch"

    def __post_init__(self) -> None:
        if self.time and not _TIME.fullmatch(self.time):
            fix = "write such as 30, 12:00:00 or 2-12:00"
            raise UsageError(f"the time limit {self.time!r}", "Slurm can't read it", fix, settings=("time",))
        for name, count in (
            ("gpus_per_node", self.gpus_per_node),
            ("cpus_per_task", self.cpus_per_task),
            ("signal", self.signal_s),
        ):
            if count < 0:
                raise UsageError(f"{name}={count} for sbatch", "it is below 0", "write 0 or more", settings=(name,))
        for name, text in (("partition", self.partition), ("account", self.account), ("qos", self.qos)):
            if text:
                check_name("slurm", text, settings=(name,))
        sbatch_options.check_lines(self.more)
        self._check_signal()

    def _check_signal(self) -> None:
        """Raise UsageError where Slurm can't send the signal, or sends it before the ranks have begun."""
        if self.signal_s > _MOST_SIGNAL_S:
            found = f"sbatch takes at most {_MOST_SIGNAL_S} seconds"
            fix = f"write {_MOST_SIGNAL_S} or less"
            raise UsageError(f"signal={self.signal_s} for sbatch", found, fix, settings=("signal",))
        limit_s = _seconds(self.time)
        if limit_s and limit_s <= self.signal_s + _EARLY_S:
            early = f"the ranks are to save {self.signal_s} s before it, and Slurm may tell them {_EARLY_S} s early"
            raise UsageError(
                f"the time limit {self.time!r} is {limit_s} s, with --signal {self.signal_s}",
                f"{early}: before they have begun",
                f"write a --time above {self.signal_s + _EARLY_S} s, or a lower --signal",
                settings=("time", "signal"),
            )


def sbatch_script(rank: RankCommand, options: SlurmOptions) -> str:
    """Write the script. Shell variables of a rank stand nowhere in it: srun gives each its own.

    Raises:
        UsageError: the options contradict the ranks, or a path can't stand in a script.
    """
    gpus = options.gpus_per_node or sbatch_options.gpus_of_node(options.more, rank.nodes)
    if gpus:
        fix = f"write -j with at most {gpus} ranks for a node, or ask for {rank.ranks_per_node} GPUs of a node"
        setting = "gpus_per_node" if options.gpus_per_node else "sbatch_option"
        check_accelerators(rank.ranks_per_node, gpus, "GPUs", fix, setting)
    lines = [_directive(name, value) for name, value in written_options(rank, options).items()]
    lines += [_line(line, "sbatch_option") for line in options.more]
    directives = "\n".join(lines)
    # Since Slurm 22.05 srun does not take this over from sbatch.
    cpus = " --cpus-per-task=$SLURM_CPUS_PER_TASK" if options.cpus_per_task else ""
    # The variables of -x; a secret comes with sbatch's environment.
    exports = "".join(f"{line}\n" for line in export_lines(rank.environment))
    return f"""#!/bin/bash
{directives}

{exports}srun --kill-on-bad-exit=1 --export=ALL{cpus} {quoted(rank.words())}
code=$?
# {STOPPED_CODE}: the ranks were told to save before the time limit, or for a job that matters more, and there is more
# to do. {STALLED_CODE}: they made no progress. Above 128: a signal ended a rank.
if [ "$code" -eq {STOPPED_CODE} ] ||
  {{ {{ [ "$code" -eq {STALLED_CODE} ] || [ "$code" -gt 128 ]; }} &&
    [ "${{SLURM_RESTART_COUNT:-0}}" -lt {options.max_restarts} ]; }}; then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
"""


def written_options(rank: RankCommand, options: SlurmOptions) -> dict[str, str]:
    """Return the options that Paceline writes into the script, and their values; "": it has none."""
    folder = str(rank.run_dir.resolve())
    check_name("path", folder)
    if "\\" in folder:
        raise UsageError(
            f"the run directory {shown(folder)}",
            "it has a backslash, and Slurm then writes the log under another name",
            "name another folder with --runs",
        )
    # `--signal` without `B:` goes to the steps, so srun's tasks get it, and not this script's shell.
    written = {
        "job-name": rank.job,
        "nodes": str(rank.nodes),
        "ntasks-per-node": str(rank.ranks_per_node),
        "output": f"{folder.replace('%', '%%')}/slurm-%j.log",
        "open-mode": "append",  # a job that goes back to the queue goes on in its log
        "requeue": "",  # lets `scontrol requeue` below put the job back, whatever the cluster's default is
        "signal": f"TERM@{options.signal_s}",
    }
    optional: dict[str, str | int] = {
        "partition": options.partition,
        "account": options.account,
        "qos": options.qos,
        "time": options.time,
        "gpus-per-node": options.gpus_per_node,
        "cpus-per-task": options.cpus_per_task,
    }
    return written | {name: str(value) for name, value in optional.items() if value}


def check_environment(rank: RankCommand, options: SlurmOptions, environment: Mapping[str, str]) -> None:
    """Raise UsageError where a variable of sbatch's would win over the script."""
    sbatch_options.check_variables(written_options(rank, options), environment)


def check_sbatch(options: SlurmOptions) -> None:
    """Raise UsageError unless there is an sbatch to call."""
    if shutil.which(options.program) is None:
        reason = "there is no such program here"
        raise UsageError(f"can't send the job by {options.program}", reason, "go to a login node, or use --dry-run")


def submit(script: str, options: SlurmOptions, environment: dict[str, str]) -> str:
    """Hand the script to sbatch, and return the job's number.

    Args:
        script: the text that `sbatch_script` wrote.
        options: the options, with the sbatch program to call.
        environment: the submitter's environment, which the job gets.

    Raises:
        UsageError: there is no sbatch, or it refuses.
    """
    check_sbatch(options)
    completed = subprocess.run(
        [options.program, "--parsable"],  # prints JOB or JOB;CLUSTER, and nothing else
        input=script,
        capture_output=True,
        text=True,
        errors="replace",
        env=environment,
    )
    if completed.returncode:
        errors = completed.stderr.strip().splitlines() or ["it printed nothing"]
        fix = "mend the option that it names; --dry-run shows the script"
        if re.search("configuration source|[Uu]nable to contact|[Cc]onnection refused", errors[-1]):
            fix = "send it from a host where `sinfo` works, such as a login node"
        raise UsageError("Slurm should take the job", errors[-1], fix)
    return completed.stdout.strip().split(";")[0]


def _directive(name: str, value: str) -> str:
    """Return an option as a line of the script, in quotes where sbatch needs them."""
    option = f"--{name}={value}" if value else f"--{name}"
    if not is_name("slurm", option):
        option = '"' + re.sub(r'(["\\])', r"\\\1", option) + '"'
    return _line(option, name.replace("-", "_"))


def _line(line: str, setting: str) -> str:
    """Return a line of the script that has options, and check it; its value is that of a setting."""
    check_name("text", line, f"the line {shown(line)} for sbatch", settings=(setting,))
    if word := _OTHER_JOB.search(line):
        found = f"it has {word[0]!r} in it, which Slurm may take for the beginning of another job"
        fix = "write it without, such as under another --job"
        raise UsageError(f"the line {shown(line)} for sbatch", found, fix, settings=(setting,))
    return f"#SBATCH {line}"


def _seconds(time: str) -> int:
    """Return a time limit in seconds; 0: there is none.

    Slurm reads minutes, minutes:seconds and hours:minutes:seconds; after days hours, hours:minutes and so on.
    """
    if not time:
        return 0
    found = _TIME.fullmatch(time)
    assert found is not None, "it was checked"
    fields = [int(field) for field in found["fields"].split(":")]
    if found["days"] is not None:
        hours, minutes, seconds = [*fields, 0, 0][:3]
        return ((int(found["days"]) * 24 + hours) * 60 + minutes) * 60 + seconds
    if len(fields) < 3:
        fields.insert(0, 0)
    hours, minutes, seconds = [*fields, 0][:3]
    return (hours * 60 + minutes) * 60 + seconds
