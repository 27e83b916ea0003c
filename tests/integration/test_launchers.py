"""The demo's BERT by every launcher: real sshd, mpirun, Slurm and Ray, and the parameters of `--on local`."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from safetensors.torch import load_file

from paceline.demo.corpus import VOCABULARY

from support import namespaces, slurm
from support.jobs import LOOP, command, events, leftovers, losses, marked, wait_for, write_workload

pytestmark = pytest.mark.integration
STEPS, RANKS = 10, 4
BERT = """
import os, time
from pathlib import Path
import paceline
from paceline.demo.demo_workload import make_workload
workload = make_workload(Path({folder!r}), {steps}, 8, deterministic=True)
if __name__ == "__main__":
    job = paceline.distribute(workload)
    for batch in job.batches():
        job.step(batch)
        pause = Path({folder!r}, "pause")
        time.sleep(float(pause.read_text() if pause.exists() else os.environ.get("TEST_PAUSE", "0")))
"""
AS_ROOT = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
}
MPIRUNS = ["mpirun.openmpi", "mpirun.mpich"]
needs_hosts = pytest.mark.skipif(not namespaces.can_make(), reason=namespaces.WHY_NOT)
needs_slurm = pytest.mark.skipif(not slurm.can_start(), reason=slurm.WHY_NOT)
needs_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs the package ray")


def run(folder: Path, *words, verb="run", inside=None, timeout=400, **environment) -> subprocess.CompletedProcess:
    line = command(verb, *words)
    whole = inside.inside("from", *line) if inside else line
    env = marked(folder, {"OMP_NUM_THREADS": "1", **environment})
    return subprocess.run(whole, cwd=folder, capture_output=True, text=True, timeout=timeout, env=env)


def parameters(run_dir: Path) -> dict[str, torch.Tensor]:
    last = max((run_dir / "checkpoints").iterdir(), key=lambda path: path.name)
    assert last.name == f"step-{STEPS:08d}", last
    return {name: tensor for path in last.glob("*.safetensors") for name, tensor in load_file(path).items()}


def check_same(folder: Path, job: str, local: Path | None = None) -> None:
    ours, theirs = parameters(folder / "runs" / job), parameters((local or folder) / "runs" / "local")
    names = [name for name in theirs if name.startswith(("model/", "optimizer/"))]
    assert len(names) > 100
    assert not [name for name in names if not torch.equal(ours[name], theirs[name])]


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    """The file, and a job of it on this host: Gloo's sums are the same wherever its ranks are."""
    folder = write_bert(tmp_path_factory.mktemp("launchers"))
    done = run(folder, "-n", RANKS, "--plan", "transport=gloo", "--job", "local", "bert.py")
    assert done.returncode == 0, done.stderr
    return folder


def write_bert(folder: Path) -> Path:
    rows = np.random.default_rng(0).integers(5, VOCABULARY, (96, 32)).astype(np.uint16)
    np.save(folder / "train.npy", rows)
    np.save(folder / "held_out.npy", rows[:8])
    (folder / "corpus.json").write_text(json.dumps({"most_frequent_id": 5}))
    (folder / "bert.py").write_text(BERT.format(folder=str(folder), steps=STEPS))
    return folder


@pytest.fixture(scope="module")
def hosts(tmp_path_factory):
    with namespaces.hosts(tmp_path_factory.mktemp("hosts")) as made:
        yield made


def over_ssh(hosts, *words, options=()):
    return ("--on", "ssh", "--cluster", hosts.cluster_file(*options), *words)


LATE = LOOP + "    job.close()\n    if job.rank == 1: os._exit(0)\n"


def check_left(bert, job, code):
    """Rank 1 has called os._exit(0): the job has failed, and says so."""
    assert code != 0
    result = json.loads((bert / "runs" / job / "result.json").read_text())
    assert (result["status"], result["failure"]["rank"]) == ("failed", 1)
    assert "rank 1's process ended with exit code 0 before the end of its file" in result["failure"]["message"]


# --- Slurm


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    if not slurm.can_start():
        pytest.skip(slurm.WHY_NOT)
    with slurm.slurm(tmp_path_factory.mktemp("slurm")) as made:
        yield made


def sent(bert, cluster, job, *words, **environment):
    environment = {**cluster.environment, "TEST_PAUSE": "0", **environment}
    done = run(
        bert,
        "slurm",
        "-j",
        f"1x{RANKS}",
        "--job",
        job,
        "--plan",
        "transport=gloo",
        *words,
        "bert.py",
        verb="submit",
        **environment,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def ended(cluster, number, timeout_s=240.0):
    """The state in which a job ends; one that waits to begin again begins at once."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        state = cluster.state(number)
        if state in ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL"):
            return state
        if state == "PENDING":
            with contextlib.suppress(RuntimeError):
                cluster.call("scontrol", "update", f"JobId={number}", "StartTime=now")
        time.sleep(0.5)
    return f"still {cluster.state(number)}"


def log(bert, job, number):
    return (bert / "runs" / job / f"slurm-{number}.log").read_text()


@pytest.fixture(scope="module")
def limited(tmp_path_factory, cluster):
    """A job that nears its time limit while other tests run: its folder and its number.

    Three minutes, and a signal a minute before: Slurm may send it a minute early, so never in the first minute.
    """
    folder = write_bert(tmp_path_factory.mktemp("limited"))
    (folder / "pause").write_text("14")
    number = sent(folder, cluster, "limited", "--time", "3", "--signal", "60")
    yield folder, number
    with contextlib.suppress(RuntimeError):  # it has ended
        cluster.call("scancel", number)


@needs_slurm
@pytest.mark.complete  # the same job is killed, and goes on to the same end, below
def test_four_tasks_of_slurm(bert, cluster):
    number = sent(bert, cluster, "slurm")
    assert ended(cluster, number) == "COMPLETED", log(bert, "slurm", number)
    check_same(bert, "slurm")


@needs_slurm
@pytest.mark.usefixtures("limited")  # from here on, for the last test of this file
def test_a_rank_that_leaves_under_slurm(bert, cluster):
    file = write_workload(bert, loop=LATE, name="left.py")
    words = ("slurm", "-j", "1x2", "--job", "left", file)
    done = run(bert, *words, verb="submit", **cluster.environment)
    number = done.stdout.strip()
    assert ended(cluster, number) == "FAILED", done.stderr
    check_left(bert, "left", 1)
    assert "rank 1's process ended with exit code 0" in log(bert, "left", number)


@needs_slurm
def test_slurm_takes_a_job_back_after_a_kill(bert, cluster):
    number = sent(bert, cluster, "requeued", "--checkpoint-every", "2", TEST_PAUSE="0.5")
    assert wait_for(lambda: len(losses(bert / "runs" / "requeued")) >= 4, 120)
    above = [
        process
        for process in psutil.process_iter(["cmdline", "cwd"])
        if process.info["cwd"] == str(bert) and "paceline.run.rank.external_rank" in process.info["cmdline"]
    ]
    ranks = [process for process in above if process.parent() in above]
    assert (len(above), len(ranks)) == (2 * RANKS, RANKS)
    ranks[1].kill()
    assert ended(cluster, number) == "COMPLETED", log(bert, "requeued", number)
    assert "Restarts=1" in cluster.call("scontrol", "show", "job", number)
    check_same(bert, "requeued")


# --- ssh


@needs_hosts
def test_two_hosts_over_ssh_end_where_one_host_does(bert, hosts):
    done = run(
        bert, *over_ssh(hosts, "-H", "h1:2,h2:2", "--plan", "transport=gloo", "--job", "ssh", "bert.py"), inside=hosts
    )
    assert done.returncode == 0, done.stdout + done.stderr
    check_same(bert, "ssh")
    assert not leftovers(bert)
    assert json.loads((bert / "runs/ssh/result.json").read_text())["status"] == "done"


@contextlib.contextmanager
def started(bert, hosts, job, *words, **environment):
    line = command(
        "run",
        *over_ssh(
            hosts,
            "--job",
            job,
            "-x",
            "TEST_PAUSE",
            "--checkpoint-every",
            "2",
            "--plan",
            "transport=gloo",
            *words,
            "bert.py",
        ),
    )
    env = marked(bert, {"OMP_NUM_THREADS": "1", "TEST_PAUSE": "0.3", **environment})
    process = subprocess.Popen(
        hosts.inside("from", *line), cwd=bert, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def ranks_on(hosts, name):
    """The processes that a host's fork server has started."""
    listed = subprocess.run(
        ["ip", "netns", "pids", f"{hosts.prefix}-{name}"], capture_output=True, text=True, check=True
    ).stdout.split()
    found = []
    for pid in map(int, listed):
        with contextlib.suppress(psutil.Error):
            parents = psutil.Process(pid).parents()
            # What a rank forks, such as the process with which it compares its first step, has its command line.
            if ["paceline.run.rank.forkserver" in " ".join(each.cmdline()) for each in parents[:2]] == [True, False]:
                found.append(pid)
    return found


@needs_hosts
def test_a_port_scan_of_a_running_job_finds_torchs_sockets_alone(bert, hosts):
    """From another host every port of both is tried: beside sshd only what torch opens, at the chosen address."""
    with started(bert, hosts, "scan", "-H", "h1:2,h2:2", TEST_PAUSE="2") as job:
        assert wait_for(lambda: losses(bert / "runs" / "scan"), 90)
        torchs = {}
        for name in hosts.names:
            own = set(ranks_on(hosts, name))
            assert len(own) == 2
            listening = subprocess.run(hosts.inside(name, "ss", "-ltnpH"), capture_output=True, text=True).stdout
            at = {}
            for line in listening.splitlines():
                address, _, port = line.split()[3].rpartition(":")
                at[int(port)] = (address, any(f"pid={pid}," in line for pid in own), "sshd" in line)
            assert all(address == hosts.address(name) for address, _, _ in at.values()), listening
            assert all(is_rank or is_sshd for _, is_rank, is_sshd in at.values()), listening
            torchs[name] = {port for port, (_, is_rank, _) in at.items() if is_rank}
            assert open_ports(hosts, hosts.address(name)) == torchs[name] | {22}
            assert open_ports(hosts, hosts.other(name)) == set(), "the other interface answers"
        assert torchs["h1"]
        assert torchs["h2"]
        job.send_signal(signal.SIGTERM)
        out, _ = job.communicate(timeout=60)
        assert job.returncode == 0, out


def open_ports(hosts, address):
    script = (
        "import socket, sys\n"
        "for port in range(1, 65536):\n"
        "    one = socket.socket(); one.settimeout(1)\n"
        "    if one.connect_ex((sys.argv[1], port)) == 0: print(port)\n"
        "    one.close()\n"
    )
    done = subprocess.run(
        hosts.inside("from", "python3", "-c", script, address), capture_output=True, text=True, timeout=120, check=True
    )
    return set(map(int, done.stdout.split()))


@needs_hosts
def test_a_rank_killed_on_another_host_is_told_and_nothing_stays(bert, hosts):
    with started(bert, hosts, "killed", "-H", "h1:2,h2:2") as job:
        assert wait_for(lambda: len(losses(bert / "runs" / "killed")) >= 3, 90)
        os.kill(ranks_on(hosts, "h2")[0], signal.SIGKILL)
        out, _ = job.communicate(timeout=60)
    assert job.returncode == 1
    assert "process was ended by SIGKILL" in out
    assert "go on with --resume --job killed" in out
    assert wait_for(lambda: not [*ranks_on(hosts, "h1"), *ranks_on(hosts, "h2"), *leftovers(bert)], 15)
    again = run(
        bert,
        *over_ssh(hosts, "-H", "h2:2,h1:2", "--resume", "--plan", "transport=gloo", "--job", "killed", "bert.py"),
        inside=hosts,
    )
    assert again.returncode == 0, again.stderr
    check_same(bert, "killed")


@needs_hosts
def test_when_the_supervisor_is_killed_no_host_keeps_ranks(bert, hosts):
    with started(bert, hosts, "orphans", "-H", "h1:1,h2:1") as job:
        assert wait_for(lambda: len(losses(bert / "runs" / "orphans")) >= 2, 90)
        assert ranks_on(hosts, "h2")
        # `ip netns exec` becomes the command: this is the supervisor itself.
        job.kill()
        assert wait_for(lambda: not [*ranks_on(hosts, "h1"), *ranks_on(hosts, "h2")], 15)
    assert wait_for(lambda: not leftovers(bert), 15)


@needs_hosts
@pytest.mark.parametrize(
    ("words", "options", "said"),
    [
        (["-H", "h1:1,h9:1"], [], "h9"),
        (["-H", "h1:1,h2:1", "--python", "/nowhere/python"], [], "/nowhere/python"),
        (["-H", "h1:1,h2:1", "--interface", "eth7"], [], "eth7"),
        (["-H", "h1:1,h2:1"], ["-oUserKnownHostsFile=/dev/null"], "verification failed"),
        (["-H", "h1:1,h2:1"], ["-oPubkeyAuthentication=no"], "ermission denied"),
    ],
)
def test_launcher_host_not_ready_is_one_error_before_the_start(bert, hosts, words, options, said):
    done = run(bert, *over_ssh(hosts, *words, "bert.py", options=options), inside=hosts)
    assert done.returncode == 2, done.stdout + done.stderr
    assert said in done.stderr
    assert "fix: " in done.stderr
    assert "Traceback" not in done.stderr
    assert wait_for(lambda: not leftovers(bert), 15)


@needs_hosts
@pytest.mark.complete
def test_hosts_that_come_and_go(bert, tmp_path):
    """Two hosts, then three, then one of them is cut off: each step is taken once, in the order of one process."""
    known = tmp_path / "known"
    known.write_text("h1:1\nh2:1\n")
    script = tmp_path / "discover"
    script.write_text(f"#!/bin/sh\ncat {known}\n")
    script.chmod(0o755)
    with namespaces.hosts(tmp_path / "three", ("h1", "h2", "h3")) as three:
        words = ("--host-discovery-script", str(script), "--min-hosts", "1", "--max-hosts", "3")
        with started(bert, three, "elastic", *words, TEST_PAUSE="1") as job:
            assert wait_for(lambda: len(losses(bert / "runs" / "elastic")) >= 2, 90)
            known.write_text("h1:1\nh2:1\nh3:1\n")
            assert wait_for(lambda: size_now(bert) == 3 and max(losses(bert / "runs" / "elastic")) >= 5, 90)
            three.cut("h2")
            known.write_text("h1:1\nh3:1\n")
            out, _ = job.communicate(timeout=180)
        assert job.returncode == 0, out
    assert "generation 2: h1:1, h2:1, h3:1" in out
    assert size_now(bert) == 2
    ours, theirs = losses(bert / "runs" / "elastic"), losses(bert / "runs" / "local")
    assert ours == pytest.approx(theirs, rel=1e-4)


def size_now(bert):
    return events(bert / "runs/elastic", "start")[-1]["world_size"]


@needs_hosts
def test_a_supervisor_for_each_node(bert, hosts):
    """As in pods: torchrun's PET_* variables name the node, and each node starts its own ranks."""
    jobs = []
    for number, name in enumerate(hosts.names):
        pod = {"PET_NNODES": "2", "PET_NODE_RANK": str(number), "PET_NPROC_PER_NODE": "2"}
        pod |= {"PET_MASTER_ADDR": hosts.address("h1"), "PET_MASTER_PORT": "29400", "OMP_NUM_THREADS": "1"}
        words = ("--plan", "transport=gloo", "--resume-or-start", "--job", "nodes", "bert.py")
        jobs.append(
            subprocess.Popen(
                hosts.inside(name, *command("run", *words)),
                cwd=bert,
                env=marked(bert, pod),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    for job in jobs:
        out, _ = job.communicate(timeout=200)
        assert job.returncode == 0, out
    check_same(bert, "nodes")


# --- MPI


def naming(folder, mpirun):
    """A cluster file that names this mpirun."""
    path = folder / f"{mpirun}.toml"
    path.write_text(f'[mpi]\nmpirun = "{mpirun}"\n')
    return path


@pytest.mark.parametrize("mpirun", MPIRUNS)
@pytest.mark.parametrize("is_ours", [True, False], ids=["paceline calls it", "it calls paceline"])
def test_under_mpirun(bert, mpirun, is_ours):
    if shutil.which(mpirun) is None:
        pytest.skip(f"needs {mpirun}")
    job = f"{mpirun}-{is_ours}"
    if is_ours:
        words = (
            "--on",
            "mpi",
            "--cluster",
            naming(bert, mpirun),
            "-n",
            RANKS,
            "--plan",
            "transport=gloo",
            "--job",
            job,
            "bert.py",
        )
        done = run(bert, *words, **AS_ROOT)
    else:
        line = command("run", "--plan", "transport=gloo", "--job", job, "bert.py")
        env = marked(bert, {"OMP_NUM_THREADS": "1", **AS_ROOT})
        whole = [mpirun, "-n", str(RANKS), *line]
        done = subprocess.run(whole, cwd=bert, capture_output=True, text=True, timeout=400, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    check_same(bert, job)
    result = json.loads((bert / "runs" / job / "result.json").read_text())
    assert (result["status"], result["steps"]) == ("done", STEPS)
    assert wait_for(lambda: not leftovers(bert), 15), leftovers(bert)


@pytest.mark.parametrize("mpirun", MPIRUNS)
def test_a_stop_under_mpirun_saves(bert, mpirun):
    if shutil.which(mpirun) is None:
        pytest.skip(f"needs {mpirun}")
    job = f"{mpirun}-stop"
    line = command("run", "--on", "mpi", "--cluster", naming(bert, mpirun), "-n", "2", "--job", job, "bert.py")
    env = marked(bert, {"OMP_NUM_THREADS": "1", "TEST_PAUSE": "0.5", **AS_ROOT})
    process = subprocess.Popen(line, cwd=bert, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert wait_for(lambda: len(losses(bert / "runs" / job)) >= 2, 120)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert "stopped; saved as" in err
    steps = max(losses(bert / "runs" / job))
    assert steps < STEPS
    assert (bert / "runs" / job / "checkpoints" / f"step-{steps:08d}").is_dir()


@pytest.mark.parametrize("mpirun", MPIRUNS)
@pytest.mark.parametrize("is_ours", [True, False], ids=["paceline calls it", "it calls paceline"])
def test_a_rank_that_leaves_under_mpirun(tmp_path, mpirun, is_ours):
    if shutil.which(mpirun) is None:
        pytest.skip(f"needs {mpirun}")
    file = write_workload(tmp_path, loop=LATE)
    if is_ours:
        words = ("--on", "mpi", "--cluster", naming(tmp_path, mpirun), "-n", 2, "--job", "left", file)
        done = run(tmp_path, *words, **AS_ROOT)
    else:
        line = [mpirun, "-n", "2", *command("run", "--job", "left", file)]
        env = marked(tmp_path, {"OMP_NUM_THREADS": "1", **AS_ROOT})
        done = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, timeout=200, env=env)
    check_left(tmp_path, "left", done.returncode)
    assert wait_for(lambda: not leftovers(tmp_path), 15), leftovers(tmp_path)


# --- Ray


@needs_ray
@pytest.mark.complete  # tests/integration/test_restarts_elsewhere.py starts ranks by Ray
def test_a_local_ray(bert):
    before = set(leftovers(bert))
    done = run(bert, "--on", "ray", "-n", RANKS, "--plan", "transport=gloo", "--job", "ray", "bert.py")
    assert done.returncode == 0, done.stdout + done.stderr
    check_same(bert, "ray")
    assert wait_for(lambda: set(leftovers(bert)) <= before, 30), leftovers(bert)


@needs_ray
@pytest.mark.complete
def test_a_rank_that_leaves_under_ray(tmp_path):
    words = ("--on", "ray", "-n", 2, "--job", "left", write_workload(tmp_path, loop=LATE))
    check_left(tmp_path, "left", run(tmp_path, *words).returncode)


# --- Slurm, the end


@needs_slurm
def test_slurm_saves_before_its_time_limit_and_goes_on(bert, cluster, limited):
    folder, number = limited
    run_dir = folder / "runs" / "limited"
    assert wait_for(lambda: events(run_dir, "stopped"), 170), log(folder, "limited", number)
    (folder / "pause").unlink()
    at = events(run_dir, "stopped")[0]["step"]
    assert 1 <= at < STEPS
    with contextlib.suppress(RuntimeError):  # it may have gone on to its end
        cluster.call("scontrol", "update", f"JobId={number}", "TimeLimit=10")
    assert ended(cluster, number) == "COMPLETED", log(folder, "limited", number)
    resumed = events(run_dir, "resumed")[0]
    assert (resumed["step"], Path(resumed["path"]).name) == (at, f"step-{at:08d}")
    check_same(folder, "limited", bert)
