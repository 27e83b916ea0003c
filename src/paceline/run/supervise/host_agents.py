"""Start agents on a job's hosts, and ask each whether its host is ready before any rank starts anywhere."""

from __future__ import annotations

import os
import secrets
import selectors
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from paceline.launch.rank_assignment import HostRanks, Rendezvous
from paceline.launch.ssh import SshOptions, ssh_command, why_lost
from paceline.nouns import module_names
from paceline.nouns.errors import PacelineError, UsageError
from paceline.run.supervise.host_backend import RemoteBackend
from paceline.run.supervise.supervisor import HostAssignment
from paceline.server.coordinator.absences import SILENCE
from paceline.server.transport.credentials import keep_credentials, new_credentials

ANSWER_S = 60.0  # seconds for ssh to connect, and Python to start from a cold file system
# Beginnings of names. sshd starts an agent with the user's login environment, so the variables that make ranks compute
# and communicate alike are sent along.
_FAMILIES = (
    *("NCCL_", "GLOO_", "TORCH_", "PYTORCH_", "OMP_", "MKL_", "PYTHONPATH", "PYTHONHASHSEED", "GLIBC_TUNABLES"),
    SILENCE,  # the coordinator and the workers must count alike
)


@dataclass(frozen=True, slots=True)
class FleetOptions:
    """The ways to reach other hosts, and the settings that are sent to them.

    Args:
        ssh: the ssh program and its arguments.
        python: the Python program on each host.
        interface: the network interface to which torch's sockets are bound on every host; "": the one that ssh came to.
        environment: the variables for the ranks, beside this process's variables for torch and Python.
    """

    ssh: SshOptions = field(default_factory=SshOptions)
    python: str = sys.executable
    interface: str = ""
    environment: dict[str, str] = field(default_factory=dict)


def agent_command(host: str, options: FleetOptions) -> list[str]:
    """Return the command that starts an agent on a host; all else goes in on its standard input."""
    return ssh_command(host, [options.python, "-m", module_names.AGENT], options.ssh)


def agent_request(
    host_ranks: Sequence[HostRanks], at: int, script: Path, run_dir: Path, options: FleetOptions
) -> dict[str, Any]:
    """Return the first message for the agent of host number `at`, but for the token."""
    inherited = {name: value for name, value in os.environ.items() if name.startswith(_FAMILIES)}
    other_hosts = [ranks.host for number, ranks in enumerate(host_ranks) if number != at]
    return {
        "run_dir": str(run_dir.resolve()),
        "script": str(script.resolve()),
        "cwd": os.getcwd(),
        "environment": {**inherited, **options.environment},
        "interface": options.interface,
        "others": other_hosts,
        "is_head": at == 0,
        "has_servers": any(ranks.servers for ranks in host_ranks),
    }


def open_posts(
    host_ranks: Sequence[HostRanks], script: Path, run_dir: Path, options: FleetOptions
) -> list[HostAssignment]:
    """Start an agent on every host, ready to start its ranks.

    Raises:
        HostError: a host can't be reached, or does not see the job's files. No rank has started.
    """
    # Certificates are only for a job with servers: its workers connect to them over the network, with TLS.
    has_servers = any(ranks.servers for ranks in host_ranks)
    credentials = new_credentials() if has_servers else {}
    token = secrets.token_hex(16)
    path = run_dir / f".token-{token[:8]}"  # a name of its own: a network file system may remember an older one
    path.write_text(token)
    backends: list[RemoteBackend] = []
    try:
        for number, ranks in enumerate(host_ranks):
            request = {**agent_request(host_ranks, number, script, run_dir, options), "token": token}
            backend = RemoteBackend(ranks.host, agent_command(ranks.host, options), request)
            backends.append(backend)  # at once: it is closed below whatever comes next
            if credentials:
                backend.credentials = {role: credentials[role] for role in _roles(ranks)}
        answers = _answers(backends)
        if credentials:
            let_watch(run_dir, credentials)
    except BaseException:
        for backend in backends:
            backend.close(0.5)
        if credentials:
            end_watch(run_dir)
        raise
    finally:
        path.unlink(missing_ok=True)
    # Rank 0 and the coordinator are on the first host, so both meet there.
    first = f"{answers[0]['address']}:{answers[0]['port']}"
    rendezvous = Rendezvous(coordinator=first) if credentials else Rendezvous(master=first)
    assignments = []
    for backend, ranks, answer in zip(backends, host_ranks, answers, strict=True):
        on_host = replace(rendezvous, interface=answer["interface"], own=answer["address"])
        assignments.append(HostAssignment(backend, ranks, on_host))
    return assignments


def _roles(host_ranks: HostRanks) -> list[str]:
    """Return the roles for which a host of a job with parameter servers gets certificates: only those that it has."""
    roles = ["worker"]
    has_coordinator = host_ranks.cross_rank == 0
    servers = len(host_ranks.servers) - has_coordinator  # the coordinator's number is among them
    if servers > 0:
        roles.append("server")
    if has_coordinator:
        roles.append("coordinator")
    return roles


def let_watch(run_dir: Path, credentials: Mapping[str, Mapping[str, str]]) -> None:
    """Keep the certificate that `paceline server top` needs for a job of several hosts; `end_watch` removes it.

    It has the role "watcher", not a worker's.
    """
    end_watch(run_dir)  # an earlier attempt's
    keep_credentials(run_dir, {"watcher": credentials["watcher"]})


def end_watch(run_dir: Path) -> None:
    """Remove the certificate that `let_watch` kept; the job has ended."""
    shutil.rmtree(run_dir / "credentials", ignore_errors=True)


class HostError(UsageError):
    """Hosts that are not ready.

    Attributes:
        hosts: the names of the hosts.
    """

    def __init__(self, errors: dict[str, PacelineError]) -> None:
        first = next(iter(errors.values()))
        other_hosts = [host for host in errors if errors[host] is not first]
        more = f"; {len(other_hosts)} more: {', '.join(other_hosts)}" if other_hosts else ""
        super().__init__(first.asked, f"{first.found}{more}", first.fix)
        self.hosts = tuple(errors)


def _answers(backends: Sequence[RemoteBackend]) -> list[dict[str, Any]]:
    """Return the answer of each agent about its host; all are waited for at once.

    Raises:
        HostError: some are not ready, or have not answered within ANSWER_S.
    """
    answers: dict[str, dict[str, Any]] = {}
    # Each host counts as silent until it has answered: who is left here at the deadline is reported so.
    errors = {backend.host: _silent(backend.host) for backend in backends}
    deadline = time.monotonic() + ANSWER_S
    # No threads: a signal ends the wait anywhere, and the backends are closed while nobody reads them.
    with selectors.DefaultSelector() as waited:
        for backend in backends:
            waited.register(backend.lines.descriptor, selectors.EVENT_READ, backend)
        while waited.get_map() and (left_s := deadline - time.monotonic()) > 0:
            for key, _ in waited.select(left_s):
                outcome = _outcome(key.data)
                if outcome is None:
                    continue
                waited.unregister(key.fd)
                if isinstance(outcome, PacelineError):
                    errors[key.data.host] = outcome
                else:
                    del errors[key.data.host]
                    answers[key.data.host] = outcome
    if errors:
        raise HostError(errors)
    return [answers[backend.host] for backend in backends]


def _outcome(backend: RemoteBackend) -> dict[str, Any] | PacelineError | None:
    """Return a host's answer, or the error why it will give none; None: no answer yet."""
    try:
        answer = backend.answer()
    except PacelineError as error:
        return error
    if answer is None and backend.lines.is_over:
        return why_lost(backend.host, backend.last_words() or "the agent ended without a message")
    return answer


def _silent(host: str) -> PacelineError:
    reason = f"it has not answered for {ANSWER_S:g} s"
    return UsageError(f"can't reach {host} over ssh", reason, "see whether the host hangs")
