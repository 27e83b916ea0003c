"""Commands on other hosts through the user's own ssh: its keys, its configuration, its known hosts.

Facts that a host must know, secrets too, go in on the command's standard input: a command line can be read by everybody
on that host.
"""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.nouns.errors import UsageError, last_error_of

# No question can be answered here, an unknown or changed host key ends the attempt, and a lost connection is noticed:
# after 3 signs of life that nobody answered, 5 s apart.
_ALWAYS = (
    *("-T", "-x", "-a"),  # no terminal, which would change the bytes; no X11; no agent for others to use on that host
    *("-o", "BatchMode=yes"),
    *("-o", "StrictHostKeyChecking=yes"),
    *("-o", "ConnectTimeout=15"),
    *("-o", "ServerAliveInterval=5"),
    *("-o", "ServerAliveCountMax=3"),
)


@dataclass(frozen=True, slots=True)
class SshOptions:
    """The ssh program and the user's arguments for it.

    Args:
        program: the path or name of the ssh program.
        more: the user's own arguments, before the host; of options named twice ssh takes the first, so theirs win.
    """

    program: str = "ssh"
    more: tuple[str, ...] = ()


def ssh_command(host: str, command: Sequence[str], options: SshOptions | None = None) -> list[str]:
    """Return the command that starts `command` on `host`: ssh hands it to that host's shell, so each word is quoted."""
    options = options or SshOptions()  # `--`: a host is never read as an option
    return [options.program, *options.more, *_ALWAYS, "--", host, shlex.join(command)]


def check_ssh(options: SshOptions) -> None:
    """Raise UsageError unless there is an ssh to call."""
    if shutil.which(options.program) is None:
        raise UsageError(
            f"can't reach other hosts by {options.program}",
            "there is no such program",
            "install OpenSSH's client",
            settings=("program",),
        )


def why_lost(host: str, last_words: str) -> UsageError:
    """Return the error that ssh's last words mean, with the advice to the user.

    Args:
        host: the host that ssh should have reached.
        last_words: the text that ssh wrote to its standard error.
    """
    # OpenSSH has one exit code, 255, for all its own errors: only the words tell them apart. The first match counts.
    fixes = (
        (
            "host key verification failed",
            f"compare {host}'s key with one you got another way, then add it to known_hosts",
        ),
        (
            "remote host identification has changed",
            f"if {host} was installed anew, remove its old key from known_hosts",
        ),
        (
            "permission denied",
            f"let `ssh {host} true` work without a password first: a key, and an agent that holds it",
        ),
        ("could not resolve", f"write {host} as it is known here, or its address"),
        ("connection refused", f"is sshd running on {host}? `paceline doctor -H {host}` looks"),
        ("timed out", f"is {host} up, and port 22 open from here?"),
        ("no route to host", f"is {host} up, and in a network that this host reaches?"),
        ("no module named", f"install Paceline on {host} in the same place as here, or name its Python with --python"),
        ("no such file", f"{host} needs the same Python and folder as this host, or --python"),
    )
    asked = f"can't reach {host} over ssh"
    found = last_error_of(last_words, "ssh said nothing")
    for sign, fix in fixes:
        if sign in last_words.lower():
            return UsageError(asked, found, fix)
    return UsageError(asked, found, f"see that `ssh {host} true` works")
