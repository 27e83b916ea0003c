"""List the settings of a job that starts here, each with its value and its source.

It reads what `paceline run`, or a rank started by another launcher, would read,
and starts nothing. Two launchers that contradict each other are the same error
here as there. With --cluster it shows the settings of that file. A whole
command can follow: `paceline explain submit slurm --cluster FILE train.py`.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from paceline.cli.explain_run import NEW_RUN, PlanSource, Row, run_rows, saving_rows
from paceline.cli.plan_flags import OneLineHelp, add_job_settings, plan_request, print_notice
from paceline.cli.run_command import make_request, settings_of
from paceline.cli.submit_command import kubernetes_request, slurm_request
from paceline.launch.plan_choice import PlanRequest, choose_plan, says_ranks
from paceline.launch.rank_command import HIDDEN, is_secret
from paceline.nouns.errors import UsageError
from paceline.nouns.mesh import Mesh
from paceline.nouns.plan import Plan
from paceline.nouns.reading import shown
from paceline.nouns.table import aligned
from paceline.rendezvous.launcher_env import ALONE, LauncherPosition, NodeInfo, find_node, find_position
from paceline.run.cluster_file import ClusterSettings, displayed, read_cluster_file
from paceline.run.job_settings import ELASTIC, TABLES
from paceline.run.request import find_launcher

# Variables of these beginnings change a job, and so do these.
PREFIXES = ("PACELINE_", "PET_", "NCCL_", "GLOO_", "TORCH_", "TORCHELASTIC_", "OMP_")
NAMES = ("CUDA_VISIBLE_DEVICES",)
NO_FILE = (
    "No configuration file is read: a setting comes from a flag, a variable or the launcher, else it is the default."
)
WITH_FILE = (
    "A setting comes from a flag, else from the cluster file, a variable or the launcher, else it is the default."
)
_STARTED_ELSEWHERE = ("ssh", "mpi", "ray", ELASTIC)
_WIDEST = 60  # letters of a value in the table; --json has all of them


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.usage = "paceline explain [options] [COMMAND ...]"
    parser.formatter_class = OneLineHelp
    add_job_settings(parser, "n", "plan", "cluster")
    parser.add_argument("--json", action="store_true", help="print the settings as JSON")
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="COMMAND", help="run ..., or submit TARGET ...")


def run(arguments: argparse.Namespace) -> int:
    """Print the settings."""
    began = _start_of(arguments)
    rows = settings(began, os.environ)
    if arguments.json:
        listed = [{"setting": name, "value": value, "from": origin} for name, value, origin in rows]
        print(json.dumps({"settings": listed}))
        return 0
    cells = [("setting", "value", "from")]
    for name, value, origin in rows:
        cells.append((name, _shortened(value), origin))
    for line in aligned(cells, "{:<}  {:<}  {}"):
        print(line.rstrip())
    has_file = began.cluster is not None or any("[" in name for name, _, _ in rows)
    print(f"\n{WITH_FILE if has_file else NO_FILE}")
    return 0


@dataclass(frozen=True, slots=True)
class _Start:
    """What starts a job's ranks, as a command says it, and its settings.

    Args:
        plan: that is asked for.
        ranks_from: the flag that says the number of ranks.
        launcher: what starts the ranks, and where that comes from; None: what the environment says, or this host.
        settings: of the launcher.
        cluster: the cluster file.
        grows: the ranks are as many as the slots of hosts that come and go.
        run: the rows of the run directory; empty where the job has none.
        flags: the command's flags, by the names of their settings.
    """

    plan: PlanRequest
    ranks_from: str
    launcher: tuple[str, str] | None = None
    settings: ClusterSettings | None = None
    cluster: Path | None = None
    grows: bool = False
    run: tuple[Row, ...] = ()
    flags: Mapping[str, str] = field(default_factory=dict)


def settings(began: _Start, environment: Mapping[str, str]) -> list[Row]:
    """Return every setting of a job that is started here.

    Raises:
        UsageError: the launcher's variables contradict each other.
        PlanError, MeshError: the plan can't be read, or does not fit the ranks.
    """
    # As `paceline run` decides it: a node first, then a rank, then a job that is started here.
    node = find_node(environment) if began.launcher is None else None
    position = LauncherPosition()
    if node is None and began.launcher is None:
        position = find_position(environment)
    is_started = began.plan.text or began.plan.ranks is not None  # by `paceline run`, without another launcher
    plan, plan_source = _plan(began, environment, position)
    origin = plan_source.row
    says_no_ranks = began.plan.ranks is not None and not says_ranks(began.plan.text)
    ranks_origin = f"flag {began.ranks_from}" if says_no_ranks else origin
    if node is None and (position.source != ALONE or not is_started) and began.launcher is None:
        Mesh.parse(plan.mesh).check_fits(position.size)
    if began.launcher is not None:
        size = ("as many as slots", began.launcher[1]) if began.grows else (str(plan.world_size), ranks_origin)
        rows = [("launcher", *began.launcher), ("size", *size)]
    elif node is not None:
        rows = _node_rows(node, environment)
    elif position.source == ALONE and plan.world_size > 1:
        rows = _started_rows(plan, ranks_origin, position)
    else:
        rows = _position_rows(position)
    rows += [
        ("plan", plan.line(), origin),
        ("transport", plan.transport, _option(began.plan, "transport", plan_source)),
        ("compression", plan.compression, _option(began.plan, "compression", plan_source)),
        ("bucket bytes", str(plan.bucket_bytes), _option(began.plan, "bucket_bytes", plan_source)),
        *(began.run or [_variable("run directory", "PACELINE_RUN_DIR", "none", environment)]),
        *(saving_rows(plan, began.flags, plan_source) if began.run else ()),
        _variable("coordinator", "PACELINE_COORDINATOR", "none", environment),
    ]
    if began.launcher is None:
        rows.append(_threads(position, node, plan, environment))
    rows += _cluster_rows(began)
    for name, text in sorted(environment.items()):
        if _changes(name):
            rows.append((name, _shown(name, text), "environment"))
    return rows


def _start_of(arguments: argparse.Namespace) -> _Start:
    """Return the start of the job that the flags of `explain`, or the command after them, ask for.

    Raises:
        UsageError: the command is none that starts a job, or can't be met.
    """
    if not arguments.command:
        request = plan_request(arguments)
        run = (NEW_RUN,) if (request.text or request.ranks) and find_launcher(None, os.environ) is None else ()
        return _Start(request, f"-n {arguments.n}", cluster=arguments.cluster, run=run)
    from paceline.cli.main import read_command  # which loads this file

    verb = arguments.command[0]
    if verb not in ("run", "submit"):
        fix = "write `paceline explain run ...` or `paceline explain submit slurm ...`"
        if verb.endswith(".py"):
            fix = f"write `paceline explain run {verb}`"
        raise UsageError(f"can't explain the command {shown(verb)}", "run and submit start jobs", fix)
    for name, flag in arguments.flags.items():
        if name != "json":
            found = f"it stands before {verb}, as a flag of explain"
            raise UsageError(
                f"{flag} should be a flag of the command that is explained", found, f"write it after {verb}"
            )
    parsed = read_command(arguments.command)
    return _start_of_run(parsed) if verb == "run" else _start_of_submit(parsed)


def _start_of_run(parsed: argparse.Namespace) -> _Start:
    request, launcher_settings = make_request(parsed)
    rows = run_rows(parsed, request.place)
    ranks_from = _ranks_from(parsed)
    if request.place not in _STARTED_ELSEWHERE:
        return _Start(request.plan, ranks_from, run=rows, flags=parsed.flags)
    launcher = (f"paceline run, {request.place}", "flag --on" if parsed.on else "flag --min-hosts")
    grows = request.place == ELASTIC
    return _Start(request.plan, ranks_from, launcher, launcher_settings, parsed.cluster, grows, rows, parsed.flags)


def _start_of_submit(parsed: argparse.Namespace) -> _Start:
    launcher_settings = settings_of(parsed, parsed.target)
    with launcher_settings.naming_sources():
        make = slurm_request if parsed.target == "slurm" else kubernetes_request
        plan = make(parsed, launcher_settings).plan
    launcher = (f"paceline submit {parsed.target}", f"command submit {parsed.target}")
    rows = run_rows(parsed, parsed.target)
    ranks_from = _ranks_from(parsed)
    return _Start(plan, ranks_from, launcher, launcher_settings, parsed.cluster, run=rows, flags=parsed.flags)


def _ranks_from(parsed: argparse.Namespace) -> str:
    """Return the flag that says how many ranks there are."""
    if parsed.n is not None:
        return f"-n {parsed.n}"
    if parsed.shape is not None:
        return f"-j {parsed.shape}"
    return "--hostfile" if getattr(parsed, "hostfile", None) else "-H"


def _cluster_rows(began: _Start) -> list[Row]:
    """Return the rows of the cluster file's tables, and of the table of the launcher that is asked for."""
    file = read_cluster_file(began.cluster)
    rows = []
    for table in TABLES:
        if began.settings is not None and began.settings.table == table:
            of_table = began.settings
        elif table in file.tables:
            of_table = file.settings(table, {})
        else:
            continue
        for key, value in of_table.values.items():
            rows.append((f"[{table}] {key}", displayed(value), of_table.sources[key].row))
    return rows


def _position_rows(position: LauncherPosition) -> list[Row]:
    """Return the rows of a rank that some launcher started, or of a process without a launcher."""
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


def _plan(began: _Start, environment: Mapping[str, str], position: LauncherPosition) -> tuple[Plan, PlanSource]:
    """Return the plan, and its source; a rank's plan is its launcher's, as the rank itself reads it."""
    if began.plan.text or began.plan.ranks is not None:
        plan = choose_plan(began.plan, print_notice, began.grows)
        flag = f"--plan {began.plan.text}" if began.plan.text else began.ranks_from
        return plan, PlanSource(f"flag {flag}", has_all_options=began.plan.text.endswith(".json"))
    if folder := environment.get("PACELINE_RUN_DIR"):
        plan_source = PlanSource(f"PACELINE_RUN_DIR={folder}: plan.json", has_all_options=True)
        return Plan.read(Path(folder, "plan.json")), plan_source
    if text := environment.get("PACELINE_PLAN"):
        return Plan.of_variable(text), PlanSource("PACELINE_PLAN", has_all_options=True)
    plan = choose_plan(began.plan.with_ranks(position.size), print_notice)
    return plan, PlanSource(f"default: replicate over {position.size}")


def _option(request: PlanRequest, name: str, source: PlanSource) -> str:
    """Return the source of an option of the plan: the plan's, or the default."""
    named = {item.partition("=")[0].strip() for item in request.text.split(",")}
    return source.row if source.has_all_options or name in named else "default"


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
