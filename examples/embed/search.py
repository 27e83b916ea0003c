"""Finds the sentences that mean the most like a query: python search.py index "a man plays a guitar"."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import vectors

from paceline.nouns.errors import UsageError


def main() -> int:
    """Search, and print what was found."""
    parser = argparse.ArgumentParser(description="Search an index that workload.py --index wrote.")
    parser.add_argument("index", type=Path, metavar="DIR", help="the index's folder")
    parser.add_argument("query", help="a sentence")
    parser.add_argument("--count", type=int, default=10, help="how many to show (default 10)")
    arguments = parser.parse_args()
    try:
        if arguments.count < 1:
            raise UsageError(f"--count {arguments.count}", "it should be at least 1", "write --count 10")
        if not arguments.query.strip():
            raise UsageError("a query", "it is empty", "write a sentence")
        for cosine, text in vectors.Search(arguments.index).nearest(arguments.query, arguments.count):
            print(f"{cosine:6.3f}  {text}")
    except UsageError as error:
        print(f"search.py: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
