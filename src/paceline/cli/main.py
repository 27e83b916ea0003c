"""Run the `paceline` command: hand the arguments to one verb, and print a PacelineError in its three lines."""

from __future__ import annotations

import argparse
import difflib
import errno
import importlib
import io
import json
import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from paceline.cli import completion_command as completion
from paceline.cli.closed_output import OutputLost, guarded
from paceline.cli.flags import actions_of, check_after_file, check_rules, misplaced, moved, written_flags
from paceline.nouns.errors import MEETS_NOT, PacelineError, UsageError, did_you_mean, how_to_write
from paceline.nouns.reading import number, shown

# Faults that are none of a command's own: a file can't be written, or none can be opened any more.
_OF_THE_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO, errno.EMFILE, errno.ENFILE)
_NO_TEMPORARY = "No usable temporary directory found"
INTERRUPTED = 130  # 128 and the number of SIGINT, as shells have it

# Name and summary of every verb; the file of the same name in this package is loaded when it is called.
VERBS = {
    "run": "train as planned, on this host or on others",
    "horovodrun": "run a script of Horovod's with horovodrun's command line",
    "submit": "send a job to Slurm or Kubernetes, and return",
    "plan": "say what a plan sends and holds, without training",
    "explain": "say each setting of a job here, and where it comes from",
    "profile": "say what a step takes: memory, operations, traffic",
    "verify": "prove that a plan trains as one process does",
    "doctor": "look at the hosts before a job does: what would stop it or slow it down",
    "runs": "list runs, show or compare some, remove some",
    "logs": "print what the ranks of a job have printed",
    "top": "show a job live: speed, and where each rank's time goes",
    "why": "say why a job stands still or is slow",
    "dashboard": "show the runs in a browser, live",
    "timeline": "write what each rank did, when, as a trace for Perfetto",
    "server": "start a parameter server alone, and look at those of a job",
    "export": "write a checkpoint's model as transformers reads it",
    "demo": "pre-train a small BERT with two processes, from nothing",
    "examples": "list the examples, and copy one to train with",
    "completion": "print what a shell needs to complete commands and runs",
}

_KINDS = {int: "a whole number", float: "a number", number: "a number"}  # of values, by what reads them
_TARGETS_BY_OTHER_NAMES = {"k8s": "kubernetes", "kubectl": "kubernetes", "sbatch": "slurm", "srun": "slurm"}
WITH_FILE = ("run", "submit", "plan", "profile", "verify")  # what stands after FILE, or after `--`, is the file's own


class Parser(argparse.ArgumentParser):
    """argparse, with errors of three parts."""

    called: argparse.ArgumentParser | None = None  # the parser of the command that was called

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, exit_on_error=False)  # an error is raised with its argument, and not as a text

    def error(self, message: str) -> NoReturn:
        """Print the error of three parts, and exit with 2."""
        self._refuse(UsageError("can't read the arguments", message, self._see_help))

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Read the arguments; exit with 2 where there is an unknown one."""
        parsed, unknown = self.parse_known_args(args, namespace)
        if unknown:
            self._refuse(self._unknown_argument(" ".join(unknown).split() or ["''"]))
        return parsed

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Read the arguments, and return the unknown ones too; exit with 2 where one can't be read."""
        try:
            return super().parse_known_args(args, namespace)
        except argparse.ArgumentError as error:
            actions = {argparse._get_action_name(action): action for action in self._actions}
            fix = self._fix_of(actions.get(error.argument_name))
            self._refuse(UsageError("can't read the arguments", str(error), fix))

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Refuse a word that is none of a command's own commands."""
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            if not isinstance(action, argparse._SubParsersAction):
                raise
            if action.dest == "target":
                self._refuse(_no_target(value))
            only = f"write `{self._command} {next(iter(action.choices))} ...`; {self._see_help}"
            fix = did_you_mean(value, action.choices, only if len(action.choices) == 1 else self._see_help)
            self._refuse(UsageError("can't read the arguments", str(error), fix))

    @property
    def _command(self) -> str:
        return self.prog if self.called is None else self.called.prog

    @property
    def _see_help(self) -> str:
        return f"see `{self._command} --help`"

    def _refuse(self, error: UsageError) -> NoReturn:
        print(f"{self._command}: error: {error}", file=sys.stderr)
        sys.exit(MEETS_NOT)

    def _unknown_argument(self, words: Sequence[str]) -> UsageError:
        """Return the error about the first of some words that no argument of the command has."""
        flags: list[str] = []
        for parser in (self, self.called or self):
            for action in parser._actions:
                flags += action.option_strings
        flag = words[0].split("=")[0]
        fix = moved(flag, self._command) if self.called is not None else ""
        fix = fix or did_you_mean(flag, _alike(flag, flags), self._see_help)
        if self.called is not None and _takes_file_arguments(self.called):
            fix += "; a flag of the file's own stands after it"
        return UsageError(f"can't read the argument {words[0]}", "this command has no such argument", fix)

    def _fix_of(self, action: argparse.Action | None) -> str:
        """Return the fix for a flag whose value can't be read."""
        if action is None or not action.option_strings:
            return self._see_help
        flag = action.option_strings[0]
        if action.nargs == 0:
            return f"write {flag} without a value" + "; --job NAME names the run" * (flag == "--resume")
        # -np 2, as mpirun takes it, is -n with the value p.
        kind = _KINDS.get(action.type)
        return f"write {flag} and {kind}, such as {flag} 2" if kind else self._see_help


def _no_target(word: str) -> UsageError:
    """Return the error about a word that stands where `submit` has its target."""
    fix = did_you_mean(word, ("slurm", "kubernetes"), "write one of these", _TARGETS_BY_OTHER_NAMES)
    if word.endswith(".py"):
        fix = f"write `paceline submit slurm {word}`, or kubernetes for slurm"
    return UsageError(f"can't send a job to {shown(word)}", "jobs are sent to slurm or kubernetes", fix)


def _find_verb(command_line: Sequence[str]) -> str | None:
    """Return the command among the words; None: there is none, which argparse refuses.

    Raises:
        UsageError: the words begin with something else. argparse's error lists all commands and suggests none.
    """
    first = command_line[0].partition("=")[0] if command_line else ""
    if first.startswith("-") and first not in ("-h", "--help", "--version", "--"):
        from paceline.cli import run_command as run  # here: every command would wait for its imports

        known = _fresh(run)
        is_of_run = any(first in action.option_strings for action in known._actions)
        fix = f"write `paceline run {first} ...`" if is_of_run else "see `paceline --help`"
        raise UsageError(f"{shown(first)[1:-1]} should stand after a command", "the command line begins with it", fix)
    verb = next((word for word in command_line if not word.startswith("-")), None)
    if verb is not None and verb not in VERBS and command_line[0] == verb:
        otherwise = f"write `paceline run {verb}`" if verb.endswith(".py") else "see `paceline --help`"
        fix = did_you_mean(verb, VERBS, otherwise)
        raise UsageError(f"there is no command {verb!r}", f"the commands are {', '.join(VERBS)}", fix)
    return verb


def _alike(flag: str, flags: Sequence[str]) -> list[str]:
    """Return the flags whose names without hyphens are alike: with their hyphens --nodes would be near --qos."""
    return [known for known in flags if difflib.get_close_matches(flag.lstrip("-"), [known.lstrip("-")])]


def _takes_file_arguments(parser: argparse.ArgumentParser) -> bool:
    return any(action.dest == "arguments" for action in parser._actions)


def main(argv: list[str] | None = None) -> int:
    """Run one verb. 0: it did what it says; 1: the job failed; 2: the request can't be met.

    130: Ctrl-C; 141: nobody read it all.
    """
    # Streams first: everything after this may print. `guarded` is outermost, since Ctrl-C's own line may fail too.
    _open_missing_streams()
    _accept_any_text()
    return guarded(lambda: _uninterrupted(argv))


def _uninterrupted(argv: list[str] | None) -> int:
    try:
        return _main(argv)
    except KeyboardInterrupt:
        print("paceline: interrupted", file=sys.stderr)
        return INTERRUPTED


def _open_missing_streams() -> None:
    """Open what the shell has closed of standard input, output and error: a pipe or socket would take its number."""
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
    if completion.VARIABLE in os.environ and argv is None:
        _complete()
    command_line = list(sys.argv[1:] if argv is None else argv)
    try:
        verb = _find_verb(command_line)
    except UsageError as error:
        print(f"paceline: error: {error}", file=sys.stderr)
        return MEETS_NOT
    module = None
    if verb in VERBS:  # only this one: others' imports would cost time
        module = importlib.import_module(f"paceline.cli.{verb}_command")
    parsed = _parse(command_line, verb, module)
    command = f"paceline {verb} {parsed.target}" if verb == "submit" else f"paceline {verb}"
    try:
        if verb in WITH_FILE:
            _find_program(parsed)
            check_after_file(parsed.workload, parsed.misplaced, command, parsed.arguments)
        if verb != "run":  # which checks them when it knows what starts the ranks
            check_rules(str(verb), parsed)
        return _run(parsed)
    except PacelineError as error:
        if getattr(parsed, "json", False):  # a program that reads JSON gets JSON for a refusal too
            failure = {"asked": error.asked, "found": error.found, "fix": error.fix}
            print(json.dumps({"status": "refused", "exit_code": error.exit_code, "error": failure}))
        print(f"{command}: error: {error}", file=sys.stderr)
        return error.exit_code


def _find_program(parsed: argparse.Namespace) -> None:
    from paceline.cli.plan_flags import find_program  # only commands with a file need it

    find_program(parsed)


def _complete() -> None:
    """Answer a shell that completes a command line."""
    verb = completion.verb_asked_for(VERBS)
    parser, parsers = _parsers()
    if verb is not None:
        _add_verb(parsers[verb], importlib.import_module(f"paceline.cli.{verb}_command"))
    completion.complete(parser)


def read_command(words: Sequence[str]) -> argparse.Namespace:
    """Read a command that begins with its verb, without running it.

    Raises:
        UsageError: a flag of the command stands after FILE.
    """
    verb = words[0]
    parsed = _parse(words, verb, importlib.import_module(f"paceline.cli.{verb}_command"))
    _find_program(parsed)
    check_after_file(parsed.workload, parsed.misplaced, f"paceline {verb}", parsed.arguments)
    return parsed


def _run(parsed: argparse.Namespace) -> int:
    try:
        return int(parsed.run(parsed))
    except OSError as error:
        if error.errno in _OF_THE_DISK and not isinstance(error, OutputLost):
            path = f"the file {shown(error.filename)}" if error.filename else "a file of this command"
            asked, found = f"{path} should be written or read", str(error.strerror)
            raise PacelineError(asked, found, how_to_write(error, "")) from None
        if str(error.strerror).startswith(_NO_TEMPORARY):  # of tempfile, which tried to write to each
            asked, found = "a folder for temporary files should take a file", str(error.strerror)
            fix = "free space in one of these, raise `ulimit -f`, or name another folder with the variable TMPDIR"
            raise PacelineError(asked, found, fix) from None
        if error.errno != errno.ENAMETOOLONG:
            raise
        # Each look at a path can say so, also whether there is one.
        raise UsageError(
            f"the path {shown(error.filename)}", "it is longer than this system takes", "use a shorter one"
        ) from None


def _parse(command_line: Sequence[str], verb: str | None, module: object) -> argparse.Namespace:
    """Read the arguments; `flags` are the flags that were written, by the names of their values.

    Args:
        command_line: the words after `paceline`.
        verb: the command among them, if any.
        module: the command's file.
    """
    parser, parsers = _parsers()
    if verb is None or module is None:
        _help_alone(parser, command_line)
        parsed: argparse.Namespace = parser.parse_args(command_line)
        return parsed
    verb_parser = parsers[verb]
    _add_verb(verb_parser, module)
    if command_line[0] == verb:
        _help_alone(verb_parser, command_line[1:])
    called = _called(verb_parser, command_line)
    parser.called = called
    after_hyphens: list[str] = []
    if verb in WITH_FILE and "--" in command_line:  # argparse hands it to whichever argument comes first
        at = command_line.index("--")
        after_hyphens = list(command_line[at + 1 :])
        command_line = command_line[:at]
        # Without FILE before it, it ends this command's flags, and FILE follows.
        if _lacks_file(module, command_line[command_line.index(verb) + 1 :]):
            return _parse([*command_line, *_begun_by_file(after_hyphens)], verb, module)
    # `verify` declares no argument for what stands after `--`: the parser would not make the list.
    namespace = argparse.Namespace(arguments=[]) if verb == "verify" else None
    parsed = parser.parse_args(command_line, namespace)
    # Read a second time, by a parser without defaults: a flag that is given with its default's value counts as given,
    # and is refused where it does not apply.
    parsed.flags = written_flags(_fresh(module), command_line[command_line.index(verb) + 1 :])
    if verb in WITH_FILE:
        parsed.misplaced = misplaced(called, parsed.arguments)
        if after_hyphens and parsed.arguments:
            after_hyphens = ["--", *after_hyphens]
        parsed.arguments = [*parsed.arguments, *after_hyphens]
    return parsed


def _help_alone(parser: argparse.ArgumentParser, words: Sequence[str]) -> None:
    """Print the help of a command that needs a word of a list, and exit, where nothing follows its name.

    The exit code is that of a request that can't be met: a script whose variable is empty has asked for nothing.
    """
    if not words and any(action.required and action.choices for action in parser._actions):
        parser.print_help(sys.stderr)
        sys.exit(MEETS_NOT)


def _begun_by_file(words: Sequence[str]) -> list[str]:
    """Return the words after `--`, of which FILE is the first: one that begins with a hyphen is no flag there."""
    file = [f"./{word}" if word.startswith("-") else word for word in words[:1]]
    return [*file, *words[1:]]


def _parsers() -> tuple[Parser, dict[str, argparse.ArgumentParser]]:
    """Return the parser, and those of the commands: only their names and summaries, their arguments cost imports."""
    parser = Parser(
        prog="paceline",
        allow_abbrev=False,
        description="Train one PyTorch model on many devices; the loop stays yours.",
    )
    parser.add_argument("--version", action="version", version=_version())
    verbs = parser.add_subparsers(required=True, metavar="COMMAND")
    parsers: dict[str, argparse.ArgumentParser] = {}
    for name, summary in VERBS.items():
        parsers[name] = verbs.add_parser(name, help=summary, allow_abbrev=False)
    return parser, parsers


def _add_verb(parser: argparse.ArgumentParser, module: Any) -> None:
    """Add the arguments of a command, and its function."""
    parser.description = module.__doc__
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    module.add_arguments(parser)
    for action in actions_of(parser):
        if action.nargs == argparse.REMAINDER:  # the file may have no arguments, which argparse would require
            action.required = False
    parser.set_defaults(run=module.run)


def _called(verb: argparse.ArgumentParser, command_line: Sequence[str]) -> argparse.ArgumentParser:
    """Return the parser of the command that a command line calls: the verb's, or that of a command below it."""
    for action in verb._actions:
        if isinstance(action, argparse._SubParsersAction):
            below: dict[str, argparse.ArgumentParser] = action.choices
            return next((below[word] for word in command_line if word in below), verb)
    return verb


class _UnreadableError(Exception):
    """argparse can't read a command line."""


class _QuietParser(argparse.ArgumentParser):
    """argparse, with an exception in place of its exit; the parsers below it have it too."""

    def error(self, message: str) -> NoReturn:
        raise _UnreadableError(message)


def _lacks_file(module: Any, command_line: Sequence[str]) -> bool:
    """True if a command line has a command's flags without its FILE."""
    if "-h" in command_line or "--help" in command_line:
        return False
    parser = _QuietParser(allow_abbrev=False)
    module.add_arguments(parser)
    for action in actions_of(parser):
        action.required = False
    try:
        parsed, _ = parser.parse_known_args(command_line)
    except _UnreadableError:
        return False
    return not getattr(parsed, "workload", True)


def _fresh(module: Any) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    module.add_arguments(parser)
    return parser


def _version() -> str:
    from paceline import __version__

    return f"paceline {__version__}"


if __name__ == "__main__":
    sys.exit(main())
