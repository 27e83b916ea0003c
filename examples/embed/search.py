"""Finds the sentences that mean the most like a query: python search.py index "a man plays a guitar"."""

from __future__ import annotations

import argparse
import shutil
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

from paceline.nouns.errors import PacelineError, UsageError

try:
    import vectors
except UsageError as error:  # usearch is missing
    sys.exit(f"search.py: {error}")


def table(found: Sequence[tuple[float, str]], width: int) -> str:
    """Return the found sentences as aligned lines, wrapped at `width` columns."""
    lines = [" no  similarity  sentence"]
    indent = " " * len(" no  similarity  ")
    for number, (cosine, text) in enumerate(found, start=1):
        wrapped = textwrap.wrap(text, max(20, width - len(indent))) or [""]
        lines.append(f"{number:3}  {cosine:10.3f}  {wrapped[0]}")
        lines += [indent + more for more in wrapped[1:]]
    return "\n".join(lines)


def main() -> int:
    """Search, and print what was found."""
    parser = argparse.ArgumentParser(description="Search an index that workload.py --index wrote.")
    parser.add_argument("index", type=Path, metavar="DIR", help="the index's folder")
    parser.add_argument("query", help="a sentence")
    parser.add_argument("--count", type=int, default=10, metavar="N", help="how many to show (default 10)")
    arguments = parser.parse_args()
    try:
        if Path(arguments.query).is_dir() and not arguments.index.is_dir():
            found, fix = f"{arguments.query} is a folder", "write the index's folder first, then the query"
            raise UsageError(f"a search for {arguments.query!r}", found, fix)
        if arguments.count < 1:
            raise UsageError(f"--count {arguments.count}", "it should be at least 1", "write --count 10")
        if not arguments.query.strip():
            raise UsageError("a query", "it is empty", "write a sentence")
        found = vectors.Search(arguments.index).nearest(arguments.query, arguments.count)
    except PacelineError as error:
        print(f"search.py: {error}", file=sys.stderr)
        return error.exit_code
    print(table(found, shutil.get_terminal_size().columns))
    return 0


if __name__ == "__main__":
    sys.exit(main())
