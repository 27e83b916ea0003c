"""`paceline horovodrun`: horovodrun's command line as a job of `paceline run`, and what is refused."""

from __future__ import annotations

import importlib
import sys

import pytest

from paceline.cli import run_command
from paceline.cli.main import main
from paceline.horovod import import_alias
from paceline.launch.ssh import SshOptions
from paceline.run.request import HostLimits

from support.jobs import paceline

HEAD = "import horovod.torch as hvd\nimport os, signal, sys, torch\nhvd.init()\n"


@pytest.fixture
def asked(tmp_path, monkeypatch):
    """A function that returns what `paceline run` would be asked for by a command line, and the changed request."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(HEAD)
    (tmp_path / "hosts.sh").write_text("#!/bin/sh\necho h1\n")
    (tmp_path / "hostfile").write_text("h1 slots=4\nh2 slots=4\n")

    def ask(*words):
        taken = []
        monkeypatch.setattr(run_command, "run", lambda *given: taken.append(given) or 0)
        assert main(["horovodrun", *words]) == 0
        parsed, change = taken[0]
        request, _ = run_command.make_request(parsed)
        return parsed, change(request)

    return ask


def test_the_program_and_its_arguments_are_handed_on(asked):
    parsed, request = asked("-np", "2", "python", "train.py", "--lr", "0.1", "-n", "3", "--", "-x")
    assert (parsed.n, request.file) == (2, "train.py")
    assert request.arguments == ("--lr", "0.1", "-n", "3", "--", "-x")
    assert request.place == "local"
    assert request.stall_notice_s == 0
    assert request.environment["PACELINE_HOROVODRUN"] == "1"


def test_arguments_of_python_are_understood(asked):
    _, request = asked("-np", "2", "/usr/bin/python3.11", "-u", "-W", "ignore", "-Wdefault", "-B", "train.py", "-u")
    assert request.environment["PYTHONWARNINGS"] == "ignore,default"
    assert request.environment["PYTHONDONTWRITEBYTECODE"] == "1"
    assert request.arguments == ("-u",)


def test_a_module_is_run_as_one(asked, tmp_path):
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "mod.py").write_text(HEAD)
    _, request = asked("-np", "1", "python", "-m", "pkg.mod", "--lr", "1")
    assert request.module == "pkg.mod"
    assert request.arguments == ("--lr", "1")


HOSTS = {
    "-np 8 -H h1:4,h2:4": ("ssh", ["h1:4", "h2:4"]),
    "-np 5 -hostfile hostfile": ("ssh", ["h1:4", "h2:1"]),
    "-np 3 -H h1:4,h2:4": ("ssh", ["h1:3"]),
    "-np 2 -H localhost:4": ("local", []),
}


@pytest.mark.parametrize("line", HOSTS)
def test_hosts_have_the_ranks_that_are_asked_for(line, asked):
    _, request = asked(*line.split(), "-p", "23", "-i", "key", "python", "train.py")
    place, hosts = HOSTS[line]
    assert request.place == place
    assert [f"{host.name}:{host.slots}" for host in request.hosts] == hosts
    assert request.ssh == SshOptions("ssh", ("-p", "23", "-i", "key"))


def test_ranks_of_a_script_are_limits_on_hosts(asked, tmp_path):
    words = "--min-np 3 --max-np 9 --slots-per-host 2 --host-discovery-script hosts.sh --reset-limit 4"
    _, request = asked(*words.split(), "--elastic-timeout", "7", "python", "train.py")
    script = request.limits.script
    assert request.limits == HostLimits(least=2, most=4, script=script, slots=2, wait_s=7, restarts=4)
    assert script.name == "hosts.sh"
    assert request.environment["HOROVOD_ELASTIC"] == "1"


def test_flags_become_variables(asked, capsys, tmp_path):
    (tmp_path / "c.yaml").write_text(
        "timeline: {filename: a.json, mark_cycles: true}\nparams: {cycle_time_ms: 2, fusion_threshold_mb: 2}\n"
        "stall_check: {enabled: false, warning_time_seconds: 9}\nautotune: {enabled: true}\n"
    )
    words = "--config-file c.yaml --timeline-filename b.json --autotune --cache-capacity 3 --reset-limit 1 --gloo"
    parsed, request = asked("-np", "1", *words.split(), "python", "train.py")
    assert parsed.max_restarts == 1
    expected = {
        "HOROVOD_TIMELINE": "b.json",
        "HOROVOD_TIMELINE_MARK_CYCLES": "1",
        "HOROVOD_FUSION_THRESHOLD": str(2**21),
        "HOROVOD_STALL_CHECK_DISABLE": "1",
        "HOROVOD_STALL_CHECK_TIME_SECONDS": "9",
        "HOROVOD_ELASTIC": "1",
    }
    assert {name: value for name, value in request.environment.items() if name.startswith("HOROVOD")} == expected
    (notice,) = capsys.readouterr().err.splitlines()
    for part in ("--autotune", "--cache-capacity", "params.cycle_time_ms", "autotune of c.yaml"):
        assert part in notice


REFUSED = {
    "-np 2": "needs a program",
    "python train.py": "-np is missing",
    "-np 0 python train.py": "no number from 1",
    "-np 2 ./train.sh": "no Python program",
    "-np 2 python": "no file follows",
    "-np 2 python -c pass": "has no such argument",
    "-np 2 python -O train.py": "has no such argument",
    "-np 9 -H h1:4 python train.py": "have 4 slots",
    "-np 2 -H h1:4 --hostfile hostfile python train.py": "named once",
    "-np 2 -H h1:2 --reset-limit 2 python train.py": "--reset-limit",
    "-np 2 --min-np 1 python train.py": "--min-np",
    "-np 2 --slots-per-host 1 python train.py": "--slots-per-host",
    "--host-discovery-script hosts.sh --slots-per-host 4 --max-np 2 python train.py": "--max-np 2",
    "-np 2 --config-file train.py python train.py": "can't read train.py",
    "-np 2 --config-file odd.yaml python train.py": "it has 'paramz'",
}


@pytest.mark.parametrize("line", REFUSED)
def test_what_can_not_be_met_is_refused_by_name(line, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("a: [\n")
    (tmp_path / "odd.yaml").write_text("paramz: {}\n")
    (tmp_path / "hostfile").write_text("h1 slots=4\n")
    assert main(["horovodrun", *line.split()]) == 2
    error = capsys.readouterr().err
    assert error.startswith("paceline horovodrun: error: ")
    assert REFUSED[line] in error


def test_the_build_is_told(capsys):
    assert main(["horovodrun", "--check-build"]) == 0
    assert "[X] PyTorch" in capsys.readouterr().out


@pytest.fixture
def alias(monkeypatch):
    """The alias, only for this test; also its variables."""
    for name in list(sys.modules):
        if name.partition(".")[0] == "horovod":
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    monkeypatch.setattr(import_alias.os, "environ", {"PACELINE_RANK": "1", "PACELINE_WORLD_SIZE": "3"})
    import_alias.install()
    yield import_alias.os.environ
    for name in list(sys.modules):
        if name.partition(".")[0] == "horovod":
            del sys.modules[name]


NAMES = """horovod horovod.torch horovod.torch.mpi_ops horovod.torch.elastic horovod.torch.elastic.state
horovod.common.util.env horovod.common.exceptions horovod.runner horovod.data"""


@pytest.mark.parametrize("name", NAMES.split())
def test_a_name_gives_the_very_module(name, alias):
    module = importlib.import_module(name)
    ours = importlib.import_module(name.replace("horovod", "paceline.horovod", 1))
    assert module is ours
    assert module.__spec__.name == module.__name__ == name.replace("horovod", "paceline.horovod", 1)


def test_a_name_that_is_not_there_is_an_import_error(alias):
    with pytest.raises(ModuleNotFoundError, match=r"horovod\.tensorflow"):
        importlib.import_module("horovod.tensorflow")


def test_ranks_have_the_variables_of_horovod(alias):
    assert (alias["HOROVOD_RANK"], alias["HOROVOD_SIZE"], alias["HOROVOD_CONTROLLER"]) == ("1", "3", "gloo")


@pytest.mark.long
def test_output_is_written_to_files_too(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        HEAD + "print('out', hvd.rank(), flush=True)\nos.write(2, b'err\\n')\nimport warnings\nwarnings.warn('w')\n"
    )
    words = ["-np", "2", "--output-filename", "out", "python", "-W", "ignore", script]
    done = paceline(tmp_path, "horovodrun", *words)
    assert done.code == 0, done.err
    for rank in range(2):
        assert f"[{rank}] out {rank}" in done.out
        assert (tmp_path / f"out/rank.{rank}/stdout").read_text() == f"out {rank}\n"
        assert (tmp_path / f"out/rank.{rank}/stderr").read_text() == "err\n"


@pytest.mark.long
def test_a_script_without_horovod_runs_too(tmp_path):
    (tmp_path / "hello.py").write_text("print('hello')\n")
    done = paceline(tmp_path, "horovodrun", "-np", "1", "python", "hello.py")
    assert done.code == 0, done.err
    assert "[0] hello" in done.out


@pytest.mark.long
def test_paceline_run_says_how_to_start_such_a_script(tmp_path):
    (tmp_path / "train.py").write_text(HEAD)
    done = paceline(tmp_path, "run", "train.py")
    assert done.code != 0
    assert "paceline horovodrun -np 2 python FILE" in done.err
