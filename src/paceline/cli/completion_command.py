"""Print the code by which a shell completes paceline's commands, flags and the names of runs at the Tab key.

paceline completion bash >> ~/.bash_completion           then open a new shell
paceline completion zsh >> ~/.zshrc
paceline completion fish > ~/.config/fish/completions/paceline.fish
"""

from __future__ import annotations

import argparse
import os
import shlex
from pathlib import Path
from typing import Any

from paceline.cli.flags import actions_of

SHELLS = ("bash", "zsh", "fish")
VARIABLE = "_ARGCOMPLETE"  # set by that code where it asks


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("shell", choices=SHELLS, metavar="SHELL", help=f"which: {', '.join(SHELLS)}")


def run(arguments: argparse.Namespace) -> int:
    """Print the code."""
    from argcomplete.shell_integration import shellcode

    print(shellcode(["paceline"], shell=arguments.shell))
    return 0


def verb_asked_for(verbs: Any) -> str | None:
    """Return the command that the line begins with whose end is to be completed; None: that is the command itself."""
    line = os.environ.get("COMP_LINE", "")[: int(os.environ.get("COMP_POINT") or 0)]
    try:
        words = shlex.split(line)
    except ValueError:  # in the middle of a quotation
        words = line.split()
    is_complete = len(words) > 2 or line.endswith((" ", "\t"))
    return words[1] if len(words) > 1 and is_complete and words[1] in verbs else None


def complete(parser: argparse.ArgumentParser) -> None:
    """Answer the shell, and end this process."""
    import argcomplete

    for action in actions_of(parser):
        if action.dest in ("job", "jobs") and not action.option_strings:
            action.completer = run_names  # type: ignore[attr-defined]
    argcomplete.autocomplete(parser)


def run_names(prefix: str, parsed_args: argparse.Namespace, **_: object) -> list[str]:
    """Return the names of the runs that begin with what is written."""
    runs = getattr(parsed_args, "runs", None) or Path("runs")
    return sorted(path.parent.name for path in Path(runs).glob("*/job.json") if path.parent.name.startswith(prefix))
