"""Every flag of every command either applies to what was asked, or is refused before anything starts."""

from __future__ import annotations

import argparse
import importlib
import json
import re
import shlex
import sys

import pytest

from paceline.cli.flags import CHECK, ELASTIC, NAMED_RANK, NODE, PLACES, RANK, RULES, RUN_FLAGS, _actions
from paceline.cli.main import main
from paceline.cli.run import decide_plan

KINDS = (*PLACES, ELASTIC, CHECK, NODE, NAMED_RANK, RANK)
FILE = "import sys\nimport paceline\nprint(sys.argv)\n"
TORCHRUN = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "x"}
TORCHRUN |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
# How a job of each kind is asked for, and the environment that its launcher gives it.
ASKED = {
    **{place: (["--on", place], {}) for place in PLACES},
    ELASTIC: (["--on", "ssh", "--min-hosts", "1"], {}),
    CHECK: (["--on", "kubernetes", "--check"], {}),
    NODE: ([], {"PET_NNODES": "1", "PET_NODE_RANK": "0", "PET_NPROC_PER_NODE": "2"}),
    RANK: ([], TORCHRUN),
    NAMED_RANK: (["--job", "a"], TORCHRUN),
}
ONLY_THERE = {"min_hosts": ELASTIC, "max_hosts": ELASTIC, "host_discovery_script": ELASTIC, "check": CHECK}


def flags_of(verb):
    """Every flag of a command, by the name of its value: the flag, and a value that it may have."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    importlib.import_module(f"paceline.cli.{verb}").add_arguments(parser)
    found = {}
    for action in _actions(parser):
        if action.option_strings and action.dest != "help":
            value = "1x2" if action.dest == "shape" else str((action.choices or ["1"])[-1])
            found[action.dest] = [action.option_strings[0], *([] if action.nargs == 0 else [value])]
    return found


RUN = flags_of("run")


def test_every_flag_of_run_has_its_places():
    assert set(RUN) == set(RUN_FLAGS)
    assert all(places and places <= set(KINDS) for places in RUN_FLAGS.values())


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
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("subprocess.Popen", reached)
    for name in ("_run_elastic", "_run_node", "decide_plan", "run_as_rank.be_rank", "run_on_kubernetes.check"):
        monkeypatch.setattr(f"paceline.cli.run.{name}", reached)


@pytest.mark.parametrize("kind", KINDS)
def test_a_flag_of_run_is_refused_exactly_where_it_changes_nothing(kind, nothing_starts, monkeypatch, capsys):
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
        if is_refused == (kind in RUN_FLAGS[name]):
            wrong.append((words, said))
    assert not wrong


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["run", "--check", "train.py"], "--check does not apply to a job on this host"),
        (["run", "--on", "slurm", "--min-hosts", "2", "train.py"], "--min-hosts does not apply to a job --on slurm"),
        (["run", "--on", "mpi", "--max-hosts", "2", "train.py"], "--max-hosts does not apply to a job --on mpi"),
        (["run", "-j", "2x8", "train.py"], "no host is named"),
        (["run", "--on", "mpi", "-j", "2x8", "train.py"], "no host is named"),
        (["run", "--on", "kubernetes", "--gang", "kueue", "--pod-group-api", "v1alpha2", "x.py"], "add --gang native"),
        (["run", "--on", "kubernetes", "--gang", "kueue", "--placeholder-timeout", "9", "x.py"], "add --gang yunikorn"),
        (["run", "--on", "kubernetes", "--accelerator", "amd.com/gpu", "x.py"], "add --gpus N"),
        (
            ["run", "--on", "kubernetes", "--image", "i", "--cpu", "1", "--memory", "2Gi", "--server-cpu", "1", "x.py"],
            "the plan has no servers",
        ),
        (["plan", "--device", "cpu", "train.py"], "add --explain-memory"),
        (["plan", "--schedule-picture", "--json", "--plan", "pipeline=2", "train.py"], "JSON has no picture"),
        (["plan", "--schedule-picture", "train.py"], "has no pipeline"),
        (["plan", "--explain-layout", "--json", "train.py"], "no tensor axis"),
        (["run", "--dry-run", "--json", "train.py"], "leave --dry-run out"),
        (["server", "serve", "--listen", "unix:a", "--coordinator", "unix:b", "--credentials", "c"], "HOST:PORT"),
        (["server", "top", "unix:a", "--credentials", "c"], "HOST:PORT"),
        (["doctor", "--python", "python3"], "no other host is named"),
        (["bench", "planner", "--rounds", "5"], "--rounds is for bench step and jobs and strategies"),
        (["bench", "strategies", "--startup-rounds", "3"], "--startup-rounds is for bench step"),
        (["bench", "step", "--steps", "300"], "write jobs"),
        (["bench", "planner", "--busy", "3"], "write jobs"),
        (["bench", "step", "--device", "cpu"], "write planner"),
        (["bench", "step", "--published", "none"], "write planner"),
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


def test_what_to_write_for_a_flag_of_the_files_own_has_all_its_arguments(tmp_path, monkeypatch, capsys):
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
    assert main(["run", "--on", "slurm", "--job", "a", "--dry-run", "train.py", "--", "-n", "9"]) == 0
    assert "train.py -- -n 9" in capsys.readouterr().out
    pods = ["--on", "kubernetes", "--image", "i", "--cpu", "1", "--memory", "2Gi", "--dry-run"]
    assert main(["run", *pods, "train.py", "--", "-n", "9"]) == 0
    assert re.search(r"- train.py\n\s+- --\n\s+- -n\n\s+- '9'", capsys.readouterr().out)


def test_a_refused_flag_is_told_in_json_too(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["run", "--json", "--partition", "gpu", "train.py"]) == 2
    refusal = json.loads(capsys.readouterr().out)
    assert refusal["error"]["fix"] == "write --on slurm, or leave --partition out"


@pytest.mark.parametrize("words", [["--plan", "shard=1,zero=2"], ["-n", "1", "--compression", "bf16"]])
def test_an_option_of_an_axis_of_size_1_is_told(words, tmp_path, monkeypatch, capsys):
    (tmp_path / "train.py").write_text(FILE)
    monkeypatch.chdir(tmp_path)
    assert main(["run", *words, "--dry-run", "train.py"]) == 0
    assert "changes nothing here: the axis it is about has size 1" in capsys.readouterr().err


def test_ranks_make_a_plan_of_options_alone():
    options = dict.fromkeys(("transport", "compression", "bucket_bytes"))
    assert decide_plan(argparse.Namespace(n=2, plan="checkpointing=full", **options)).mesh == "replicate=2"


def test_where_hosts_come_and_go_the_ranks_to_come_count():
    asked = {"transport": None, "compression": "bf16", "bucket_bytes": None}
    plan = decide_plan(argparse.Namespace(n=None, plan=None, **asked), grows=True)
    assert plan.compression == "bf16"


def test_an_unknown_flag_before_the_file_may_be_the_files(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["run", "--learning-rate", "3", "train.py"])
    assert "a flag of the file's own stands after it" in capsys.readouterr().err
