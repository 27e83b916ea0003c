"""A job whose ranks die is started again, as often as --max-restarts says, from its newest checkpoint."""

from __future__ import annotations

import io
import json
import os
import re
import signal

import pytest

from paceline.checkpoint.owner import RECORD, take
from paceline.cli.main import main
from paceline.nouns.errors import CheckpointError
from paceline.nouns.plan import Plan
from paceline.run.supervise import restarts
from paceline.run.supervise.progress import Progress, Screen
from paceline.run.supervise.restarts import Restarts, Tries
from paceline.run.supervise.supervisor import Ending, HostAssignment, JobRequest

from support.jobs import (
    LOOP,
    STEPS,
    events,
    leftovers,
    losses,
    paceline,
    rank_pids,
    send,
    start,
    wait_for,
    write_workload,
)

STEP = {"event": "step", "position": 24, "loss": 0.5, "at": 1.0, "samples": 8, "memory_bytes": 0}
CAUSE = {"rank": 1, "step": 3, "message": "no such thing", "type": "KeyError", "where": None, "traceback": "Traceback"}
CAUSE |= {"is_paceline": False, "is_peer_loss": False, "at": 1.0, "exit_code": 1}


def failed(exit_code=1, is_host_failure=False, **more):
    return Ending("failed", exit_code, {**CAUSE, **more}, 1, is_host_failure=is_host_failure)


DONE = Ending("done", 0)
KILLED = failed(is_host_failure=True, type="ProcessDied", message="rank 1's process was ended by SIGKILL", traceback="")
MPI_KILLED = failed(type="ProcessDied", message="rank 1's process was ended by SIGKILL", traceback="")
LAUNCHER = failed(
    type="ProcessDied", is_paceline=True, message="mpirun should run the ranks to their end", traceback=""
)
RAISED = failed()
REFUSED = failed(2, is_paceline=True, type="PlanError")
HUNG = failed(124, is_host_failure=True, is_paceline=True, type="Stalled", message="the job should make progress")
LOSS = failed(1, is_paceline=True, type="LossError")


@pytest.fixture
def tries(tmp_path, monkeypatch):
    """Runs tries that end as they are told, each after its last step; None: before the first."""

    def run(most, *told, between=lambda number: None, assignments=restarts.no_assignments, owned=None):
        requests = []

        class Told:
            def __init__(self, request, screen, asked_to_stop):
                requests.append(request)
                self.asked_to_stop = asked_to_stop
                self.request = request

            def run(self):
                ending, last = told[len(requests) - 1]
                progress = Progress(tmp_path)
                if last is not None:
                    with (tmp_path / "events.jsonl").open("a") as file:
                        file.write(json.dumps({**STEP, "step": last, "loss": float(len(requests))}) + "\n")
                    progress.read()
                between(len(requests), self.asked_to_stop)
                return ending, progress

            def restore_signals(self):
                pass

        monkeypatch.setattr(restarts, "Supervisor", Told)
        said = io.StringIO()
        job = Tries(Plan(mesh="replicate=2"), Restarts(most, assignments), Screen(io.StringIO(), said))
        request = JobRequest(tmp_path / "file.py", (), 2, tmp_path, environment={"A": "1"}, owned=owned)
        ending, progress = job.run(request)
        return ending, progress, requests, said.getvalue()

    return lambda *words, between=lambda *_: None, **more: run(*words, between=between, **more)


AGAIN = {
    "a kill": [(KILLED, 3), (DONE, 9)],
    "no progress for --stall-timeout": [(HUNG, 3), (DONE, 9)],
    "no progress for --stall-timeout before the first step": [(HUNG, None), (DONE, 9)],
    "a kill before the first step": [(KILLED, None), (DONE, 9)],
    "an exception after steps": [(RAISED, 3), (DONE, 9)],
    "an error of Paceline's after steps": [(LOSS, 3), (DONE, 9)],
    "a kill under mpirun before the first step": [(MPI_KILLED, None), (DONE, 9)],
    "mpirun after steps": [(LAUNCHER, 3), (DONE, 9)],
    "an exception before the first step of a restart": [(KILLED, 3), (RAISED, None), (DONE, 9)],
}


@pytest.mark.parametrize("case", AGAIN)
def test_a_job_is_started_again(case, tries):
    ending, progress, requests, said = tries(3, *AGAIN[case])
    number = len(AGAIN[case]) - 1
    assert (ending.status, len(requests), progress.restarts) == ("done", number + 1, number)
    assert [request.environment.get("PACELINE_RESTART") for request in requests] == [None, "1", "2"][: number + 1]
    assert {request.environment["A"] for request in requests} == {"1"}
    assert said.count(f"paceline: restart {number} of 3, from the beginning: the job has no checkpoint") == 1
    assert progress.last["step"] == 9


NOT_AGAIN = {
    "a job that is done": (DONE, 9, ""),
    "one that was stopped": (Ending("stopped", 143), 3, ""),
    "ranks that were killed on purpose": (
        Ending("failed", 1, None, 2),
        3,
        "no restart: its ranks were killed on purpose",
    ),
    "an error before the first step": (RAISED, None, "no restart: the job failed before its first step"),
    "a launcher that can't start": (LAUNCHER, None, "no restart: the job failed before its first step"),
    "a request that is refused": (REFUSED, None, "no restart: what the job asks for would be refused again"),
    "a request that is refused after steps": (REFUSED, 3, "no restart: what the job asks for would be refused again"),
}


@pytest.mark.parametrize("case", NOT_AGAIN)
def test_a_job_is_not_started_again(case, tries):
    ending, last, why = NOT_AGAIN[case]
    found, progress, requests, said = tries(3, (ending, last))
    assert found is ending
    assert (len(requests), progress.restarts) == (1, 0)
    assert why in said
    assert bool(why) == bool(said)


def test_restarts_without_the_option_start_and_say_nothing(tries):
    ending, _, requests, said = tries(0, (KILLED, 3))
    assert (ending, len(requests), said) == (KILLED, 1, "")


def test_every_restart_counts_and_one_without_progress_is_named(tries):
    last = failed(7)
    ending, progress, requests, said = tries(3, (KILLED, 3), (KILLED, 3), (KILLED, 5), (last, None))
    assert (ending, len(requests), progress.restarts) == (last, 4, 3)
    told = re.findall(r"paceline: restart .*", said)
    assert [line.partition("; ")[2] for line in told] == ["", "the last try came no further than step 3", ""]
    assert said.count("rank 1's process was ended by SIGKILL") == 3
    assert progress.first["loss"] == 1.0, "the first step is that of the first try"


@pytest.mark.parametrize("when", ["at the end of a try", "while hosts are asked"])
def test_a_signal_between_two_tries_ends_the_job(tries, when):
    noted = []

    def between(number, asked_to_stop):
        noted[:] = [asked_to_stop]
        if when == "at the end of a try":
            asked_to_stop.append(signal.SIGINT)

    def assignments(restart):
        noted[0].append(signal.SIGINT)
        return ()

    ending, _, requests, _ = tries(3, (KILLED, 3), (DONE, 9), between=between, assignments=assignments)
    assert len(requests) == 1
    wanted = ("failed", 1) if when == "at the end of a try" else ("stopped", 130)
    assert (ending.status, ending.exit_code) == wanted


def test_what_an_earlier_try_left_may_write_nothing(tries, tmp_path):
    tokens = []
    with take(tmp_path, print, "") as owned:
        tries(2, (KILLED, 3), (KILLED, 6), (DONE, 9), between=lambda *_: tokens.append(owned.owner.token), owned=owned)
    assert len(set(tokens)) == 3


def test_a_job_that_lost_its_run_directory_is_not_started_again(tries, tmp_path):
    def lose(number, asked_to_stop):
        record = json.loads((tmp_path / RECORD).read_text())
        (tmp_path / RECORD).write_text(json.dumps({**record, "token": "other"}))

    with take(tmp_path, print, "") as owned:
        ending, _, requests, said = tries(2, (KILLED, 3), between=lose, owned=owned)
    assert (ending.status, len(requests), said) == ("failed", 1, "")


def test_hosts_are_asked_for_anew(tries):
    made = {1: HostAssignment(None, None, None), 2: HostAssignment(None, None, None)}
    told = [(KILLED, 3), (KILLED, 4), (DONE, 9)]
    _, _, requests, _ = tries(2, *told, assignments=lambda restart: [made[restart]])
    assert [list(request.assignments) for request in requests] == [[], [made[1]], [made[2]]]


def test_a_run_without_a_whole_checkpoint_is_not_started_again(tries, monkeypatch):
    def none_is_whole(folder, report):
        raise CheckpointError("a checkpoint in it", "none of the 2 there is whole", "start under another --job")

    monkeypatch.setattr("paceline.run.directory.find_resume_point", none_is_whole)
    ending, _, requests, said = tries(3, (KILLED, 3), (DONE, 9))
    assert (ending, len(requests)) == (KILLED, 1)
    assert "paceline: no restart: a checkpoint in it\n  found: none of the 2 there is whole" in said


REFUSALS = {
    "below zero": (["--max-restarts", "-1"], "write 0 or more"),
    "over ssh": (["--on", "ssh", "-H", "h1:2", "--max-restarts", "1"], "and write --min-hosts N"),
    "elastic": (["--on", "ssh", "-H", "h1:2", "--min-hosts", "1", "--max-restarts", "1"], "goes on by itself after"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_where_there_are_no_restarts_the_option_is_refused(case, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words, said = REFUSALS[case]
    assert main(["run", *words, str(write_workload(tmp_path))]) == 2
    error = capsys.readouterr().err
    assert "--max-restarts" in error
    assert said in error
    assert not (tmp_path / "runs").exists()


# --- whole jobs

DIE = """    if job and job.step_number == {step} and job.rank == 1:
        if os.environ.get('PACELINE_RESTART', '0') in {tries!r}: {how}
"""
KILL = "os.kill(os.getpid(), signal.SIGKILL)"
RAISE = "raise KeyError('the cause')"


def run_of(tmp_path, name="a"):
    return tmp_path / "runs" / name


@pytest.mark.slow
@pytest.mark.parametrize("plan", [pytest.param("replicate=2", marks=pytest.mark.complete), "server=1,replicate=2"])
def test_restarts_give_the_losses_of_an_undisturbed_job(tmp_path, plan):
    undisturbed = paceline(tmp_path, "run", "--plan", plan, "--job", "whole", write_workload(tmp_path))
    assert undisturbed.code == 0, undisturbed.err
    how = KILL if plan == "replicate=2" else RAISE  # a killed worker of servers is replaced
    file = write_workload(tmp_path, DIE.format(step=6, tries="01", how=how))
    words = ("run", "--plan", plan, "--max-restarts", "3", "--job", "a", "--checkpoint-every", "4", "--json", file)
    ended = paceline(tmp_path, *words, TEST_PAUSE="0.1")  # checkpoints are written in the background
    assert ended.code == 0, ended.err
    result = json.loads(ended.out)
    assert (result["status"], result["restarts"], result["steps"], result["failure"]) == ("done", 2, STEPS, None)
    assert [event.get("restart", 0) for event in events(run_of(tmp_path), "start")] == [0, 1, 2]
    assert losses(run_of(tmp_path)) == losses(run_of(tmp_path, "whole"))
    assert ended.err.count("paceline: restart ") == 2
    assert "restart 1 of 3, from step-00000004" in ended.err
    assert re.search(r"step 20/20 .* restart 2\n", ended.err)
    assert not list((run_of(tmp_path) / "failures").iterdir())


@pytest.mark.slow
def test_the_exit_code_and_the_failure_are_those_of_the_last_try(tmp_path):
    hook = DIE.format(step=6, tries="0", how=KILL) + DIE.format(step=7, tries="12", how=RAISE)
    file = write_workload(tmp_path, hook)
    ended = paceline(tmp_path, "run", "-n", "2", "--max-restarts", "2", "--job", "a", "--json", file)
    assert ended.code == 1
    result = json.loads(ended.out)
    assert (result["status"], result["restarts"], result["failure"]["type"]) == ("failed", 2, "KeyError")
    assert ended.err.count("rank 1's process was ended by SIGKILL") == 1
    assert ended.err.count("Traceback (most recent call last)") == 2
    assert ended.err.count("from the beginning: the job has no checkpoint") == 2
    assert "(after 2 restarts)" in ended.err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("hook", "loop", "code"),
    [
        ("", "raise KeyError('at once')\n", 1),
        ("", "paceline.distribute(None)\n", 2),
        ("", LOOP + "        if job.step_number == 3: job.step(next(iter(job.batches())), 1, 2)\n", 1),
    ],
    ids=["error", "refused", "after steps"],
)
def test_what_would_come_again_is_tried_once(tmp_path, hook, loop, code):
    file = write_workload(tmp_path, hook, loop)
    file.write_text("import os\nopen('tries', 'a').write(os.environ['PACELINE_RANK'])\n" + file.read_text())
    ended = paceline(tmp_path, "run", "-n", "2", "--max-restarts", "2", "--job", "a", file)
    tries = 3 if "job.step" in loop else 1  # the fork server imports what the file imports, not the file
    assert sorted((tmp_path / "tries").read_text()) == sorted("01" * tries)
    assert ended.code == code, ended.err
    assert ended.err.count("paceline: no restart: ") == (tries == 1)


OWN_LOOP = """
import os, signal, time, torch, paceline
from torch.nn import functional as F
torch.manual_seed(0)
model = torch.nn.Linear(4, 1).double()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
data = torch.utils.data.TensorDataset(torch.randn(40, 4).double(), torch.randn(40, 1).double())
loader = torch.utils.data.DataLoader(data, batch_size=8, shuffle=True)
job, model, optimizer, loader = paceline.prepare(model, optimizer, loader)
for _ in job.epochs(4):
    for x, y in loader:
        optimizer.zero_grad()
        job.backward(F.mse_loss(model(x), y))
        optimizer.step()
        time.sleep(0.05)
        if job.step_number == 7 and job.rank == 1 and os.environ.get("PACELINE_RESTART", "0") in os.environ["TRIES"]:
            os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
def test_a_loop_of_ones_own_goes_on_in_the_middle_of_a_pass(tmp_path):
    file = tmp_path / "own.py"
    file.write_text(OWN_LOOP)
    words = ("run", "-n", "2", "--checkpoint-every", "3", "--max-restarts", "2")
    assert paceline(tmp_path, *words, "--job", "whole", file, TRIES="-").code == 0
    ended = paceline(tmp_path, *words, "--job", "a", "--json", file, TRIES="01")
    assert ended.code == 0, ended.err
    assert json.loads(ended.out)["restarts"] == 2
    assert "restart 1 of 2, from step-00000006" in ended.err
    whole = losses(run_of(tmp_path, "whole"))
    assert len(whole) == STEPS
    assert losses(run_of(tmp_path)) == whole


@pytest.mark.slow
def test_a_stop_after_a_restart_saves_and_ends(tmp_path):
    file = write_workload(tmp_path, DIE.format(step=3, tries="0", how=KILL))
    words = ("run", "-n", "2", "--max-restarts", "1", "--job", "a", "--checkpoint-every", "2", file)
    job = start(tmp_path, *words, TEST_PAUSE="0.2")
    assert wait_for(lambda: len(losses(run_of(tmp_path))) >= 6, 60)
    send(job, signal.SIGTERM)
    _, err = job.communicate(timeout=30)
    assert job.returncode == 0, err
    assert "stopped; saved as " in err
    assert wait_for(lambda: not leftovers(tmp_path))


@pytest.mark.slow
def test_ranks_that_are_killed_from_outside(tmp_path):
    job = start(
        tmp_path, "run", "-n", "2", "--max-restarts", "1", "--job", "a", write_workload(tmp_path), TEST_PAUSE="0.1"
    )
    assert wait_for(lambda: len(losses(run_of(tmp_path))) >= 3, 60)
    for pid in rank_pids(job):
        os.kill(pid, signal.SIGKILL)
    _, err = job.communicate(timeout=60)
    assert job.returncode == 0, err
    assert len(losses(run_of(tmp_path))) == STEPS
