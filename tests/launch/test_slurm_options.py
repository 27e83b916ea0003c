"""Which options a job on Slurm may have: none that contradicts the ranks, the script or the run directory."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from paceline.cli.main import main
from paceline.launch.sbatch_options import TAKEN, gpus_of_node, options_of
from paceline.launch.slurm import SlurmOptions, _seconds
from paceline.nouns.errors import UsageError

DRY = ["submit", "slurm", "--dry-run", "--job", "a"]


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    (tmp_path / "train.py").write_text("import paceline\nworkload = paceline.Workload(**{})\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def error_of(capsys, *words):
    assert main([*DRY, *words, "train.py"]) == 2, words
    error = capsys.readouterr().err
    assert re.fullmatch(r"paceline submit slurm: error: [^\n]+\n  found: [^\n]+\n  fix: [^\n]+\n", error), error
    return error


# The words of a command, and what their error says.
BAD = {
    "fewer GPUs than ranks": (["-j", "2x4", "--gpus-per-node", "2"], "4 ranks on a node with 2 GPUs"),
    "fewer GPUs in all": (["-j", "2x4", "--sbatch-option=--gpus=7"], "4 ranks on a node with 3 GPUs"),
    "fewer GPUs than nodes": (["-j", "2x4", "--sbatch-option=-G1"], "4 ranks on a node with 1 GPUs"),
    "fewer GPUs by kind": (["-j", "2x4", "--sbatch-option=--gpus=a100:2,v100:2"], "4 ranks on a node with 2 GPUs"),
    "fewer GPUs as resources": (["-n", "4", "--sbatch-option=--gres=gpu:a100:2(S:0),nvme:1"], "with 2 GPUs"),
    "one GPU as a resource": (["-n", "2", "--sbatch-option=--gres gpu"], "2 ranks on a node with 1 GPUs"),
    "a GPU of each rank's own": (["-n", "2", "--sbatch-option=--gpus-per-task=1"], "write --gpus-per-node"),
    "several jobs": (["--sbatch-option=--array=0-3"], "it makes several jobs of one"),
    "several jobs, in short": (["--sbatch-option=-a0-3"], "it makes several jobs of one"),
    "several jobs, after others": (["--sbatch-option=-HOa 0-3"], "it makes several jobs of one"),
    "several jobs, shortened": (["--sbatch-option=--arr=0-3"], "it makes several jobs of one"),
    "several jobs, behind another": (["--sbatch-option=--exclusive --array=0-3"], "it makes several jobs of one"),
    "several jobs, in quotes": (["--sbatch-option=--exclusive '--array=0-3'"], "it makes several jobs of one"),
    "several jobs, of sbatch's own": (["--sbatch-option=--comment=hetjob"], "the beginning of another job"),
    "nodes": (["--sbatch-option=-N2"], "write -j NODESxRANKS"),
    "tasks": (["--sbatch-option=--ntasks 9"], "write -j NODESxRANKS"),
    "tasks, by their older name": (["--sbatch-option=--tasks-per-node=9"], "write -j NODESxRANKS"),
    "a partition": (["--sbatch-option=-p gpu"], "write --partition"),
    "a time": (["--sbatch-option=--time=1"], "write --time"),
    "CPUs": (["--sbatch-option=-c4"], "write --cpus-per-task"),
    "a log elsewhere": (["--sbatch-option=--output=/tmp/x"], "the log is in the run directory"),
    "a log that is cut": (["--sbatch-option=--open-mode=truncate"], "Paceline writes it itself"),
    "a name": (["--sbatch-option=-Jx"], "write --job NAME"),
    "no way back": (["--sbatch-option=--no-requeue"], "goes back to the queue by itself"),
    "another signal": (["--sbatch-option=--signal=USR1@9"], "write --signal S"),
    "no variables": (["--sbatch-option=--export=NONE"], "write -x NAME or -x NAME=VALUE"),
    "nothing is sent": (["--sbatch-option=--test-only"], "write --dry-run"),
    "a command that waits": (["--sbatch-option=-W"], "returns when the job is sent"),
    "a remark": (["--sbatch-option=--exclusive # --array=0"], "a # outside of quotes"),
    "half a quote": (["--sbatch-option=--comment='a"], "no closing quotation"),
    "a backslash": (["--sbatch-option=--\\array=0-3"], "it is no option"),
    "two lines": (["--sbatch-option=--exclusive\n#SBATCH --array=0-3"], "control character"),
    "a signal before the ranks": (["--time", "1", "--signal", "120"], "is 60 s, with --signal 120"),
    "a signal as the ranks begin": (["--time", "3", "--signal", "120"], "is 180 s, with --signal 120"),
    "the usual signal": (["--time", "2"], "is 120 s, with --signal 120"),
    "a signal that sbatch refuses": (["--signal", "65536"], "sbatch takes at most 65535 seconds"),
}


@pytest.mark.parametrize("case", BAD)
def test_an_option_that_contradicts_the_job_is_refused(case, capsys):
    words, said = BAD[case]
    assert said in error_of(capsys, *words)


GOOD = [
    ["-j", "2x4", "--gpus-per-node", "4"],
    ["-j", "2x4", "--sbatch-option=--gpus=8"],
    ["-j", "2x4", "--sbatch-option=--gres=gpu:a100:4"],
    ["-j", "2x4", "--sbatch-option=--gres=nvme:1"],
    ["-j", "2x4", "--cpus-per-task", "2"],
    ["--sbatch-option=--exclusive", "--sbatch-option=--mail-user a@b", "--sbatch-option=--mem=0"],
    ["--sbatch-option=--comment='issue #3'", "--sbatch-option=-C a100", "--sbatch-option=-w h1"],
    ["--sbatch-option=--gres-flags=enforce-binding", "--sbatch-option=--time-min=5", "--sbatch-option=-H"],
    ["--time", "3", "--signal", "60"],
    ["--time", "0", "--signal", "120"],
]


@pytest.mark.parametrize("words", GOOD)
def test_slurm_options_of_the_user_are_unchanged_in_the_script(words, capsys):
    assert main([*DRY, *words, "train.py"]) == 0
    script = capsys.readouterr().out
    for word in words:
        if word.startswith("--sbatch-option="):
            assert f"#SBATCH {word.removeprefix('--sbatch-option=')}\n" in script


@pytest.mark.parametrize(
    ("time", "seconds"),
    [("3", 180), ("3:20", 200), ("1:00:05", 3605), ("1-2", 93600), ("1-2:30", 95400), ("1-2:30:10", 95410), ("", 0)],
)
def test_a_time_limit_in_each_form_that_slurm_reads(time, seconds):
    assert _seconds(time) == seconds


def test_what_sbatch_reads_in_a_line():
    assert list(options_of("--mail-user a@b -N2 --gre=gpu:1")) == [
        ("mail-user", "a@b"),
        ("nodes", "2"),
        ("gres", "gpu:1"),
    ]
    assert gpus_of_node(["--gres=gpu:2,gpu:a100:2"], 9) == 4
    assert gpus_of_node(["--gpus=0"], 2) == 0
    assert gpus_of_node(["--exclusive"], 2) is None


@pytest.mark.parametrize("name", [name for name, taken in TAKEN.items() if taken.variable])
def test_slurm_variable_that_overrides_the_script_is_refused(name, monkeypatch, capsys):
    flags = {"partition": "p", "account": "a", "qos": "q", "time": "9:00:00", "gpus-per-node": "1"}
    words = [f"--{name}", flags[name]] if name in flags else []
    monkeypatch.setenv(TAKEN[name].variable, "other")
    error = error_of(capsys, *words)
    assert f"{TAKEN[name].variable} should not be set here" in error
    assert f"fix: unset {TAKEN[name].variable}\n" in error
    monkeypatch.setenv(TAKEN[name].variable, flags.get(name, TAKEN[name].same))
    if name in flags or TAKEN[name].same:
        assert main([*DRY, *words, "train.py"]) == 0
    if name in flags:  # a default of the user's, where the script says nothing
        monkeypatch.setenv(TAKEN[name].variable, "other")
        assert main([*DRY, "train.py"]) == 0


def test_slurm_script_lines_are_options_reserved_from_users(capsys):
    words = ["--partition=p", "--account=a", "--qos=q", "--time=9:00:00", "--gpus-per-node=1", "--cpus-per-task=1"]
    assert main([*DRY, *words, "train.py"]) == 0
    written = re.findall(r"^#SBATCH --([a-z-]+)", capsys.readouterr().out, re.MULTILINE)
    assert len(written) == 13
    assert set(written) <= set(TAKEN)


def test_slurm_secret_goes_to_sbatch_and_not_into_the_script(here, monkeypatch, capsys):
    program = here / "bin" / "sbatch"
    program.parent.mkdir()
    program.write_text('#!/bin/sh\ncat > sent.sh\nprintf %s "$HF_TOKEN,$FOO" > got\necho 7\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent), prepend=":")
    monkeypatch.setenv("HF_TOKEN", "s3cr3t")
    words = ["submit", "slurm", "--job", "a", "-x", "HF_TOKEN", "-x", "FOO=a b"]
    assert main([*words, "--dry-run", "train.py"]) == 0
    shown = capsys.readouterr().out
    assert main([*words, "train.py"]) == 0
    assert Path("sent.sh").read_text() == shown.removesuffix("\n"), "a dry run shows what is sent"
    assert Path("got").read_text() == "s3cr3t,"
    assert "export FOO='a b'\n" in shown
    assert "s3cr3t" not in shown


def test_options_are_checked_when_they_are_made():
    with pytest.raises(UsageError, match="several jobs"):
        SlurmOptions(more=("--array=0-3",))
    with pytest.raises(UsageError, match="has spaces"):
        SlurmOptions(qos="a b")
