"""Hosts as people write them, and ranks onto hosts."""

from __future__ import annotations

import pytest

from paceline.launch.hosts import Host, parse_hosts, read_hostfile
from paceline.launch.local import RankSettings
from paceline.launch.rank_assignment import HostRanks, Rendezvous, seat, with_servers
from paceline.nouns.errors import UsageError


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("h1:4,h2:4", [("h1", 4), ("h2", 4)]),
        ("h1", [("h1", 1)]),
        (" h1 , h2:2 ", [("h1", 1), ("h2", 2)]),
        ("[fe80::1]:3,10.0.0.2:1", [("fe80::1", 3), ("10.0.0.2", 1)]),
        ("user@h1:2", [("user@h1", 2)]),
    ],
)
def test_hosts_of_a_line(text, hosts):
    assert parse_hosts(text) == tuple(Host(*one) for one in hosts)


@pytest.mark.parametrize(
    ("lines", "hosts"),
    [
        ("h1:4\nh2:2\n", [("h1", 4), ("h2", 2)]),  # Horovod
        ("worker-1 slots=4\n# a comment\n\nworker-2 slots=2 # more\n", [("worker-1", 4), ("worker-2", 2)]),  # DeepSpeed
        ("h1 slots=2 max_slots=4\nh2 slots=1 max-slots=9\n", [("h1", 2), ("h2", 1)]),  # Open MPI
        ("h1\nh1\nh2\n", [("h1", 2), ("h2", 1)]),  # Open MPI, a line a slot
        ("h1\n", [("h1", 1)]),
    ],
)
def test_hosts_of_a_file(tmp_path, lines, hosts):
    path = tmp_path / "hosts"
    path.write_text(lines)
    assert read_hostfile(path) == tuple(Host(*one) for one in hosts)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("h1:x", "no number of slots"),
        ("h1:0", "no number of slots"),
        ("h1:-1", "no number of slots"),
        ("h1:", "no number of slots"),
        ("", "'' is no host's name"),
        ("h1,,h2", "'' is no host's name"),
        ("-oProxyCommand=id:1", "is no host's name"),
        ("h1;reboot", "is no host's name"),
        ("h1 h2", "is no host's name"),
        ("$(id)", "is no host's name"),
        ("h1:1,h1:2", "h1 is named twice"),
    ],
)
def test_what_is_no_list_of_hosts(text, said):
    with pytest.raises(UsageError, match=said.replace("$", r"\$").replace("(", r"\(").replace(")", r"\)")):
        parse_hosts(text)


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ("", "it names none"),
        ("# nothing\n", "it names none"),
        ("h1 slots=four\n", "line 1"),
        ("h1:2\nh2 cores=4\n", "line 2"),
        ("h1:2\nh1:2\n", "h1 is named twice"),
        ("h1 slots=2\nh1\n", "h1 is named twice"),
        ("-F/etc/passwd\n", "is no host's name"),
    ],
)
def test_what_is_no_hostfile(tmp_path, lines, said):
    path = tmp_path / "hosts"
    path.write_text(lines)
    with pytest.raises(UsageError, match=said):
        read_hostfile(path)


def test_a_hostfile_that_is_not_there(tmp_path):
    with pytest.raises(UsageError, match="can't read the hosts"):
        read_hostfile(tmp_path / "none")


def test_servers_are_dealt_out_and_their_coordinator_is_first():
    host_ranks = seat(parse_hosts("a:2,b:3,c:1"), None)
    assert with_servers(host_ranks, 0) == host_ranks
    assert [one.servers for one in with_servers(host_ranks, 2)] == [(6, 8), (7,), ()]
    assert [one.servers for one in with_servers(host_ranks, 4)] == [(6, 9, 10), (7,), (8,)]
    here = with_servers(host_ranks, 4)[1]
    assert (here.ranks, here.processes) == (range(2, 5), (2, 3, 4, 7))
    settings = RankSettings("f.py", [], 6, here, Rendezvous(coordinator="h:1", own="h2"), "/run", None, [], 4, "")
    assert RankSettings.from_json(settings.to_json()) == settings


def test_each_host_is_filled_before_the_next():
    hosts = parse_hosts("a:2,b:3,c:1")
    assert seat(hosts, None) == (HostRanks("a", 0, 2, 0, 3), HostRanks("b", 2, 3, 1, 3), HostRanks("c", 5, 1, 2, 3))
    assert seat(hosts, 3) == (HostRanks("a", 0, 2, 0, 2), HostRanks("b", 2, 1, 1, 2))
    with pytest.raises(UsageError, match=r"can't place 7 ranks on 3 hosts(?s:.*)6 slots"):
        seat(hosts, 7)


def test_an_error_names_some_of_many_hosts():
    hosts = [Host(f"h{number}") for number in range(100_000)]
    with pytest.raises(UsageError, match="h19:1 and 99980 more") as caught:
        seat(hosts, 100_001)
    assert len(str(caught.value)) < 500
