"""The interface of gang schedulers: every scheduler keeps to it, and no other file knows one by name."""

import ast
import re
from pathlib import Path

import pytest

from paceline.launch import kubernetes
from paceline.launch.kubernetes.gang import SCHEDULERS
from paceline.launch.kubernetes.kubernetes_job import GANGS, KINDS
from paceline.launch.kubernetes.objects import pod_sets
from paceline.launch.kubernetes.submit import render
from paceline.nouns.errors import PacelineError, UsageError
from paceline.nouns.names import LABEL_VALUE

from support.on_kubernetes import a_job

FOLDER = Path(kubernetes.__file__).parent


def test_every_file_is_one_scheduler():
    stems = {path.stem for path in (FOLDER / "schedulers").glob("*.py")} - {"__init__"}
    assert set(SCHEDULERS) == stems
    assert GANGS[0] == "none", "the default comes first: errors propose it"
    assert set(GANGS) >= {"none", "yunikorn", "kueue", "volcano", "coscheduling", "kai", "native"}
    assert all(name == scheduler.name for name, scheduler in SCHEDULERS.items())


def test_no_other_file_names_a_scheduler():
    files = [path for path in FOLDER.parent.rglob("*.py") if path.parent.name != "schedulers"]
    named = []
    for path in files:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and node.value in SCHEDULERS and node.value != "none":
                named.append(f"{path.name}:{node.lineno}")
    assert len(files) > 10
    assert not named


IMPOSSIBLE = [
    *[(name, kind, 0, why) for name, each in SCHEDULERS.items() for kind, why in each.impossible.items()],
    *[(name, kind, 2, why) for name, each in SCHEDULERS.items() for kind, why in each.impossible_with_servers.items()],
]


@pytest.mark.parametrize(("gang", "kind", "servers", "why"), IMPOSSIBLE)
def test_scheduler_refuses_an_unsupported_kind_with_its_reason(gang, kind, servers, why):
    assert kind in KINDS
    with pytest.raises(UsageError) as caught:
        a_job(servers, kind=kind, gang=gang)
    assert caught.value.found == why


@pytest.mark.parametrize("gang", GANGS)
def test_a_queue_is_named_where_the_scheduler_has_queues(gang):
    scheduler = SCHEDULERS[gang]
    if scheduler.queue is None:
        assert not scheduler.needs_queue
        with pytest.raises(UsageError, match=f"gang={gang} has none"):
            a_job(gang=gang, queue="ml")
        return
    a_job(gang=gang, queue=scheduler.queue_example)
    for bad in ("a b", "-ml", "ml-", "ml\n", "q" * 64):
        with pytest.raises(UsageError, match=f"write such as {re.escape(scheduler.queue_example)}$"):
            a_job(gang=gang, queue=bad)
    if scheduler.needs_queue:
        with pytest.raises(UsageError, match="no queue is named"):
            a_job(gang=gang, queue="")
    else:
        a_job(gang=gang, queue="")


def test_queues_of_yunikorn_are_labels_of_parts():
    pattern = SCHEDULERS["yunikorn"].queue
    names = ["root", "root.ml", "root.m_l", "Root.a-b.c", "r", "root.-x"]
    assert [name for name in names if pattern.fullmatch(name) and LABEL_VALUE.fullmatch(name)] == names
    for bad in ("", ".", "root.", ".root", "root..ml", "_root", "root_", "root.ml-", "root/ml", "root.ml\n"):
        assert not pattern.fullmatch(bad), bad


@pytest.mark.parametrize("gang", GANGS)
def test_scheduler_that_changes_pods_refuses_a_foreign_runtime(gang):
    scheduler = SCHEDULERS[gang]
    if scheduler.changes_pods:
        with pytest.raises(PacelineError, match="its runtime does"):
            a_job(kind="trainjob", gang=gang, runtime="torch")
        return
    plain = [pod_set.template for pod_set in pod_sets(render(a_job()))]
    assert [pod_set.template for pod_set in pod_sets(render(a_job(gang=gang)))] == plain
