"""`paceline run` of scripts that distribute their training without Paceline, beside torchrun."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from support.jobs import marked, paceline, start

HEAD = """
import argparse, os, sys
import torch
import torch.distributed as dist
from torch import nn

def trained(model):
    torch.manual_seed(dist.get_rank())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(4, 3, dtype=torch.float64)).pow(2).mean().backward()
        optimizer.step()

def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
"""
END = """
if dist.get_rank() == 0:
    print("result", repr(float(total)))
dist.destroy_process_group()
"""
DDP = """
from torch.nn.parallel import DistributedDataParallel as DDP
dist.init_process_group("gloo")
ddp = DDP(model())
trained(ddp)
total = sum(parameter.detach().sum() for parameter in ddp.parameters())
"""
FSDP = """
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
mesh = init_device_mesh("cpu", (2,))
net = model()
fully_shard(net, mesh=mesh)
trained(net)
total = sum(parameter.full_tensor().detach().sum() for parameter in net.parameters())
"""
OWN = """
dist.init_process_group(init_method="env://", backend="gloo")
net = model()
net(torch.full((2, 3), dist.get_rank() + 1.0, dtype=torch.float64)).sum().backward()
total = 0
for parameter in net.parameters():
    dist.all_reduce(parameter.grad)
    total += parameter.grad.sum() * len(sys.argv)
"""
LOCAL_RANK = """
parser = argparse.ArgumentParser()
parser.add_argument("--local{}rank", dest="local_rank", type=int, required=True)
parser.add_argument("--factor", type=float)
options = parser.parse_args()
dist.init_process_group("gloo")
assert options.local_rank == int(os.environ["LOCAL_RANK"])
total = torch.tensor(options.local_rank * options.factor)
dist.all_reduce(total)
"""
SCRIPTS = {"DDP": DDP, "FSDP": FSDP, "all_reduce": OWN}


def under_torchrun(folder, *words):
    return subprocess.run(
        [sys.executable, "-m", *words],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=200,
        env=marked(folder, {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}),
    )


def result_of(text: str) -> str:
    return text.partition("result ")[2].split()[0]


def write(folder, text, name="train.py"):
    (folder / name).write_text(text)
    return name


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_ends_as_under_torchrun(tmp_path, name):
    write(tmp_path, HEAD + SCRIPTS[name] + END)
    ours = paceline(tmp_path, "run", "-n", "2", "train.py", "--", "--flag", "a word")
    assert ours.code == 0, ours.err
    assert ours.err.count("docs/migrate.md") == 1
    words = ["--nproc-per-node", "2", "train.py", "--flag", "a word"]
    theirs = under_torchrun(tmp_path, "torch.distributed.run", *words)
    assert result_of(ours.out) == result_of(theirs.stdout), theirs.stderr


@pytest.mark.parametrize("sign", ["-", "_"])
def test_an_option_for_the_local_rank_is_handed_in(tmp_path, sign):
    write(tmp_path, HEAD + LOCAL_RANK.format(sign) + END)
    ours = paceline(tmp_path, "run", "-n", "2", "train.py", "--factor=3")
    assert ours.code == 0, ours.err
    assert result_of(ours.out) == "3.0"
    if sign == "-":  # torch.distributed.launch knows no other
        words = ["--nproc-per-node", "2", "train.py", "--factor=3"]
        assert result_of(under_torchrun(tmp_path, "torch.distributed.launch", *words).stdout) == "3.0"


NAMES = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"),
    *("ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME", "TORCHELASTIC_RESTART_COUNT"),
    *("TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_USE_AGENT_STORE", "TORCH_NCCL_ASYNC_ERROR_HANDLING"),
)
SHOW = f"""
import json, os, sys
import psutil
import torch.distributed as dist
dist.init_process_group("gloo")
values = {{name: os.environ.get(name) for name in {NAMES!r}}}
values["elastic"] = dist.is_torchelastic_launched()
with open(f"values-{{sys.argv[1]}}-{{dist.get_rank()}}.json", "w") as file:
    json.dump(values, file)
if sys.argv[1] == "ours":
    processes = [psutil.Process(), psutil.Process(os.getppid())]
    listening = [c.laddr.ip for p in processes for c in p.net_connections() if c.status == "LISTEN"]
    print("listening", sorted(set(listening)))
dist.barrier()
dist.destroy_process_group()
"""


def test_variables_are_torchruns_and_only_loopback_listens(tmp_path):
    write(tmp_path, SHOW)
    ours = paceline(tmp_path, "run", "-n", "2", "train.py", "ours")
    assert ours.code == 0, ours.err
    assert "[0] listening ['127.0.0.1']" in ours.out
    theirs = under_torchrun(tmp_path, "torch.distributed.run", "--nproc-per-node=2", "train.py", "theirs")
    assert theirs.returncode == 0, theirs.stderr
    for rank in range(2):
        values = [json.loads((tmp_path / f"values-{who}-{rank}.json").read_text()) for who in ("ours", "theirs")]
        assert values[0] == values[1]


FAILS = """
import torch.distributed as dist
dist.init_process_group("gloo")
if dist.get_rank() == 1:
    raise ValueError("no such file of samples")
dist.barrier()
"""


def test_the_rank_that_fails_is_named_and_ends_the_others(tmp_path):
    write(tmp_path, FAILS)
    ours = paceline(tmp_path, "run", "-n", "2", "train.py")
    assert ours.code == under_torchrun(tmp_path, "torch.distributed.run", "--nproc-per-node=2", "train.py").returncode
    assert "rank 1 failed first: ValueError: no such file of samples" in ours.err
    assert "Connection closed" not in ours.err.partition("rank 1 failed first")[2]


RESTARTS = """
import os
import torch.distributed as dist
dist.init_process_group("gloo")
store = dist.distributed_c10d._get_default_store()
restart = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
tries = store.add("tries", 1)
dist.barrier()
if restart < 2:
    raise RuntimeError(f"restart {restart}")
assert store.add("tries", 0) == 2, "the store is not a fresh one"
print("restart", restart, "of", os.environ["TORCHELASTIC_MAX_RESTARTS"])
dist.barrier()
"""


def test_a_restart_has_a_fresh_store(tmp_path):
    write(tmp_path, RESTARTS)
    ours = paceline(tmp_path, "run", "-n", "2", "--max-restarts", "3", "train.py")
    assert ours.code == 0, ours.err
    assert "[0] restart 2 of 3" in ours.out
    assert "paceline: restart 2 of 3, from the beginning of the script" in ours.err


WAITS = """
import time
import torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()
print("waiting", flush=True)
time.sleep(300)
"""


def test_ctrl_c_ends_the_ranks(tmp_path):
    write(tmp_path, WAITS)
    job = start(tmp_path, "run", "-n", "2", "train.py")
    for line in job.stdout:
        if "waiting" in line:
            break
    began = time.monotonic()
    os.kill(job.pid, signal.SIGINT)
    _, err = job.communicate(timeout=60)
    assert job.returncode == 130
    assert time.monotonic() - began < 60
    assert "stopped; runs/" in err
    assert "--resume" not in err.partition("docs/migrate.md")[2]


SPAWNS = """
import os, sys
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel

def work(rank, size):
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    os.environ["MASTER_PORT"] = sys.argv[1] if len(sys.argv) > 1 else os.environ["PORT"]
    dist.init_process_group("gloo", rank=rank, world_size=size)
    model = DistributedDataParallel(__import__("torch").nn.Linear(2, 2))
    # In one write: both have the same standard output.
    os.write(1, f"spawned {rank} of {dist.get_world_size()}\\n".encode())
    dist.destroy_process_group()

if __name__ == "__main__":
    mp.spawn(work, args=(2,), nprocs=2)
"""


def test_a_script_that_spawns_its_ranks_runs_once(tmp_path, free_port):
    write(tmp_path, SPAWNS)
    refused = paceline(tmp_path, "run", "-n", "2", "train.py")
    assert refused.code == 2
    assert "found: it starts its processes itself, by torch.multiprocessing.spawn" in refused.err
    assert not (tmp_path / "runs").exists()
    ours = paceline(tmp_path, "run", "train.py", PORT=str(free_port))
    assert ours.code == 0, ours.err
    for rank in range(2):
        assert f"spawned {rank} of 2" in ours.out


@pytest.fixture
def free_port():
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


GIVEN = {
    "--plan": ["--plan", "shard=2"],
    "--checkpoint-every": ["-n", "2", "--checkpoint-every", "5"],
    "--keep": ["-n", "2", "--keep", "2"],
    "--copy-to": ["-n", "2", "--copy-to", "s3://a/b"],
    "--no-check": ["-n", "2", "--no-check"],
    "--resume": ["-n", "2", "--resume"],
    "--resume-or-start": ["-n", "2", "--job", "a", "--resume-or-start"],
    "--profile": ["-n", "2", "--profile", "1:2"],
    "--stall-notice": ["-n", "2", "--stall-notice", "9"],
    "--stall-timeout": ["-n", "2", "--stall-timeout", "90"],
    "--min-hosts": ["--on", "ssh", "-H", "h1:2", "--min-hosts", "1"],
}


@pytest.mark.parametrize("flag", GIVEN)
def test_a_flag_of_our_jobs_is_refused_by_name(tmp_path, flag):
    write(tmp_path, HEAD + DDP + END)
    ended = paceline(tmp_path, "run", *GIVEN[flag], "train.py")
    assert ended.code == 2
    assert f"error: {flag} does not apply to train.py" in ended.err
    assert "it wraps its model in DistributedDataParallel" in ended.err
    assert not (tmp_path / "runs").exists()


def test_a_launcher_without_a_store_is_refused(tmp_path):
    write(tmp_path, HEAD + DDP + END)
    ended = paceline(tmp_path, "run", "--on", "mpi", "-n", "2", "train.py")
    assert ended.code == 2
    assert "train.py can't run under --on mpi" in ended.err


def test_json_has_no_note_and_an_end_by_exit_is_one(tmp_path):
    write(tmp_path, HEAD + DDP + "os._exit(0)\n")
    ended = paceline(tmp_path, "run", "-n", "2", "--json", "train.py")
    assert ended.code == 0, ended.err
    assert "docs/migrate.md" not in ended.err
    assert json.loads(ended.out)["status"] == "done"


@pytest.mark.parametrize("named", [(), ("--job", "a")], ids=["unnamed", "named"])
def test_torchrun_may_start_the_command(tmp_path, named):
    write(tmp_path, HEAD + DDP + END)
    ended = under_torchrun(
        tmp_path, "torch.distributed.run", "--nproc-per-node=2", "--no-python", sys.executable,
        "-m", "paceline", "run", *named, "train.py",
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    assert "result " in ended.stdout


STANDS_FOR_SSH = """#!/bin/bash
while [[ "$1" == -* ]]; do
  if [[ "$1" == -o || "$1" == -p || "$1" == -i ]]; then shift; fi
  shift
done
shift
exec bash -c "$*"
"""


def test_agents_of_two_hosts_meet_at_the_first(tmp_path):
    program = tmp_path / "ssh"
    program.write_text(STANDS_FOR_SSH)
    program.chmod(0o755)
    (tmp_path / "cluster.toml").write_text(f'[ssh]\nprogram = "{program}"\n')
    write(tmp_path, SHOW)
    words = ["--on", "ssh", "-H", "127.0.0.1:1,localhost:1", "--cluster", "cluster.toml", "train.py", "agents"]
    ended = paceline(tmp_path, "run", *words)
    assert ended.code == 0, ended.err
    values = [json.loads((tmp_path / f"values-agents-{rank}.json").read_text()) for rank in range(2)]
    assert [value["GROUP_RANK"] for value in values] == ["0", "1"]
    assert [value["LOCAL_RANK"] for value in values] == ["0", "0"]
    assert [value["GROUP_WORLD_SIZE"] for value in values] == ["2", "2"]
