"""Hosts of a job, generation after generation: made-up hosts, made-up failures, no time."""

from __future__ import annotations

import random

import pytest

from paceline.launch.hosts import Host, parse_hosts
from paceline.nouns.errors import UsageError
from paceline.nouns.plan import Plan
from paceline.run.supervise.elastic import GENERATION, last_generation, rescaled, script_hosts
from paceline.run.supervise.membership import GiveUp, Membership, Regroup, Rules, Start, Wait


def begun(text="a:1,b:1", **rules):
    members, decision = Membership(Rules(**{"least": 1, "most": 3, **rules})).discovered(parse_hosts(text))
    assert isinstance(decision, Start)
    return members


def names(decision):
    return [host.name for host in decision.hosts]


def test_it_waits_for_enough_hosts_and_takes_no_more_than_it_may():
    members, decision = Membership(Rules(2, 3)).discovered(parse_hosts("a"))
    assert decision == Wait("1 of at least 2 hosts are there")
    members, decision = members.discovered(parse_hosts("a,b,c,d"))
    assert decision == Start(1, parse_hosts("a,b,c"))
    assert members.discovered(parse_hosts("a,b,c,d"))[1] is None


def test_membership_change_of_hosts_regroups_and_keeps_rank_0():
    members = begun()
    members, decision = members.discovered(parse_hosts("c:1,b:1,a:1"))
    assert decision == Regroup("c came")
    assert members.discovered(parse_hosts("a:1"))[1] is None, "it is said once"
    members, decision = members.ended((), is_failure=False)
    assert decision is None
    assert members.restarts == 0
    members, decision = members.discovered(parse_hosts("c:1,b:1,a:1"))
    assert names(decision) == ["a", "b", "c"]
    assert decision.generation == 2
    members, decision = members.discovered(parse_hosts("c:1,b:1"))
    assert decision == Regroup("a went or changed")


def test_a_host_with_other_slots_is_another_host():
    _, decision = begun("a:1,b:2").discovered(parse_hosts("a:1,b:4"))
    assert decision == Regroup("b went or changed and b came")


def test_too_few_hosts_do_not_end_what_still_runs():
    """A list that is empty for a moment is no reason to stop ranks that are well."""
    members, decision = begun("a:1,b:1", least=2).discovered(parse_hosts("a:1"))
    assert decision is None
    assert members.hosts == parse_hosts("a:1,b:1")


def test_a_host_that_fails_again_and_again_is_left_out():
    members = begun("a:1,b:1", patience=2)
    for _ in range(2):
        members, decision = members.ended(["b"])
        assert decision is None
        members, decision = members.discovered(parse_hosts("a:1,b:1"))
        assert isinstance(decision, Start)
    assert names(decision) == ["a"]
    assert members.discovered(parse_hosts("a:1,b:1"))[1] is None


def test_hosts_that_are_not_ready_count_and_are_no_restart():
    members = begun("a:1,b:1", patience=1).not_ready(["a"])
    members, decision = members.discovered(parse_hosts("a:1,b:1"))
    assert names(decision) == ["b"]
    assert members.restarts == 0
    members, decision = members.not_ready(["b"]).discovered(parse_hosts("a:1,b:1"))
    assert decision == Wait("0 of at least 1 hosts are there; a, b failed 1 times")


def test_membership_forgets_failures_of_a_host_that_was_unlisted():
    members = begun("a:1,b:1", patience=1).ended(["b"])[0]
    assert names(members.listed(["a", "b"]).discovered(parse_hosts("a:1,b:1"))[1]) == ["a"]
    assert names(members.listed(["a"]).listed(["a", "b"]).discovered(parse_hosts("a:1,b:1"))[1]) == ["a", "b"]


def test_it_gives_up_after_so_many_failures():
    members = begun(restarts=2, patience=99)
    for _ in range(2):
        members, decision = members.ended(["a"])
        assert decision is None
        members, _ = members.discovered(parse_hosts("a:1,b:1"))
    assert isinstance(members.ended(["a"])[1], GiveUp)


@pytest.mark.parametrize("seed", range(200))
def test_whatever_happens_generations_rise_and_rules_hold(seed):
    draws = random.Random(seed)
    least = draws.randint(1, 3)
    rules = Rules(least, draws.randint(least, 5), restarts=draws.randint(0, 5), patience=draws.randint(1, 3))
    members, last, is_running = Membership(rules), 0, False
    for _ in range(60):
        pool = draws.sample("abcdef", draws.randint(0, 6))
        if is_running and draws.random() < 0.4:
            bad = draws.sample([host.name for host in members.hosts], 1)
            if draws.random() < 0.3:
                members, decision = members.not_ready(bad), None
            else:
                members, decision = members.ended(bad, is_failure=not members.is_regrouping)
            is_running = False
            assert not members.hosts
            if isinstance(decision, GiveUp):
                assert members.restarts > rules.restarts
                return
        was_regrouping = members.is_regrouping
        members, decision = members.discovered([Host(name, draws.randint(1, 2)) for name in pool])
        if isinstance(decision, Start):
            assert not is_running
            assert decision.generation == last + 1
            assert rules.least <= len(decision.hosts) <= rules.most
            assert {host.name for host in decision.hosts} <= set(pool)
            assert all(members.failures.get(host.name, 0) < rules.patience for host in decision.hosts)
            last, is_running = decision.generation, True
        elif isinstance(decision, Regroup):
            assert is_running
            assert not was_regrouping
        elif isinstance(decision, Wait):
            assert not is_running


@pytest.mark.parametrize(
    ("plan", "ranks", "mesh"),
    [
        ("replicate=2", 5, "replicate=5"),
        ("replicate=1", 1, "replicate=1"),
        ("shard=4", 6, "shard=6"),
        ("replicate=2,shard=4", 12, "replicate=3,shard=4"),
        ("tensor=2", 7, "replicate=3,tensor=2"),
        ("pipeline=2,tensor=2", 4, "pipeline=2,tensor=2"),
    ],
)
def test_the_data_axis_takes_what_there_is(plan, ranks, mesh):
    now = rescaled(Plan.parse(plan), ranks)
    assert Plan.parse(mesh).mesh == now.mesh
    assert now.world_size <= ranks


def test_too_few_ranks_for_one_copy():
    with pytest.raises(UsageError, match="4 hold one copy"):
        rescaled(Plan.parse("pipeline=2,tensor=2"), 3)


def test_the_number_of_a_generation_is_kept(tmp_path):
    (tmp_path / GENERATION).write_text("3\n")
    assert last_generation(tmp_path) == 3
    assert last_generation(tmp_path / "none") == 0


@pytest.mark.parametrize(
    ("text", "hosts"), [("echo h1:2; echo; echo h2", "h1:2,h2:1"), ("echo ' h1:1 '", "h1:1"), ("true", None)]
)
def test_a_discovery_script(tmp_path, text, hosts):
    script = tmp_path / "discover"
    script.write_text(f"#!/bin/sh\n{text}\n")
    script.chmod(0o755)
    assert script_hosts(script)() == (parse_hosts(hosts) if hosts else ())


@pytest.mark.parametrize(
    ("text", "said"), [("echo no >&2; exit 3", "ended with 3: no"), ("echo 'a b'", "no host's name")]
)
def test_a_discovery_script_that_fails(tmp_path, text, said):
    script = tmp_path / "discover"
    script.write_text(f"#!/bin/sh\n{text}\n")
    script.chmod(0o755)
    with pytest.raises(UsageError, match=said):
        script_hosts(script)()
    with pytest.raises(UsageError, match="did not run"):
        script_hosts(tmp_path / "none")()
    script.write_text("echo h1\n")
    with pytest.raises(UsageError, match="begin it with a line such as #!/bin/sh"):
        script_hosts(script)()
    script.chmod(0o644)
    with pytest.raises(UsageError, match=f"did not run.*\n  fix: make it executable: chmod [+]x {script}"):
        script_hosts(script)()
