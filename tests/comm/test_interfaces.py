"""Ports of this host."""

from __future__ import annotations

import socket

import pytest

from paceline.nouns.errors import UsageError
from paceline.rendezvous.interfaces import open_listener, reserve_port


def test_a_reserved_port_is_for_those_who_name_it():
    """One listener after the other may have it, and two at once may not."""
    with reserve_port("127.0.0.1") as reserved:
        port = reserved.getsockname()[1]
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", port))
        with socket.socket() as other, pytest.raises(ConnectionRefusedError):
            other.connect(("127.0.0.1", port))
        for _ in range(2):
            with open_listener("127.0.0.1", port), pytest.raises(UsageError, match="name another port"):
                open_listener("127.0.0.1", port)


def test_an_address_of_another_host():
    with pytest.raises(UsageError, match=r"192.0.2.1:0\n  found: Cannot assign"):
        reserve_port("192.0.2.1")
