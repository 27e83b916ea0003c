"""Slurm's node lists and tasks per node, without `scontrol`."""

from __future__ import annotations

import tracemalloc

import pytest

from paceline.nouns.errors import UsageError
from paceline.rendezvous.hostlist import hosts_of, tasks_per_host

LISTS = {
    "a": "a",
    "a,b": "a b",
    "a[1-3]": "a1 a2 a3",
    "a[01-03,7],b-gpu[1-2]-x,c": "a01 a02 a03 a7 b-gpu1-x b-gpu2-x c",
    "a[08-11]": "a08 a09 a10 a11",
    "a[8-11]": "a8 a9 a10 a11",
    "a[098-101]": "a098 a099 a100 a101",
    "r[1-2]n[3-4]": "r1n3 r1n4 r2n3 r2n4",
    "r[1,3]-n[01-02]x": "r1-n01x r1-n02x r3-n01x r3-n02x",
    "nid00[1000-1001]": "nid001000 nid001001",
    "a[5]": "a5",
    "node-1.cluster.example,node-2.cluster.example": "node-1.cluster.example node-2.cluster.example",
    "[1-2]": "1 2",
}


@pytest.mark.parametrize("text", LISTS)
def test_a_node_list(text):
    assert hosts_of(text) == LISTS[text].split()


BAD = [
    "",
    "a,",
    ",a",
    "a[",
    "a]",
    "a[]",
    "a[1-]",
    "a[-2]",
    "a[3-1]",
    "a[1,]",
    "a[b]",
    "a[[1]]",
    "a[1-2",
    "a b",
    "a[1-99999999]",
]
BAD += ["a[1-2000]b[1-2000]", "a[1\u0663]"]
# A million hosts in all, and not for each word or range; names of so many letters fill the memory, too.
BAD += ["a[1-600000],b[1-600000]", "a[1-600000,1-600000]", "[1-1000000][1-1000000]", "a" * 100 + "[1-900000]"]
BAD += ["a[" + "0" * 3000 + "-999999]", "a[1-" + "9" * 5000 + "]"]


@pytest.mark.parametrize("text", BAD)
def test_what_is_no_node_list_is_an_error(text):
    tracemalloc.start()
    with pytest.raises(UsageError, match="SLURM_JOB_NODELIST from Slurm should be a list of hosts") as raised:
        hosts_of(text, "SLURM_JOB_NODELIST")
    _, most_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert repr(text)[:60] in str(raised.value)
    assert len(str(raised.value)) < 600
    assert most_bytes < 2**20


@pytest.mark.parametrize(
    ("text", "counts"),
    [("4", [4]), ("4(x2)", [4, 4]), ("4(x2),3", [4, 4, 3]), ("1,2(x1),1(x3)", [1, 2, 1, 1, 1]), ("2,2", [2, 2])],
)
def test_tasks_per_host(text, counts):
    assert tasks_per_host(text) == counts


@pytest.mark.parametrize("text", ["", "x", "4(x)", "4(2)", "4(x2", "4,", "0", "-1", "4(x0)", "4(x99999999)", "4x2"])
def test_what_is_no_count_of_tasks_is_an_error(text):
    with pytest.raises(UsageError, match="should be tasks per host"):
        tasks_per_host(text)
