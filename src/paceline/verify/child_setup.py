"""The beginning of every child of a verification: its settings, and `sys` as under `python FILE`."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from paceline.launch.orphans import die_with_parent
from paceline.nouns.errors import PacelineError
from paceline.nouns.user_program import UserProgram


def read_settings(path: Path) -> tuple[dict[str, Any], Path, UserProgram]:
    """Read what is asked for, the folder where answers go and the user's program, whose `sys.argv` and path are set."""
    settings = json.loads(path.read_text())
    # The reference and the dry run are children of the command itself; ranks end with their fork server.
    if "PACELINE_RANK" not in os.environ:
        die_with_parent()
    program = UserProgram(settings["script"], settings.get("module", ""))
    program.enter(settings["arguments"])
    return settings, Path(settings["folder"]), program


def refuse(folder: Path, error: PacelineError) -> None:
    """Write refused.json, which says why there is no answer."""
    parts = {"asked": error.asked, "found": error.found, "fix": error.fix}
    is_own = type(error) is PacelineError  # no refusal, but an error of ours: see `nouns/own_errors.py`
    (folder / "refused.json").write_text(json.dumps({"is_own": is_own, "parts": parts}))
