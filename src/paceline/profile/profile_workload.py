"""Simulate a workload's step under several plans and write the profiles.

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
from pathlib import Path
from typing import Any

import torch

from paceline.launch.orphans import die_with_parent
from paceline.launch.process_exit import exit_process
from paceline.launch.profile_workload import handed_requests
from paceline.nouns.errors import PacelineError, WorkloadError
from paceline.nouns.own_errors import own_error, own_line
from paceline.nouns.plan import Plan
from paceline.nouns.user_program import UserProgram
from paceline.nouns.workload import Workload
from paceline.train.find_workload import find_workload


def main() -> int:
    """Answer the requests.

    Arguments: the folder for profiles, and then the user's file and arguments.
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
    for request in requests:
        number = request["number"]
        ranks = Plan.of(request["plan"], "the request").world_size
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // ranks))  # as `paceline run` shares them out
        answer = _failed(number, refused) if refused else _answer(number, workload, request, folder)
        print(json.dumps(answer), file=answers, flush=True)
    return 0


def _answer(number: int, workload: Workload, request: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Simulate a step and write its profile; return the JSON object of the line to print."""
    from paceline.profile.simulate import simulate

    try:
        changes = {name: request[name] for name in ("micro_batch_size", "precision") if request.get(name)}
        workload = dataclasses.replace(workload, **changes)
        plan = Plan.of(request["plan"], "the request")
        profile = simulate(workload, plan, request["rank"], request["device"], request["is_brief"], request["capacity"])
    except PacelineError as error:
        return _failed(number, error)
    except Exception as error:  # of the user's code, mostly; the next request may do without it
        if line := own_line(error):
            return _failed(number, own_error(line, "".join(traceback.format_exception_only(error)).strip()))
        first_line = str(error).splitlines()[0] if str(error) else "nothing more"
        asked = f"can't simulate a step of {sys.argv[0]} under {request['plan']['mesh']}"
        found = f"it raised {type(error).__name__}: {first_line}"
        return _failed(number, WorkloadError(asked, found, "run it alone with python first"))
    path = folder / f"profile-{number}.json"
    profile.write(path)
    return {"number": number, "path": str(path)}


def _failed(number: int, error: PacelineError) -> dict[str, Any]:
    return {"number": number, "error": {"asked": error.asked, "found": error.found, "fix": error.fix}}


if __name__ == "__main__":
    exit_process(main())
