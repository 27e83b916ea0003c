"""Run the first steps of a loop of the user's own as one rank under a plan, and write what its steps hold and send.

Started as `python -m paceline.profile.profile_loop ...`.

It runs in a child process: the user's file is run, as `python FILE` does, until its loop has taken the steps that
are wanted. Nothing is saved. Standard output has one JSON object: where the profile is, or why there is none.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import sys
import traceback
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

import paceline
from paceline.comm import api
from paceline.comm.fake_process_group import fake_world
from paceline.launch.process_exit import die_with_parent, exit_process
from paceline.launch.simulators import answered, handed_requests
from paceline.nouns.errors import PacelineError, WorkloadError
from paceline.nouns.loop_plan import check_plan_of_loop
from paceline.nouns.loop_profile import LoopProfile
from paceline.nouns.parts import check_sinks
from paceline.nouns.patching import patched
from paceline.nouns.plan import Plan
from paceline.nouns.profile import Profile
from paceline.nouns.sink import MakeSink
from paceline.nouns.user_program import UserProgram
from paceline.parallel.low_precision_states import not_compiled
from paceline.profile.gpu_dispatch import as_on_gpu
from paceline.profile.loop_recorder import (
    AllStepsRecorded,
    LoneJob,
    LoopAllocations,
    LoopRecorder,
)
from paceline.profile.simulate import check_can_try, check_dense
from paceline.rendezvous.launcher_env import LauncherPosition, variables_of
from paceline.rendezvous.launchers import NAMES
from paceline.torch_private.optim import switch_off
from paceline.train.loop_objects import sort_objects, updated_by
from paceline.train.seed import seed_everything

_OF_ALLOCATIONS = ("SLURM_NTASKS", "SLURM_NPROCS", "SLURM_NNODES")  # Slurm's numbers of ranks and hosts
_NOWHERE = ("127.0.0.1", 1)  # where the ranks would meet


def main() -> int:
    """Answer one request.

    Arguments: the folder for the profile, and then the user's file and arguments.
    """
    die_with_parent()
    request = next(handed_requests())
    folder = Path(sys.argv[1])
    program = UserProgram.of_this_process(sys.argv[2])
    program.enter(sys.argv[3:])
    answers = sys.stdout
    sys.stdout = sys.stderr  # what the user's file prints is no answer

    def write(path: Path) -> None:
        plan = Plan.of(request["plan"], "the request")
        profile_loop(program, plan, request["rank"], request["device"]).write(path)

    print(answered(0, folder, write), file=answers, flush=True)
    return 0


def profile_loop(program: UserProgram, plan: Plan, rank: int = 0, device: str = "cpu") -> LoopProfile:
    """Run a program's loop as `rank` of a plan, and return what its steps hold and send. It changes this process.

    Args:
        program: the user's program.
        plan: the plan of the job.
        rank: the rank whose steps are profiled.
        device: "cpu", or "cuda" for the memory that a GPU's allocator would take.

    Raises:
        PlanError: a loop can't be trained, or not tried out, under the plan.
        WorkloadError: the file raised, or ended before a step.
    """
    check_plan_of_loop(plan)
    check_can_try(plan)
    plan = replace(plan, check="off")  # there are no other ranks with which a step could be compared
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // plan.world_size))  # as `paceline run` shares them out
    recorders: list[LoopRecorder] = []
    with contextlib.ExitStack() as stack, fake_world(rank, plan.world_size):
        _be_rank(plan, rank)

        def prepare(
            *objects: Any,
            seed: int = 0,
            shard_frozen: bool = False,
            whole: Iterable[torch.nn.Module] = (),
            by_part: Iterable[torch.nn.Module] = (),
            sinks: Sequence[MakeSink] = (),
        ) -> tuple[Any, ...]:
            check_sinks(sinks)  # none is made
            _check_is_first(recorders)
            found = sort_objects(objects, whole, by_part)
            for scaler in found.scalers:
                switch_off(scaler)  # fake gradients can't be looked at; scaling them takes no memory
            recorder = LoopAllocations(loads_elsewhere=device != "cpu")
            stack.enter_context(_watching(recorder, device, plan.optimizer_states))
            job = LoneJob(found, plan.without_shared_memory(), seed, shard_frozen)
            check_dense(job.parallel.placed, plan.world_size)
            recorders.append(LoopRecorder(job, recorder))
            recorders[0].begin()
            replaced = (job.batches_of(item) if item is found.loader else item for item in objects)
            return job, *replaced

        api.init()
        seed_everything(0)
        with patched(paceline, prepare=prepare):
            try:
                _run_file(program)
                if recorders:
                    recorders[0].job.close(save=False)  # the last step ends with the job
            except AllStepsRecorded:
                pass
        if not recorders or not recorders[0].steps:
            raise _no_step(program.script)
        profile = _profile(recorders[0], plan, rank, device)
        stack.close()
    return profile


def _be_rank(plan: Plan, rank: int) -> None:
    """Have this process's environment name a rank, and no GPU."""
    # It may be that of a rank of another job, or of a shell in an allocation.
    launched = set()
    for names in itertools.chain.from_iterable(NAMES.values()):
        launched.update(names.split())
    for name in list(os.environ):
        if name.startswith("PACELINE_") or name in launched or name in _OF_ALLOCATIONS:
            del os.environ[name]
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    size = plan.world_size
    os.environ.update(variables_of(LauncherPosition(rank, size, rank, size, master=_NOWHERE)))
    os.environ["PACELINE_PLAN"] = json.dumps(asdict(plan))  # a Trainer asks it how large a batch is


@contextmanager
def _watching(recorder: LoopAllocations, device: str, states: str) -> Iterator[None]:
    # A GPU's attention kernels take no tensors of the CPU, whose kernel keeps about the same.
    attention = functional.scaled_dot_product_attention
    plain = patched(functional, scaled_dot_product_attention=attention)
    with as_on_gpu(device, recorder), plain, not_compiled(states), recorder.watching():
        yield


def _run_file(program: UserProgram) -> None:
    """Run the program as Python does.

    Raises:
        WorkloadError: it raised.
        SystemExit: it ended by one with a status.
    """
    try:
        program.run()
    except SystemExit as ended:
        if ended.code not in (None, 0):
            raise
    except PacelineError:
        raise
    except Exception as error:
        first_line = str(error).splitlines()[0] if str(error) else "nothing more"
        lines = [
            frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == program.script
        ]
        place = f" in line {lines[-1]}" if lines else ""
        raise WorkloadError(
            f"can't try out the loop of {program.script}",
            f"it raised {type(error).__name__}{place}: {first_line}",
            "see that it trains alone on the CPU: CUDA_VISIBLE_DEVICES= python FILE",
        ) from error


def _check_is_first(recorders: list[LoopRecorder]) -> None:
    if recorders:
        raise WorkloadError(
            "a loop is tried out as one job",
            "the file calls paceline.prepare a second time",
            "hand one call of paceline.prepare all models and optimizers",
        )


def _no_step(script: str) -> WorkloadError:
    return WorkloadError(
        f"the loop of {script} should take a step",
        "it ended before one",
        "call job.backward(loss) and optimizer.step() in it, outside of functions that nobody calls",
    )


def _profile(found: LoopRecorder, plan: Plan, rank: int, device: str) -> LoopProfile:
    job, parallel, steps = found.job, found.parallel, found.steps
    recording = found.recorder.recording
    from_step = _from_step(found)
    recording.last_step = found.began[from_step]
    part = job.part
    profile = Profile(
        plan.line(),
        rank,
        device,
        0 if part is None else part.samples,
        str(torch.get_default_dtype()).removeprefix("torch."),
        recording,
        found.recorder.operations,
        found.recorder.modules,
        steps[-1]["traffic"],
        found.shared_bytes(plan.transport) if device == "cpu" else 0,
        _notices(found, device),
    )
    models = [_model(model) for model in job.objects.models]
    optimizers = []
    for optimizer, state_bytes in zip(job.objects.optimizers, found.states(), strict=True):
        numel = sum(parameter.numel() for parameter in updated_by(optimizer, parallel.named()).values())
        optimizers.append({"name": type(optimizer).__name__, "parameters": numel, "state_bytes": state_bytes})
    owned = [parallel.models.owned.loads[0, index] for index in range(found.shards)] if found.shards > 1 else []
    return LoopProfile(profile, models, optimizers, steps, from_step, 0 if part is None else part.of, owned)


def _from_step(found: LoopRecorder) -> int:
    """Return the index of the first step that found all of the optimizers' state there."""
    if found.all_updated is None:
        return len(found.steps) - 1
    return min(found.all_updated, len(found.steps) - 1)


def _notices(found: LoopRecorder, device: str) -> list[str]:
    steps = len(found.steps)
    first_steps = "step" if steps == 1 else f"{steps} steps"
    notices = [f"the loop's first {first_steps} ran on real tensors on the CPU, as one rank whose peers are not there"]
    if found.all_updated is None:
        missing = ", ".join(type(optimizer).__name__ for optimizer in found.missing())
        notices.append(f"{missing} made no update there: its state is in no number here")
    elif steps <= found.all_updated:
        notices.append("the loop ended with the step in which optimizers make their state: later steps are not in this")
    if any(type(module).__name__ == "OptimizedModule" for module in found.parallel.model.modules()):
        notices.append("torch.compile had no effect there: what a compiled model holds is not known beforehand")
    if device != "cpu":
        notices.append("attention is the CPU's, and autocast to a GPU has no effect: a GPU may hold something else")
    return notices


def _model(model: torch.nn.Module) -> dict[str, Any]:
    parameters = list(model.parameters())
    return {
        "name": type(model).__name__,
        "parameters": sum(parameter.numel() for parameter in parameters),
        "parameter_bytes": sum(parameter.numel() * parameter.dtype.itemsize for parameter in parameters),
        "trained": sum(parameter.numel() for parameter in parameters if parameter.requires_grad),
        "buffer_bytes": sum(buffer.nbytes for buffer in model.buffers()),
    }


if __name__ == "__main__":
    exit_process(main())
