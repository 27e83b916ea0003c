"""List the examples, or copy one: its files, which are yours to change, and the command that trains it.

paceline examples                      their names, what they show and what they need
paceline examples copy classifier      writes classifier.py here
paceline examples copy glue mine       writes the files of an example with several to the folder `mine`
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("--json", action="store_true", help="print a JSON object on stdout")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB")
    copy = verbs.add_parser("copy", help="write an example's files")
    copy.add_argument("name", metavar="NAME", help="of the list that `paceline examples` prints")
    copy.add_argument(
        "folder", nargs="?", type=Path, metavar="DIR", help="gets the files (default: . for one file, NAME for several)"
    )
    copy.add_argument("--force", action="store_true", help="write over files that are there")
    # Without a default: it would hide a --json before the verb.
    copy.add_argument("--json", action="store_true", default=argparse.SUPPRESS, help="print a JSON object on stdout")


def run(arguments: argparse.Namespace) -> int:
    """List, or copy."""
    return _copy(arguments) if arguments.verb == "copy" else _list(arguments.json)


def _list(as_json: bool) -> int:
    from paceline.demo.example_files import find_examples

    examples = find_examples()
    if as_json:
        entries = {}
        for name, example in examples.items():
            entries[name] = {"summary": example.summary, "needs": list(example.needs), "files": list(example.files)}
        print(json.dumps(entries))
        return 0
    width = max(map(len, examples))
    for name, example in examples.items():
        needs = f" (needs {', '.join(example.needs)})" if example.needs else ""
        print(f"{name:<{width}}  {example.summary}{needs}")
    print("paceline examples: `paceline examples copy NAME` writes one", file=sys.stderr)
    return 0


def _copy(arguments: argparse.Namespace) -> int:
    from paceline.demo.example_files import choose_example, copy_example, next_commands

    example = choose_example(arguments.name)
    folder = arguments.folder or (Path(example.name) if example.is_folder else Path())
    files = copy_example(example, folder, arguments.force)
    commands = next_commands(example, folder)
    if arguments.json:
        print(json.dumps({"files": [str(file) for file in files], "commands": commands}))
        return 0
    for file in files:
        print(file)
    print("\n".join(["", "next:", *(f"  {command}" for command in commands)]))
    return 0
