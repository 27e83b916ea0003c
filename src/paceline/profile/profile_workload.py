"""Describe a workload's model, simulate its step under several plans, and write what was found.

Started as `python -m paceline.profile.profile_workload ...`.

It runs in a child process: the user's file is loaded, its loop is not. Standard input has a request a line, standard
output a JSON object for each: it is done, or why it can't be.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import traceback
from functools import partial
from pathlib import Path
from typing import Any

import torch

from paceline.launch.process_exit import die_with_parent, exit_process
from paceline.launch.simulators import STEP, TRAFFIC, answered, handed_requests
from paceline.nouns.errors import PacelineError, WorkloadError
from paceline.nouns.own_errors import own_error, own_line
from paceline.nouns.plan import Plan
from paceline.nouns.user_program import UserProgram
from paceline.nouns.workload import Workload
from paceline.train.find_workload import find_workload


def main() -> int:
    """Answer the requests.

    Arguments: the folder for answers, and then the user's file and arguments.
    """
    die_with_parent()
    requests = handed_requests()
    folder = Path(sys.argv[1])
    program = UserProgram.of_this_process(sys.argv[2])
    program.enter(sys.argv[3:])
    answers = sys.stdout
    sys.stdout = sys.stderr  # what the user's file prints is no answer
    refused: PacelineError | None = None
    try:
        workload = find_workload(program)
    except PacelineError as error:
        refused = error

    def write(request: dict[str, Any], path: Path) -> None:
        if refused is not None:
            raise refused
        _write(workload, request, path)

    for request in requests:
        ranks = Plan.of(request["plan"], "the request").world_size
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // ranks))  # as `paceline run` shares them out
        print(answered(request["number"], folder, partial(write, request)), file=answers, flush=True)
    return 0


def _write(workload: Workload, request: dict[str, Any], path: Path) -> None:
    """Write the answer to a request.

    Raises:
        PacelineError: there is none.
    """
    from paceline.profile.describe import describe, stages_traffic
    from paceline.profile.simulate import simulate

    is_step = request["what"] == STEP
    try:
        changes = {name: request[name] for name in ("micro_batch_size", "precision") if request.get(name)}
        workload = dataclasses.replace(workload, **changes)
        plan = Plan.of(request["plan"], "the request")
        if is_step:
            rank, device = request["rank"], request["device"]
            simulate(workload, plan, rank, device, request["is_brief"], request["capacity"]).write(path)
            return
        model = describe(workload, plan)
        if request["what"] == TRAFFIC:
            model["traffic"] = stages_traffic(workload, plan, model)
        path.write_text(json.dumps(model))
    except PacelineError:
        raise
    except Exception as error:  # of the user's code, mostly; the next request may do without it
        if line := own_line(error):
            raise own_error(line, "".join(traceback.format_exception_only(error)).strip()) from error
        first_line = str(error).splitlines()[0] if str(error) else "nothing more"
        asked = f"can't simulate a step of {sys.argv[0]} under {request['plan']['mesh']}"
        if not is_step:
            asked = f"can't load {sys.argv[0]}"
        found = f"it raised {type(error).__name__}: {first_line}"
        raise WorkloadError(asked, found, "run it alone with python first") from error


if __name__ == "__main__":
    exit_process(main())
