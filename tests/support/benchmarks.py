"""The benchmarks of the clone, for tests that start processes of them."""

from __future__ import annotations

import os

from support.documented_commands import ROOT

BENCHMARKS = ROOT / "benchmarks"
SCRIPT = ROOT / "scripts" / "bench"
# As scripts/bench sets it: pytest's own `pythonpath` is for its process alone.
ENVIRONMENT = {"PYTHONPATH": os.pathsep.join(filter(None, (str(BENCHMARKS), os.environ.get("PYTHONPATH"))))}
