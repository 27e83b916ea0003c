"""Ports of this host."""

from __future__ import annotations

import fcntl
import socket
import struct
import sys
from types import SimpleNamespace

import psutil
import pytest

from paceline.nouns.errors import UsageError
from paceline.rendezvous.interfaces import address_of, addresses, interface_of, open_listener, reserve_port


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


SIOCGIFADDR = 0x8915  # linux/sockios.h


def address(family, text):
    return SimpleNamespace(family=family, address=text)


def test_addresses_of_interfaces(monkeypatch):
    """The first IPv4 address of each; macOS lists the hardware's address and IPv6 first."""
    answer = {
        "lo0": [address(socket.AF_INET, "127.0.0.1"), address(socket.AF_INET6, "::1")],
        "en0": [address(18, "3c:22:fb:00:00:01"), address(socket.AF_INET6, "fe80::1c%en0"),
                address(socket.AF_INET, "192.0.2.7"), address(socket.AF_INET, "192.0.2.8")],
        "utun3": [address(socket.AF_INET6, "fe80::2%utun3")],
    }  # fmt: skip
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: answer)
    assert addresses() == {"lo0": "127.0.0.1", "en0": "192.0.2.7"}
    assert address_of("en0") == "192.0.2.7"
    assert interface_of("127.0.0.1") == "lo0"
    assert interface_of("192.0.2.8") is None
    for name in ("utun3", "en1", ""):
        with pytest.raises(UsageError, match="it has no IPv4 address here\n  fix: name one of: en0, lo0"):
            address_of(name)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="asks Linux's kernel by its own call")
def test_addresses_are_those_of_the_kernel():
    assert address_of("lo") == "127.0.0.1"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for name, text in addresses().items():
            # struct ifreq of netdevice(7): a name of 15 characters and a zero, then a sockaddr_in.
            answer = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            assert socket.inet_ntoa(answer[20:24]) == text
