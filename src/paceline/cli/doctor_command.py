"""Look at this host, or at all hosts of a fleet, before a job does: what would stop it, slow it down or make it wrong.

Versions, cores, memory, accelerators and their links, network interfaces, names, ports, clocks, /dev/shm, limits and
disks, each finding with its fix. Nothing is changed. With several hosts, each is asked through your own ssh, and for
some seconds listens on one port while the others try to reach it.

Exit codes: 0 no errors (there may be warnings); 1 at least one error; 2 the request can't be met.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import shutil
import sys
import time
from pathlib import Path

from paceline.doctor.ask import Asker, SshAsker, answer, ask_fleet
from paceline.doctor.checks.fleet import check_fleet
from paceline.doctor.checks.host_checks import check_host
from paceline.doctor.facts import HostFacts
from paceline.doctor.finding import Finding
from paceline.doctor.findings_report import as_json, summary_line, table
from paceline.doctor.probe.host_facts import Question, look
from paceline.launch.hosts import Host, parse_hosts, read_hostfile
from paceline.launch.ssh import SshOptions, check_ssh
from paceline.nouns.errors import UsageError
from paceline.nouns.reading import parse_whole

_PORT = 29400  # torchrun's
_WIDTH = 120


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    host_group = parser.add_mutually_exclusive_group()
    host_group.add_argument("-H", "--hosts", metavar="H1:N,H2:N", help="look at these hosts and between them")
    host_group.add_argument("--hostfile", type=Path, metavar="FILE", help="the same, a host a line")
    parser.add_argument("--runs", type=Path, metavar="DIR", help="the run directory, for all hosts (default runs)")
    parser.add_argument("--port", type=int, metavar="P", help=f"where ranks will meet (MASTER_PORT, or {_PORT})")
    parser.add_argument("--python", default=sys.executable, metavar="PATH", help="Python on the other hosts (this one)")
    parser.add_argument("--quick", action="store_true", help="leave out how fast the disk is")
    parser.add_argument("--json", action="store_true", help="print facts and findings as JSON")
    parser.add_argument("--answer", action="store_true", help=argparse.SUPPRESS)  # another host's doctor asks


def run(arguments: argparse.Namespace) -> int:
    """Look, and print the table."""
    if arguments.answer:
        text = sys.stdin.buffer.read()
        print(json.dumps(answer(text, time.time_ns())))
        return 0
    hosts = _hosts(arguments)
    asker = SshAsker(arguments.python)
    if any(asker.needs_ssh(host.name) for host in hosts):
        check_ssh(SshOptions())
    host_facts, findings = examine(hosts, _question(arguments, hosts), asker, has_runs=arguments.runs is not None)
    if arguments.json:
        print(json.dumps(as_json(host_facts, findings)))
    else:
        width = min(_WIDTH, shutil.get_terminal_size((_WIDTH, 24)).columns)
        print("\n".join([*table(findings, width), "", summary_line(findings, len(hosts) or 1)]))
    return int(any(finding.level == "error" for finding in findings))


def examine(
    hosts: tuple[Host, ...], question: Question, asker: Asker, has_runs: bool
) -> tuple[dict[str, HostFacts], list[Finding]]:
    """Return the facts of every host, and all findings.

    Args:
        hosts: the hosts of the fleet; none: only this host.
        question: the facts to collect.
        asker: the object that asks the hosts.
        has_runs: True if the user named a run directory.
    """
    if not hosts:
        host_facts = look(question)
        name = host_facts.network.hostname or "this host"
        return {name: host_facts}, check_host(host_facts, name)
    names = [host.name for host in hosts]
    fleet = ask_fleet(names, question, asker, lambda text: print(text, file=sys.stderr, flush=True))
    findings = check_fleet(fleet, {host.name: host.slots for host in hosts}, has_runs)
    for name, host_facts in fleet.hosts.items():
        findings += check_host(host_facts, name, is_fleet=len(names) > 1)
    return fleet.hosts, findings


def _hosts(arguments: argparse.Namespace) -> tuple[Host, ...]:
    if arguments.hosts is not None:
        return parse_hosts(arguments.hosts)
    if arguments.hostfile:
        return read_hostfile(arguments.hostfile)
    return ()


def _question(arguments: argparse.Namespace, hosts: tuple[Host, ...]) -> Question:
    port = arguments.port
    if port is None:
        port = parse_whole(os.environ.get("MASTER_PORT", ""), most=65535) or _PORT
    if not 0 < port < 65536:
        if arguments.port is not None:
            raise UsageError(f"can't use the port {port}", "ports go from 1 to 65535", "write such as --port 29400")
        port = _PORT  # the value of MASTER_PORT is a finding of its own
    runs = (arguments.runs or Path("runs")).absolute()
    # A file of this name in the run directory, written on one host, tells whether the others see the same folder.
    marker = ""
    if len(hosts) > 1 and arguments.runs:
        marker = secrets.token_hex(16)
    return Question(tuple(host.name for host in hosts), str(runs), (port,), arguments.quick, marker)
