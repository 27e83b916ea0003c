"""Load a person's file for its `workload`, without running its loop."""

from __future__ import annotations

import runpy

from paceline.nouns.errors import PacelineError, WorkloadError
from paceline.nouns.workload import Workload


def find_workload(script: str) -> Workload:
    """The `workload` that the file declares at its top level.

    Raises:
        WorkloadError: it declares none, or fails when it is loaded.
    """
    try:
        names = runpy.run_path(script, run_name="paceline_workload")
    except PacelineError:
        raise
    except BaseException as error:
        raise WorkloadError(
            f"to load {script}", f"it raised {type(error).__name__}: {error}", "mend it; `python FILE` shows more"
        ) from error
    workload = names.get("workload")
    if not isinstance(workload, Workload):
        raise WorkloadError(
            f"{script} should declare its workload at the top level",
            "it has no variable `workload` that is a paceline.Workload",
            "write workload = paceline.Workload(...) outside of functions",
        )
    return workload
