"""The `paceline` command: hands the arguments to one verb, and turns a PacelineError into two lines."""

from __future__ import annotations

import argparse
import importlib
import io
import json
import os
import sys
from typing import NoReturn

from paceline.nouns.errors import MEETS_NOT, PacelineError, did_you_mean

INTERRUPTED = 130  # 128 and the number of SIGINT, as shells have it

# Name and summary of every verb; the file of the same name in this room is loaded when it is called.
VERBS = {
    "run": "train as planned, on this host",
    "plan": "say what a plan sends and holds, without training",
    "explain": "say each setting of a job here, and where it comes from",
    "profile": "say what a step takes: memory, operations, traffic",
    "verify": "prove that a plan trains as one process does",
    "doctor": "look at the hosts before a job does: what would stop it or slow it down",
    "server": "start a parameter server alone, and look at those of a job",
    "export": "write a checkpoint's model as transformers reads it",
    "demo": "pre-train a small BERT with two processes, from nothing",
    "bench": "measure Paceline against what else there is",
}


class Parser(argparse.ArgumentParser):
    """argparse, with errors of three parts."""

    verbs: tuple[argparse.ArgumentParser, ...] = ()  # the parser of the command that was called

    def error(self, message: str) -> NoReturn:
        """Say what was asked, found and what to do, and exit with 2."""
        print(f"{self.prog}: {self._explained(message)}", file=sys.stderr)
        sys.exit(MEETS_NOT)

    def _explained(self, message: str) -> str:
        flags = [flag for parser in (self, *self.verbs) for action in parser._actions for flag in action.option_strings]
        marker = "unrecognized arguments: "
        if marker in message:
            word = message.split(marker)[1].split()[0]
            fix = did_you_mean(word.split("=")[0], flags, f"see `{self.prog} --help`")
            return f"the argument {word} was given, but this command has no such argument.\n  Fix: {fix}."
        return f"the arguments can't be read, but they must be: {message}.\n  Fix: see `{self.prog} --help`."


def main(argv: list[str] | None = None) -> int:
    """Run one verb. 0: it did what it says; 1: the job failed; 2: the request can't be met; 130: Ctrl-C."""
    _open_missing_streams()
    _accept_any_text()
    try:
        return _main(argv)
    except KeyboardInterrupt:
        print("paceline: interrupted", file=sys.stderr)
        return INTERRUPTED


def _open_missing_streams() -> None:
    """Where the shell has closed standard input, output or error, a pipe or socket of ours would take its number."""
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(descriptor)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # it gets the lowest number that is free: this one
            setattr(sys, name, os.fdopen(descriptor, "w" if descriptor else "r"))


def _accept_any_text() -> None:
    """Have what the terminal's encoding lacks escaped; it must not end a command."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _main(argv: list[str] | None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    verb = next((word for word in arguments if not word.startswith("-")), None)
    if verb is not None and verb not in VERBS and arguments[0] == verb:
        fix = did_you_mean(verb, VERBS, "see `paceline --help`")
        print(f"paceline: the command {verb!r}, but there are {', '.join(VERBS)}.\n  Fix: {fix}.", file=sys.stderr)
        return MEETS_NOT
    parser = Parser(
        prog="paceline",
        allow_abbrev=False,
        description="Train one PyTorch model on many devices; the loop stays yours.",
    )
    parser.add_argument("--version", action="version", version=_version())
    verbs = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, summary in VERBS.items():
        subparser = verbs.add_parser(name, help=summary, allow_abbrev=False)
        if name == verb:
            module = importlib.import_module(f"paceline.cli.{name}")
            subparser.description = module.__doc__
            subparser.formatter_class = argparse.RawDescriptionHelpFormatter
            module.add_arguments(subparser)
            subparser.set_defaults(run=module.run)
            parser.verbs = (subparser,)
    rest: list[str] = []
    if verb == "verify" and "--" in arguments:  # argparse can't have options and words on both sides of the file
        at = arguments.index("--")
        arguments, rest = arguments[:at], arguments[at + 1 :]
    parsed = parser.parse_args(arguments, argparse.Namespace(arguments=rest) if verb == "verify" else None)
    try:
        return int(parsed.run(parsed))
    except PacelineError as error:
        if getattr(parsed, "json", False):
            failure = {"asked": error.asked, "found": error.found, "fix": error.fix}
            print(json.dumps({"status": "refused", "exit_code": error.exit_code, "error": failure}))
        print(f"paceline {verb}: {error}", file=sys.stderr)
        return error.exit_code


def _version() -> str:
    from paceline import __version__

    return f"paceline {__version__}"


if __name__ == "__main__":
    sys.exit(main())
