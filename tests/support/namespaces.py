"""Hosts for tests: network namespaces of this machine on one bridge, each with its own sshd."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

SSHD = shutil.which("sshd", path="/usr/sbin:/usr/bin:/sbin")
_MADE = itertools.count()
WHY_NOT = "needs root, ip and sshd"


def can_make() -> bool:
    """Whether this machine lets namespaces be made."""
    return os.geteuid() == 0 and SSHD is not None and shutil.which("ip") is not None and shutil.which("ssh") is not None


@dataclass
class Hosts:
    """Some hosts, and one from which they are reached.

    Attributes:
        names: of the hosts, such as h1 and h2.
        folder: keys, configuration and logs.
        prefix: of the namespaces' names.
    """

    names: Sequence[str]
    folder: Path
    prefix: str

    @property
    def config(self) -> Path:
        """For `ssh -F`."""
        return self.folder / "config"

    def cluster_file(self, *more: str) -> Path:
        """A cluster file with the options by which ssh reaches the hosts, and more of them."""
        path = self.folder / f"cluster-{len(more)}.toml"
        path.write_text(f"[ssh]\noptions = {json.dumps(['-F', str(self.config), *more])}\n")
        return path

    def address(self, name: str) -> str:
        """Of a host."""
        return f"10.77.{self.subnet}.{self.names.index(name) + 2}"

    def other(self, name: str) -> str:
        """Its address on a second network, which no job was told to use."""
        return f"10.78.{self.subnet}.{self.names.index(name) + 2}"

    @property
    def subnet(self) -> int:
        """A number that no other test's hosts have."""
        return int(self.prefix.removeprefix("pl")) % 250

    def inside(self, name: str, *words: str) -> list[str]:
        """A command in a host's network; "from" is the host from which the others are reached."""
        return ["ip", "netns", "exec", f"{self.prefix}-{name}", *words]

    def cut(self, name: str) -> None:
        """Nothing reaches the host any more."""
        _call("ip", "-n", f"{self.prefix}-{name}", "link", "set", "eth0", "down")

    def pids(self, name: str, words: str) -> list[int]:
        """A host's processes with these words in their command line."""
        listed = subprocess.run(["ip", "netns", "pids", f"{self.prefix}-{name}"], capture_output=True, text=True)
        found = []
        for pid in map(int, listed.stdout.split()):
            with contextlib.suppress(psutil.Error):
                if words in " ".join(psutil.Process(pid).cmdline()):
                    found.append(pid)
        return found

    def has_nothing_of_paceline(self) -> bool:
        """Whether no host has a process of a job."""
        return not [pid for name in self.names for pid in self.pids(name, "paceline.run")]

    def listening(self, name: str) -> set[str]:
        """Where something on the host takes connections: address:port."""
        done = subprocess.run(self.inside(name, "ss", "-ltnH"), capture_output=True, text=True, check=True)
        return {line.split()[3] for line in done.stdout.splitlines()}


@contextlib.contextmanager
def hosts(folder: Path, names: Sequence[str] = ("h1", "h2")) -> Iterator[Hosts]:
    """Hosts for the time of the block."""
    made = Hosts(names, folder, f"pl{(os.getpid() + 7 * next(_MADE)) % 10000}")
    daemons: list[subprocess.Popen] = []
    folder.mkdir(parents=True, exist_ok=True)
    try:
        _make_network(made)
        _make_keys(made)
        daemons += [_start_sshd(made, name) for name in names]
        yield made
    finally:
        for daemon in daemons:
            daemon.terminate()
            daemon.wait()
        for name in ("from", *names):
            pids = subprocess.run(["ip", "netns", "pids", f"{made.prefix}-{name}"], capture_output=True, text=True)
            for pid in pids.stdout.split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), 9)
            subprocess.run(["ip", "netns", "del", f"{made.prefix}-{name}"], capture_output=True)
        subprocess.run(["ip", "link", "del", made.prefix], capture_output=True)


def _make_network(made: Hosts) -> None:
    _call("ip", "link", "add", made.prefix, "type", "bridge")
    _call("ip", "link", "set", made.prefix, "up")
    for number, name in enumerate(("from", *made.names), 1):
        space, cable = f"{made.prefix}-{name}", f"{made.prefix}v{number}"
        _call("ip", "netns", "add", space)
        _call("ip", "link", "add", cable, "type", "veth", "peer", "name", "eth0", "netns", space)
        _call("ip", "link", "set", cable, "master", made.prefix, "up")
        _call("ip", "-n", space, "addr", "add", f"10.77.{made.subnet}.{number}/24", "dev", "eth0")
        _call("ip", "-n", space, "addr", "add", f"10.78.{made.subnet}.{number}/24", "dev", "eth0", "label", "eth0:1")
        _call("ip", "-n", space, "link", "set", "eth0", "up")
        _call("ip", "-n", space, "link", "set", "lo", "up")


def _make_keys(made: Hosts) -> None:
    for kind in ("host", "user"):
        _call("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(made.folder / kind))
    (made.folder / "authorized").write_text((made.folder / "user.pub").read_text())
    key = (made.folder / "host.pub").read_text().rsplit(" ", 1)[0]
    (made.folder / "known").write_text("".join(f"{made.address(name)} {key}\n" for name in made.names))
    blocks = [
        f"Host {name}\n  HostName {made.address(name)}\n  User root\n  IdentityFile {made.folder}/user\n"
        f"  UserKnownHostsFile {made.folder}/known\n  IdentitiesOnly yes\n"
        for name in made.names
    ]
    made.config.write_text("\n".join(blocks))


def _start_sshd(made: Hosts, name: str) -> subprocess.Popen:
    Path("/run/sshd").mkdir(exist_ok=True)
    settings = {
        "HostKey": made.folder / "host",
        "AuthorizedKeysFile": made.folder / "authorized",
        "StrictModes": "no",
        "UsePAM": "no",
        "PasswordAuthentication": "no",
        "PermitRootLogin": "prohibit-password",
        "PidFile": "none",
        "ListenAddress": made.address(name),
        "SetEnv": f"HOME={made.folder}",  # what a login shell of this user does is not tested, and may take its time
    }
    words = [word for key, value in settings.items() for word in ("-o", f"{key}={value}")]
    assert SSHD is not None
    with (made.folder / f"{name}.log").open("w") as log:
        daemon = subprocess.Popen(made.inside(name, SSHD, "-D", "-e", "-f", "/dev/null", *words), stderr=log)
    deadline = time.monotonic() + 10
    while subprocess.run(
        made.inside("from", "ssh", "-F", str(made.config), name, "true"), capture_output=True
    ).returncode:
        if time.monotonic() > deadline or daemon.poll() is not None:
            raise RuntimeError((made.folder / f"{name}.log").read_text())
        time.sleep(0.1)
    return daemon


def _call(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)}: {done.stderr}")
