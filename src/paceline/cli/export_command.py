"""Write a checkpoint's model as plain safetensors, as transformers' from_pretrained reads it.

Any mesh may have saved it. The tensors keep their names and their bits. With --to hf the folder also gets
config.json, where the model that was trained is one of transformers.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="a checkpoint, or a run: its newest; or such a URL")
    parser.add_argument("--to", metavar="FORM", default="hf", help="hf (default), or safetensors: no config.json")
    parser.add_argument("folder", type=Path, metavar="DIR", help="the folder to write; new or empty")
    parser.add_argument("--dry-run", action="store_true", help="say what would be written, and write nothing")
    parser.add_argument("--json", action="store_true", help="print the result as JSON on stdout; all else to stderr")


def run(arguments: argparse.Namespace) -> int:
    """Export the model."""
    from paceline.checkpoint.copies import is_url
    from paceline.checkpoint.export import FORMS, check_may_export, plan_export, write_export
    from paceline.nouns.errors import UsageError, did_you_mean
    from paceline.run.supervise.progress import WorkProgress

    if arguments.to not in FORMS:
        fix = did_you_mean(arguments.to, FORMS, f"write --to {FORMS[0]}")
        raise UsageError(f"can't export to the form {arguments.to!r}", f"the choices are {', '.join(FORMS)}", fix)
    folder = arguments.folder
    check_may_export(folder)
    with _on_disk(arguments.checkpoint) as checkpoint:
        export = plan_export(checkpoint, arguments.to, _print_notice)
        if not arguments.dry_run:
            with WorkProgress("MiB") as progress:
                progress.total = export.nbytes / 2**20
                progress.begins(f"writing {folder}")
                write_export(export, folder, lambda nbytes: progress.adds(nbytes / 2**20))
    source = arguments.checkpoint if is_url(arguments.checkpoint) else str(export.source)
    if arguments.json:
        facts = {**export.to_json(), "checkpoint": source}
        print(json.dumps({**facts, "folder": str(folder), "written": not arguments.dry_run}))
        return 0
    for name, tensors in export.files.items():
        nbytes = sum(export.tensors[tensor].nbytes for tensor in tensors)
        print(f"{name:<36}{len(tensors)} tensors, {nbytes / 2**20:.1f} MiB")
    for name in export.texts:
        print(name)
    word = "would be written" if arguments.dry_run else "written"
    print(f"paceline export: {word} to {folder}, of {source} (step {export.step})", file=sys.stderr)
    return 0


def _print_notice(text: str) -> None:
    print(f"paceline: {text}", file=sys.stderr)


@contextmanager
def _on_disk(checkpoint: str) -> Iterator[Path]:
    """Have the checkpoint as a folder inside the `with`; one in an object store is read to the disk for that time."""
    from paceline.checkpoint.copies import check_url, find_copy, is_url

    if not is_url(checkpoint):
        yield Path(checkpoint)
        return
    check_url(checkpoint, "paceline export")
    with tempfile.TemporaryDirectory(prefix="paceline-export-") as folder:
        yield find_copy(checkpoint, _print_notice, Path(folder))
