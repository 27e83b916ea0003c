"""Run a script that says `import horovod.torch as hvd`, with horovodrun's command line.

paceline horovodrun -np 2 python train.py --lr 0.1
paceline horovodrun -np 8 -H h1:4,h2:4 python train.py
paceline horovodrun --min-np 4 --host-discovery-script hosts.sh python -m package.train

It starts the job as `paceline run` does; docs/horovod.md says what differs from Horovod's own.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import os
import re
import shlex
import socket
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from paceline.cli import run_command
from paceline.cli.plan_flags import OneLineHelp, print_notice
from paceline.launch.hosts import Host, parse_hosts, read_hostfile
from paceline.launch.ssh import SshOptions
from paceline.nouns.errors import ReadError, UsageError
from paceline.nouns.reading import read_text
from paceline.nouns.user_program import HOROVOD
from paceline.run.request import RunRequest

_OUTPUT = "PACELINE_HOROVOD_OUTPUT"  # read by horovod/import_alias.py
_MOST = 2**16  # ranks, seconds or restarts
# Flags of horovodrun that have no effect here: those without a value, and those with one.
_SWITCHES = """disable-cache hierarchical-allreduce no-hierarchical-allreduce hierarchical-allgather
no-hierarchical-allgather torus-allreduce no-torus-allreduce autotune no-autotune mpi-threads-disable
no-mpi-threads-disable tcp mpi jsrun log-with-timestamp log-without-timestamp prefix-output-with-timestamp"""
_VALUES = """cycle-time-ms cache-capacity autotune-log-file autotune-warmup-samples autotune-steps-per-sample
autotune-bayes-opt-max-samples autotune-gaussian-process-noise mpi-args binding-args num-nccl-streams thread-affinity
gloo-timeout-seconds log-level blacklist-cooldown-range start-timeout"""
_NO_EFFECT = (*_SWITCHES.split(), *_VALUES.split())
# Sections of --config-file, and the flags that their keys stand for; the others have no effect.
_CONFIGURED = {
    "params": {"fusion_threshold_mb": "fusion_threshold_mb"},
    "timeline": {"filename": "timeline_filename", "mark_cycles": "timeline_mark_cycles"},
    "stall_check": {
        "enabled": "stall_check",
        "warning_time_seconds": "stall_check_warning_time_seconds",
        "shutdown_time_seconds": "stall_check_shutdown_time_seconds",
    },
}
_SECTIONS_WITHOUT_EFFECT = ("autotune", "library_options", "logging", "controller", "verbose")
_PYTHON = re.compile(r"python[\d.]*")
# Arguments of Python, and the variable that has the same effect; "": the ranks are so anyway.
_OF_PYTHON = {"-u": "", "-B": "PYTHONDONTWRITEBYTECODE", "-W": "PYTHONWARNINGS"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add horovodrun's arguments; those after the program are its own."""
    from paceline import __version__

    parser.usage = "paceline horovodrun -np N [options] python FILE ..."
    parser.formatter_class = OneLineHelp
    add = parser.add_argument
    add("-v", "--version", action="version", version=f"paceline {__version__}")
    add("-cb", "--check-build", action="store_true", help="say what there is, and end")
    add("-np", "--num-proc", type=int, dest="np", metavar="N", help="ranks")
    add("-H", "--hosts", metavar="H1:4,H2:4", help="hosts and their slots")
    add("-hostfile", "--hostfile", type=Path, metavar="FILE", help="a host a line: `h1 slots=4`")
    add("-p", "--ssh-port", type=int, metavar="PORT", help="port of ssh")
    add("-i", "--ssh-identity-file", metavar="FILE", help="key of ssh")
    add("--network-interfaces", metavar="IF", help="network interface for torch's sockets")
    add("--output-filename", type=Path, metavar="DIR", help="gets rank.N/stdout and rank.N/stderr too")
    add("--config-file", type=Path, metavar="FILE", help="some of these flags (YAML)")
    add("--verbose", action="store_true", help="say which `paceline run` this is")
    add("--gloo", action="store_true", help="the only way that ranks are joined on CPUs")
    elastic = parser.add_argument_group("hosts that come and go, and restarts")
    add = elastic.add_argument
    add("--min-np", "--min-num-proc", type=int, dest="min_np", metavar="N", help="fewest ranks")
    add("--max-np", "--max-num-proc", type=int, dest="max_np", metavar="N", help="most ranks")
    add("--slots-per-host", type=int, metavar="N", help="ranks of a host that the script prints alone")
    add("--host-discovery-script", type=Path, metavar="FILE", help="prints the hosts there are, a line each")
    add("--reset-limit", type=int, metavar="N", help="restarts after a rank has died (default 0)")
    add("--elastic-timeout", type=float, metavar="SECONDS", help="to wait for hosts (default 600)")
    runtime = parser.add_argument_group("collectives")
    add = runtime.add_argument
    add("--fusion-threshold-mb", type=int, metavar="MB", help="most bytes of fused all-reduces (default 128)")
    add("--timeline-filename", metavar="FILE", help="gets rank 0's timeline")
    _add_switch(runtime, "timeline-mark-cycles")
    _add_switch(runtime, "stall-check")
    add("--stall-check-warning-time-seconds", type=float, metavar="S", help="until a warning (default 60)")
    add("--stall-check-shutdown-time-seconds", type=float, metavar="S", help="until the job fails (default: never)")
    ignored = parser.add_argument_group("accepted, without effect")
    for name in _SWITCHES.split():
        ignored.add_argument(f"--{name}", action="store_true", help=argparse.SUPPRESS)
    for name in _VALUES.split():
        ignored.add_argument(f"--{name}", metavar="VALUE", help=argparse.SUPPRESS)
    ignored.description = ", ".join(f"--{name}" for name in _NO_EFFECT)
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="python FILE ...", help="the program")


def _add_switch(group: argparse._ArgumentGroup, name: str) -> None:
    dest = name.replace("-", "_")
    group.add_argument(f"--{name}", action="store_true", dest=dest, default=None, help="or --no-" + name)
    group.add_argument(f"--no-{name}", action="store_false", dest=dest, default=None, help=argparse.SUPPRESS)


def run(arguments: argparse.Namespace) -> int:
    """Start the job as `paceline run` does."""
    from paceline.cli.main import read_command  # here: it imports this file

    if arguments.check_build:
        return _print_build()
    ignored = [f"--{name}" for name in _NO_EFFECT if name.replace("-", "_") in arguments.flags]
    if arguments.config_file is not None:
        ignored += _configure(arguments)
    if ignored:
        print_notice(f"paceline horovodrun: without effect here: {', '.join(ignored)}; see docs/horovod.md")
    program, environment = _program(arguments.command)
    environment |= _runtime_variables(arguments)
    words = ["run", "--stall-notice", "0", *_place(arguments)]
    if arguments.network_interfaces is not None:
        words += ["--interface", arguments.network_interfaces]
    # Horovod's ranks have these variables of the command's, also on other hosts.
    inherited = {name: value for name, value in os.environ.items() if name.startswith("HOROVOD_")}
    for name, value in {**inherited, HOROVOD: "1", **environment}.items():
        words += ["-x", f"{name}={value}"]
    words += program
    if arguments.verbose:
        print_notice(f"paceline horovodrun: paceline {shlex.join(words)}")
    return run_command.run(read_command(words), _change(arguments))


def _program(command: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Return the program's words for `paceline run`, and variables for Python's own arguments.

    Raises:
        UsageError: it is no Python program, or has arguments of Python that a rank can't have.
    """
    words = list(command[1:] if command[:1] == ["--"] else command)
    fix = "write such as `paceline horovodrun -np 2 python train.py`"
    if not words:
        raise UsageError("horovodrun needs a program", "none is named", fix)
    if not _PYTHON.fullmatch(Path(words[0]).name):
        if not words[0].endswith(".py"):
            raise UsageError(f"can't run {words[0]}", "it is no Python program, and ranks are Python processes", fix)
        return [words[0], *_own_arguments(words[1:])], {}
    environment: dict[str, str] = {}
    at = 1
    while at < len(words) and words[at].startswith("-"):
        flag, value = words[at][:2], words[at][2:]
        takes_value = flag in ("-W", "-m")
        if flag not in (*_OF_PYTHON, "-m") or (value and not takes_value):
            raise UsageError(
                f"can't run python {words[at]}",
                "ranks are copies of a running Python, which has no such argument",
                f"leave it out; {', '.join(_OF_PYTHON)} and -m can be written",
            )
        at += 1
        if takes_value and not value:
            value = words[at] if at < len(words) else ""
            at += 1
        if flag == "-m":
            return ["-m", value, *_own_arguments(words[at:])], environment
        if name := _OF_PYTHON[flag]:
            earlier = environment.get(name)
            environment[name] = f"{earlier},{value}" if earlier else value or "1"
    if at >= len(words):
        raise UsageError(f"can't run {shlex.join(words)}", "no file follows", fix)
    return [words[at], *_own_arguments(words[at + 1 :])], environment


def _own_arguments(arguments: Sequence[str]) -> list[str]:
    return ["--", *arguments] if arguments else []


def _place(arguments: argparse.Namespace) -> list[str]:
    """Return the words that say which ranks there are, and where.

    Raises:
        UsageError: flags contradict each other.
    """
    _check_numbers(arguments)
    if arguments.hosts and arguments.hostfile:
        raise UsageError("the hosts should be named once", "-H and --hostfile name them", "leave one out")
    if arguments.host_discovery_script is not None:
        return _elastic_place(arguments)
    if arguments.np is None:
        raise UsageError("horovodrun needs the number of ranks", "-np is missing", "write such as -np 2")
    hosts = parse_hosts(arguments.hosts) if arguments.hosts else ()
    if arguments.hostfile:
        hosts = read_hostfile(arguments.hostfile)
    hosts = _first_slots(hosts, arguments.np)
    if all(host.name in ("localhost", "127.0.0.1", socket.gethostname()) for host in hosts):
        return ["-n", f"{arguments.np}", "--max-restarts", f"{arguments.reset_limit or 0}"]
    if arguments.reset_limit is not None:
        found = "a lost host would not be there for a restart"
        raise UsageError("--reset-limit on a fixed list of hosts", found, "name hosts by --host-discovery-script")
    return ["--on", "ssh", "-H", ",".join(f"{host.name}:{host.slots}" for host in hosts)]


def _check_numbers(arguments: argparse.Namespace) -> None:
    """Raise UsageError for a number of ranks that can't be, and for flags of hosts that come and go without them."""
    for name in ("np", "min_np", "max_np", "slots_per_host"):
        value = getattr(arguments, name)
        if value is not None and not 1 <= value <= _MOST:
            flag = arguments.flags[name]
            raise UsageError(f"{flag} {value}", f"it is no number from 1 to {_MOST}", f"write such as {flag} 2")
    if arguments.host_discovery_script is not None:
        return
    for name in ("slots_per_host", "elastic_timeout", "max_np", "min_np"):
        if name in arguments.flags:
            flag = arguments.flags[name]
            found = "the number of ranks is fixed where no script says which hosts there are"
            raise UsageError(f"the flag {flag}", found, f"add --host-discovery-script, or leave {flag} out")


def _first_slots(hosts: Sequence[Host], ranks: int) -> tuple[Host, ...]:
    """Return the first hosts, with as many slots as there are ranks."""
    slots = sum(host.slots for host in hosts)
    if hosts and slots < ranks:
        raise UsageError(f"-np {ranks}", f"the hosts have {slots} slots", "write fewer ranks, or more slots")
    chosen = []
    for host in hosts:
        count = min(host.slots, ranks)
        ranks -= count
        if count:
            chosen.append(Host(host.name, count))
    return tuple(chosen)


def _elastic_place(arguments: argparse.Namespace) -> list[str]:
    if arguments.hosts or arguments.hostfile:
        raise UsageError("the hosts should be named once", "they are named, and there is a script", "leave one out")
    slots = arguments.slots_per_host or 1
    least = arguments.min_np or arguments.np or 1
    words = ["--on", "ssh", "--host-discovery-script", str(arguments.host_discovery_script)]
    words += ["--min-hosts", f"{-(-least // slots)}"]
    if arguments.max_np is not None:
        if arguments.max_np < max(least, slots):
            found = f"--min-np is {least}, and a host has {slots} ranks"
            raise UsageError(f"--max-np {arguments.max_np}", found, "write a larger --max-np")
        words += ["--max-hosts", f"{arguments.max_np // slots}"]
    return words


def _runtime_variables(arguments: argparse.Namespace) -> dict[str, str]:
    """Return the variables that say the same as the flags."""
    variables: dict[str, Any] = {
        "HOROVOD_TIMELINE": arguments.timeline_filename,
        "HOROVOD_STALL_CHECK_TIME_SECONDS": arguments.stall_check_warning_time_seconds,
        "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": arguments.stall_check_shutdown_time_seconds,
    }
    if arguments.timeline_mark_cycles is not None:
        variables["HOROVOD_TIMELINE_MARK_CYCLES"] = int(arguments.timeline_mark_cycles)
    if arguments.stall_check is not None:
        variables["HOROVOD_STALL_CHECK_DISABLE"] = int(not arguments.stall_check)
    if arguments.fusion_threshold_mb is not None:
        variables["HOROVOD_FUSION_THRESHOLD"] = arguments.fusion_threshold_mb * 2**20
    if arguments.output_filename is not None:
        variables[_OUTPUT] = arguments.output_filename.absolute()
    if arguments.host_discovery_script is not None or arguments.reset_limit:
        variables["HOROVOD_ELASTIC"] = 1
    return {name: f"{value}" for name, value in variables.items() if value is not None}


def _configure(arguments: argparse.Namespace) -> list[str]:
    """Take flags that were not written from the file, and return what has no effect in it.

    Raises:
        UsageError: the file can't be read, or has something unknown.
    """
    import yaml  # only here: other commands start faster without

    path = arguments.config_file
    try:
        content = yaml.safe_load(read_text(path)) or {}
    except (ReadError, yaml.YAMLError) as error:
        raise UsageError(f"can't read {path}", str(error).partition("\n")[0], "name a file of YAML") from None
    ignored = []
    for section, values in content.items() if isinstance(content, dict) else [(content, None)]:
        if section in _SECTIONS_WITHOUT_EFFECT:
            ignored.append(f"{section} of {path}")
        elif section not in _CONFIGURED or not isinstance(values, dict):
            known = ", ".join((*_CONFIGURED, *_SECTIONS_WITHOUT_EFFECT))
            raise UsageError(f"can't read {path}", f"it has {section!r}", f"its sections are {known}")
        else:
            ignored += _configure_section(arguments, section, values)
    return ignored


def _configure_section(arguments: argparse.Namespace, section: str, values: dict[str, Any]) -> list[str]:
    ignored = []
    for key, value in values.items():
        name = _CONFIGURED[section].get(str(key).replace("-", "_"))
        if name is None:
            ignored.append(f"{section}.{key}")
        elif name not in arguments.flags:  # a flag says more than the file
            setattr(arguments, name, value)
    return ignored


def _change(arguments: argparse.Namespace) -> Callable[[RunRequest], RunRequest]:
    """Return the function that adds to a request what `paceline run` has no flag for."""
    more: list[str] = []
    if arguments.ssh_port is not None:
        more += ["-p", f"{arguments.ssh_port}"]
    if arguments.ssh_identity_file is not None:
        more += ["-i", arguments.ssh_identity_file]

    def change(request: RunRequest) -> RunRequest:
        limits = request.limits
        if arguments.host_discovery_script is not None:
            limits = dataclasses.replace(
                limits,
                slots=arguments.slots_per_host or 1,
                wait_s=limits.wait_s if arguments.elastic_timeout is None else arguments.elastic_timeout,
                restarts=limits.restarts if arguments.reset_limit is None else arguments.reset_limit,
            )
        ssh = SshOptions(request.ssh.program, (*request.ssh.more, *more))
        return dataclasses.replace(request, limits=limits, ssh=ssh)

    return change


def _print_build() -> int:
    has_torch = importlib.util.find_spec("torch") is not None
    print(f"paceline {sys.modules['paceline'].__version__}, in Horovod's place:\n")
    print(f"Available Frameworks:\n    [{'X' if has_torch else ' '}] PyTorch\n    [ ] TensorFlow\n    [ ] MXNet\n")
    print("Available Controllers:\n    [ ] MPI\n    [X] Gloo\n")
    print("Available Tensor Operations:\n    [X] Gloo, and shared memory on one host\n    [X] NCCL, where torch has it")
    return 0
