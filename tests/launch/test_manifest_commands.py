"""What the golden manifests start is what the command line understands."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path

import pytest
import yaml

from paceline.cli import run_command as run
from paceline.cli import server_command as server
from paceline.cli.plan_flags import plan_request
from paceline.launch.plan_choice import choose_plan

GOLDEN = sorted((Path(__file__).parent / "golden").glob("*.yaml"))


def commands(node):
    """Every command of `paceline` in a manifest, wherever it stands."""
    if isinstance(node, dict):
        for key, value in node.items():
            if key in ("command", "entrypoint") and value:
                words = shlex.split(value) if isinstance(value, str) else [str(word) for word in value]
                yield words[words.index("paceline") :] if "paceline" in words else words
            yield from commands(value)
    elif isinstance(node, list):
        for one in node:
            yield from commands(one)


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_the_command_line_understands_them(path):
    found = [words for one in yaml.safe_load_all(path.read_text()) for words in commands(one) if words[0] == "paceline"]
    assert found
    for _, verb, *words in found:
        parser = argparse.ArgumentParser(allow_abbrev=False)
        {"run": run, "server": server}[verb].add_arguments(parser)
        parsed = parser.parse_args(words)
        if verb == "run":
            assert parsed.job
            assert parsed.plan
            choose_plan(plan_request(parsed), print)
