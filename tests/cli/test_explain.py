"""`paceline explain`: each setting, its value, and the flag or variable it comes from; nothing from a file."""

from __future__ import annotations

import json
import os
import re
from dataclasses import asdict

import pytest

from paceline.cli.main import main
from paceline.nouns.plan import Plan

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "1"}
TORCHRUN |= {"GROUP_WORLD_SIZE": "2", "MASTER_ADDR": "a1", "MASTER_PORT": "29511"}
OURS = {"PACELINE_RANK": "1", "PACELINE_WORLD_SIZE": "2", "PACELINE_LOCAL_RANK": "1", "PACELINE_LOCAL_SIZE": "2"}
OURS |= {"PACELINE_RENDEZVOUS": "/run/job/rendezvous", "PACELINE_COORDINATOR": "unix:/run/job/coordinator"}
POD = {"PET_NNODES": "4", "PET_NODE_RANK": "2", "PET_NPROC_PER_NODE": "2", "MASTER_ADDR": "a1", "MASTER_PORT": "1234"}


@pytest.fixture
def explain(monkeypatch, tmp_path, capsys):
    """Runs the command in nothing but `environment`: its exit code, what it prints and what it complains."""

    def run(environment, *words):
        monkeypatch.chdir(tmp_path)
        with monkeypatch.context() as patch:
            for name in list(os.environ):
                patch.delenv(name)
            for name, text in environment.items():
                patch.setenv(name, text)
            code = main(["explain", *words])
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return run


@pytest.fixture
def settings(explain):
    """The settings that `--json` prints, by name: (value, from)."""

    def run(environment, *words):
        code, out, err = explain(environment, "--json", *words)
        assert (code, err) == (0, "")
        (document,) = out.splitlines()
        rows = json.loads(document)["settings"]
        assert all(row.keys() == {"setting", "value", "from"} for row in rows)
        return {row["setting"]: (row["value"], row["from"]) for row in rows}

    return run


def test_alone_everything_is_the_default(settings):
    found = settings({})
    assert found["launcher"] == ("alone", "default: no launcher")
    assert found["rank"] == ("0", "default: no launcher")
    assert found["host"] == ("0 of 1", "default: no launcher")
    assert found["plan"] == ("replicate=1", "default: replicate over 1")
    assert found["run directory"] == found["coordinator"] == ("none", "default")
    assert found["interface"] == ("any", "default")
    assert found["threads of a rank"][1].startswith("computed: ")


@pytest.mark.parametrize(
    ("words", "origin"),
    [
        (["-n", "2"], "flag -n 2"),
        (["--plan", "tensor=2"], "flag --plan tensor=2"),
        (["-n", "2", "--plan", "server=1"], "flag -n 2"),
        (["-n", "2", "--plan", "compression=bf16"], "flag -n 2"),
    ],
)
def test_ranks_that_paceline_run_would_start(words, origin, settings):
    found = settings({}, *words)
    assert found["launcher"][0] == "paceline run"
    assert found["size"] == found["local size"] == ("2", origin)
    assert found["rank"] == found["local rank"] == ("0 to 1", origin)
    assert found["host"][0] == "0 of 1"


def test_a_plan_that_does_not_fit_this_process_is_refused(explain):
    """As it would be in a rank that reads it."""
    code, out, err = explain({"PACELINE_PLAN": json.dumps({"mesh": "replicate=2"})})
    assert (code, out) == (2, "")
    assert "covers 2 ranks\n  found: the job has 1 rank" in err


def test_a_launchers_variables_are_named(settings):
    found = settings({**TORCHRUN, "PACELINE_INTERFACE": "eth1", "OMP_NUM_THREADS": "3"})
    assert found["launcher"][0] == "torchrun"
    assert found["rank"] == ("3", "RANK=3")
    assert found["local size"] == ("2", "LOCAL_WORLD_SIZE=2")
    assert found["host"] == ("1 of 2", "GROUP_RANK=1, GROUP_WORLD_SIZE=2")
    assert found["ranks meet at"] == ("a1 port 29511", "MASTER_ADDR=a1 MASTER_PORT=29511")
    assert found["interface"] == ("eth1", "PACELINE_INTERFACE=eth1")
    assert found["plan"] == ("replicate=4", "default: replicate over 4")
    assert found["threads of a rank"] == ("3", "OMP_NUM_THREADS")


def test_paceline_runs_own(settings, tmp_path):
    Plan(mesh="replicate=2", compression="bf16").write(tmp_path / "plan.json")
    found = settings({**OURS, "PACELINE_RUN_DIR": str(tmp_path)})
    assert found["launcher"][0] == "paceline run"
    assert found["ranks meet at"] == ("/run/job/rendezvous", "PACELINE_RENDEZVOUS=/run/job/rendezvous")
    assert found["coordinator"] == ("unix:/run/job/coordinator", "PACELINE_COORDINATOR")
    assert found["run directory"] == (str(tmp_path), "PACELINE_RUN_DIR")
    assert found["plan"] == ("replicate=2,compression=bf16", f"PACELINE_RUN_DIR={tmp_path}: plan.json")
    assert found["compression"] == ("bf16", f"PACELINE_RUN_DIR={tmp_path}: plan.json")


# The environment, the words, and what the plan and the compression are and come from.
PLANS = {
    "a flag": ({}, ["--plan", "dp=2,tp=2"], ("replicate=2,tensor=2", "flag --plan dp=2,tp=2"), ("none", "default")),
    "-n": ({}, ["-n", "3"], ("replicate=3", "flag -n 3"), ("none", "default")),
    "two flags": (
        {},
        ["-n", "2", "--plan", "compression=fp16"],
        ("replicate=2,compression=fp16", "flag --plan compression=fp16"),
        ("fp16", "flag --plan compression=fp16"),
    ),
    "a variable": (
        {**OURS, "PACELINE_PLAN": json.dumps(asdict(Plan(mesh="shard=2", compression="bf16")))},
        [],
        ("shard=2,compression=bf16", "PACELINE_PLAN"),
        ("bf16", "PACELINE_PLAN"),
    ),
    "a flag before a variable": (
        {"PACELINE_PLAN": "?"},
        ["-n", "2"],
        ("replicate=2", "flag -n 2"),
        ("none", "default"),
    ),
}


@pytest.mark.parametrize("case", PLANS)
def test_where_the_plan_comes_from(case, settings):
    environment, words, plan, compression = PLANS[case]
    found = settings(environment, *words)
    assert (found["plan"], found["compression"]) == (plan, compression)


def test_a_host_that_is_to_start_its_ranks(settings):
    found = settings(POD)
    assert found["launcher"][0] == "torchrun's PET_* variables"
    assert found["host"] == ("2 of 4", "PET_NODE_RANK=2, PET_NNODES=4")
    assert found["ranks of a host"] == ("2", "PET_NPROC_PER_NODE=2")
    assert found["ranks meet at"] == ("a1 port 1234", "MASTER_ADDR=a1 MASTER_PORT=1234")
    assert settings({**POD, "PACELINE_PLAN": json.dumps({"mesh": "replicate=8"})})["plan"][0] == "replicate=8"
    assert settings({"PET_NPROC_PER_NODE": "gpu"})["ranks of a host"] == (
        "as many as devices",
        "PET_NPROC_PER_NODE=gpu",
    )


def test_explain_shows_variables_of_the_job_and_hides_secrets(settings):
    shown = {
        "NCCL_DEBUG": "INFO",
        "GLOO_SOCKET_IFNAME": "lo",
        "TORCH_LOGS": "x",
        "CUDA_VISIBLE_DEVICES": "1",
        "OMP_PROC_BIND": "true",
    }
    secret = {
        "PACELINE_API_TOKEN": "s3cr3t",
        "NCCL_KEY_FILE": "s3cr3t",
        "TORCH_SECRET": "s3cr3t",
        "PACELINE_password": "s3cr3t",
    }
    found = settings({**shown, **secret, "HOME": "s3cr3t", "AWS_SECRET_ACCESS_KEY": "s3cr3t"})
    for name, text in shown.items():
        assert found[name] == (text, "environment")
    for name in secret:
        assert found[name] == ("(set, not shown)", "environment")
    assert "s3cr3t" not in str(found)
    assert not {"HOME", "AWS_SECRET_ACCESS_KEY"} & found.keys()


def test_the_table_aligns_and_says_that_no_file_is_read(explain):
    plan = json.dumps(asdict(Plan(mesh="replicate=4")))
    code, out, _ = explain({**TORCHRUN, "NCCL_DEBUG": "INFO", "PACELINE_PLAN": plan, "TORCH_LOGS": "two\nlines"})
    assert code == 0
    table, last = out.rstrip("\n").rsplit("\n\n", 1)
    lines = table.splitlines()
    assert re.split(r"  +", lines[0]) == ["setting", "value", "from"]
    starts = [lines[0].index(word) for word in ("setting", "value", "from")]
    assert all(line[start - 1] == " " != line[start] for line in lines for start in starts[1:])
    assert all(len(re.split(r"  +", line)) == 3 for line in lines)
    assert max(map(len, lines)) < 160
    assert last.startswith("No configuration file is read")


def test_no_file_changes_a_setting(settings, tmp_path):
    """Files that other tools read, in the folder and in the home directory."""
    before = settings({"HOME": str(tmp_path)})
    for name in (
        "paceline.toml",
        "paceline.yaml",
        "pyproject.toml",
        ".paceline",
        "plan.json",
        ".deepspeed_env",
        "hostfile",
    ):
        (tmp_path / name).write_text("plan = 'tensor=2'\n[tool.paceline]\nplan = 'tensor=2'\n")
    assert settings({"HOME": str(tmp_path)}) == before


# The environment, the words, and what the error says: the same as where a job is started.
REFUSED = {
    "two launchers": ({**TORCHRUN, **OURS}, [], "paceline run says rank 1 of 2"),
    "a world of one": ({"SLURM_NTASKS": "4"}, [], "SLURM_NTASKS=4 promises more than one rank"),
    "a host without a number": ({"PET_NNODES": "4"}, [], "neither PET_NODE_RANK nor"),
    "the plan covers other ranks": (TORCHRUN, ["--plan", "tensor=2"], "covers 2 ranks\n  found: the job has 4 ranks"),
    "-n of other ranks": (TORCHRUN, ["-n", "2"], "covers 2 ranks\n  found: the job has 4 ranks"),
    "no plan": ({"PACELINE_PLAN": "?"}, [], "the variable PACELINE_PLAN should hold a plan"),
    "no plan.json": ({"PACELINE_RUN_DIR": "nowhere"}, [], "can't read the plan in nowhere/plan.json"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_a_job_would_refuse_is_refused(case, explain):
    environment, words, said = REFUSED[case]
    code, out, err = explain(environment, *words)
    assert (code, out) == (2, "")
    assert said in err
    assert re.match(r"^paceline explain: .+\n  found: .+\n  fix: .+\n$", err), err
    code, out, err = explain(environment, "--json", *words)
    assert code == 2
    assert json.loads(out)["status"] == "refused"
