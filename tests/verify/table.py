"""The table of docs/verify-table.md: twelve unmodified models under twelve plans, verified. `scripts/verify-table`.

Every cell: order of collectives, two steps in float64 with clipping, the ledger against the prediction; then two steps
in float32. A plan may be refused, with its reason below the table.
"""

from __future__ import annotations

import datetime
import platform
import sys
import time

import torch
from test_every_plan import plans_of

from models import MODELS
from paceline.nouns.errors import PacelineError

from kit import verify
from ranks import preload


def cell(name: str, plan: str) -> tuple[str, str]:
    """The word of a cell, and what is to be said of it below the table."""
    try:
        verdict = verify(name, plan, what=("step", "traffic"))
        narrow = verify(name, plan, precision="float32")
    except AssertionError as error:  # a rank raised
        last = str(error).strip().splitlines()
        refused = [line for line in last if "Error: " in line and "paceline.nouns.errors" in line]
        if refused:
            return "refused", refused[-1].split("Error: ", 1)[1]
        raise
    except PacelineError as error:
        return "refused", str(error).splitlines()[0]
    if "bug" in (verdict.word, narrow.word):
        return "**bug**", "; ".join(one.said for one in (*verdict.checks, *narrow.checks) if not one.passed)
    return f"{narrow.checks[-1].details['largest']:.0e}", ""


FAMILIES = ("bert", "distilbert", "roberta", "gpt2", "llama", "qwen2", "t5", "vit")


def main() -> None:
    preload([f"transformers.models.{family}.modeling_{family}" for family in FAMILIES])
    began = time.monotonic()
    names = sys.argv[1:] or list(MODELS)
    plans = list(dict.fromkeys(plan for name in names for plan in plans_of(name)))
    notes = []
    print("| plan | " + " | ".join(names) + " |")
    print("|---|" + "--:|" * len(names), flush=True)
    words = {}
    for plan in plans:
        row = []
        for name in names:
            if plan not in plans_of(name):
                row.append("")
                continue
            word, note = cell(name, plan)
            words[name, plan] = word
            row.append(word)
            notes += [f"- {name}, `{plan}`: {note}"] if note else []
            print(f"{time.monotonic() - began:6.0f} s  {name} {plan}: {word} {note}", file=sys.stderr, flush=True)
        print(f"| `{plan}` | " + " | ".join(row) + " |", flush=True)
    equal = sum(word not in ("refused", "**bug**") for word in words.values())
    print(
        f"\n{equal} of {len(words)} cells are the same step; {sum(w == '**bug**' for w in words.values())} are not.\n"
    )
    print("\n".join(notes))
    python = platform.python_version()
    print(f"\n{datetime.date.today()}, torch {torch.__version__}, transformers {_transformers()}, Python {python}.")


def _transformers() -> str:
    from transformers import __version__

    return __version__


if __name__ == "__main__":
    main()
