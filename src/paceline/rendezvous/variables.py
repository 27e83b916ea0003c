"""Read numbers and addresses from a launcher's variables: every error names the variable and the launcher."""

from __future__ import annotations

from collections.abc import Mapping

from paceline.nouns.errors import UsageError
from paceline.nouns.reading import parse_whole, shown

LARGEST_PORT = 65535


def without_empty(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that are not empty: `RANK= python FILE` is how a shell leaves RANK out."""
    return {name: text for name, text in environment.items() if text}


def whole_number(text: str, name: str, source: str) -> int:
    """Return the number that `source` wrote into the variable `name`.

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
    """Return the port that the variable `name` holds.

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
    """Return HOST and PORT of a variable `HOST:PORT`; an IPv6 address stands in brackets.

    Raises:
        UsageError: it has not this form.
    """
    # From the right, as an IPv6 address has colons itself.
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
    """Return HOST and PORT from a variable each, such as MASTER_ADDR and MASTER_PORT; None where neither is set.

    Raises:
        UsageError: one is there without the other, or the port is none.
    """
    host_name, port_name = names
    host = environment.get(host_name)
    port = environment.get(port_name)
    if host is None and port is None:
        return None
    if host is None or port is None:
        present, missing = (port_name, host_name) if host is None else (host_name, port_name)
        raise UsageError(
            f"{host_name} and {port_name} should be set together",
            f"{present}={environment[present]} is set and {missing} is not",
            f"set {missing} as well, or unset {present}",
        )
    return host.strip("[]"), port_number(port, port_name, source)
