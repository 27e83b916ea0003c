"""Every flag of every command either applies to what was asked, or is refused before anything starts."""

from __future__ import annotations

import argparse
import importlib
import json
import re
import shlex
import sys
from pathlib import Path

import pytest

import paceline
from paceline.cli.flags import RULES, actions_of
from paceline.cli.main import main
from paceline.launch.plan_choice import PlanRequest, choose_plan
from paceline.run.job_settings import ELASTIC, JOB, NAMED_RANK, NODE, PLACES, RANK, RUN_PLACES, TABLES

KINDS = (*PLACES, ELASTIC, NODE, NAMED_RANK, RANK)
FILE = "import sys\nimport paceline\nprint(sys.argv)\n"
TORCHRUN = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "x"}
TORCHRUN |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
# How a job of each kind is asked for, and the environment that its launcher gives it.
ASKED = {
    **{place: (["--on", place], {}) for place in PLACES},
    ELASTIC: (["--on", "ssh", "--min-hosts", "1"], {}),
    NODE: ([], {"PET_NNODES": "1", "PET_NODE_RANK": "0", "PET_NPROC_PER_NODE": "2"}),
    RANK: ([], TORCHRUN),
    NAMED_RANK: (["--job", "a"], TORCHRUN),
}
ONLY_THERE = {"min_hosts": ELASTIC, "max_hosts": ELASTIC, "host_discovery_script": ELASTIC}
SUBMIT = ["submit", "kubernetes"]


def flags_of(verb):
    """Every flag of a command, by the name of its value: the flag, and a value that it may have."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    importlib.import_module(f"paceline.cli.{verb}_command").add_arguments(parser)
    found = {}
    for action in actions_of(parser):
        if action.option_strings and action.dest != "help":
            value = VALUES.get(action.dest, "1")
            found[action.dest] = [action.option_strings[0], *([] if action.nargs == 0 else [value])]
    return found


VALUES = {"shape": "1x2", "cluster": "cluster.toml", "hostfile": "hosts", "hosts": "h1:2", "env": "A=1"}
VALUES["stall_timeout"] = "61"  # above the notice's


RUN = flags_of("run")


def test_every_flag_of_run_has_its_places():
    assert set(RUN) == {name for name, setting in JOB.items() if setting.places & RUN_PLACES}
    assert set(KINDS) == RUN_PLACES
    assert all(setting.places for setting in JOB.values())


def test_every_rule_is_about_flags_that_there_are():
    for verb, rules in RULES.items():
        assert {name for rule in rules for name in rule.flags} <= set(flags_of(verb))


class Reached(Exception):
    """The command went on to what it was asked for."""


def reached(*_, **__):
    raise Reached


@pytest.fixture
def nothing_starts(tmp_path, monkeypatch):
    """The command in a folder with a file, stopped where it would go on to do something."""
    (tmp_path / "train.py").write_text(FILE)
    (tmp_path / "cluster.toml").write_text("")
    (tmp_path / "hosts").write_text("h1:2")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("subprocess.Popen", reached)
    monkeypatch.setattr("paceline.cli.run_command.start", reached)


@pytest.mark.parametrize("kind", KINDS)
def test_flags_of_run_are_refused_exactly_where_without_effect(kind, nothing_starts, monkeypatch, capsys):
    asked, environment = ASKED[kind]
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    wrong = []
    for name, words in RUN.items():
        if name == "on" or words[0] in asked or ONLY_THERE.get(name, kind) != kind or (name == "job" and kind == RANK):
            continue  # with this flag it is a job of another kind
        try:
            code = main(["run", *asked, *words, "train.py"])
        except Reached:
            code = 0
        said = capsys.readouterr().err
        is_refused = code == 2 and f": {words[0]} " in said and f"leave {words[0]} out" in said
        if is_refused == (kind in JOB[name].places):
            wrong.append((words, said))
    assert not wrong


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["run", "--on", "mpi", "--max-hosts", "2", "train.py"], "--max-hosts does not apply to a job --on mpi"),
        (["run", "-j", "2x8", "train.py"], "no host is named"),
        (["run", "--on", "mpi", "-j", "2x8", "train.py"], "no host is named"),
        ([*SUBMIT, "--gang", "kueue", "--pod-group-api", "v1alpha2", "x.py"], "add --gang native"),
        ([*SUBMIT, "--gang", "kueue", "--placeholder-timeout", "9", "x.py"], "add --gang yunikorn"),
        ([*SUBMIT, "--accelerator", "amd.com/gpu", "x.py"], "add --gpus N"),
        ([*SUBMIT, "--image", "i", "--cpu", "1", "--memory", "2Gi", "--server-cpu", "1", "x.py"], "has no servers"),
        ([*SUBMIT, "--check", "--gang", "kueue", "job.yaml"], "--gang does not apply with --check"),
        ([*SUBMIT, "--check", "--dry-run", "job.yaml"], "leave --dry-run out, or --check"),
        (["plan", "--device", "cpu", "train.py"], "add --explain-memory"),
        (["plan", "--expandable-segments", "train.py"], "add --explain-memory"),
        (["plan", "--expandable-segments", "--explain-memory", "train.py"], "the device is cpu"),
        (["profile", "--expandable-segments", "train.py"], "the device is cpu"),
        (["plan", "--schedule-picture", "--json", "--plan", "pipeline=2", "train.py"], "JSON has no picture"),
        (["plan", "--schedule-picture", "train.py"], "has no pipeline"),
        (["plan", "--explain-layout", "--json", "train.py"], "no tensor axis"),
        (["run", "--dry-run", "--json", "train.py"], "leave --dry-run out"),
        (["submit", "slurm", "--dry-run", "--json", "train.py"], "leave --dry-run out"),
        (["server", "serve", "--listen", "unix:a", "--coordinator", "unix:b", "--credentials", "c"], "HOST:PORT"),
        (["server", "top", "unix:a", "--credentials", "c"], "HOST:PORT"),
        (["doctor", "--python", "python3"], "no other host is named"),
    ],
)
def test_a_flag_that_needs_another_is_refused_without_it(words, said, tmp_path, monkeypatch, capsys):
    (tmp_path / "train.py").write_text(FILE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("subprocess.Popen", reached)
    assert main(words) == 2
    error = capsys.readouterr().err
    assert said in error
    assert re.search(r"\n  found: .+\n  fix: .+\n", error), error


@pytest.mark.parametrize("verb", ["run", "plan", "profile"])
def test_a_flag_after_the_file_is_refused(verb, nothing_starts, capsys):
    wrong = []
    for words in flags_of(verb).values():
        if (
            main([verb, "train.py", *words]) != 2
            or f"{words[0]} should stand before train.py" not in capsys.readouterr().err
        ):
            wrong.append(words)
    assert not wrong
    for joined in ("-n2", "--plan=tensor=2"):
        assert main([verb, "train.py", joined]) == 2
        assert "write it before train.py" in capsys.readouterr().err


def test_flags_of_the_file_are_advised_with_all_their_arguments(tmp_path, monkeypatch, capsys):
    (tmp_path / "train.py").write_text(FILE)
    monkeypatch.chdir(tmp_path)
    assert main(["run", "train.py", "--lr", "1", "--plan", "a b"]) == 2
    advised = re.search(r"write `(train.py -- .+)` if", capsys.readouterr().err)[1]
    assert main(["run", "--dry-run", *shlex.split(advised)]) == 0
    assert shlex.split(capsys.readouterr().out.splitlines()[1])[2:] == ["--lr", "1", "--plan", "a b"]


@pytest.mark.parametrize("words", [["explain", ""], ["doctor", ""], ["plan", "", "train.py"]])
def test_an_empty_word_is_refused(words, tmp_path, monkeypatch, capsys):
    (tmp_path / "train.py").write_text(FILE)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match="2"):
        sys.exit(main(words))
    assert "fix: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "own"),
    [
        (["train.py", "--", "-n", "2"], ["-n", "2"]),
        (["train.py", "--epochs", "2", "x"], ["--epochs", "2", "x"]),
        (["train.py", "a", "--", "-b"], ["a", "--", "-b"]),
        (["train.py", "--help"], ["--help"]),
        (["own.py", "--resume", "--time=3"], ["--resume", "--time=3"]),
        (["train.py"], []),
        (["-n", "1", "--", "train.py", "--epochs", "2"], ["--epochs", "2"]),
        (["--", "train.py", "--", "-n", "2"], ["-n", "2"]),
    ],
)
def test_a_files_own_arguments_reach_it(words, own, tmp_path, monkeypatch, capsys):
    (tmp_path / "train.py").write_text(FILE)
    (tmp_path / "own.py").write_text(FILE + 'FLAGS = ["--resume", "--time"]\n')
    monkeypatch.chdir(tmp_path)
    assert main(["run", "--dry-run", *words]) == 0
    line = capsys.readouterr().out.splitlines()[1]
    assert line.split()[2:] == own


def test_arguments_of_the_file_stay_its_own_in_what_is_sent(tmp_path, monkeypatch, capsys):
    (tmp_path / "train.py").write_text(FILE)
    monkeypatch.chdir(tmp_path)
    assert main(["submit", "slurm", "--job", "a", "--dry-run", "train.py", "--", "-n", "9"]) == 0
    assert "train.py -- -n 9" in capsys.readouterr().out
    assert (
        main([*SUBMIT, "--image", "i", "--cpu", "1", "--memory", "2Gi", "--dry-run", "train.py", "--", "-n", "9"]) == 0
    )
    assert re.search(r"- train.py\n\s+- --\n\s+- -n\n\s+- '9'", capsys.readouterr().out)


def test_a_refused_flag_is_told_in_json_too(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["run", "--json", "--hosts", "h1:2", "train.py"]) == 2
    refusal = json.loads(capsys.readouterr().out)
    assert refusal["error"]["fix"] == "write --on ssh, or leave -H out"


@pytest.mark.parametrize("words", [["--plan", "shard=1,zero=2"], ["-n", "1", "--plan", "compression=bf16"]])
def test_an_option_of_an_axis_of_size_1_is_told(words, tmp_path, monkeypatch, capsys):
    (tmp_path / "train.py").write_text(FILE)
    monkeypatch.chdir(tmp_path)
    assert main(["run", *words, "--dry-run", "train.py"]) == 0
    assert "changes nothing here: the axis it is about has size 1" in capsys.readouterr().err


def plan_of(ranks, text, **more):
    return choose_plan(PlanRequest(ranks=ranks, text=text), print, **more)


@pytest.mark.parametrize("option", ["checkpointing=full", "transport=gloo", "compression=bf16", "bucket_bytes=1024"])
def test_ranks_make_a_plan_of_options_alone(option):
    plan = plan_of(2, option)
    name, value = option.split("=")
    assert (plan.mesh, str(getattr(plan, name))) == ("replicate=2", value)


def test_where_hosts_come_and_go_the_ranks_to_come_count():
    assert plan_of(None, "compression=bf16", grows=True).compression == "bf16"


def test_an_unknown_flag_before_the_file_may_be_the_files(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["run", "--learning-rate", "3", "train.py"])
    assert "a flag of the file's own stands after it" in capsys.readouterr().err


# --- what a person can hold in the head


def help_of(capsys, monkeypatch, *words):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit, match="0"):
        main([*words, "--help"])
    return capsys.readouterr().out


def parsers():
    """By name, the parsers of `run` and of each target of `submit`."""
    found = {}
    for verb in ("run", "submit"):
        parser = argparse.ArgumentParser(prog=verb, allow_abbrev=False)
        importlib.import_module(f"paceline.cli.{verb}_command").add_arguments(parser)
        below = [action.choices for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
        found |= {f"{verb} {name}": one for name, one in below[0].items()} if below else {verb: parser}
    return found


def test_run_has_few_flags():
    flags = [action for action in parsers()["run"]._actions if action.option_strings]
    assert len(flags) <= 30


@pytest.mark.parametrize("name", ["run", "submit slurm", "submit kubernetes"])
def test_help_fits_one_screen(name, capsys, monkeypatch):
    lines = help_of(capsys, monkeypatch, *name.split()).splitlines()
    assert lines[0] == f"usage: paceline {name} [options] FILE ..."
    assert 30 < len(lines) <= 60
    assert max(map(len, lines)) <= 80


def test_every_flag_says_what_it_is():
    assert set(parsers()) == {"run", "submit slurm", "submit kubernetes"}
    for parser in parsers().values():
        for action in parser._actions:
            assert len(action.help or "") > 8, action.option_strings


@pytest.mark.parametrize("table", ["slurm", "kubernetes"])
def test_submit_has_a_flag_for_each_key_of_the_cluster_file(table):
    flags = {action.dest for action in parsers()[f"submit {table}"]._actions}
    assert set(TABLES[table]) <= flags


def test_only_the_command_line_knows_argparse():
    source = Path(paceline.__file__).parent
    files = [path for package in ("launch", "run") for path in (source / package).rglob("*.py")]
    assert len(files) > 40
    assert [path.name for path in files if "argparse" in path.read_text()] == []


# Flags of earlier versions: the command, the flag, and what to write in its place.
MOVED = {
    "an option of the plan": ("run", ["transport", "gloo"], "--plan replicate=2,transport=..."),
    "another": ("verify", ["compression", "bf16"], "--plan replicate=2,compression=..."),
    "of ssh": ("run", ["ssh-program", "x"], "write program under [ssh] in a file, and name that with --cluster"),
    "of ssh, in one word": ("run", ["ssh-option=-F"], "write options under [ssh]"),
    "of Ray": ("run", ["gpus-per-rank", "1"], "write gpus_per_rank under [ray]"),
    "of Slurm": ("run", ["partition", "gpu"], "write `paceline submit slurm`"),
    "of Kubernetes": ("run", ["gang", "kueue"], "write `paceline submit kubernetes`"),
    "of checks": ("run", ["check"], "write `paceline submit kubernetes`"),
    "of Slurm, in pods": ("submit kubernetes", ["qos", "x"], "write `paceline submit slurm`"),
    "of pods, in Slurm": ("submit slurm", ["image", "x"], "write `paceline submit kubernetes`"),
}


# Flags of other commands and launchers: the command, the words, and the fix.
FOREIGN = {
    "torchrun's ranks": ("run", ["--nproc-per-node", "2"], "write -n N for N ranks"),
    "torchrun's ranks, in its older form": ("run", ["--nproc_per_node=2"], "write -n N for N ranks"),
    "Accelerate's ranks": ("run", ["--num_processes", "2"], "write -n N for N ranks"),
    "torchrun's hosts": ("run", ["--nnodes", "2"], "write -j NODESxRANKS, such as -j 2x8"),
    "torchrun's master": ("run", ["--master_addr", "h1"], "leave it out; the ranks find each other without it"),
    "torchrun alone": ("run", ["--standalone"], "leave it out; the ranks find each other without it"),
    "sbatch's hosts": ("submit slurm", ["--nodes", "2"], "write -j NODESxRANKS, such as -j 2x8"),
    "sbatch's tasks": ("submit slurm", ["--ntasks=2"], "write -n N for N ranks"),
    "sbatch's partition": ("submit slurm", ["-p", "gpu"], "write --partition"),
    "sbatch's hosts, in short": ("submit slurm", ["-N", "2"], "write -j NODESxRANKS, such as -j 2x8"),
    "sbatch's time": ("submit slurm", ["-t", "1:00:00"], "write --time"),
    "sbatch's GPUs": ("submit slurm", ["--gres=gpu:4"], "write --sbatch-option=--gres=VALUE"),
    "sbatch's GPUs of a job": ("submit slurm", ["--gpus", "4"], "write --sbatch-option=--gpus=VALUE"),
    "sbatch's whole hosts": ("submit slurm", ["--exclusive"], "write --sbatch-option=--exclusive;"),
    "sbatch's memory": ("submit slurm", ["--mem-per-cpu", "4G"], "write --sbatch-option=--mem-per-cpu=VALUE"),
    "of run, in Slurm": ("submit slurm", ["--on", "ssh"], "leave it out; `paceline run` has it"),
    "sbatch's GPUs of a task": ("submit slurm", ["--gpus-per-task", "1"], "write --gpus-per-node"),
    "sbatch's arrays": ("submit slurm", ["--array=0-3"], "send each job by a command of its own, with another --job"),
    "sbatch's arrays, in short": ("submit slurm", ["-a", "0-3"], "send each job by a command of its own"),
    "restarts, in Slurm": ("submit slurm", ["--max-restarts", "3"], "leave it out; Slurm starts the job again"),
    "of run, in pods": ("submit kubernetes", ["--runs", "x"], "leave it out; `paceline run` has it"),
    "nothing like it": ("submit slurm", ["--noodles", "2"], "see `paceline submit slurm --help`"),
}


@pytest.mark.parametrize("case", FOREIGN)
def test_a_flag_of_another_program_says_which_is_meant(case, capsys):
    command, words, said = FOREIGN[case]
    with pytest.raises(SystemExit, match="2"):
        main([*command.split(), *words, "train.py"])
    error = capsys.readouterr().err
    assert f"\n  fix: {said}" in error, error
    assert "did you mean" not in error
    assert re.fullmatch(rf"paceline {command}: error: .+\n  found: .+\n  fix: .+\n", error), error


@pytest.mark.parametrize("case", MOVED)
def test_a_flag_that_has_moved_says_where(case, capsys):
    command, (flag, *value), said = MOVED[case]
    with pytest.raises(SystemExit, match="2"):
        main([*command.split(), f"--{flag}", *value, "train.py"])
    error = capsys.readouterr().err
    assert said in error
    assert re.fullmatch(rf"paceline {command}: error: .+\n  found: .+\n  fix: .+\n", error), error
