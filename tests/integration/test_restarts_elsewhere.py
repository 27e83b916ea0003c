"""Ranks that mpirun or Ray started are started again after one has died, as those of this host are."""

from __future__ import annotations

import importlib.util
import json
import shutil

import pytest

from support.jobs import STEPS, events, losses, paceline, write_workload
from support.sample import COMPLETE

pytestmark = pytest.mark.integration
AS_ROOT = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
}
DIE = """    if job and job.step_number == 6 and job.rank == 1 and os.environ.get('PACELINE_RESTART', '0') in '01':
        os.kill(os.getpid(), signal.SIGKILL)
"""
CLUSTERS = {
    "openmpi": ("mpi", '[mpi]\nmpirun = "mpirun.openmpi"\n', shutil.which("mpirun.openmpi")),
    "mpich": ("mpi", '[mpi]\nmpirun = "mpirun.mpich"\n', shutil.which("mpirun.mpich")),
    "ray": ("ray", '[ray]\naddress = "local"\n', importlib.util.find_spec("ray")),
}


IN_CI = "ray" if CLUSTERS["ray"][2] else "openmpi"


@pytest.mark.parametrize("launcher", [pytest.param(name, marks=() if name == IN_CI else COMPLETE) for name in CLUSTERS])
def test_ranks_of_another_launcher_are_started_again(launcher, tmp_path):
    place, cluster, is_there = CLUSTERS[launcher]
    if not is_there:
        pytest.skip(f"needs {launcher}")
    (tmp_path / "cluster.toml").write_text(cluster)
    words = ("run", "-n", "2", "--checkpoint-every", "2", "--plan", "transport=gloo")
    whole = paceline(tmp_path, *words, "--job", "whole", write_workload(tmp_path, name="whole.py"))
    assert whole.code == 0, whole.err
    file = write_workload(tmp_path, DIE)
    elsewhere = ("--on", place, "--cluster", "cluster.toml", "--max-restarts", "2", "--job", "a", "--json", file)
    ended = paceline(tmp_path, *words, *elsewhere, TEST_PAUSE="0.1", **AS_ROOT)
    assert ended.code == 0, ended.out + ended.err
    result = json.loads(ended.out.splitlines()[-1])
    assert (result["status"], result["restarts"], result["steps"]) == ("done", 2, STEPS)
    assert "restart 2 of 2, from step-0000000" in ended.err
    run_dir = tmp_path / "runs" / "a"
    assert [event.get("restart", 0) for event in events(run_dir, "start")] == [0, 1, 2]
    assert losses(run_dir) == losses(tmp_path / "runs" / "whole")
