"""What README.md and the pages in docs/ show works as it stands there."""

from __future__ import annotations

import argparse
import importlib
import re
import shlex
import shutil
import subprocess
import sys

import pytest

from paceline.cli.flags import check_place, check_rules
from paceline.cli.main import VERBS, WITH_FILE, _parse, main
from paceline.cli.run_command import host_limits
from paceline.run.cluster_file import read_cluster_file
from paceline.run.job_settings import TABLES
from paceline.run.request import place_of

from support.documented_commands import ROOT, Shown, shown
from support.jobs import marked, paceline
from support.sample import sampled

README = (ROOT / "README.md").read_text()
FEATURES = (ROOT / "docs" / "features.md").read_text()
OF_TRAIN_PY = ("README.md", "docs/features.md")  # pages whose options belong to `paceline run ... train.py`
SHOWN = shown()
COMMANDS = [one for one in SHOWN if not one.text.startswith("-")]
OPTIONS = [one for one in SHOWN if one.text.startswith("-")]
OWN = [one for one in COMMANDS if one.own]

# Commands that are parsed, and not run here: how they begin, and why.
NOT_RUN = {
    "paceline run -n 2 loop.py": "test_the_changed_loop_runs_on_one_and_two_ranks runs it",
    "paceline run --on": "other hosts: tests/integration, tests/launch",
    "paceline run -n 2 classifier.py": "tests/examples/test_loops.py runs it",
    "paceline run -n 2 --checkpoint-every 20 classifier.py": "the same",
    "paceline run -n 2 --resume classifier.py": "the same",
    "paceline verify -n 2 classifier.py": "the same",
    "paceline plan -n 4 classifier.py": "tests/cli/test_plan_loop.py plans loops",
    "paceline plan -n 4 --explain-memory classifier.py": "the same",
    "paceline plan --explain-oom --device V100-16GB classifier.py": "the same",
    "paceline run -n 2 finetune.py": "tests/examples/test_finetuning.py runs it",
    "paceline run --plan shard=2 finetune.py": "the same",
    "paceline run --plan tensor=2 finetune.py": "the same",
    "paceline run -n 2 lora.py": "the same",
    "paceline run --plan tensor=2 lora.py": "the same",
    "paceline run -n 2 lightning_module.py": "tests/integrations/test_lightning_page.py runs it",
    "paceline run --plan shard=2 lightning_module.py": "the same",
    "paceline run -n 2 contrastive.py": "tests/comm/test_collectives_page.py runs it",
    "paceline run --job": "tests/examples/test_tutorial.py runs it",
    "paceline run -n 2 --job killed": "the same",
    "paceline run --resume --job killed": "the same",
    "paceline verify --plan tensor=2 letters.py": "the same",
    "paceline plan --plan replicate=2 letters.py": "the same",
    "paceline plan --plan shard=2 letters.py": "the same",
    "paceline plan --plan tensor=2 --explain-layout letters.py": "the same",
    "paceline plan --plan pipeline=2,schedule=1f1b --schedule-picture letters.py": "the same",
    "paceline plan --explain-memory letters.py": "scripts/tutorial_pictures.py runs it for each plan",
    "paceline plan --plan context=4,context_by=ring --explain-layout long.py": "tests/cli/test_split_pages.py runs it",
    "paceline plan --explain-memory long.py": "the same",
    "paceline plan --plan expert=2 --explain-layout mixture.py": "tests/cli/test_split_pages.py runs it",
    "paceline verify --plan expert=2 mixture.py": "the same",
    "paceline verify --plan context=2 long.py": "the same",
    "paceline submit": "it sends a job to a scheduler: tests/integration, tests/launch",
    "paceline explain submit": "it reads a cluster file: tests/cli/test_explain.py",
    "paceline run -n 2 examples/glue": "tests/examples trains it",
    "paceline run -n 2 examples/distil": "tests/examples/test_distil.py trains it",
    "paceline verify -n 2 examples/distil": "the same",
    "paceline run -n 2 examples/forecast": "tests/examples/test_forecast.py trains it",
    "paceline run --plan shard=2 examples/forecast": "the same",
    "paceline verify -n 2 examples/forecast": "the same",
    "paceline run -n 2 examples/gpt": "tests/examples/test_gpt.py trains it",
    "paceline verify -n 2 examples/gpt": "the same",
    "paceline run -n 2 examples/typographic": "tests/examples/test_typographic.py trains it, with fewer data",
    "paceline run -n 2 examples/racer": "tests/examples/test_racer.py trains it",
    "paceline run -n 2 --plan server=1,mode=async examples/racer": "the same, with servers",
    "paceline run -n 4 --plan server=2,mode=stale,staleness=4 examples/racer": "the same, with two actors",
    "paceline run -n 2 examples/embed": "tests/examples/test_embed.py trains it, with fewer data",
    "paceline verify -n 2 examples/embed": "the same",
    "paceline run -n 2 examples/logs": "tests/examples/test_logs.py trains it",
    "paceline run -n 2 examples/contracts": "tests/examples/test_contracts.py trains it",
    "paceline plan --plan tensor=2 --explain-layout examples/logs": "the same file is verified there",
    "paceline run -n 2 examples/zero": "tests/examples/test_zero.py trains it, with fewer steps",
    "paceline verify -n 2 examples/zero": "the same",
    "mpirun -n 4 paceline": "tests/integration/test_launchers.py starts ranks with mpirun",
    "srun paceline": "the same, with srun",
    "paceline doctor -H": "it asks other hosts",
    "paceline horovodrun": "tests/horovod/test_horovodrun.py and test_horovod_examples.py run it",
    "paceline doctor --hostfile": "it asks other hosts",
    "paceline doctor": "it says what this machine lacks: tests/cli/test_doctor.py",
    "paceline top": "it reads a run: tests/run/test_times.py",
    "paceline why": "it asks a running job: tests/run/test_causes.py",
    "paceline dashboard": "it serves until Ctrl-C: tests/dashboard",
    "paceline profile --job": "it needs a run: tests/run/test_prediction.py",
    "paceline timeline": "it reads a run: tests/run/test_times.py",
    "paceline logs": "it reads a run: tests/cli/test_kept_output.py",
    "paceline runs": "it reads a folder of runs: tests/cli/test_runs.py",
    "paceline server": "tests/server; coordinator and servers run until a job ends",
    "paceline demo": "tests/demo",
    "paceline examples": "tests/demo/test_examples_command.py; the installed one: tests/integration/test_installed.py",
    "paceline plan --explain-oom --device V100-16GB bert.py": "its file needs transformers",
    "paceline verify train.py --plan replicate=2,tensor=2": "four ranks of tests/verify; the shorter one is run",
}
# Commands of other programs, which nothing here can parse, and why they are not run.
NEITHER = {
    "make demo": "tests/demo",
    "python -m build": "tests/integration/test_release.py runs it",
    "python examples/glue/sample.py data": "tests/integration/test_installed.py runs its copy",
    "python finetune.py": "tests/examples/test_finetuning.py runs it",
    "torchrun --nproc-per-node 2 finetune.py": "tests/integrations/test_transformers.py starts such ranks",
    "python lora.py": "the same, by the command",
    "python classifier.py": "tests/examples/test_loops.py runs it",
    "scripts/bench": "tests/benchmarks/test_bench_command.py reads it",
    "python benchmarks/loops/count.py": "tests/examples/test_loop_lines.py runs it",
    "torchrun --nnodes": "another library's: docs/migrate.md",
    "torchrun --max-restarts": "the same",
    "python lightning_module.py": "tests/integrations/test_lightning_page.py runs it",
    "python letters.py": "tests/examples/test_tutorial.py runs it",
    "python scripts/tutorial_pictures.py": "the same test draws its pictures",
    "python benchmarks/train_examples.py": "hours; tests/examples/test_examples_page.py checks what it wrote",
    "python benchmarks/trials/architectures.py": "an hour; tests/trials/test_architectures.py runs it, with few models",
    "make test": "this is it",
    "make docs": "scripts/check builds the documentation",
    "pip install": "it would change the installation that the tests run in",
    "kubectl": "it needs a cluster",
    "srun": "it needs a Slurm allocation: tests/integration/test_launchers.py",
    "mpirun": "it needs an MPI: tests/integration/test_launchers.py",
    "ssh h1 true": "it needs another host",
    "ssh -L": "the same",
    "python contrastive.py": "tests/comm/test_collectives_page.py runs it",
    "python examples/glue": "tests/examples trains it",
    "python examples/distil": "tests/examples/test_distil.py trains it",
    "python examples/forecast": "tests/examples/test_forecast.py trains it",
    "python examples/gpt": "tests/examples/test_gpt.py trains it",
    "python examples/typographic": "tests/examples/test_typographic.py trains it, with fewer data",
    "python examples/racer": "tests/examples/test_racer.py trains it",
    "python examples/contracts": "tests/examples/test_contracts.py trains it, with fewer contracts",
    "python examples/embed": "tests/examples/test_embed.py trains it, and searches",
    "python examples/zero": "tests/examples/test_zero.py trains it, with fewer steps",
    "python examples/logs": "tests/examples/test_logs.py trains it, and checks the parser",
}
# Options that are another program's, or are no option.
NOT_OURS = {
    "--conf": "Airflow's",
    **dict.fromkeys(("-u", "-W", "-B"), "Python's"),
    **dict.fromkeys(("--local-rank", "--local_rank"), "torch.distributed.launch's"),
    "--gang-scheduling": "the MPI Operator's",
    "--share-packages": "scripts/release's",
    "--published": "scripts/bench's",
}
# What the tables of docs/features.md add in brackets or after "or", to the option before it.
ALTERNATIVES = {
    "--plan shard=4": ["--plan shard=4,zero=1", "--plan shard=4,zero=2", "--plan shard=4,zero=3"],
    "--plan tensor=2": ["--plan tensor=2,sequence=on"],
    "--plan pipeline=2,schedule=1f1b": [
        f"--plan pipeline=2,schedule={name}" for name in ("gpipe", "interleaved", "zero_bubble")
    ],
    "--plan shard=2,checkpointing=full": ["--plan shard=2,checkpointing=selective"],
    "-n 2 --plan compression=bf16": [f"-n 2 --plan compression={name}" for name in ("fp16", "powersgd", "topk")],
}


def is_listed(one, table):
    return any(one.text.startswith(beginning) for beginning in table)


def runnable():
    """The words of every command that is run: those of the pages, and the options of OF_TRAIN_PY as commands."""
    commands = [one.words for one in COMMANDS if one.own[:1] and not is_listed(one, NOT_RUN) and len(one.own) > 1]
    options = [one.text for one in OPTIONS if one.page in OF_TRAIN_PY and " " in one.text and "host" not in one.text]
    for text in options:
        for line in (text, *ALTERNATIVES.get(text, [])):
            ranks = [] if "--plan" in line or "-n " in line else ["-n", "2"]
            commands.append(["paceline", "run", *ranks, *shlex.split(line), "train.py"])
    unique = {shlex.join(words): words for words in commands}
    elsewhere = ("--resume", "export", "s3://")  # of a run that there is; of a store: tests/checkpoint/test_copies.py
    return [words for line, words in unique.items() if not any(part in line for part in elsewhere)]


def test_the_pages_show_what_is_looked_for():
    assert len(OWN) > 40
    assert len(OPTIONS) > 60
    assert len(runnable()) > 20
    for words in (["paceline", "run", "-n", "2", "train.py"], ["paceline", "run", "--plan", "shard=4", "train.py"]):
        assert words in runnable()


@pytest.mark.parametrize("table", [NOT_RUN, NEITHER, NOT_OURS, ALTERNATIVES], ids=["run", "parse", "flags", "more"])
def test_no_exception_outlives_what_it_excepts(table):
    unused = [beginning for beginning in table if not any(one.text.startswith(beginning) for one in SHOWN)]
    assert unused == []


def test_alternatives_are_those_of_the_table():
    rows = [line for line in FEATURES.splitlines() if line.startswith("| ")]
    for option, others in ALTERNATIVES.items():
        (row,) = [row for row in rows if f"`{option}`" in row][:1]
        for other in others:
            last = re.split(r"[ =]", other)[-1]
            assert f"`{last}`" in row or f"={last}`" in row, (option, last)


def test_every_command_is_run_parsed_or_listed():
    lost = [one for one in COMMANDS if not one.own and not is_listed(one, NEITHER)]
    assert [one.text for one in lost] == [
        "python loop.py",
        "python train.py",
        "torchrun --nproc-per-node 2 train.py",
    ]  # they are run below


def read(one: Shown) -> argparse.Namespace:
    """The arguments of a command that a page shows; `...` stands for what is left out."""
    words = [
        word for before, word in zip(["", *one.own], one.own, strict=False) if word != "..." or before == "--image"
    ]
    is_cut = len(words) < len(one.own)
    verb = words[0]
    if is_cut and verb in WITH_FILE:
        words.append("train.py")
    return _parse(words, verb, importlib.import_module(f"paceline.cli.{verb}_command"))


@pytest.mark.parametrize("page", sorted({one.page for one in OWN}))
def test_every_command_is_read_and_its_flags_apply(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for one in (one for one in OWN if one.page == page and len(one.own) > (2 if one.own[0] == "submit" else 1)):
        parsed = read(one)
        assert not getattr(parsed, "misplaced", [])
        if one.own[0] == "run":
            check_place(parsed.flags, place_of(None, parsed.on, parsed.job, host_limits(parsed)))
            check_rules("run", parsed)
        else:
            check_rules(one.own[0], parsed)


CLUSTER = re.search(r"```toml\n(.*?)```", (ROOT / "docs/hosts.md").read_text(), re.DOTALL).group(1)


def test_cluster_file_of_the_page_has_all_tables_and_keys(tmp_path):
    (tmp_path / "cluster.toml").write_text(CLUSTER)
    tables = read_cluster_file(tmp_path / "cluster.toml").tables
    assert set(tables) == set(TABLES)
    for name in ("ssh", "mpi", "ray"):
        assert set(tables[name]) == set(TABLES[name])


def jobs_in_full():
    """Every job of README's file that a page shows in full, and the options of README and features.md as such."""
    for one in OWN:
        if one.own[0] in ("run", "submit") and len(one.own) > 2 and not {"...", "--check", "--resume"} & {*one.own}:
            yield one.own
    for one in OPTIONS:
        if one.page in OF_TRAIN_PY and " " in one.text:
            ranks = [] if "--plan" in one.text or "host" in one.text else ["-n", "2"]
            yield ["run", *ranks, *one.words, "train.py"]


@pytest.mark.parametrize("words", [words for words in jobs_in_full() if words[-1] == "train.py"], ids=" ".join)
def test_a_dry_run_of_a_shown_job_says_what_would_be_started(words, tmp_path, monkeypatch, capsys):
    write_readme_file(tmp_path)
    for name, said in (("mpirun", "mpirun (Open MPI) 5.0"), ("ssh", ""), ("hosts.sh", "h1:2")):
        program = tmp_path / name
        program.write_text(f"#!/bin/sh\necho '{said}'\n")
        program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cluster.toml").write_text(CLUSTER)
    at = 1 + (words[0] == "submit")
    assert main([*words[:at], "--dry-run", *words[at:]]) == 0
    assert capsys.readouterr().out


def test_every_option_that_a_page_names_is_a_commands():
    known = {"--help", "-h"}
    for verb in VERBS:
        parser = argparse.ArgumentParser(allow_abbrev=False)
        importlib.import_module(f"paceline.cli.{verb}_command").add_arguments(parser)
        known |= set(flags_of(parser))
    for main_file in (ROOT / "examples").glob("*/*.py"):
        known |= set(re.findall(r'"(--[a-z-]+)"', main_file.read_text()))
    named = {word.split("=")[0]: one for one in OPTIONS for word in one.words if word.startswith("-")}
    assert {flag: one.page for flag, one in named.items() if flag not in known and flag not in NOT_OURS} == {}


def flags_of(parser):
    """Every flag of a parser and of those below it."""
    for action in parser._actions:
        yield from action.option_strings
        for below in (action.choices or {}).values() if isinstance(action, argparse._SubParsersAction) else ():
            yield from flags_of(below)


def write_readme_file(folder, tiny=False):
    """README's train.py; `tiny`: with a few steps."""
    text = re.search(r"```python\n(.*?)```", README, re.DOTALL).group(1)
    if tiny:
        assert "torch.randn(4096, 20)" in text
        assert "epochs=3" in text
        assert "% 64 == 0" in text
        text = text.replace("torch.randn(4096, 20)", "torch.randn(256, 20)").replace("epochs=3", "epochs=1")
        text = text.replace("% 64 == 0", "% 4 == 0")
    (folder / "train.py").write_text(text)


def loop_before_and_after():
    """README's plain loop, and the same with its lines changed: what the diff takes away, and what it adds."""
    lines = re.search(r"```diff\n(.*?)```", README, re.DOTALL).group(1).splitlines()
    before = "\n".join(line[1:] for line in lines if not line.startswith("+"))
    after = "\n".join(line[1:] for line in lines if not line.startswith("-"))
    return before + "\n", after + "\n"


def test_readmes_diff_changes_five_lines():
    lines = re.search(r"```diff\n(.*?)```", README, re.DOTALL).group(1).splitlines()
    assert "## Change five lines" in README
    assert len([line for line in lines if line.startswith("+")]) == 5
    assert len([line for line in lines if line.startswith("-")]) == 3  # each is replaced


@pytest.mark.slow
def test_the_changed_loop_runs_on_one_and_two_ranks(tmp_path):
    before, after = loop_before_and_after()
    plain = subprocess.run([sys.executable, "-c", before], cwd=tmp_path, capture_output=True, text=True)
    assert plain.returncode == 0, plain.stderr
    total = "sum(parameter.abs().sum().item() for parameter in model.parameters())"
    (tmp_path / "loop.py").write_text(f"{after}print(f'sum {{{total}:.3f}}')\n")
    alone = subprocess.run([sys.executable, "loop.py"], cwd=tmp_path, capture_output=True, text=True)
    assert alone.returncode == 0, alone.stderr
    two = paceline(tmp_path, "run", "-n", "2", "loop.py")
    assert two.code == 0, two.err
    (expected,) = re.findall(r"sum ([\d.]+)", alone.stdout)
    found = re.findall(r"\[\d\] sum ([\d.]+)", two.out)
    assert len(found) == 2
    assert [float(one) for one in found] == pytest.approx([float(expected)] * 2, rel=1e-4)


@pytest.mark.slow
def test_the_first_example_runs_alone_and_with_two_ranks(tmp_path):
    write_readme_file(tmp_path)
    alone = subprocess.run([sys.executable, "train.py"], cwd=tmp_path, capture_output=True, text=True)
    assert alone.returncode == 0, alone.stderr
    two = paceline(tmp_path, "run", "-n", "2", "train.py")
    assert two.code == 0, two.err
    printed = re.findall(r"step \d+  loss [\d.]+", alone.stdout)
    assert len(printed) == 3
    assert re.findall(r"\[0\] (step \d+  loss [\d.]+)", two.out) == printed
    assert (tmp_path / "out" / "manifest.json").exists()
    finished = paceline(tmp_path, "run", "--resume", "-n", "2", "train.py")
    assert finished.code == 0, finished.err  # no step is left to take


@pytest.mark.parametrize(
    "words",
    [pytest.param(words, marks=sampled(row, 0), id=" ".join(words)) for row, words in enumerate(runnable())],
)
def test_a_shown_command_works_on_readmes_file(words, tmp_path):
    write_readme_file(tmp_path, tiny=True)
    done = paceline(tmp_path, *words[1:])
    assert done.code == 0, done.out + done.err
    if words[1] == "run":
        assert "step 4  loss" in done.out
        assert (tmp_path / "out" / "manifest.json").exists()
    else:
        assert done.out.strip()


@pytest.mark.integration
def test_a_run_is_resumed_and_exported_as_shown(tmp_path):
    resume, export = ("paceline run --resume -n 2 train.py", "paceline export runs/JOB --to hf DIR")
    assert {resume, export} <= {one.text for one in OWN}
    write_readme_file(tmp_path, tiny=True)
    assert paceline(tmp_path, "run", "--checkpoint-every", "2", "train.py").code == 0
    (run,) = (tmp_path / "runs").iterdir()
    shutil.rmtree(run / "checkpoints" / "step-00000004")  # as if it had crashed before
    again = paceline(tmp_path, *resume.split()[1:])
    assert again.code == 0, again.err
    assert "goes on at step-00000002" in again.err
    done = paceline(tmp_path, *export.replace("JOB", run.name).split()[1:])
    assert done.code == 0, done.err
    assert (tmp_path / "DIR" / "model.safetensors").exists()


@pytest.mark.integration
def test_torchrun_starts_readmes_file(tmp_path):
    write_readme_file(tmp_path, tiny=True)
    words = ["torchrun", "--nproc-per-node", "2", "train.py"]
    assert " ".join(words) in {one.text for one in COMMANDS}
    program = [sys.executable, "-m", "torch.distributed.run", *words[1:]]
    done = subprocess.run(
        program,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        env=marked(tmp_path, {"OMP_NUM_THREADS": "1"}),
    )
    assert done.returncode == 0, done.stderr
    assert "step 4  loss" in done.stdout
