"""Say how a job would run here: each setting, its value, and the flag or variable that it comes from.

It reads what `paceline run` or a rank started by another launcher would read, and starts nothing. Two launchers
that contradict each other are the same error here as there.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Mapping
from pathlib import Path

from paceline.cli.run import add_plan_arguments, decide_plan
from paceline.launch.command import HIDDEN, is_secret
from paceline.nouns.mesh import Mesh
from paceline.nouns.plan import Plan
from paceline.nouns.table import aligned
from paceline.rendezvous.launcher_env import ALONE, LauncherPosition, NodeInfo, find_node, find_position

Row = tuple[str, str, str]  # the setting, its value, where it comes from
# Variables of these beginnings change a job, and so do these.
PREFIXES = ("PACELINE_", "PET_", "NCCL_", "GLOO_", "TORCH_", "TORCHELASTIC_", "OMP_")
NAMES = ("CUDA_VISIBLE_DEVICES",)
NO_FILE = (
    "No configuration file is read: a setting comes from a flag, a variable or the launcher, else it is the default."
)
_WIDEST = 60  # letters of a value in the table; --json has all of them


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add_plan_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print the settings as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Print the settings."""
    rows = settings(arguments, os.environ)
    if arguments.json:
        listed = [{"setting": name, "value": value, "from": origin} for name, value, origin in rows]
        print(json.dumps({"settings": listed}))
        return 0
    cells = [("setting", "value", "from")]
    for name, value, origin in rows:
        cells.append((name, _shortened(value), origin))
    for line in aligned(cells, "{:<}  {:<}  {}"):
        print(line.rstrip())
    print(f"\n{NO_FILE}")
    return 0


def settings(arguments: argparse.Namespace, environment: Mapping[str, str]) -> list[Row]:
    """Return every setting of a job that is started here.

    Raises:
        UsageError: the launcher's variables contradict each other.
        PlanError, MeshError: the plan can't be read, or does not fit the ranks.
    """
    # As `paceline run` decides it: a node first, then a rank, then a job that is started here.
    node = find_node(environment)
    position = LauncherPosition() if node is not None else find_position(environment)
    is_started = arguments.plan or arguments.n is not None  # by `paceline run`, where there is no other launcher
    plan, origin = _plan(arguments, environment, position)
    if node is None and (position.source != ALONE or not is_started):
        Mesh.parse(plan.mesh).check_fits(position.size)
    if node is not None:
        rows = _node_rows(node, environment)
    elif position.source == ALONE and plan.world_size > 1:
        rows = _started_rows(plan, origin, position)
    else:
        rows = _position_rows(position)
    rows += [
        ("plan", plan.line(), origin),
        ("transport", plan.transport, _flag(arguments, "transport", origin)),
        ("compression", plan.compression, _flag(arguments, "compression", origin)),
        ("bucket bytes", str(plan.bucket_bytes), _flag(arguments, "bucket_bytes", origin)),
        _variable("run directory", "PACELINE_RUN_DIR", "none", environment),
        _variable("coordinator", "PACELINE_COORDINATOR", "none", environment),
        _threads(position, node, plan, environment),
    ]
    for name, text in sorted(environment.items()):
        if _changes(name):
            rows.append((name, _shown(name, text), "environment"))
    return rows


def _position_rows(position: LauncherPosition) -> list[Row]:
    """Return the rows of a rank that some launcher started, or of one process alone."""
    origins = position.origins
    meeting = "nowhere" if position.master is None else f"{position.master[0]} port {position.master[1]}"
    host = f"{position.cross_rank} of {position.cross_size}"
    host_origins = dict.fromkeys((origins["cross_rank"], origins["cross_size"]))  # once where they are the same
    launcher_origin = "default: no launcher" if position.source == ALONE else "its variables, below"
    return [
        ("launcher", position.source, launcher_origin),
        ("rank", str(position.rank), origins["rank"]),
        ("size", str(position.size), origins["size"]),
        ("local rank", str(position.local_rank), origins["local_rank"]),
        ("local size", str(position.local_size), origins["local_size"]),
        ("host", host, ", ".join(host_origins)),
        ("ranks meet at", position.file or meeting, origins.get("meeting", "not needed by one rank")),
        ("interface", position.interface or "any", origins["interface"]),
    ]


def _started_rows(plan: Plan, origin: str, position: LauncherPosition) -> list[Row]:
    """Return the rows of a job whose ranks `paceline run` would start on this host."""
    size = str(plan.world_size)
    ranks = f"0 to {plan.world_size - 1}"
    return [
        ("launcher", "paceline run", "default: no other launcher"),
        ("rank", ranks, origin),
        ("size", size, origin),
        ("local rank", ranks, origin),
        ("local size", size, origin),
        ("host", "0 of 1", "default: this host"),
        ("ranks meet at", "a file of the job's", "default: one host"),
        ("interface", position.interface or "any", position.origins["interface"]),
    ]


def _node_rows(node: NodeInfo, environment: Mapping[str, str]) -> list[Row]:
    """Return the rows of a host that is to start its own ranks."""
    origins = node.origins
    meeting = "this host" if node.master is None else f"{node.master[0]} port {node.master[1]}"
    return [
        ("launcher", node.source, "its variables, below"),
        ("host", f"{node.node_rank} of {node.nodes}", f"{origins['node_rank']}, {origins['nodes']}"),
        ("ranks of a host", str(node.ranks_per_node or "as many as devices"), origins["ranks_per_node"]),
        ("ranks meet at", meeting, origins["meeting"]),
        _variable("interface", "PACELINE_INTERFACE", "any", environment),
    ]


def _plan(
    arguments: argparse.Namespace, environment: Mapping[str, str], position: LauncherPosition
) -> tuple[Plan, str]:
    """Return the plan, and where it comes from; a rank's plan is its launcher's, as the rank itself reads it."""
    if arguments.plan or arguments.n is not None:
        plan = decide_plan(arguments)
        flag = f"--plan {arguments.plan}" if arguments.plan else f"-n {arguments.n}"
        return plan, f"flag {flag}"
    if folder := environment.get("PACELINE_RUN_DIR"):
        return Plan.read(Path(folder, "plan.json")), f"PACELINE_RUN_DIR={folder}: plan.json"
    if text := environment.get("PACELINE_PLAN"):
        return Plan.of_variable(text), "PACELINE_PLAN"
    arguments.n = position.size
    return decide_plan(arguments), f"default: replicate over {position.size}"


def _flag(arguments: argparse.Namespace, name: str, plan_origin: str) -> str:
    """Return where an option of the plan comes from: its own flag, else what the plan comes from."""
    if getattr(arguments, name) is not None:
        return f"flag --{name.replace('_', '-')}"
    # A plan.json has every option; axes on the command line have none of them.
    is_of_axes = plan_origin.startswith(("default", "flag")) and not plan_origin.endswith(".json")
    return "default" if is_of_axes else plan_origin


def _threads(
    position: LauncherPosition, node: NodeInfo | None, plan: Plan, environment: Mapping[str, str]
) -> tuple[str, str, str]:
    if environment.get("OMP_NUM_THREADS"):
        return _variable("threads of a rank", "OMP_NUM_THREADS", "", environment)
    if position.source != ALONE or (node is not None and not node.ranks_per_node):
        return "threads of a rank", "torch's choice", "default"
    ranks = plan.world_size if node is None else node.ranks_per_node
    cores = os.cpu_count() or 1
    return "threads of a rank", str(max(1, cores // ranks)), f"computed: {cores} cores for {ranks} ranks"


def _variable(setting: str, name: str, otherwise: str, environment: Mapping[str, str]) -> Row:
    text = environment.get(name)
    if not text:
        return setting, otherwise, "default"
    return setting, _shown(name, text), name


def _changes(name: str) -> bool:
    return name.startswith(PREFIXES) or name in NAMES


def _shown(name: str, text: str) -> str:
    return HIDDEN if is_secret(name) else text


def _shortened(text: str) -> str:
    text = " ".join(text.split())  # a variable may hold line ends
    return text if len(text) <= _WIDEST else f"{text[: _WIDEST - 1]}…"
