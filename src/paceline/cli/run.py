"""Train as planned: start the ranks, show their progress, end them together.

The workload file runs as it would with `python FILE`, once per rank. What the job decides and does is
written to RUNS/JOB: plan.json, events.jsonl, failures, checkpoints, result.json.

Ranks start on this host; with --on ssh on the hosts of -H or --hostfile, and parameter servers with them; with --on mpi
under mpirun, with --on ray as actors.
--on slurm and --on kubernetes send the job and return. Started itself by torchrun, mpirun, srun or in a pod, it
becomes the rank, or starts the ranks of its node.

Exit codes: 0 done, or stopped by SIGTERM with a checkpoint; 129 or 130 stopped by SIGHUP or Ctrl-C; 143 stopped by
SIGTERM without a checkpoint of its last step, or by one that was sent to a rank and not to this command; 1 the job
failed; 2 the request can't be met.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path

from paceline.checkpoint.manifest import has_resume_point, list_checkpoints
from paceline.cli import run_as_rank, run_on, run_on_kubernetes
from paceline.cli.flags import CHECK, ELASTIC, NAMED_RANK, NODE, OWN_ARGUMENTS, RANK, check_place
from paceline.launch.rank_assignment import HostRanks, Rendezvous
from paceline.launch.ssh import check_ssh
from paceline.launch.workload_file import WorkloadFile, read_workload_file
from paceline.nouns.errors import PacelineError, UsageError
from paceline.nouns.mesh import AXES, SHORT, Mesh
from paceline.nouns.options import without_effect
from paceline.nouns.plan import COMPRESSIONS, OPTIONS, SHORT_OPTIONS, TRANSPORTS, Plan
from paceline.nouns.reading import number
from paceline.rendezvous.launcher_env import LauncherPosition, NodeInfo
from paceline.rendezvous.rank_variables import joined_address
from paceline.run import directory
from paceline.run.failures import format_failure
from paceline.run.supervise.elastic import Elastic
from paceline.run.supervise.fleet import end_watch
from paceline.run.supervise.host_backend import LocalBackend
from paceline.run.supervise.interrupts import interruptible
from paceline.run.supervise.job import run_job
from paceline.run.supervise.progress import Progress, Screen
from paceline.run.supervise.stalls import DEFAULT_S, VARIABLE, notice_time
from paceline.run.supervise.supervisor import GRACE_S, THE_COMMAND, Ending, HostAssignment, JobRequest, Supervisor

RUNS = Path("runs")
PLAN_FLAGS = ("transport", "compression", "bucket_bytes", "checkpoint_every", "keep")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments; those after the file are the file's own."""
    add_plan_arguments(parser)
    default = Plan()
    parser.add_argument(
        "--checkpoint-every",
        type=int,
        metavar="STEPS",
        help=f"save every so many steps (default {default.checkpoint_every}; 0: only at the end)",
    )
    parser.add_argument("--keep", type=int, metavar="K", help=f"checkpoints that stay (default {default.keep})")
    parser.add_argument("--job", metavar="NAME", help="the run's name (default: the file's name and the time)")
    parser.add_argument("--runs", type=Path, default=RUNS, metavar="DIR", help="where runs are kept (default runs)")
    parser.add_argument(
        "--resume",
        action="store_true",
        help="go on with --job, or with this file's last run, at its newest whole checkpoint",
    )
    parser.add_argument(
        "--grace",
        type=number,
        default=GRACE_S,
        metavar="SECONDS",
        help=f"time to save after Ctrl-C or SIGTERM (default {GRACE_S:g})",
    )
    parser.add_argument(
        "--stall-notice",
        type=float,
        metavar="SECONDS",
        help="if no rank makes progress for so long, print where each one is, and end nothing (a rank that ended its "
        f"file while others wait for it always ends the job; default {DEFAULT_S:g}, or what {VARIABLE} says; 0: never)",
    )
    parser.add_argument(
        "--json", action="store_true", help="print the result as JSON on stdout; all else goes to stderr"
    )
    run_on.add_arguments(parser)
    run_on_kubernetes.add_arguments(parser)
    parser.add_argument("workload", metavar="FILE", help="the Python file that declares the workload")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help=OWN_ARGUMENTS)


def add_plan_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that decide a plan."""
    parser.add_argument("-n", type=int, metavar="N", help="ranks to start (default: as many as --plan covers, else 1)")
    parser.add_argument(
        "--plan",
        metavar="PLAN",
        help="axes with sizes and options, such as replicate=2 or pipeline=2,tensor=2,schedule=gpipe, or a plan.json",
    )
    parser.add_argument(
        "--transport",
        metavar="WORD",
        help=f"{', '.join(TRANSPORTS)} (default auto: shared memory on one host, else gloo; nccl on GPUs)",
    )
    parser.add_argument("--compression", metavar="WORD", help=f"of gradients on the wire: {', '.join(COMPRESSIONS)}")
    parser.add_argument(
        "--bucket-bytes",
        type=int,
        metavar="BYTES",
        help=f"gradients that travel together (default {Plan().bucket_bytes})",
    )


def decide_plan(arguments: argparse.Namespace, grows: bool = False) -> Plan:
    """Return the plan that the arguments ask for.

    Args:
        arguments: of the command.
        grows: True if the number of ranks follows from the hosts that there are, and may change.

    Raises:
        UsageError: N is below 1.
        MeshError: the mesh names no axis, or does not cover N ranks.
        PlanError: a value is none that a plan can have, or an option has no effect under the plan's axes.
    """
    if arguments.n is not None and arguments.n < 1:
        raise UsageError(f"can't start {arguments.n} ranks", "a job has at least one", "write -n 1 or more")
    may_be_axes = "=" in (arguments.plan or "=")
    if not may_be_axes and os.path.isdir(arguments.plan):  # False, not an error, for what is longer than a path can be
        fix = "name the plan.json in it, or axes with sizes such as replicate=2"
        raise UsageError(f"can't read the plan {arguments.plan}", "it is a folder", fix)
    ranks = 1 if grows else arguments.n
    text = _with_ranks(arguments.plan or "", ranks)
    is_file = text.endswith(".json")
    plan = Plan.read(Path(text)) if is_file else Plan.parse(text or "replicate=1")
    mesh = Mesh.parse(plan.mesh)
    mesh.check_fits(arguments.n or mesh.world_size)
    changes = {}
    for name in PLAN_FLAGS:
        value = getattr(arguments, name, None)  # not every command has all of them
        if value is not None:
            changes[name] = value
    plan = dataclasses.replace(plan, **changes, mesh=str(mesh))
    plan.check_effect(changes, plan.mesh if is_file else text)
    if not grows:
        options = dict(item.strip().partition("=")[::2] for item in text.split(","))
        for name in without_effect({**options, **changes}, mesh):
            print(f"paceline: {name} changes nothing here: the axis it is about has size 1", file=sys.stderr)
    return plan.settled()


def _with_ranks(text: str, ranks: int | None) -> str:
    """Return a plan that names no axis with the ranks, or workers of servers, that -n says."""
    # `-n 4 --plan server=2` means four workers: the axis is left out, so -n says its size.
    names = {item.partition("=")[0].strip() for item in text.split(",")}
    is_unknown = bool(names - {"", *OPTIONS, *SHORT_OPTIONS})  # an error then quotes what was written
    has_axis = not names.isdisjoint({*AXES, *SHORT})
    if not ranks or text.endswith(".json") or has_axis or is_unknown:
        return text
    return f"replicate={ranks},{text}" if text else f"replicate={ranks}"


def run(arguments: argparse.Namespace) -> int:
    """Run the job, send it, or be a part of it."""
    # Outside of the supervisor's time a signal unwinds to here. `ended` tells whether the job had ended by then.
    arguments.ended = None
    with interruptible() as interrupted:
        return _run(arguments)
    if arguments.ended is not None:  # the job's end stands in result.json
        return int(arguments.ended)
    print("paceline run: stopped before the job started", file=sys.stderr)
    return 128 + interrupted[0]


def _run(arguments: argparse.Namespace) -> int:
    _check_stall_notice(arguments)
    # First what this process is (a rank, a node, or who starts a job), then where the job goes. Flags are checked as
    # soon as the place is known: each applies in some places only.
    place = run_as_rank.find_rank_info(arguments)
    if isinstance(place, LauncherPosition):
        check_place(arguments, NAMED_RANK if arguments.job else RANK, place.source)
        return run_as_rank.be_rank(arguments, place, decide_plan)
    if place is not None:
        check_place(arguments, NODE, place.source)
        return _run_node(arguments, place)
    kind = run_on.kind_of(arguments)
    check_place(arguments, kind)
    if kind == CHECK:
        return run_on_kubernetes.check(Path(arguments.workload))
    if kind == ELASTIC:
        return _run_elastic(arguments)
    arguments.n = run_on.ranks_asked(arguments)
    plan = decide_plan(arguments)
    run_on.check_place(arguments, plan)
    if arguments.on == "kubernetes":
        return run_on_kubernetes.run(arguments, plan)  # FILE is in the image
    file = read_workload_file(arguments.workload, plan.data_size)
    if arguments.dry_run:
        name = arguments.job or directory.new_name(file.path)
        print(run_on.rendered(arguments, plan, arguments.runs / name, file.path))
        return 0
    return _start(arguments, plan, file)


def _start(arguments: argparse.Namespace, plan: Plan, file: WorkloadFile) -> int:
    """Send the job to a scheduler, or start its ranks and supervise them."""
    run_on.check_programs(arguments, plan)  # before the run directory is made
    # With --json standard output has the result alone.
    screen = Screen(sys.stderr if arguments.json else sys.stdout, sys.stderr)
    if arguments.on in (None, "local") and plan.world_size > (os.cpu_count() or 1):
        screen.say(f"paceline: {plan.world_size} ranks share {os.cpu_count()} cores: they will take turns")
    folder, resume = _folder(arguments, file.path, screen)
    try:
        if arguments.on == "slurm":
            return _send(arguments, plan, folder, file.path)
        assignments = run_on.posts_of(arguments, plan, folder, file.path)
    except BaseException:  # Ctrl-C too: a run that did not begin leaves no folder, and its name stays free
        directory.remove_unbegun(folder)
        raise
    environment = {}
    if arguments.on not in ("mpi", "ray", "ssh"):  # there -x is in what starts the ranks
        environment = run_on.environment_of(arguments.env)
    request = JobRequest(
        file.path,
        arguments.arguments,
        plan.world_size,
        folder,
        resume,
        file.imports,
        arguments.grace,
        servers=plan.server,
        assignments=assignments,
        environment=environment,
        stall_notice_s=arguments.stall_notice,
    )
    return _supervise(arguments, plan, request, screen)


def _check_stall_notice(arguments: argparse.Namespace) -> None:
    """Put what the ranks' environment says in the place of a missing --stall-notice; UsageError where it is no time."""
    # This variable alone: whether -x applies here, and is well formed, is told later.
    stall_variable = {}
    for definition in arguments.env:
        name, equals, value = definition.partition("=")
        if name == VARIABLE and equals:
            stall_variable[name] = value
    if arguments.stall_notice is None:
        arguments.stall_notice = notice_time({**os.environ, **stall_variable})
        return
    notice_time(stall_variable)  # the ranks read it, beside the flag too
    asked = f"--stall-notice {arguments.stall_notice:g}"
    if not 0 <= arguments.stall_notice < float("inf"):
        raise UsageError(asked, "it is no number of seconds", "write seconds, or 0 for no notice")


def _folder(arguments: argparse.Namespace, script: Path, screen: Screen) -> tuple[Path, Path | None]:
    """Make or find the run directory, and return it with the checkpoint to go on from."""
    # job.json is written when a job starts: without it there is nothing to go on with.
    may_start = False
    if arguments.resume_or_start and arguments.job:
        may_start = not (arguments.runs / arguments.job / "job.json").exists()
    must_go_on = arguments.resume or arguments.resume_or_start
    if may_start or not must_go_on:
        return directory.new_run(arguments.runs, arguments.job, script), None
    if arguments.job is None and not arguments.resume:
        raise UsageError("--resume-or-start needs a job's name", "no job is named", "write --job NAME")
    folder = directory.find_run(arguments.runs, arguments.job, script)
    directory.check_writable(folder)
    resume = directory.find_resume_point(folder, lambda text: screen.say(f"paceline: {text}"))
    place = f" at {resume.name}" if resume else ""
    screen.say(f"paceline: {folder.name} goes on{place}")
    return folder, resume


def _run_elastic(arguments: argparse.Namespace) -> int:
    """Run the job on the hosts that there are, generation after generation."""
    rules, discover = run_on.elastic_rules(arguments)
    plan = decide_plan(arguments, grows=True)
    if plan.server:
        raise UsageError(
            "can't move parameter servers between hosts that come and go",
            "they stay where they are",
            "leave server out",
        )
    file = read_workload_file(arguments.workload, 1)  # how many ranks there are is only known in each generation
    options = run_on.fleet_options(arguments)
    check_ssh(options.ssh)
    now = ", ".join(host.name for host in discover())  # asked before anything is written, too
    if arguments.dry_run:
        print(f"# between {rules.least} and {rules.most} hosts; now: {now}")
        return 0
    screen = Screen(sys.stderr if arguments.json else sys.stdout, sys.stderr)
    folder, _ = _folder(arguments, file.path, screen)
    request = JobRequest(
        file.path,
        arguments.arguments,
        plan.world_size,
        folder,
        preload=file.imports,
        grace_s=arguments.grace,
        stall_notice_s=arguments.stall_notice,
    )
    job = Elastic(rules, discover, options, plan, request, screen)
    try:
        ending, progress, result = job.run()
    except BaseException:
        directory.remove_unbegun(folder)
        raise
    _tell(folder, ending, progress)
    if arguments.json:
        print(json.dumps(result))
    return ending.exit_code


def _supervise(arguments: argparse.Namespace, plan: Plan, request: JobRequest, screen: Screen) -> int:
    try:
        ending, progress, result = run_job(plan, request, screen)
    except PacelineError:
        directory.remove_unbegun(request.run_dir)
        raise
    finally:  # the certificates for `paceline server top`, also when the job failed
        if request.assignments and request.servers:
            end_watch(request.run_dir)
    arguments.ended = ending.exit_code  # from here on a signal does not change the command's exit code
    _tell(request.run_dir, ending, progress)
    if arguments.json:
        print(json.dumps(result))
    return ending.exit_code


def _send(arguments: argparse.Namespace, plan: Plan, folder: Path, script: Path) -> int:
    """Hand the job to a scheduler."""
    directory.write_start(folder, plan, script, arguments.arguments)
    number = run_on.send_to_slurm(arguments, plan, folder, script)
    if arguments.json:
        print(json.dumps({"job": folder.name, "run_dir": str(folder), "slurm_job": number}))
    else:
        print(number)
    log = folder / f"slurm-{number}.log"
    print(f"paceline run: sent as job {number}; look with `squeue -j {number}` and `tail -f {log}`", file=sys.stderr)
    return 0


def _run_node(arguments: argparse.Namespace, node: NodeInfo) -> int:
    """Start this node's ranks of a job that has other nodes; rank 0's node keeps the run directory."""
    shape = run_on.shape_of(arguments.shape)
    per_node = node.ranks_per_node
    if not per_node and shape is not None:
        _, per_node = shape
    if not per_node:
        raise UsageError(
            f"can't tell how many ranks a node of {node.source} has",
            "nothing says how many",
            "write -j NODESxRANKS, such as -j 2x8",
        )
    world = node.nodes * per_node
    if shape is not None and shape != (node.nodes, per_node):
        raise UsageError(
            f"-j {arguments.shape} on a node of {node.source}", f"it says {node.nodes}x{per_node}", "leave -j out"
        )
    if arguments.job is None:
        raise UsageError(
            "a job of several nodes needs a name", "each node would choose another name for it", "write --job NAME"
        )
    arguments.n = arguments.n or world
    plan = decide_plan(arguments)
    Mesh.parse(plan.mesh).check_fits(world)
    file = read_workload_file(arguments.workload, plan.data_size)
    if arguments.dry_run:
        print(f"# {per_node} ranks from {node.node_rank * per_node} of {world} on this node")
        return 0
    screen = Screen(sys.stderr if arguments.json else sys.stdout, sys.stderr)
    folder = arguments.runs / arguments.job
    if node.node_rank == 0:
        folder, _ = _folder(arguments, file.path, screen)
        directory.write_start(folder, plan, file.path, arguments.arguments)
    else:
        (folder / "failures").mkdir(parents=True, exist_ok=True)
    resume = None
    checkpoints = folder / "checkpoints"
    must_go_on = arguments.resume or arguments.resume_or_start
    if must_go_on and has_resume_point(checkpoints):
        resume = checkpoints
    request = JobRequest(
        file.path,
        arguments.arguments,
        per_node,
        folder,
        resume,
        file.imports,
        arguments.grace,
        assignments=_node_assignments(arguments, node, per_node),
        world_size=world,
        environment={**run_on.environment_of(arguments.env), "PACELINE_PLAN": json.dumps(asdict(plan))},
        stall_notice_s=arguments.stall_notice,
    )
    if node.node_rank == 0:
        return _supervise(arguments, plan, request, screen)
    supervisor = Supervisor(request, screen)
    try:
        ending, progress = supervisor.run()
        _tell(folder, ending, progress)
    finally:
        supervisor.restore_signals()
    return ending.exit_code


def _node_assignments(arguments: argparse.Namespace, node: NodeInfo, per_node: int) -> list[HostAssignment]:
    """Return this node's assignment, in a job of several; none for a node alone, which has a file to meet at."""
    if node.nodes <= 1:
        return []
    master = joined_address(*node.master) if node.master else ""
    rendezvous = Rendezvous(master=master, interface=arguments.interface)
    host_ranks = HostRanks("", node.node_rank * per_node, per_node, node.node_rank, node.nodes)
    return [HostAssignment(LocalBackend(), host_ranks, rendezvous)]


def _saved_part(folder: Path, progress: Progress) -> str:
    """Return what of a stopped job is on the disk, and how to go on."""
    go_on = f"go on with --resume --job {folder.name}"
    if progress.has_stopped and progress.saved_step == progress.stopped_step:
        return f"saved as {progress.checkpoint}; {go_on}"
    earlier = list_checkpoints(folder / "checkpoints")
    if earlier:
        return f"its last steps are not saved, the newest checkpoint is {earlier[0]}; {go_on}"
    return f"nothing was saved; --resume --job {folder.name} starts it again at step 0"


def _tell(folder: Path, ending: Ending, progress: Progress) -> None:
    if ending.status == "failed" and ending.cause is not None:
        print(f"paceline run: {format_failure(ending.cause, ending.others)}", file=sys.stderr)
        if newest := list_checkpoints(folder / "checkpoints")[:1]:
            print(f"  Last checkpoint: {newest[0]}; go on with --resume --job {folder.name}", file=sys.stderr)
    elif ending.status == "stopped":
        reason = ""
        if ending.stop_sent_to not in ("", THE_COMMAND):
            reason = f", since {ending.stop_sent_to} was sent SIGTERM"
        print(f"paceline run: stopped{reason}; {_saved_part(folder, progress)}", file=sys.stderr)
    elif ending.status == "failed":
        print("paceline run: the ranks had to be killed: they did not end by themselves", file=sys.stderr)
    else:
        print(f"paceline run: done; {folder}", file=sys.stderr)
