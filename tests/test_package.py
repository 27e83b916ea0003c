"""What a person sees of the package: Tab, `dir` and `help`."""

from __future__ import annotations

import subprocess
import sys

import paceline

# In a process of its own: what is loaded there is not what other tests have loaded.
SHOWS = """
import sys
import paceline
names = dir(paceline)
assert "torch" not in sys.modules, "dir loads torch"
print(*names)
import paceline.cli.main
assert dir(paceline) == names
"""


def test_tab_shows_what_is_for_users():
    done = subprocess.run([sys.executable, "-c", SHOWS], capture_output=True, text=True, check=True)
    shown = [name for name in done.stdout.split() if not name.startswith("__")]
    assert shown == sorted(paceline.__all__)


def test_every_name_is_there():
    assert all(callable(getattr(paceline, name)) for name in paceline.__all__)


def test_help_begins_with_what_it_is_for():
    text = paceline.__doc__
    assert text.startswith("Train one PyTorch model on many processes")
    assert "room" not in text
    for name in paceline.__all__:
        assert f"`{name}`" in text, name
