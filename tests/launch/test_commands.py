"""What would be sent: command lines and scripts, word for word, and nothing secret in them."""

from __future__ import annotations

import itertools
import json
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.cli.main import main
from paceline.launch.hosts import Host
from paceline.launch.mpi import MpiOptions, Mpirun, find_mpirun, mpi_command
from paceline.launch.rank_command import RankCommand, is_secret, shown
from paceline.launch.ray import RayOptions, ray_job
from paceline.launch.slurm import SlurmOptions, sbatch_script, submit
from paceline.launch.ssh import SshOptions, ssh_command, why_lost
from paceline.nouns.errors import UsageError
from paceline.nouns.plan import Plan

WORKLOAD = "import paceline\nworkload = paceline.Workload(**{})\n"


def rank(folder: Path, **more) -> RankCommand:
    plan = Plan(mesh="replicate=4")
    return RankCommand(folder / "train.py", ["--lr", "a b"], plan, folder / "runs", "bert", python="/py", **more)


# --- ssh


def test_ssh_checks_host_keys_asks_nothing_and_quotes():
    words = ssh_command("h1", ["/py thon", "-m", "agent"], SshOptions(more=("-p2222",)))
    assert words[:2] == ["ssh", "-p2222"]
    assert words[-3:] == ["--", "h1", "'/py thon' -m agent"]
    options = " ".join(words)
    assert "StrictHostKeyChecking=yes" in options
    assert "BatchMode=yes" in options


@pytest.mark.parametrize(
    ("words", "fix"),
    [
        ("Host key verification failed.", "known_hosts"),
        ("@@@ WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED! @@@", "old key"),
        ("root@h1: Permission denied (publickey).", "a key"),
        ("ssh: Could not resolve hostname h1: Name or service not known", "its address"),
        ("ssh: connect to host h1 port 22: Connection refused", "is sshd running"),
        ("ssh: connect to host h1 port 22: Connection timed out", "port 22"),
        ("ssh: connect to host h1 port 22: No route to host", "network"),
        ("/py: No module named paceline", "install Paceline"),
        ("bash: /py: No such file or directory", "same Python"),
        ("", "ssh h1 true"),
    ],
)
def test_what_ssh_says_comes_with_what_to_do(words, fix):
    error = why_lost("h1", words)
    assert fix in error.fix
    assert words in str(error) or not words


def test_a_dry_run_over_ssh_shows_all_and_no_secret(tmp_path, capsys, monkeypatch):
    file = tmp_path / "train.py"
    file.write_text(WORKLOAD)
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    monkeypatch.setenv("WANDB_API_KEY", "s3cr3t")
    line = ["run", "--on", "ssh", "-H", "h1:2,h2:2", "-x", "WANDB_API_KEY", "-x", "A=1", "--dry-run", "--job", "j"]
    assert main([*line, "--runs", str(tmp_path / "runs"), str(file)]) == 0
    out = capsys.readouterr().out
    assert "# h1: ranks 0 to 1" in out
    assert "# h2: ranks 2 to 3" in out
    assert "ssh -T" in out
    assert "s3cr3t" not in out
    requests = [json.loads(row.split(": ", 1)[1]) for row in out.splitlines() if row.startswith("# on its")]
    assert [one["is_head"] for one in requests] == [True, False]
    assert requests[0]["environment"] | {"NCCL_DEBUG": "WARN", "A": "1"} == requests[0]["environment"]
    assert not (tmp_path / "runs").exists(), "a dry run makes nothing"
    assert main([*line, "--plan", "replicate=3,server=2", str(file)]) == 0
    out = capsys.readouterr().out
    assert "# h1: ranks 0 to 1, server 0, the coordinator\n" in out
    assert "# h2: rank 2, server 1\n" in out


# --- MPI


def test_mpirun_gets_names_and_no_values():
    words = mpi_command(
        Mpirun("mpirun", "openmpi", ("--mca", "x", "y")), 4, [Host("h1", 2), Host("h2", 2)], ["A"], ["p"]
    )
    assert words == [
        *("mpirun", "-np", "4", "-H", "h1:2,h2:2", "--bind-to", "none", "--tag-output"),
        *("-x", "A", "--mca", "x", "y", "p"),
    ]
    words = mpi_command(Mpirun("mpiexec", "mpich"), 4, [Host("h1", 4)], ["A", "B"], ["p"])
    assert words == ["mpiexec", "-n", "4", "-hosts", "h1:4", "-prepend-rank", "-genvlist", "A,B", "p"]


@pytest.mark.parametrize(
    ("says", "flavor"),
    [
        ("mpirun (Open MPI) 4.1.4", "openmpi"),
        ("mpirun.openmpi (OpenRTE) 4.1.4", "openmpi"),
        ("HYDRA build details:\n Version: 4.0.2", "mpich"),
        ("Intel(R) MPI Library for Linux* OS, Version 2021.11", "mpich"),
        ("a shell script", None),
    ],
)
def test_whose_mpirun_it_is(tmp_path, says, flavor):
    program = tmp_path / "mpirun"
    program.write_text(f"#!/bin/sh\necho '{says}'\n")
    program.chmod(0o755)
    if flavor is None:
        with pytest.raises(UsageError, match="a shell script"):
            find_mpirun(MpiOptions(str(program)))
    else:
        assert find_mpirun(MpiOptions(str(program))).flavor == flavor


def test_no_mpirun(tmp_path):
    with pytest.raises(UsageError, match="no such program"):
        find_mpirun(MpiOptions(str(tmp_path / "none")))


def test_a_dry_run_needs_no_program_of_the_launcher(tmp_path, capsys, monkeypatch):
    file = tmp_path / "train.py"
    file.write_text(WORKLOAD)
    monkeypatch.setattr("shutil.which", lambda name, **_: None)
    assert main(["run", "--on", "mpi", "-n", "2", "-x", "A=1", "--job", "j", "--dry-run", str(file)]) == 0
    remark, *exports, command = capsys.readouterr().out.splitlines()
    assert remark == "# there is no mpirun or mpiexec here; these are the flags of Open MPI's"
    assert shlex.split(command)[:3] == ["mpirun", "-np", "2"]
    named = {name for flag, name in itertools.pairwise(shlex.split(command)) if flag == "-x"}
    assert named == {line.split()[1].partition("=")[0] for line in exports}, "each that is named is shown"
    assert main(["run", "--on", "ssh", "-H", "h1:2", "--min-hosts", "1", "--dry-run", str(file)]) == 0


# --- Slurm


def test_the_script_for_slurm_is_shell_and_leaves_ranks_to_srun(tmp_path):
    options = SlurmOptions("gpu", time="2-12:00", gpus_per_node=8, cpus_per_task=4, more=("--exclusive",))
    script = sbatch_script(rank(tmp_path, nodes=2, ranks_per_node=2), options)
    asked = [line.removeprefix("#SBATCH ") for line in script.splitlines() if line.startswith("#SBATCH")]
    assert {"--nodes=2", "--ntasks-per-node=2", "--requeue", "--signal=TERM@120", "--partition=gpu"} <= set(asked)
    assert {"--time=2-12:00", "--gpus-per-node=8", "--cpus-per-task=4", "--exclusive"} <= set(asked)
    assert "SLURM_PROCID" not in script
    assert "SLURM_NODEID" not in script
    srun = next(line for line in script.splitlines() if line.startswith("srun"))
    assert shlex.split(srun)[-2:] == ["--lr", "a b"]
    assert subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True).returncode == 0


@pytest.mark.parametrize(
    ("code", "restarts", "requeues"),
    [
        (0, "", False),
        (75, "", True),
        (75, "9", True),
        (1, "", False),
        (2, "", False),
        (137, "", True),
        (137, "3", False),
        (124, "", True),
        (124, "3", False),
    ],
)
def test_what_the_script_does_after_the_ranks(tmp_path, code, restarts, requeues):
    """With programs of the same names in place of Slurm's."""
    (tmp_path / "bin").mkdir()
    for name, text in (("srun", f"exit {code}"), ("scontrol", f'echo "$@" >> {tmp_path}/said')):
        path = tmp_path / "bin" / name
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)
    environment = {"PATH": f"{tmp_path}/bin:/usr/bin:/bin", "SLURM_JOB_ID": "7"}
    environment |= {"SLURM_RESTART_COUNT": restarts} if restarts else {}
    script = sbatch_script(rank(tmp_path), SlurmOptions())
    done = subprocess.run(["bash"], input=script, text=True, env=environment)
    assert done.returncode == code
    said = (tmp_path / "said").read_text() if (tmp_path / "said").exists() else ""
    assert said == ("requeue 7\n" if requeues else "")


def test_sbatch_that_refuses_is_told(tmp_path):
    program = tmp_path / "sbatch"
    program.write_text("#!/bin/sh\necho 'sbatch: error: invalid partition specified: x' >&2\nexit 1\n")
    program.chmod(0o755)
    with pytest.raises(UsageError, match="invalid partition"):
        submit("#!/bin/bash\n", SlurmOptions(program=str(program)), {})
    program.write_text("#!/bin/sh\necho 'sbatch: fatal: Could not establish a configuration source' >&2\nexit 1\n")
    with pytest.raises(UsageError, match="send it from a host where `sinfo` works, such as a login node"):
        submit("#!/bin/bash\n", SlurmOptions(program=str(program)), {})
    with pytest.raises(UsageError, match="no such program"):
        submit("#!/bin/bash\n", SlurmOptions(program=str(tmp_path / "none")), {})


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"time": "soon"}, "time limit"),
        ({"more": ("exclusive",)}, "no option"),
        ({"more": ("--a\nrm -rf /",)}, "no option"),
        ({"partition": "a b"}, "spaces"),
        ({"account": "x\ny"}, "spaces"),
    ],
)
def test_what_sbatch_is_not_told(tmp_path, options, said):
    with pytest.raises(UsageError, match=said):
        sbatch_script(rank(tmp_path), SlurmOptions(**options))


# --- Ray


def test_a_bundle_for_each_rank(tmp_path):
    job = ray_job(rank(tmp_path, environment={"A": "1", "HF_TOKEN": "s3cr3t"}), RayOptions(gpus_per_rank=1), "/w")
    assert job.bundles == [{"CPU": 1.0, "GPU": 1.0}] * 4
    assert job.program[:3] == ["/py", "-m", "paceline.run.rank.external_rank"]
    assert "s3cr3t" not in job.text()
    assert json.loads(job.request())["environment"]["HF_TOKEN"] == "s3cr3t"
    with pytest.raises(UsageError, match="it has none"):
        RayOptions(cpus_per_rank=0)
    with pytest.raises(UsageError, match="SPREAD"):
        RayOptions(strategy="APART")


def test_secrets_are_not_shown():
    given = {"A": "1", "MY_API_KEY": "x", "hf_token": "x", "DB_PASSWORD": "x", "AWS_SECRET_ACCESS_KEY": "x"}
    assert [name for name, value in shown(given).items() if value == "x"] == []
    assert shown(given)["A"] == "1"
    assert not is_secret("TOKENIZERS_PARALLELISM")
    assert is_secret("MYTOKEN")
    assert is_secret("AWSSECRETKEY")


# --- the command

NOWHERE = """
[ssh]
program = "/nowhere/ssh"
[mpi]
mpirun = "/nowhere/mpirun"
[ray]
cpus_per_rank = 0
"""


PODS = ["kubernetes", "--image", "i", "--cpu", "1", "--memory", "2Gi"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["slurm", "-n", "2"], "sbatch"),
        (["--on", "ssh", "-H", "h1:2", "--cluster", "nowhere.toml"], "/nowhere/ssh"),
        (["--on", "ssh"], "no host is named"),
        (["--on", "ssh", "-H", "h1:2", "-n", "3"], "2 slots"),
        (["--on", "ssh", "-H", "h1:2", "--hostfile", "x"], "leave one out"),
        (["--on", "ray", "-H", "h1:2"], "-H does not apply to a job --on ray\n  found: it belongs to --on ssh"),
        (["-H", "h1:2"], "write --on ssh"),
        (["-j", "2"], "NODESxRANKS"),
        (["-j", "0x2"], "NODESxRANKS"),
        (["-j", "2x2", "-n", "3"], "leave one out"),
        (["--on", "ssh", "-H", "h1:2", "-x", "NOT_SET_ANYWHERE"], "not set here"),
        (["--on", "ssh", "-H", "h1:2", "-x", "A_TOKEN"], "set it (export A_TOKEN=...), then write -x A_TOKEN"),
        (["--on", "ssh", "-H", "h1:2", "-x", "A B=1"], "no variable's name"),
        (["--on", "ssh", "-H", "h1:2", "-x", "API_KEY=abc"], "read by others"),
        (["--on", "mpi", "--plan", "replicate=2,server=1"], "it starts ranks alone"),
        (["slurm", "--plan", "replicate=2,server=1"], "it starts ranks alone"),
        (["--on", "ray", "--plan", "replicate=2,server=1"], "write --on ssh"),
        (["--on", "ssh", "-H", "h1:2,h2:2", "--min-hosts", "1", "--plan", "server=1"], "they stay where they are"),
        (["--on", "mpi", "--cluster", "nowhere.toml", "-n", "2"], "no such program"),
        (["slurm", "--time", "soon", "-n", "2"], "time limit"),
        (["--on", "ray", "--cluster", "nowhere.toml", "-n", "2"], "it has none"),
        (["kubernetes", "-n", "2"], "--image"),
        ([*PODS, "-x", "NOT_SET_ANYWHERE"], "not set here"),
        ([*PODS, "-x", "PATH_KEY"], "a manifest is plain text"),
        ([*PODS, "-x", "PATH_KEY=abc"], "refer to that under env in what --dry-run prints"),
        ([*PODS, "--toleration", "gpu:Never"], "the effects are NoSchedule, PreferNoSchedule, NoExecute"),
        ([*PODS, "--job", "my_job"], "write such as --job bert-1"),
        (["--min-hosts", "2"], "no host is named"),
        (["--min-hosts", "0", "-H", "h1:1"], "1 <= min"),
        (["--min-hosts", "3", "--max-hosts", "2", "-H", "h1:1"], "1 <= min"),
        (["--on", "mpi", "--min-hosts", "1"], "leave --min-hosts out"),
        (["-H", "h1:1", "--host-discovery-script", "x"], "leave one out"),
        (["--resume-or-start"], "no job is named"),
    ],
)
def test_bad_input_is_one_error_before_anything(tmp_path, capsys, monkeypatch, words, said):
    monkeypatch.chdir(tmp_path)
    which = shutil.which
    monkeypatch.setattr("shutil.which", lambda name, **more: None if name == "sbatch" else which(name, **more))
    file = tmp_path / "train.py"
    file.write_text(WORKLOAD)
    (tmp_path / "nowhere.toml").write_text(NOWHERE)
    verb = "submit" if words[0] in ("slurm", "kubernetes") else "run"
    assert main([verb, *words, str(file)]) == 2
    err = capsys.readouterr().err
    assert said in err, err
    assert "fix: " in err
    assert not list(tmp_path.glob("runs/*")), "something was begun"


def test_ranks_of_this_host_in_a_dry_run(tmp_path, capsys):
    file = tmp_path / "train.py"
    file.write_text(WORKLOAD)
    assert main(["run", "-n", "3", "--dry-run", str(file)]) == 0
    assert capsys.readouterr().out.splitlines() == ["# 3 ranks on this host", f"{sys.executable} {file}"]
