"""Bad input: one error of three parts, before any rank starts where that can be, and nothing is lost."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import pytest

from paceline.cli.main import main

from support.jobs import LOOP, TINY, command, paceline, write_workload

THREE_PARTS = re.compile(r"^paceline( [a-z]+){0,2}: .+\n  found: .+\n  fix: .+$", re.DOTALL | re.MULTILINE)
GOOD = TINY + LOOP


def file_with(tmp_path, old="", new="", name="tiny.py"):
    assert old in GOOD
    path = tmp_path / name
    path.write_text(GOOD.replace(old, new, 1) if old else GOOD)
    return str(path)


# What the person wrote (a change of a good file), the command's words, and what the error must say.
# Everything here is found by reading, so no rank and no fork server may start.
BEFORE_ANY_PROCESS = {
    "missing file": (None, ["missing.py"], "there is no such file"),
    "misspelt file": (None, ["tinny.py"], "did you mean"),
    "a folder": (None, ["."], "that is a folder"),
    "not Python": (("import torch\n", "import torch oops\n"), ["tiny.py"], "line 3"),
    "a module that is not there": ((), ["-m", "tiny.sub"], "tiny has no sub"),
    "a module of a misspelt name": ((), ["-m", "tinny"], "did you mean 'tiny'"),
    "a file where a module is asked for": ((), ["-m", "./tiny.py"], "that is no module's name"),
    "a part is missing": (("    data=Numbers(),\n", ""), ["tiny.py"], "data is missing"),
    "two parts are missing": (("    data=Numbers(),\n    batch_size=8,\n", ""), ["tiny.py"], "data and batch_size are missing"),
    "a part is misspelt": (("    batch_size=8", "    batchsize=8"), ["tiny.py"], "did you mean 'batch_size'"),
    "a part is unknown": (("    epochs=4", "    colour=4"), ["tiny.py"], "'colour'"),
    "batch below the ranks": ((), ["-n", "9", "tiny.py"], "1 of them would get none"),
    "no rank": ((), ["-n", "0", "tiny.py"], "write -n 1 or more"),
    "ranks below zero": ((), ["-n", "-3", "tiny.py"], "write -n 1 or more"),
    "ranks not a number": ((), ["-n", "two", "tiny.py"], "invalid int value"),
    "unknown flag": ((), ["--plann", "dp=2", "tiny.py"], "did you mean '--plan'"),
    "unknown axis": ((), ["--plan", "replicat=2", "tiny.py"], "did you mean 'replicate'"),
    "axis of another tool": ((), ["--plan", "zero3=2", "tiny.py"], "the axes are pipeline, replicate, shard, expert, context, tensor"),
    "axis of size zero": ((), ["--plan", "replicate=0", "tiny.py"], "a size is a whole number above 0"),
    "axis named twice": ((), ["--plan", "dp=2,replicate=2", "tiny.py"], "it names it twice"),
    "mesh and ranks differ": ((), ["-n", "3", "--plan", "replicate=2", "tiny.py"], "covers 2 ranks\n  found: the job has 3 ranks"),
    "a misspelt mode of servers": ((), ["--plan", "server=1,mode=asinc", "tiny.py"], "did you mean 'async'"),
    "a mode without servers": ((), ["--plan", "mode=async", "tiny.py"], "it has no servers"),
    "staleness below zero": ((), ["--plan", "server=1,mode=stale,staleness=-1", "tiny.py"], "staleness should be a whole number of at least 0"),
    "staleness under sync": ((), ["--plan", "server=1,staleness=1", "tiny.py"], "write mode=stale"),
    "a quorum above the workers": ((), ["-n", "2", "--plan", "server=1,mode=quorum,quorum=3", "tiny.py"], "it is 3 of 2 workers"),
    "a deadline under sync": ((), ["--plan", "server=1,deadline=2", "tiny.py"], "its mode is sync and its deadline 2 s"),
    "a deadline that is no number": ((), ["--plan", "server=1,mode=deadline,deadline=soon", "tiny.py"], "it is a number of seconds"),
    "a quorum of nobody": ((), ["-n", "2", "--plan", "server=1,mode=quorum", "tiny.py"], "write quorum=1"),
    "servers beside tensor": ((), ["--plan", "server=1,tensor=2", "tiny.py"], "not with tensor"),
    "compression to servers": ((), ["--plan", "server=1,compression=bf16", "tiny.py"], "leave compression out"),
    "no replica": ((), ["--plan", "server=1,replicas=0", "tiny.py"], "replicas should be a whole number of at least 1"),
    "zero without shard": ((), ["--plan", "zero=3", "tiny.py"], "without the axis shard"),
    "zero of several ranks without shard": ((), ["-n", "4", "--plan", "zero=3", "tiny.py"], "add shard=N to the plan"),
    "compression of one rank": ((), ["--plan", "compression=bf16", "tiny.py"], "without the axis replicate or shard"),
    "replicas without servers": ((), ["--plan", "replicas=3", "tiny.py"], "it has no servers"),
    "more replicas than servers": ((), ["--plan", "server=1,replicas=2", "tiny.py"], "each is a server of its own"),
    "the number of ranks after the file": ((), ["tiny.py", "-n", "2"], "write it before tiny.py"),
    "a plan after the file": ((), ["tiny.py", "--plan=tensor=2"], "write it before tiny.py"),
    "a partition of this host": ((), ["--partition", "gpu", "--time", "1:00:00", "--gpus-per-node", "8", "tiny.py"], "write `paceline submit slurm`"),
    "a gang of this host": ((), ["--gang", "yunikorn", "tiny.py"], "write `paceline submit kubernetes`"),
    "hosts' ranks on this host": ((), ["-j", "2x4", "tiny.py"], "no host is named"),
    "plan file is missing": ((), ["--plan", "plan.json", "tiny.py"], "can't read the plan in plan.json"),
    "unknown transport": ((), ["-n", "2", "--plan", "transport=glooo", "tiny.py"], "did you mean 'gloo'"),
    "unknown compression": ((), ["-n", "2", "--plan", "compression=power", "tiny.py"], "did you mean 'powersgd'"),
    "bucket of nothing": ((), ["-n", "2", "--plan", "bucket_bytes=0", "tiny.py"], "bucket_bytes should be a whole number of at least 1"),
    "checkpoints below zero": ((), ["--checkpoint-every", "-1", "tiny.py"], "checkpoint_every"),
    "keep nothing": ((), ["--keep", "0", "tiny.py"], "keep should be"),
    "resume without a run": ((), ["--resume", "tiny.py"], "start it without --resume"),
    "resume an unknown job": ((), ["--resume", "--job", "x", "tiny.py"], "there is no such job"),
    "a size of 5,000 digits": ((), ["--plan", "replicate=" + "9" * 5000, "tiny.py"], "a size is a whole number above 0"),
    "an option of 5,000 digits": ((), ["--plan", "shard=2,zero=" + "9" * 5000, "tiny.py"], "the plan's zero should be a whole number"),
    "a billion ranks": ((), ["-n", "1000000000", "tiny.py"], "at most 1000000"),
    "slots of 5,000 digits": ((), ["--on", "ssh", "-H", "h1:" + "9" * 5000, "tiny.py"], "no number of slots"),
    "a shape of 5,000 digits": ((), ["--on", "ssh", "-H", "h1", "-j", "9" * 5000 + "x2", "tiny.py"], "it is not NODESxRANKS"),
    "a patience that is no time": ((), ["--grace", "nan", "tiny.py"], "invalid number value: 'nan'"),
    "a file with a name too long": ((), ["x" * 5000 + ".py"], "it is longer than this system takes"),
    "a job with a name too long": ((), ["--job", "x" * 5000, "tiny.py"], "it has 5000 characters, and 255 are allowed"),
    "a run to resume with a name too long": ((), ["--resume", "--job", "x" * 5000, "tiny.py"], "it has 5000 characters, and 255 are allowed"),
    "a job outside of the runs": ((), ["--job", "../x", "tiny.py"], "it is not the name of a folder in the folder of the runs"),
    "a job in the folder of the runs itself": ((), ["--job", ".", "tiny.py"], "it is not the name of a folder"),
    "a job without a name": ((), ["--job", "", "tiny.py"], "the job's name ''"),
    "a job whose name is a command of the terminal": ((), ["--job", "a\x1b[2J", "tiny.py"], r"the job's name 'a\x1b[2J'"),
    "a job of two words": ((), ["--job", "my job", "tiny.py"], "write such as --job bert-1"),
    "a run to resume elsewhere": ((), ["--resume", "--job", "..", "tiny.py"], "it is not the name of a folder"),
    "runs in a folder of two lines": ((), ["--runs", "a\nb", "tiny.py"], "a line end or another control character"),
    "a variable that says which rank it is": ((), ["-x", "RANK=0", "tiny.py"], "leave RANK out"),
    "no file at all": ((), ["-n", "2"], "required: FILE\n"),
    "ranks as mpirun takes them": ((), ["-np", "2", "tiny.py"], "fix: write -n and a whole number, such as -n 2"),
    "data parallelism by torch's name": ((), ["--plan", "ddp=2", "tiny.py"], "did you mean 'replicate'"),
    "an axis without a size": ((), ["--plan", "tensor", "tiny.py"], "write tensor=2 for two ranks"),
    "no checkpoint to keep": ((), ["--keep", "0", "tiny.py"], "write --keep 1 or more"),
    "a step below zero": ((), ["--checkpoint-every", "-1", "tiny.py"], "write --checkpoint-every 1 or more"),
    "a time to save below zero": ((), ["--grace", "-1", "tiny.py"], "write --grace 30"),
    "Python in the command": ((), ["-n", "2", "python3", "tiny.py"], "leave python3 out"),
    "file and arguments in one word": ((), ["tiny.py --epochs 3"], "write tiny.py --epochs 3 without quotes"),
    "a plan of two words": ((), ["--plan", "replicate=2", "shard=2", "tiny.py"], "join it to the plan by a comma: --plan ...,shard=2"),
    "a plan with a colon": ((), ["--plan", "tensor:2", "tiny.py"], "fix: write tensor=2"),
    "a plan with semicolons": ((), ["-n", "4", "--plan", "dp=2;tp2;zero=1", "tiny.py"], "fix: write dp=2,tp=2,zero=1"),
    "a plan that is a number": ((), ["--plan", "2", "tiny.py"], "write replicate=2, or -n 2 without a plan"),
    "an axis that takes what is left": ((), ["-n", "2", "--plan", "replicate=-1", "tiny.py"], "or replicate=2 for two ranks"),
    "checkpoints in another notation": ((), ["--checkpoint-every", "1e3", "tiny.py"], "write --checkpoint-every and a whole number"),
    "a number that is left out": ((), ["--max-restarts", "tiny.py"], "write --max-restarts and a whole number"),
    "a run after --resume": ((), ["--resume=runs/a", "tiny.py"], "write --resume without a value; --job NAME names the run"),
    "limits without hosts": ((), ["--min-hosts", "2", "tiny.py"], "write --on ssh, and -H, --hostfile or --host-discovery-script"),
    "copies to no URL": ((), ["--copy-to", "/backup", "tiny.py"], "a folder of this machine is file:///FOLDER"),
    "copies to this process's memory": ((), ["--copy-to", "memory://backup", "tiny.py"], "this process's own memory, which ends with it"),
    "copies to a relative folder": ((), ["--copy-to", "file://backup", "tiny.py"], "write file:///FOLDER, from the root"),
    "copies among the runs": ((), ["--runs", "/tmp/runs", "--copy-to", "file:///tmp/runs/backup/", "tiny.py"], "a folder outside of the runs in /tmp/runs"),
    "copies over the runs": ((), ["--runs", "/tmp/runs", "--copy-to", "local:///tmp/../tmp/runs", "tiny.py"], "among the runs themselves"),
    "a run directory that can't be": ((), ["--runs", "tiny.py/runs", "tiny.py"], "it can't be written"),
}  # fmt: skip


# The words, and what the error says.
WITHOUT_A_COMMAND = {
    "flags of run alone": (["-n", "2", "tiny.py"], "-n should stand after a command", "write `paceline run -n ...`"),
    "an unknown flag alone": (["--nproc=2", "tiny.py"], "--nproc should stand after a command", "see `paceline --help`"),
    "a flag before its command": (["--plan", "shard=2", "run", "tiny.py"], "--plan should stand after a command", "write `paceline run --plan ...`"),
    "a file for a target": (["submit", "tiny.py"], "can't send a job to 'tiny.py'", "write `paceline submit slurm tiny.py`, or kubernetes for slurm"),
    "a target in short": (["submit", "k8s", "tiny.py"], "can't send a job to 'k8s'", "did you mean 'kubernetes'"),
    "a target by its command": (["submit", "sbatch", "tiny.py"], "can't send a job to 'sbatch'", "did you mean 'slurm'"),
    "an example without the verb": (["examples", "classifier"], "can't read the arguments", "write `paceline examples copy ...`"),
    "a misspelt verb of a command": (["runs", "shw"], "can't read the arguments", "did you mean 'show'"),
    "an export by the run's name": (["export", "a", "out"], "can't read the checkpoint a", "a run by its folder: runs/JOB"),
    "no target that there is": (["submit", "pbs", "tiny.py"], "can't send a job to 'pbs'", "write one of these"),
}  # fmt: skip


@pytest.mark.parametrize("case", WITHOUT_A_COMMAND)
def test_a_command_line_without_its_command(case, capsys):
    words, asked, fix = WITHOUT_A_COMMAND[case]
    assert exit_code(words) == 2
    error = capsys.readouterr().err.strip()
    assert THREE_PARTS.match(error), error
    assert asked in error.splitlines()[0]
    assert fix in error.splitlines()[2]


@pytest.mark.parametrize("words", [[], ["submit"], ["server"], ["completion"]], ids=" ".join)
def test_a_command_alone_that_needs_another_prints_its_help(words, capsys):
    """Such as click's and clap's commands: the help, and the exit code of a request that can't be met."""
    assert exit_code(words) == 2
    out, error = capsys.readouterr()
    assert out == ""
    assert error.startswith(" ".join(["usage: paceline", *words]))
    assert "error:" not in error
    assert exit_code([*words, "--help"]) == 0
    assert capsys.readouterr().out == error


@pytest.mark.parametrize("case", BEFORE_ANY_PROCESS)
def test_before_any_process_starts(case, tmp_path, monkeypatch, capsys):
    change, words, said = BEFORE_ANY_PROCESS[case]
    if change is not None:
        file_with(tmp_path, *change)
    elif case == "misspelt file":
        file_with(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("subprocess.Popen", refuse_to_start)
    code = exit_code(["run", *words])
    error = capsys.readouterr().err.strip()
    assert code == 2
    assert said in error
    assert THREE_PARTS.match(error), error
    assert error.count("fix: ") == 1
    assert not list(tmp_path.glob("runs/*/events.jsonl"))


# Files that are not to be run: name, text, and what the error must say.
OTHER_FILES = {
    "a notebook": ("train.ipynb", '{"cells": [], "nbformat": 4}', "nbconvert"),
    "a plan": ("plan.json", '{"mesh": "replicate=2"}', "stands after --plan"),
    "a shell script": ("train.sh", "python train.py\n", "name the Python file that trains"),
    "the directory of a run": ("runs/a/plan.json", "{}", "--job a --resume FILE"),
}


@pytest.mark.parametrize("case", OTHER_FILES)
def test_another_file_is_not_run(case, tmp_path, monkeypatch, capsys):
    name, text, said = OTHER_FILES[case]
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("subprocess.Popen", refuse_to_start)
    assert exit_code(["run", str(path.parent if "run" in case else path)]) == 2
    error = capsys.readouterr().err.strip()
    assert THREE_PARTS.match(error), error
    assert said in error.splitlines()[2]


# How a loop's file calls `paceline.prepare`, and what the error says.
CALLS_OF_PREPARE = {
    "the job is forgotten": (
        "model, optimizer = paceline.prepare(model, optimizer)",
        "the file takes model, optimizer",
    ),
    "the job comes last": ("model, optimizer, job = prepare(model, optimizer)", "the file takes model, optimizer, job"),
    "by names": ("job, model, optimizer = prepare(model=model, optimizer=optimizer)", "it is called with model=..."),
    "with a plan": (
        "job, model, optimizer = paceline.prepare(model, optimizer, plan='dp=2')",
        "it is called with plan=...",
    ),
    "as it should be": ("job, model, optimizer = paceline.prepare(model, optimizer, seed=1)", ""),
    "of an object": ("self.job, self.model, optimizer = prepare(self.model, optimizer)", ""),
    "with what only the run knows": ("job, model, *others = prepare(model, *others)", ""),
    "all as one": ("everything = prepare(model, optimizer)", ""),
}


@pytest.mark.parametrize("case", CALLS_OF_PREPARE)
def test_a_call_of_prepare(case, tmp_path, monkeypatch, capsys):
    line, said = CALLS_OF_PREPARE[case]
    (tmp_path / "loop.py").write_text(f"import paceline\nfrom paceline import prepare\n{line}\n")
    monkeypatch.chdir(tmp_path)
    code = exit_code(["run", "--dry-run", "-n", "2", "loop.py"])
    error = capsys.readouterr().err.strip()
    assert code == (2 if said else 0), error
    if said:
        assert THREE_PARTS.match(error), error
        assert said in error.splitlines()[1]
        assert "loop.py, line 3" in error


@pytest.mark.parametrize("command", ["verify", "plan"])
@pytest.mark.parametrize(
    ("code", "trainer"),
    [
        ("from paceline.integrations import lightning as pl\npl.Strategy()\n", "Lightning's Trainer"),
        ("from paceline.integrations.accelerate import Accelerator\nAccelerator()\n", "Accelerate's Accelerator"),
    ],
)
def test_steps_on_batches_of_each_rank_are_not_taken(code, trainer, command, tmp_path, monkeypatch, capsys):
    (tmp_path / "train.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("subprocess.Popen", refuse_to_start)
    assert exit_code([command, "-n", "2", "train.py"]) == 2
    error = capsys.readouterr().err.strip()
    assert THREE_PARTS.match(error), error
    assert f"train.py trains by {trainer}" in error


# Commands whose output file is there, and no output of such a command; and what they would write it from.
@pytest.mark.parametrize("words", [["profile", "-o", "tiny.py", "tiny.py"], ["timeline", "a", "-o", "tiny.py"]])
def test_a_program_is_not_written_over(words, tmp_path, monkeypatch, capsys):
    file_with(tmp_path)
    (tmp_path / "runs" / "a").mkdir(parents=True)
    (tmp_path / "runs" / "a" / "job.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("subprocess.Popen", refuse_to_start)
    assert exit_code(words) == 2
    assert "a file is there that is no JSON" in capsys.readouterr().err
    assert (tmp_path / "tiny.py").read_text() == GOOD


def refuse_to_start(*_, **__):
    raise AssertionError("a process was started")


def exit_code(words):
    try:
        return main(words)
    except SystemExit as end:
        return end.code


def test_an_existing_job_is_not_written_over(tmp_path, monkeypatch, capsys):
    file = file_with(tmp_path)
    folder = tmp_path / "runs" / "a"
    folder.mkdir(parents=True)
    (folder / "plan.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    assert exit_code(["run", "--job", "a", file]) == 2
    assert "write --resume to go on with it" in capsys.readouterr().err
    assert (folder / "plan.json").read_text() == "{}"


def test_a_plan_with_an_unknown_key_is_refused(tmp_path, monkeypatch, capsys):
    file = file_with(tmp_path)
    (tmp_path / "plan.json").write_text(json.dumps({"mesh": "replicate=2", "bucketbytes": 3}))
    monkeypatch.chdir(tmp_path)
    assert exit_code(["run", "--plan", "plan.json", file]) == 2
    assert "did you mean 'bucket_bytes'" in capsys.readouterr().err


@pytest.mark.parametrize("ranks", [[], ["-n", "2"]])
@pytest.mark.parametrize(
    ("plan", "said"),
    [
        ("folder", "the plan folder\n  found: it is a folder"),
        ("nosuch", "'nosuch'"),
        ("nosuch,mode=sync", "it names 'nosuch'"),
    ],
)
def test_an_error_quotes_the_plan_that_was_written(tmp_path, monkeypatch, capsys, plan, said, ranks):
    file = file_with(tmp_path)
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path)
    assert exit_code(["run", *ranks, "--plan", plan, file]) == 2
    err = capsys.readouterr().err
    assert said in err
    assert "replicate=2,nosuch" not in err


def test_a_folder_named_like_axes_does_not_hide_the_axes(tmp_path, monkeypatch, capsys):
    file = file_with(tmp_path)
    (tmp_path / "replicate=2").mkdir()
    monkeypatch.chdir(tmp_path)
    assert exit_code(["run", "--on", "ray", "--dry-run", "--plan", "replicate=2", file]) == 0, capsys.readouterr().err


def test_an_unknown_command(capsys):
    assert main(["rnu"]) == 2
    assert "did you mean 'run'" in capsys.readouterr().err
    assert main(["train.py", "-x"]) == 2
    assert "fix: write `paceline run train.py`" in capsys.readouterr().err


# What only shows when the file runs: still one error, from the rank that has the cause, before step 1 where
# that can be. The change, the exit code, and what the error must say.
WHEN_IT_RUNS = {
    "loss returns a mean only": ("return F.mse_loss(model(x)[:, 0], y, reduction=\"sum\"), len(y)", "return F.mse_loss(model(x)[:, 0], y)", 1, "a mean alone can't be split over ranks"),
    "loss returns a vector": ("reduction=\"sum\"), len(y)", "reduction=\"none\"), len(y)", 1, "should be one floating-point number"),
    "loss's weight is text": ("reduction=\"sum\"), len(y)", "reduction=\"sum\"), 'all'", 1, "the loss's weight should be a number"),
    "loss weighs nothing": ("reduction=\"sum\"), len(y)", "reduction=\"sum\"), 0", 1, "its weights add up to 0"),
    "loss is NaN": ("reduction=\"sum\"), len(y)", "reduction=\"sum\") * float('nan'), len(y)", 1, "[rank 0, step 1] the loss should be a finite number"),
    "data set is empty": ("        return 37\n", "        return 0\n", 2, "it is empty"),
    "data set is empty, and a stream": ("    data=Numbers(),", "    data=lambda: iter([]),", 2, "it is a stream that ends before its first sample"),
    "data set is a generator": ("    data=Numbers(),", "    data=(n for n in range(9)),", 2, "data=samples in place of data=samples()"),
    "batch is no number": ("    batch_size=8", "    batch_size=2.5", 2, "batch_size should be a whole number"),
    "computed batch below the ranks": ("    batch_size=8", "    batch_size=int('1')", 2, "1 of them would get none"),
    "precision is unknown": ("precision=\"float64\"", "precision=\"fp64\"", 2, "did you mean 'float64'"),
    "clip below zero": ("clip_norm=1.0", "clip_norm=-1.0", 2, "clip_norm should be a number above 0"),
    "optimizer is an empty list": ("optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=0.01)", "optimizer=lambda model: []", 2, "it returned none"),
    "optimizers leave a parameter out": ("optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=0.01)", "optimizer=lambda model: [torch.optim.SGD(model[0].parameters())]", 2, "3.weight, 3.bias are in none of the 1"),
    "optimizer of another model": ("torch.optim.AdamW(model.parameters(), lr=0.01)", "torch.optim.AdamW(torch.nn.Linear(2, 2).parameters())", 2, "is not the model's"),
    "optimizer with a closure": ("torch.optim.AdamW(model.parameters(), lr=0.01)", "torch.optim.LBFGS(model.parameters())", 2, "LBFGS"),
    "model is a function": ("model=lambda: torch.nn.Sequential(", "model=lambda: (lambda *layers: abs)(", 2, "it made a builtin_function_or_method"),
    "a variable of torchrun": ("SEEN = os.environ.get(\"TEST_SEEN\")", "SEEN = os.environ[\"LOCAL_RANK\"]", 2, "write PACELINE_LOCAL_RANK"),
    "torch's process group": ("torch.manual_seed(0)", "torch.distributed.init_process_group(\"gloo\")", 2, "leave out init_process_group"),
    "the model is not called": ("def loss(model, batch):\n", "OTHER = torch.nn.Linear(4, 1).double()\ndef loss(_, batch):\n    model = OTHER\n", 1, "no parameter of the model has a gradient"),
    "data set has no length": ("    def __len__(self):\n        return 37\n", "", 2, "Numbers has [] and no len()"),
    "precision is a dtype": ("precision=\"float64\"", "precision=torch.bfloat16", 2, "did you mean 'bf16'"),
    "model differs between ranks": ("torch.nn.Linear(4, 8)", "torch.nn.Linear(4, 8, bias=paceline.rank() == 0)", 2, "all ranks should make the same model"),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("case", WHEN_IT_RUNS)
def test_when_it_runs(case, tmp_path):
    old, new, code, said = WHEN_IT_RUNS[case]
    ended = paceline(tmp_path, "run", "-n", "2", "--job", "a", file_with(tmp_path, old, new))
    error = ended.err[ended.err.index("paceline run: ") :]
    assert said in error, ended.err
    assert ended.code == code, error
    assert ended.err.count("fix: ") == 1, "told more than once"
    assert "Traceback" not in ended.err
    assert not [line for line in events_of(tmp_path) if line["event"] == "step"], "a step was taken"


@pytest.mark.slow
def test_files_with_names_of_modules_hide_none(tmp_path):
    for name in ("random.py", "torch.py"):
        (tmp_path / name).write_text("raise ImportError\n")
    write_workload(tmp_path, name="paceline.py")
    # -P as the installed command has it: the folder of the script, and not this one, is where imports begin.
    words = [sys.executable, "-P", *command("run", "-n", "2", "--job", "a", "paceline.py")[1:]]
    ended = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr


def events_of(tmp_path):
    path = tmp_path / "runs" / "a" / "events.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.mark.slow
def test_no_space_for_a_checkpoint_is_told_before_the_first_step(tmp_path):
    hook = "    pass\nimport shutil, collections\nshutil.disk_usage = lambda path: collections.namedtuple('U', 'total used free')(9, 9, 0)\n"
    ended = paceline(tmp_path, "run", "-n", "2", "--job", "a", write_workload(tmp_path, hook))
    assert ended.code == 1
    assert "0 MiB are free there" in ended.err
    assert not [line for line in events_of(tmp_path) if line["event"] == "step"]


@pytest.mark.slow
def test_resuming_with_another_model_names_the_first_difference(tmp_path):
    file = write_workload(tmp_path)
    assert paceline(tmp_path, "run", "-n", "2", "--job", "a", file).code == 0
    file.write_text(file.read_text().replace("Linear(4, 8)", "Linear(4, 9)").replace("Linear(8, 1)", "Linear(9, 1)"))
    ended = paceline(tmp_path, "run", "-n", "2", "--job", "a", "--resume", file)
    assert ended.code == 2
    assert "0.weight has the shape (8, 4) in it and (9, 4) in the model" in ended.err


@pytest.mark.slow
def test_all_checkpoints_damaged_is_refused_before_any_process(tmp_path):
    file = write_workload(tmp_path)
    assert paceline(tmp_path, "run", "--job", "a", file).code == 0
    for path in (tmp_path / "runs" / "a" / "checkpoints").glob("*/*.safetensors"):
        path.write_bytes(path.read_bytes()[:-1])
    ended = paceline(tmp_path, "run", "--job", "a", "--resume", file)
    assert ended.code == 2
    assert "none of the 1 there is whole" in ended.err


def test_more_ranks_than_cores_is_allowed_with_a_word(tmp_path):
    ranks = (os.cpu_count() or 1) + 1
    file = tmp_path / "words.py"
    file.write_text("import paceline\npaceline.init()\npaceline.barrier()\n")
    ended = paceline(tmp_path, "run", "-n", str(ranks), str(file))
    assert ended.code == 0, ended.err
    assert f"{ranks} ranks share {os.cpu_count()} cores" in ended.err


@pytest.mark.parametrize(
    ("job", "said"),
    [
        ("runs/none", "the servers of the run runs/none\n  found: there is no such folder"),
        ("host:99999", "the address 'host:99999'\n  found: it is neither unix:PATH nor HOST:PORT"),
        (".", "the servers of the run .\n  found: it has no servers.json"),
    ],
)
def test_servers_that_nobody_finds(job, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["server", "top", job]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert THREE_PARTS.search(error), error
