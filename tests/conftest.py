"""The order of files: the long ones first, so that no process is left with one of them when the others have ended."""

from __future__ import annotations

from pathlib import Path

# By time under -m integration; of two neighbours one computes while the other mostly waits.
LONGEST_FIRST = (
    "integration/test_server_jobs.py",
    "parallel/test_every_plan.py",
    "integration/test_launchers.py",
    "verify/test_mutants.py",
    "integration/test_servers_over_ssh.py",
    "integration/test_bench.py",
    "test_readme.py",
    "integration/test_odd_moments.py",
    "checkpoint/test_any_mesh.py",
)
LAST = "server/test_protocol.py"  # its seeds take all cores
TESTS = Path(__file__).parent


def pytest_collection_modifyitems(items):
    lost = [name for name in (*LONGEST_FIRST, LAST) if not (TESTS / name).is_file()]
    assert not lost, f"{__file__} gives an order to {lost}"
    items.sort(key=lambda item: place(item.path))


def place(path):
    name = path.relative_to(TESTS).as_posix()
    if name in LONGEST_FIRST:
        return LONGEST_FIRST.index(name)
    return len(LONGEST_FIRST) + (name == LAST)
