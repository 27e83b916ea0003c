"""Whatever a name, a path or a value has in it: it is refused where it enters, or is one word of what is sent."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import types
from pathlib import Path

import pytest
import yaml

from paceline.cli.main import main
from paceline.launch.rank_command import RankCommand, export_lines, quoted
from paceline.launch.slurm import SlurmOptions, sbatch_script
from paceline.nouns.errors import UsageError
from paceline.nouns.names import KINDS, is_name, job_name_of
from paceline.nouns.plan import Plan
from paceline.run.directory import RunChoice
from paceline.run.notebook import launch

from support.documented_commands import ROOT

FILE = "import paceline\nworkload = paceline.Workload(**{})\n"
PODS = ["kubernetes", "--image", "i", "--cpu", "1", "--memory", "2Gi"]
# Each way to start a job, in a form that starts nothing.
STARTS = {
    "local": ["run", "--dry-run"],
    "ssh": ["run", "--on", "ssh", "-H", "h1:1", "--dry-run"],
    "elastic": ["run", "--on", "ssh", "-H", "h1:1", "--min-hosts", "1", "--dry-run"],
    "mpi": ["run", "--on", "mpi", "--dry-run"],
    "ray": ["run", "--on", "ray", "--dry-run"],
    "slurm": ["submit", "slurm", "--dry-run"],
    "slurm, sent": ["submit", "slurm"],
    "kubernetes": ["submit", *PODS, "--dry-run"],
}
HOSTILE = {
    "a folder above": "../x",
    "the folder above": "..",
    "this folder": ".",
    "a path": "/tmp/x",
    "a folder below": "a/b",
    "nothing": "",
    "a line end": "a\n#SBATCH --array=0-3",
    "a carriage return": "a\rb",
    "a terminal's command": "a\x1b[2Jb",
    "another one": "a\x9b2Jb",
    "a line separator": "a\u2028b",
    "no UTF-8": "a\udcff",
    "a flag": "-x",
    "two words": "a b",
    "a remark": "a#b",
    "a quote": "a'b",
    "a command of a shell": "$(id)",
    "the end of a command": "a;id",
    "a pattern": "a%j*",
    "a bound on length": "x" * 300,
}


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder with a workload file, in which nothing may appear."""
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "train.py").write_text(FILE)
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setattr("shutil.which", lambda name, **_: None)
    return tmp_path


def refused(words, capsys):
    assert main(words) == 2, words
    error = capsys.readouterr().err
    assert re.fullmatch(r"paceline [a-z ]+: error: [^\n]+\n  found: [^\n]+\n  fix: [^\n]+\n", error), error
    assert all(each.isprintable() for each in error.replace("\n", "")), error
    return error


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("case", HOSTILE)
def test_name_of_a_hostile_job_is_refused_and_nothing_is_written(case, start, here, capsys):
    before = sorted(here.rglob("*"))
    error = refused([*STARTS[start], f"--job={HOSTILE[case]}", "train.py"], capsys)
    assert "the job's name" in error
    assert sorted(here.rglob("*")) == before


def test_what_only_explains_or_asks_checks_alike(here, capsys):
    for words in (["explain", *STARTS["local"]], ["explain", *STARTS["kubernetes"]], ["explain", *STARTS["slurm"]]):
        for name in ("a\x1b[2Jb", "../x", ""):
            assert "the job's name" in refused([*words, f"--job={name}", "train.py"], capsys)
    for python in ("-x", "a\nb"):
        assert "the program" in refused(["doctor", "-H", "h1:1", f"--python={python}"], capsys)


@pytest.mark.parametrize("name", ["bert", "bert-1", "lr=0.1,batch=32", "v1.0+a@b", "9", "_x", "größe"])
def test_names_that_a_job_may_have(name, here, capsys):
    assert is_name("job", name)
    for start in ("local", "ssh", "mpi", "ray", "slurm"):
        assert main([*STARTS[start], "--job", name, "train.py"]) == 0
    script = capsys.readouterr().out
    assert f"#SBATCH --job-name={name}\n" in script


def test_name_of_a_job_made_from_any_file_name_is_valid():
    for text in (*HOSTILE.values(), "my train (2)", "hetjob", "-.-"):
        name = job_name_of(text)[:200]
        assert is_name("job", name), name
    assert job_name_of("dag-train-run:1") == "dag-train-run-1"  # as before: a retry finds its run
    assert job_name_of("manual__2025-01-01T00:00:00+00:00") == "manual__2025-01-01T00-00-00-00-00"


@pytest.mark.parametrize("name", ["a b", "a'b", "a#b", "(1)"])
def test_a_run_that_there_is_goes_on_under_any_name_of_a_folder(name, here):
    (here / "runs" / name).mkdir(parents=True)
    assert RunChoice(runs=here / "runs", job=name, resume=True).folder == here / "runs" / name
    with pytest.raises(UsageError, match="the job's name"):
        RunChoice(runs=here / "none", job=name, resume=True)


@pytest.mark.parametrize("name", ["..", "a/../..", "a\x1bb"])
def test_no_run_goes_on_elsewhere(name, here):
    (here / "runs").mkdir()
    (here / "plan.json").write_text("{}")
    with pytest.raises(UsageError, match="not the name of a folder"):
        RunChoice(runs=here / "runs", job=name, resume=True)


CONTROL = [text for text in HOSTILE.values() if text and not is_name("path", text)]


@pytest.mark.parametrize("start", [start for start in STARTS if start != "kubernetes"])
@pytest.mark.parametrize("text", CONTROL)
def test_a_folder_of_runs_with_a_control_character_is_refused(text, start, here, capsys):
    assert "the path" in refused([*STARTS[start], f"--runs={text}", "train.py"], capsys)


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("text", CONTROL)
def test_a_file_with_a_control_character_is_refused(text, start, here, capsys):
    assert "the workload file" in refused([*STARTS[start], f"{text}.py"], capsys)


@pytest.mark.parametrize("start", ["ssh", "elastic", "mpi", "ray", "slurm"])
@pytest.mark.parametrize("text", ["-x", "a\nb", "a\x1bb"])
def test_a_python_that_is_a_flag_or_several_lines_is_refused(text, start, here, capsys):
    refused([*STARTS[start], f"--python={text}", "train.py"], capsys)
    refused([*STARTS[start], f"--interface={text}", "train.py"], capsys)


@pytest.mark.parametrize("flag", ["image", "context", "namespace", "service-account", "priority-class", "scheduler"])
@pytest.mark.parametrize("text", ["a\nb", "a\x1bb"])
def test_a_setting_of_pods_with_a_control_character_is_refused(flag, text, here, capsys):
    refused([*STARTS["kubernetes"], f"--{flag}={text}", "--job", "a", "train.py"], capsys)


@pytest.mark.parametrize("flag", ["partition", "account", "qos", "time"])
@pytest.mark.parametrize("text", ["a b", "a\nb", "a#b", 'a"b', "a\\b", "a'b"])
def test_a_setting_of_slurm_is_one_word(flag, text, here, capsys):
    refused([*STARTS["slurm"], f"--{flag}={text}", "train.py"], capsys)


@pytest.mark.parametrize("text", ["-oProxyCommand=id", "a\nb", "a b", "$(id)"])
@pytest.mark.parametrize("start", ["ssh", "elastic", "mpi"])
def test_a_host_that_is_none_is_refused(text, start, here, capsys):
    words = [f"-H={text}" if word == "h1:1" else word for word in STARTS[start] if word != "-H"]
    words = words if start != "mpi" else [*words, f"-H={text}"]
    error = refused([*words, "train.py"], capsys)
    assert "is no host's name" in error


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("name", ["RANK", "PACELINE_RUN_DIR", "SBATCH_ARRAY_INX", "SLURM_NTASKS", "PET_NNODES", "A B"])
def test_a_variable_that_a_launcher_sets_is_refused(name, start, here, capsys):
    assert "can't pass -x" in refused([*STARTS[start], "-x", f"{name}=1", "train.py"], capsys)


# --- what may have any characters is one word of what is sent

VALUE = "a b'c\"d\\e;$(id)`id`#f\n#PBS -t 0-3\n#SBATCH --array=0-3"


def words_of_bash(text: str, folder: Path) -> list[str]:
    """The words that bash makes of a line."""
    show = [sys.executable, "-c", "import json, sys; print(json.dumps(sys.argv[1:]))"]
    line = f"{shlex.join(show)} {text}"
    return json.loads(subprocess.run(["bash", "-c", line], cwd=folder, capture_output=True, check=True).stdout)


def test_words_for_bash_are_one_line_and_stay_what_they_are(tmp_path):
    words = ["a", "", "a b", "it's", "é\n\t\x1b\\'", VALUE, "\u2028", os.fsdecode(b"\xff")]
    line = quoted(words)
    assert line.isprintable()
    assert words_of_bash(line, tmp_path) == [*words[:-1], "\udcff"]


def variables_of_bash(lines, folder):
    program = "import json, os; print(json.dumps(dict(os.environ)))"
    script = "\n".join([*lines, shlex.join([sys.executable, "-c", program])])
    done = subprocess.run(["bash"], input=script, cwd=folder, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


@pytest.mark.parametrize("start", [start for start in STARTS if start != "slurm, sent"])
def test_a_dry_run_shows_each_variable_and_no_secret(start, here, monkeypatch, capsys):
    monkeypatch.setenv("HF_TOKEN", "s3cr3t")
    secret = [] if start == "kubernetes" else ["-x", "HF_TOKEN"]
    assert main([*STARTS[start], "--job", "a", "-x", f"FOO={VALUE}", *secret, "train.py"]) == 0
    out = capsys.readouterr().out
    assert "s3cr3t" not in out
    if start == "kubernetes":
        pods = json.dumps(list(yaml.safe_load_all(out)))
        assert json.dumps({"name": "FOO", "value": VALUE.replace("$(", "$$(")}) in pods
        return
    assert "HF_TOKEN" in out
    if start == "ray":
        assert json.loads(out)["environment"]["FOO"] == VALUE
    elif start == "ssh":
        assert json.loads(out.split("standard input: ", 1)[1])["environment"]["FOO"] == VALUE
    else:
        exports = [line for line in out.splitlines() if line.startswith("export ")]
        assert variables_of_bash(exports, here)["FOO"] == VALUE


def options_of_sbatch(script: str) -> list[str]:
    """The options that sbatch reads in a script: up to the first command, by its rules for quotes and remarks."""
    words = []
    for line in script.splitlines():
        assert "hetjob" not in line
        if not line.startswith("#"):
            if line.strip():
                break
            continue
        if line.startswith("#SBATCH"):
            words += shlex.split(line.removeprefix("#SBATCH"), comments=True)
    assert not re.search("^#(PBS|BSUB)", script, re.MULTILINE), "sbatch takes these for options, wherever they stand"
    return words


@pytest.mark.parametrize("folder", ["plain", "a b", "it's", 'say "x"', "50%j", "a#b", "$(id)", "-x", "ü"])
def test_any_path_is_one_word_of_the_script_for_slurm(folder, tmp_path):
    runs = tmp_path / folder
    arguments = ["--lr", VALUE]
    rank = RankCommand(runs / "train.py", arguments, Plan(), runs, "a", environment={"FOO": VALUE}, python="/py thon")
    script = sbatch_script(rank, SlurmOptions())
    options = options_of_sbatch(script)
    assert [word for word in options if word.startswith("--output")] == [
        f"--output={str(runs).replace('%', '%%')}/a/slurm-%j.log"
    ]
    assert not [word for word in options if not word.startswith("--")]
    line = next(line for line in script.splitlines() if line.startswith("srun "))
    words = words_of_bash(line, tmp_path)
    assert words[words.index("/py thon") :] == rank.words()
    assert words[-3:] == ["--", *arguments]
    assert subprocess.run(["bash", "-n"], input=script, text=True).returncode == 0


@pytest.mark.parametrize("folder", ["a\nb", "a\\b", "my-hetjob", "PackJob"])
def test_slurm_path_that_no_script_can_have_is_refused_first(folder, here, monkeypatch, capsys):
    (here / folder).mkdir()
    (here / folder / "train.py").write_text(FILE)
    monkeypatch.chdir(here / folder)
    monkeypatch.setattr("paceline.run.start.send_to_slurm.check_sbatch", lambda options: None)
    refused(["submit", "slurm", "train.py"], capsys)
    assert not (here / folder / "runs").exists()


def test_a_file_that_begins_with_a_hyphen_is_no_flag(here, capsys):
    Path("-x.py").write_text(FILE)
    for start, words in STARTS.items():
        if start == "slurm, sent":
            continue
        assert main([*words, "--job", "a", "--", "-x.py", "--", "-n", "9"]) == 0, start
        out = capsys.readouterr().out
        assert "./-x.py" in out if start == "kubernetes" else "/-x.py" in out or start == "elastic"


# --- the other ways in


@pytest.mark.parametrize("name", ["a\nb", "a\x1bb", "two words"])
def test_a_notebooks_run_directory_is_checked_alike(name, here):
    with pytest.raises(UsageError, match="the job's name"):
        launch(print, run_dir=here / name)
    assert not (here / name).exists()


@pytest.fixture
def operator(monkeypatch):
    """The class of the operator, on a stand-in for Airflow."""

    class Base:
        def __init__(self, **task):
            """Airflow's has more."""

    exceptions = types.SimpleNamespace(AirflowException=Exception, AirflowFailException=Exception)
    monkeypatch.setitem(sys.modules, "airflow", types.ModuleType("airflow"))
    monkeypatch.setitem(sys.modules, "airflow.exceptions", exceptions)
    monkeypatch.setitem(sys.modules, "airflow.sdk", types.SimpleNamespace(BaseOperator=Base))
    monkeypatch.delitem(sys.modules, "paceline.integrations.airflow", raising=False)
    yield __import__("paceline.integrations.airflow", fromlist=["PacelineOperator"])
    sys.modules.pop("paceline.integrations.airflow", None)


@pytest.mark.parametrize("text", [*HOSTILE.values(), "--dry-run", "--python=/bin/sh"])
def test_no_argument_of_the_airflow_operator_is_a_flag(text, operator, here):
    from paceline.cli.main import read_command

    task = operator.PacelineOperator(file=text, runs=text, plan=text, arguments=[text], job=text)
    words = task._command(operator._named(task.job, None))
    plain = operator.PacelineOperator(file="f.py", runs="r", plan="p", arguments=["a"], job="j")
    parsed = read_command(words[3:])
    expected = read_command(plain._command("j")[3:])
    assert set(parsed.flags) == set(expected.flags), words
    assert parsed.workload == (f"./{text}" if text.startswith("-") else text)
    assert (parsed.plan, parsed.runs, parsed.arguments) == (text, Path(text), ["--", text][-1:])
    assert text == HOSTILE["a bound on length"] or is_name("job", parsed.job)


def test_flags_that_the_operator_sets_are_found_in_one_word_too(operator):
    for flags in (["-n2"], ["--job=x"], ["-n", "2"]):
        with pytest.raises(UsageError, match="is among them"):
            operator.PacelineOperator(file="f.py", flags=flags)


def test_every_kind_says_what_is_wrong_and_is_used():
    source = "".join(path.read_text() for path in (ROOT / "src").rglob("*.py") if path.name != "names.py")
    for name, kind in KINDS.items():
        assert f'"{name}"' in source, name
        assert "{}" in kind.asked
        assert kind.found
        assert kind.fix
    assert export_lines({"A": "1", "MY_KEY": "x"}) == ["export A=1", "# MY_KEY (set, not shown)"]
