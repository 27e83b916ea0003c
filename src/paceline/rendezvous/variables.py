"""Numbers and addresses out of a launcher's variables: every error names the variable and whose it is."""

from __future__ import annotations

from collections.abc import Mapping

from paceline.nouns.errors import UsageError
from paceline.nouns.reading import parse_whole, shown

LARGEST_PORT = 65535


def without_empty(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that hold something: `RANK= python FILE` is how a shell leaves RANK out."""
    return {name: text for name, text in environment.items() if text}


def whole_number(text: str, name: str, source: str) -> int:
    """The number that `source` wrote into the variable `name`.

    Raises:
        UsageError: it is no whole number from 0 to 2^63 - 1.
    """
    number = parse_whole(text)
    if number is None:
        raise UsageError(
            f"{name} from {source} should be a whole number",
            f"it is {shown(text)}",
            f"unset {name}, or start the job with `paceline run` or torchrun",
        )
    return number


def port_number(text: str, name: str, source: str) -> int:
    """The port that the variable `name` holds.

    Raises:
        UsageError: it is no number from 1 to 65535.
    """
    port = parse_whole(text, 1, LARGEST_PORT)
    if port is None:
        raise UsageError(
            f"{name} from {source} should be a port, 1 to {LARGEST_PORT}",
            f"it is {shown(text)}",
            f"set {name} to a port that is free on rank 0's host, such as 29500",
        )
    return port


def host_and_port(text: str, name: str, source: str) -> tuple[str, int]:
    """HOST and PORT of a variable `HOST:PORT`; an IPv6 address stands in brackets.

    Raises:
        UsageError: it has not this form.
    """
    host, colon, port = text.rpartition(":")
    is_bracketed = host.startswith("[") and host.endswith("]")
    if not colon or not host.strip("[]") or (":" in host and not is_bracketed):
        raise UsageError(
            f"{name} from {source} should be HOST:PORT",
            f"it is {shown(text)}",
            f"write {name}=HOST:PORT, and an IPv6 address in brackets: [fd00::1]:29500",
        )
    return host.strip("[]"), port_number(port, name, source)


def address(environment: Mapping[str, str], names: tuple[str, str], source: str) -> tuple[str, int] | None:
    """HOST and PORT out of a variable each, such as MASTER_ADDR and MASTER_PORT; None where neither is set.

    Raises:
        UsageError: one is there without the other, or the port is none.
    """
    host, port = (environment.get(name) for name in names)
    if host is None and port is None:
        return None
    if host is None or port is None:
        there, missing = names if host is not None else names[::-1]
        raise UsageError(
            f"{names[0]} and {names[1]} should be set together",
            f"{there}={environment[there]} is set and {missing} is not",
            f"set {missing} as well, or unset {there}",
        )
    return host.strip("[]"), port_number(port, names[1], source)
