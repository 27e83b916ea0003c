"""The loops of examples/loops: the same end on any number of ranks in float64, also after a kill; verify agrees."""

from __future__ import annotations

import contextlib
import functools
import io
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.checkpoint.manifest import list_checkpoints
from paceline.nouns.plan import Plan
from paceline.run.directory import RunChoice, new_run, write_start

from support.jobs import paceline
from support.ranks import preload, run_ranks
from support.sample import sampled

preload("paceline.train.loop_job", "paceline.run.rank.worker")
LOOPS = Path(__file__).parents[2] / "examples" / "loops"
NAMES = sorted(path.stem for path in LOOPS.glob("*.py"))
USUAL = ("gan", "tokens")  # also killed under one plan and resumed under another
HEAD = "import os, signal, torch\ntorch.set_default_dtype(torch.float64)\n"
TAIL = """
trained = [parameter for parameter in job.model.parameters() if parameter.requires_grad]
whole = [job.parallel.models.full_tensor(parameter) for parameter in trained]  # a rank may have pieces
total = sum(float((value * torch.arange(1.0, 1 + value.numel()).view_as(value)).sum()) for value in whole)
print("rank", job.rank, "ends at", job.step_number, job.position, repr(total))
"""
# Ends as kill -9 does, in the middle of the training, once.
KILL = """
from paceline.train.loop_job import LoopJob
plain_end_step = LoopJob.end_step
def end_step(job, goes_on=False):
    plain_end_step(job, goes_on)
    if job.step_number == int(os.environ.get("KILL_AT", -1)):
        os.kill(os.getpid(), signal.SIGKILL)
LoopJob.end_step = end_step
"""
AT = 11  # where they are killed; every loop takes more steps


def write(folder, name):
    """A loop that says where it ends."""
    file = folder / f"{name}.py"
    file.write_text(HEAD + KILL + (LOOPS / f"{name}.py").read_text() + TAIL)
    return file


def ends(output):
    """What the ranks say: step, position and a sum over the parameters."""
    found = re.findall(r"ends at (\d+) (\d+) (\S+)", output)
    return [(int(step), int(position), float(total)) for step, position, total in found]


def train(folder, name, ranks, *flags, **environment):
    ended = paceline(folder, "run", "-n", str(ranks), *flags, write(folder, name), **environment)
    return ended, ends(ended.out)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Where a loop ends on one rank, by its name."""

    @functools.cache
    def ends_at(name):
        ended, found = train(tmp_path_factory.mktemp("alone"), name, 1, "--job", "alone")
        assert ended.code == 0, ended.err
        assert len(found) == 1
        return found[0]

    return ends_at


def be_rank(rank, run_dir, file):
    """Run the file as a rank of `paceline run` does, without the processes above it; return what it prints."""
    from paceline.run.rank.worker import run_rank  # it imports torch, and the fork server has

    os.environ["PACELINE_RUN_DIR"] = str(run_dir)
    with contextlib.redirect_stdout(io.StringIO()) as said:
        code = run_rank(str(file), [])
    assert code == 0, (run_dir / "failures" / f"{rank}.json").read_text()
    return said.getvalue()


def ends_under(folder, name, plan):
    """Where the ranks of a plan end: forks of the tests' own fork server, which has imported torch."""
    file = write(folder, name)
    with new_run(RunChoice(runs=folder / "runs", job=plan), file, print) as owned:
        run_dir = owned.folder
    write_start(run_dir, Plan.parse(plan), file, [])
    said = run_ranks(Plan.parse(plan).world_size, be_rank, run_dir, file)
    assert list_checkpoints(run_dir / "checkpoints"), "the last step is not saved"
    return [end for text in said for end in ends(text)]


def check_same(here, there):
    """The same steps and samples; parameters up to rounding, as Adam enlarges it."""
    assert [end[:2] for end in here] == [there[:2]] * len(here)
    assert {end[2] for end in here} == {here[0][2]}  # bit for bit between ranks
    assert here[0][2] == pytest.approx(there[2], rel=1e-6)


def test_there_are_nine_in_the_table_of_the_page():
    page = (LOOPS.parents[1] / "docs" / "loops.md").read_text()
    assert sorted(re.findall(r"\| `(\w+)\.py` \|", page)) == NAMES
    assert len(NAMES) == 9


def test_the_page_shows_the_classifier():
    page = (LOOPS.parents[1] / "docs" / "loops.md").read_text()
    (shown,) = re.findall(r"^<!-- test: classifier.py -->\n```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    _, _, code = (LOOPS / "classifier.py").read_text().partition('"""\n\n')
    assert shown == code


KILLED = [
    pytest.param(name, plan, marks=sampled(row, column, of=5))
    for column, plan in enumerate(("replicate=2", "tensor=2"))
    for row, name in enumerate(NAMES)
]
FOUR = ("replicate=4", *(f"replicate=2,shard=2,zero={level}" for level in (1, 2, 3)), "replicate=2,tensor=2")


@pytest.mark.parametrize(("name", "plan"), KILLED)
def test_two_ranks_end_as_one_does_also_after_a_kill(tmp_path, alone, plan, name):
    assert alone(name)[0] > AT
    flags = ("--job", "both", "--plan", plan)
    ended, both = train(tmp_path, name, 2, *flags, "--checkpoint-every", "3", KILL_AT=str(AT))
    assert ended.code == 1, ended.err
    assert not both
    ended, both = train(tmp_path, name, 2, *flags, "--resume")
    assert ended.code == 0, ended.err
    assert "goes on at step-0000000" in ended.err
    assert len(both) == 2
    check_same(both, alone(name))


def table(plans, of):
    """Cells of all loops and these plans, of which CI runs one of so many."""
    return [
        pytest.param(name, plan, marks=sampled(row, column, of))
        for column, plan in enumerate(plans)
        for row, name in enumerate(NAMES)
    ]


@pytest.mark.parametrize(("name", "plan"), table(FOUR, of=5))
def test_four_ranks_end_as_one_does(tmp_path, alone, name, plan):
    all_four = ends_under(tmp_path, name, plan)
    assert len(all_four) == 4
    check_same(all_four, alone(name))


@pytest.mark.integration
@pytest.mark.parametrize("name", USUAL)
@pytest.mark.complete  # tests/checkpoint/test_any_mesh.py
def test_a_killed_job_goes_on_under_another_plan(tmp_path, alone, name):
    shard = ("--plan", "shard=2")
    train(tmp_path, name, 2, "--job", "a", "--checkpoint-every", "3", *shard, KILL_AT=str(AT))
    for job, plan in (("b", ()), ("c", shard), ("d", ("--plan", "shard=2,zero=1")), ("e", ("--plan", "tensor=2"))):
        shutil.copytree(tmp_path / "runs" / "a", tmp_path / "runs" / job)
        ended, both = train(tmp_path, name, 2, "--job", job, "--resume", *plan)
        assert ended.code == 0, ended.err
        check_same(both, alone(name))


@pytest.mark.parametrize(("name", "plan"), table(("replicate=2", "shard=2", "tensor=2"), of=9))
def test_verify_finds_the_steps_of_two_ranks_those_of_one(tmp_path, name, plan):
    ended = paceline(tmp_path, "verify", "--plan", plan, LOOPS / f"{name}.py")
    assert ended.code == 0, ended.out + ended.err
    assert re.search(r"^step float64 +ok ", ended.out, re.MULTILINE), ended.out


@pytest.mark.slow
def test_a_loop_runs_as_a_plain_file_too(tmp_path, alone):
    file = write(tmp_path, "classifier")
    done = subprocess.run([sys.executable, file], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert ends(done.stdout) == [alone("classifier")]


@pytest.mark.integration
def test_loops_classifier_killed_on_two_ranks_resumes_on_one(tmp_path, alone):
    train(tmp_path, "classifier", 2, "--job", "other", "--checkpoint-every", "3", KILL_AT=str(AT))
    ended, ends_of_one = train(tmp_path, "classifier", 1, "--job", "other", "--resume")
    assert ended.code == 0, ended.err
    check_same(ends_of_one, alone("classifier"))
