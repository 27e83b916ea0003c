"""Event sinks of a job whose hosts come and go."""

from __future__ import annotations

import json
import subprocess

import pytest

from support import namespaces
from support.jobs import STEPS, command, events, losses, marked, wait_for
from support.sinks import received, sink_file

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(not namespaces.can_make(), reason=namespaces.WHY_NOT),
]


def test_each_generation_has_its_own_sinks(tmp_path):
    """Together they get what is in the file."""
    known, script = tmp_path / "known", tmp_path / "discover"
    known.write_text("h1:1\n")
    script.write_text(f"#!/bin/sh\ncat {known}\n")
    script.chmod(0o755)
    words = ["--on", "ssh", "--job", "a", "-x", "TEST_PAUSE", "-x", "TEST_SINK", "--host-discovery-script", script]
    env = marked(tmp_path, {"TEST_PAUSE": "0.5", "TEST_SINK": str(tmp_path / "sink")})
    with namespaces.hosts(tmp_path / "hosts", ("h1", "h2")) as hosts:
        words += ["--max-hosts", "2", "--cluster", hosts.cluster_file(), sink_file(tmp_path)]
        job = subprocess.Popen(
            hosts.inside("from", *command("run", *words)),
            cwd=tmp_path,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        try:
            assert wait_for(lambda: len(losses(tmp_path / "runs" / "a")) >= 2, 90)
            known.write_text("h1:1\nh2:1\n")
            out, _ = job.communicate(timeout=180)
        finally:
            job.kill()
    assert job.returncode == 0, out
    run_dir = tmp_path / "runs" / "a"
    assert [event["world_size"] for event in events(run_dir, "start")] == [1, 2]
    sinks = received(tmp_path)
    assert len(sinks) == 2
    got = [row for sink in sinks for row in sink if "event" in row]
    assert got == [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]
    assert {row["step"] for row in got if row["event"] == "step"} == set(range(1, STEPS + 1))
    assert all(sink[-1] == {"closed": True} for sink in sinks)
