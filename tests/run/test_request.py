"""A request is made without argparse, is complete, and is all that starting a job looks at."""

from __future__ import annotations

import dataclasses

import pytest

from paceline.launch.host_choice import Shape, choose_ranks
from paceline.launch.hosts import Host
from paceline.launch.plan_choice import PlanRequest, choose_plan, says_ranks
from paceline.launch.slurm import SlurmOptions
from paceline.launch.ssh import SshOptions
from paceline.nouns.errors import MeshError, UsageError
from paceline.rendezvous.launcher_env import LauncherPosition, NodeInfo
from paceline.run.directory import RunChoice
from paceline.run.job_settings import ELASTIC, NAMED_RANK, NODE, RANK
from paceline.run.request import HostLimits, RunRequest, find_launcher, place_of
from paceline.run.start.outcome import Outcome
from paceline.run.start.send_to_slurm import SlurmRequest, slurm_script
from paceline.run.start.start_job import elastic_rules, start

HOSTS = (Host("h1", 2), Host("h2", 2))
TORCHRUN = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "x"}
TORCHRUN |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
POD = {"PET_NNODES": "1", "PET_NODE_RANK": "0", "PET_NPROC_PER_NODE": "2"}


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "train.py"
    path.write_text("import paceline\nworkload = paceline.Workload(**{})\n")
    return str(path)


def a_request(file, tmp_path, **more):
    usual = {"file": file, "arguments": ("--lr", "1"), "place": "local", "launcher": None, "plan": PlanRequest(ranks=4)}
    usual |= {"run": RunChoice(runs=tmp_path / "runs", job="a"), "python": "/py", "grace_s": 3.0, "stall_notice_s": 0.0}
    return RunRequest(**{**usual, "is_dry_run": True, **more})


def dry_run(request):
    notices = []
    outcome = Outcome()
    start(request, outcome, notices.append)
    assert (outcome.exit_code, outcome.end, notices) == (0, None, [])
    return outcome.dry_run


def test_a_request_is_frozen(file, tmp_path):
    with pytest.raises(dataclasses.FrozenInstanceError):
        a_request(file, tmp_path).place = "ssh"


def test_a_dry_run_is_text_and_prints_nothing(file, tmp_path, capsys):
    assert dry_run(a_request(file, tmp_path)).startswith("# 4 ranks on this host\n")
    over_ssh = a_request(file, tmp_path, place="ssh", hosts=HOSTS, ssh=SshOptions("no-such-ssh", ("-p22",)))
    shown = dry_run(over_ssh)
    assert "# h2: ranks 2 to 3\nno-such-ssh -p22 " in shown
    assert "'/py -m paceline.run.supervise.agent'" in shown
    assert capsys.readouterr() == ("", "")
    assert not (tmp_path / "runs").exists()


def test_nothing_has_become_of_a_job_that_has_not_ended():
    assert Outcome().exit_code is None


def test_a_script_for_slurm(file, tmp_path):
    run = RunChoice(runs=tmp_path / "runs", job="a")
    options = SlurmOptions(partition="gpu")
    request = SlurmRequest(
        file=file, arguments=(), plan=PlanRequest(ranks=4), run=run, options=options, shape=Shape(2, 2), python="/py"
    )
    script = slurm_script(request, print)
    assert "#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=2\n" in script
    assert "/py -m paceline.cli.main run" in script


@pytest.mark.parametrize(
    ("on", "environment", "job", "limits", "place"),
    [
        (None, {}, None, HostLimits(), "local"),
        ("mpi", {}, None, HostLimits(), "mpi"),
        (None, {}, None, HostLimits(least=1), ELASTIC),
        ("ssh", {}, None, HostLimits(most=4), ELASTIC),
        ("mpi", {}, None, HostLimits(most=4), "mpi"),
        (None, POD, "a", HostLimits(), NODE),
        (None, TORCHRUN, None, HostLimits(), RANK),
        (None, TORCHRUN, "a", HostLimits(), NAMED_RANK),
        ("local", TORCHRUN, "a", HostLimits(), "local"),
    ],
)
def test_what_starts_the_ranks(on, environment, job, limits, place):
    launcher = find_launcher(on, environment)
    assert place_of(launcher, on, job, limits) == place
    kinds = {NODE: NodeInfo, RANK: LauncherPosition, NAMED_RANK: LauncherPosition}
    assert type(launcher) is kinds.get(place, type(None))


@pytest.mark.parametrize(
    ("ranks", "shape", "hosts", "plan", "asked"),
    [
        (None, None, (), "", None),
        (3, None, HOSTS, "", 3),
        (None, Shape(2, 8), (), "", 16),
        (16, Shape(2, 8), (), "", 16),
        (None, None, HOSTS, "", 4),
        (None, None, HOSTS, "replicate=2", None),
        (None, None, HOSTS, "dp=2", None),
        (None, None, HOSTS, "plan.json", None),
        (None, None, HOSTS, "compression=bf16", 4),
        (None, None, HOSTS, "server=2", 4),
    ],
)
def test_how_many_ranks_are_asked_for(ranks, shape, hosts, plan, asked):
    assert choose_ranks(ranks, shape, hosts, says_ranks(plan)) == asked


def test_ranks_that_contradict_the_shape():
    with pytest.raises(UsageError, match="-n 3 and -j 2x8 should agree"):
        choose_ranks(3, Shape(2, 8), (), False)


def test_the_flags_of_checkpoints_win_over_a_plan_file(tmp_path):
    path = tmp_path / "plan.json"
    path.write_text('{"mesh": "replicate=2", "keep": 5, "checkpoint_every": 7, "transport": "gloo"}')
    plan = choose_plan(PlanRequest(text=str(path), keep=1), print)
    assert (plan.keep, plan.checkpoint_every, plan.transport) == (1, 7, "gloo")
    with pytest.raises(MeshError, match="covers 2 ranks"):
        choose_plan(PlanRequest(ranks=3, text=str(path)), print)


def test_limits_on_hosts(file, tmp_path):
    def rules(least=None, most=None, **more):
        limits = HostLimits(least=least, most=most)
        return elastic_rules(
            a_request(file, tmp_path, limits=limits, **{"plan": PlanRequest(), "hosts": HOSTS, **more})
        )

    found, discover = rules(least=1)
    assert (found.least, found.most, tuple(discover())) == (1, 2, HOSTS)
    assert rules(most=8)[0].least == 1
    assert rules(least=4)[0].most == 4
    with pytest.raises(UsageError, match="no host is named"):
        rules(least=1, hosts=())
    with pytest.raises(UsageError, match="let 1 <= min <= max"):
        rules(least=3, most=2)
    with pytest.raises(UsageError, match="-n and -j do not apply"):
        rules(least=1, plan=PlanRequest(ranks=2))
