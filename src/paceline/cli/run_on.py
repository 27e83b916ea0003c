"""Read the arguments of `paceline run` about hosts and schedulers, and send a job there."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import os
import re
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from paceline.checkpoint.manifest import list_checkpoints
from paceline.cli.flags import CHECK, ELASTIC, PLACES
from paceline.launch.command import RankCommand, is_secret, shown
from paceline.launch.hosts import Host, parse_hosts, read_hostfile
from paceline.launch.mpi import find_mpirun, mpi_command
from paceline.launch.rank_assignment import HostRanks, Rendezvous, seat, with_servers
from paceline.launch.ray import STRATEGIES, RayJob, RayOptions, ray_job
from paceline.launch.slurm import SlurmOptions, check_sbatch, sbatch_script, submit
from paceline.launch.ssh import SshOptions, check_ssh
from paceline.nouns import module_names
from paceline.nouns.errors import UsageError
from paceline.nouns.mesh import MOST_RANKS
from paceline.nouns.plan import Plan
from paceline.nouns.reading import number, parse_whole
from paceline.run.supervise.command_backend import STOP, CommandBackend
from paceline.run.supervise.elastic import script_hosts
from paceline.run.supervise.fleet import FleetOptions, agent_command, agent_request, open_posts
from paceline.run.supervise.membership import Rules
from paceline.run.supervise.restart_policy import Replaced
from paceline.run.supervise.stalls import VARIABLE as STALL_NOTICE
from paceline.run.supervise.supervisor import HostAssignment
from paceline.server.coordinator.absences import silence_s
from paceline.server.transport.credentials import check_can_make

_PORTS = range(20000, 40000)  # for rank 0's store under somebody else's mpirun; below the kernel's own


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments about hosts."""
    where = parser.add_argument_group("hosts")
    where.add_argument("--on", choices=PLACES, help="what starts the ranks (default local)")
    where.add_argument("-j", metavar="NODESxRANKS", dest="shape", help="hosts and ranks on each, such as 2x8")
    where.add_argument("-H", "--hosts", metavar="H1:4,H2:4", help="hosts and their slots: ssh, or mpi")
    where.add_argument("--hostfile", type=Path, metavar="FILE", help="a host a line: `h1:4`, `h1 slots=4` or `h1`")
    where.add_argument("--interface", metavar="IF", default="", help="network interface for torch's sockets")
    where.add_argument(
        "-x", "--env", metavar="NAME[=VALUE]", action="append", default=[], help="a variable for the ranks; may repeat"
    )
    where.add_argument("--python", metavar="PATH", default=sys.executable, help="Python on the hosts (default: this)")
    where.add_argument("--dry-run", action="store_true", help="print what would be sent, and send nothing")
    where.add_argument(
        "--resume-or-start", action="store_true", help="go on at the newest whole checkpoint of --job, if it has one"
    )
    where.add_argument("--ssh-option", metavar="WORD", action="append", default=[], help="an argument for ssh: -p2222")
    where.add_argument("--ssh-program", metavar="PATH", default="ssh", help="which ssh (default ssh)")
    where.add_argument("--mpirun", metavar="PATH", default="", help="which mpirun (default: the first in PATH)")
    where.add_argument(
        "--mpi-option", metavar="WORD", action="append", default=[], help="an argument for mpirun; may repeat"
    )
    _add_slurm(parser.add_argument_group("Slurm"))
    elastic = parser.add_argument_group("hosts that come and go")
    elastic.add_argument("--min-hosts", type=int, metavar="N", help="fewest hosts to run on (with --on ssh)")
    elastic.add_argument("--max-hosts", type=int, metavar="N", help="most hosts to run on")
    elastic.add_argument(
        "--host-discovery-script",
        type=Path,
        metavar="FILE",
        help="a program that prints the hosts there are, a line each",
    )
    ray = parser.add_argument_group("Ray")
    ray.add_argument("--ray-address", default="local", metavar="ADDRESS", help="HOST:PORT, auto, or local (default)")
    ray.add_argument("--cpus-per-rank", type=number, default=1, metavar="N", help="of each bundle (default 1)")
    ray.add_argument("--gpus-per-rank", type=number, default=0, metavar="N", help="of each bundle (default 0)")
    ray.add_argument("--strategy", choices=STRATEGIES, default="PACK", help="of the placement group (default PACK)")


def _add_slurm(slurm: argparse._ArgumentGroup) -> None:
    for name in ("partition", "account", "qos", "time"):
        slurm.add_argument(f"--{name}", default="", metavar=name.upper(), help="as sbatch has it")
    slurm.add_argument("--gpus-per-node", type=int, default=0, metavar="N", help="(default 0)")
    slurm.add_argument("--cpus-per-task", type=int, default=0, metavar="N", help="(default: the cluster's own)")
    slurm.add_argument(
        "--signal",
        type=int,
        default=120,
        metavar="S",
        help="save this many seconds before the time limit (default 120)",
    )
    slurm.add_argument(
        "--sbatch-option", metavar="WORD", action="append", default=[], help="for an #SBATCH line; may repeat"
    )


def hosts_of(arguments: argparse.Namespace) -> tuple[Host, ...]:
    """Return the hosts that were named.

    Raises:
        UsageError: they can't be read, or are given twice.
    """
    if arguments.hosts and arguments.hostfile:
        raise UsageError("the job's hosts should be named once", "there is -H and --hostfile", "leave one out")
    if arguments.hosts:
        return _shaped(parse_hosts(arguments.hosts), arguments.shape)
    if arguments.hostfile:
        return _shaped(read_hostfile(arguments.hostfile), arguments.shape)
    return ()


def _shaped(hosts: tuple[Host, ...], text: str | None) -> tuple[Host, ...]:
    """Return, with -j, so many of the hosts, with so many slots each."""
    shape = shape_of(text)
    if shape is None:
        return hosts
    nodes, ranks = shape
    # Hosts with fewer slots are passed over, the rest are taken in the order in which they were named.
    fit = [dataclasses.replace(host, slots=ranks) for host in hosts if host.slots >= ranks]
    if len(fit) < nodes:
        reason = f"{len(fit)} of the {len(hosts)} hosts have {ranks} slots"
        raise UsageError(f"-j {text} on these hosts", reason, "name more, or write fewer")
    return tuple(fit[:nodes])


def shape_of(text: str | None) -> tuple[int, int] | None:
    """Read `2x8`: the number of hosts, and of ranks on each.

    Raises:
        UsageError: it can't be read.
    """
    if text is None:
        return None
    before, _, after = text.partition("x")
    nodes = parse_whole(before, 1, MOST_RANKS)
    ranks = parse_whole(after, 1, MOST_RANKS)
    if nodes is None or ranks is None:
        fix = "write such as -j 2x8: 2 hosts with 8 ranks each"
        raise UsageError(f"can't read -j {text[:100]}", "it is not NODESxRANKS", fix)
    return nodes, ranks


def ranks_asked(arguments: argparse.Namespace) -> int | None:
    """Return how many ranks the arguments ask for; None: they leave it to the plan.

    Raises:
        UsageError: they contradict each other.
    """
    shape = shape_of(arguments.shape)
    hosts = hosts_of(arguments)
    asked: int | None = arguments.n
    if shape is not None:
        nodes, per_node = shape
        if asked not in (None, nodes * per_node):
            raise UsageError(
                f"-n {asked} and -j {arguments.shape} should agree", f"-j is {nodes * per_node} ranks", "leave one out"
            )
        asked = nodes * per_node
    if asked is None and hosts and not arguments.plan:  # a plan says itself how many ranks it covers
        asked = sum(host.slots for host in hosts)
    return asked


def environment_of(definitions: Sequence[str]) -> dict[str, str]:
    """Return the variables that -x names, with the values given or those of this process.

    Raises:
        UsageError: a name is none, or it is not set here.
    """
    environment = {}
    for definition in definitions:
        name, equals, value = definition.partition("=")
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise UsageError(
                f"can't pass -x {definition}", "that is no variable's name", "write -x NAME or -x NAME=VALUE"
            )
        if not equals and name not in os.environ:
            raise UsageError(f"can't pass -x {name}", "it is not set here", f"write -x {name}=VALUE, or set it")
        if equals and is_secret(name):  # `ps` shows every user's command lines
            raise UsageError(
                f"can't pass -x {name}=...",
                "a secret on a command line is read by others",
                f"set it, then write -x {name}",
            )
        environment[name] = value if equals else os.environ[name]
    return environment


def check_place(arguments: argparse.Namespace, plan: Plan) -> None:
    """Raise UsageError unless what is said of hosts fits the place and the plan."""
    place = arguments.on or "local"
    hosts = hosts_of(arguments)
    shape = shape_of(arguments.shape)
    if shape is not None and shape[0] > 1 and not hosts and place in ("local", "mpi"):
        ranks = shape[0] * shape[1]
        raise UsageError(
            f"-j {arguments.shape} needs {shape[0]} hosts", "no host is named", f"write -n {ranks}, or --on ssh -H"
        )
    if shape is not None and place == "ray":
        print("paceline run: Ray places each rank by itself; -j says only how many there are", file=sys.stderr)
    if place == "ssh" and not hosts:
        raise UsageError("--on ssh needs hosts", "no host is named", "write -H h1:4,h2:4 or --hostfile FILE")
    if plan.server:
        silence_s(os.environ)
    if plan.server and place in ("mpi", "slurm", "ray"):
        raise UsageError(
            f"can't run a plan with servers --on {place}",
            "it starts ranks alone",
            "write --on ssh, or see docs/parameter-server.md for servers that are started by hand",
        )


def check_programs(arguments: argparse.Namespace, plan: Plan) -> None:
    """Raise UsageError, before anything is written, where what is to be called is not there or would refuse."""
    environment_of(arguments.env)
    if arguments.on == "ssh":
        check_ssh(fleet_options(arguments).ssh)
        seat(hosts_of(arguments), plan.world_size)
        if plan.server:
            check_can_make()
    elif arguments.on == "mpi":
        find_mpirun(arguments.mpirun, arguments.mpi_option)
    elif arguments.on == "slurm":
        check_sbatch(slurm_options(arguments))
    elif arguments.on == "ray":
        ray_options(arguments)
        if importlib.util.find_spec("ray") is None:
            raise UsageError("--on ray", "the package ray is not installed", "pip install 'paceline[ray]'")


def ray_options(arguments: argparse.Namespace) -> RayOptions:
    """Return what Ray is asked for."""
    return RayOptions(arguments.ray_address, arguments.cpus_per_rank, arguments.gpus_per_rank, arguments.strategy)


def posts_of(arguments: argparse.Namespace, plan: Plan, run_dir: Path, file: Path) -> list[HostAssignment]:
    """Return the hosts of the job, ready to start ranks; none: this host alone.

    Raises:
        UsageError: a host is not ready, or there is no such program.
    """
    if arguments.on == "ssh":
        return open_posts(_seats(arguments, plan), file, run_dir, fleet_options(arguments))
    if arguments.on in ("mpi", "ray"):
        backend_of = _mpi_station if arguments.on == "mpi" else _ray_station
        backend = backend_of(arguments, plan, run_dir, file)
        return [HostAssignment(backend, HostRanks(arguments.on, 0, plan.world_size), Rendezvous())]
    return []


def _seats(arguments: argparse.Namespace, plan: Plan) -> tuple[HostRanks, ...]:
    return with_servers(seat(hosts_of(arguments), plan.world_size), plan.server)


def kind_of(arguments: argparse.Namespace) -> str:
    """Return what starts the ranks, as cli/flags.py calls it, where nobody else's launcher did."""
    place: str = arguments.on or "local"
    if place == "kubernetes" and arguments.check:
        return CHECK
    elastic_flags = (arguments.min_hosts, arguments.max_hosts, arguments.host_discovery_script)
    is_elastic = any(value is not None for value in elastic_flags)
    return ELASTIC if is_elastic and place in ("local", "ssh") else place


def elastic_rules(arguments: argparse.Namespace) -> tuple[Rules, Callable[[], Sequence[Host]]]:
    """Return how many hosts the job wants, and what tells which there are.

    Raises:
        UsageError: the numbers contradict each other, or nothing names hosts.
    """
    hosts = hosts_of(arguments)
    if hosts and arguments.host_discovery_script:
        raise UsageError(
            "the job's hosts should be named once", "they are named, and there is a script", "leave one out"
        )
    if not hosts and arguments.host_discovery_script is None:
        raise UsageError(
            "--min-hosts and --max-hosts need hosts",
            "no host is named",
            "write -H, --hostfile or --host-discovery-script",
        )
    least = 1 if arguments.min_hosts is None else arguments.min_hosts
    most = arguments.max_hosts
    if most is None:
        most = max(least, len(hosts) or sys.maxsize)  # a script may name any number of hosts
    if arguments.n is not None or arguments.shape is not None:
        raise UsageError(
            "-n and -j do not apply to hosts that come and go", "the ranks are as many as their slots", "leave it out"
        )
    if not 1 <= least <= most:
        raise UsageError(
            "--min-hosts should be at least 1 and not above --max-hosts",
            f"they are {least} and {most}",
            "let 1 <= min <= max",
        )
    rules = Rules(least, most)
    if hosts:
        return rules, lambda: hosts
    return rules, script_hosts(arguments.host_discovery_script)


def fleet_options(arguments: argparse.Namespace) -> FleetOptions:
    """Return how other hosts are reached."""
    ssh = SshOptions(arguments.ssh_program, tuple(arguments.ssh_option))
    return FleetOptions(ssh, arguments.python, arguments.interface, environment_of(arguments.env))


def _supervised(arguments: argparse.Namespace, run_dir: Path) -> dict[str, str]:
    """Return the variables of ranks under somebody else's launcher, with our supervisor above it."""
    interface = {"PACELINE_INTERFACE": arguments.interface} if arguments.interface else {}
    checkpoints = run_dir.resolve() / "checkpoints"
    resume = {"PACELINE_RESUME": str(checkpoints)} if list_checkpoints(checkpoints) else {}
    job = {"PACELINE_RUN_DIR": str(run_dir.resolve()), "PACELINE_SUPERVISED": "1"}
    return {STALL_NOTICE: str(arguments.stall_notice), **environment_of(arguments.env), **interface, **resume, **job}


def mpi_words(arguments: argparse.Namespace, plan: Plan, run_dir: Path, file: Path) -> tuple[list[str], dict[str, str]]:
    """Return mpirun's command line, and the variables that it takes from its environment."""
    hosts = hosts_of(arguments)
    environment = _supervised(arguments, run_dir)
    if len(hosts) > 1:
        # Chosen at random, not found free: rank 0's host may be another one. On one host ranks meet in a file.
        port = _PORTS[int.from_bytes(os.urandom(4)) % len(_PORTS)]
        environment |= {"MASTER_ADDR": hosts[0].name, "MASTER_PORT": os.environ.get("MASTER_PORT", str(port))}
    program = [arguments.python, "-m", module_names.EXTERNAL_RANK, str(file.resolve()), *arguments.arguments]
    names = sorted({*environment, "PACELINE_STOP_FILE"})  # `CommandBackend` sets the latter
    mpirun = find_mpirun(arguments.mpirun, arguments.mpi_option)
    return mpi_command(mpirun, plan.world_size, hosts, names, program), environment


def _mpi_station(arguments: argparse.Namespace, plan: Plan, run_dir: Path, file: Path) -> CommandBackend:
    command, environment = mpi_words(arguments, plan, run_dir, file)
    return CommandBackend(command, environment)


def _ray_job(arguments: argparse.Namespace, plan: Plan, run_dir: Path, file: Path) -> RayJob:
    options = ray_options(arguments)
    stop = {"PACELINE_STOP_FILE": str(run_dir.resolve() / STOP)}
    rank = rank_command(arguments, plan, run_dir, file)
    rank = dataclasses.replace(rank, environment={**_supervised(arguments, run_dir), **stop})
    return ray_job(rank, options, os.getcwd())


def _ray_station(arguments: argparse.Namespace, plan: Plan, run_dir: Path, file: Path) -> CommandBackend:
    job = _ray_job(arguments, plan, run_dir, file)
    return CommandBackend([sys.executable, "-m", module_names.RAY_DRIVER], {}, job.request(), "Ray's driver")


def rank_command(arguments: argparse.Namespace, plan: Plan, run_dir: Path, file: Path) -> RankCommand:
    """Return what a scheduler's task runs."""
    nodes, per_node = shape_of(arguments.shape) or (1, plan.world_size)
    environment = environment_of(arguments.env)
    if arguments.interface:
        environment["PACELINE_INTERFACE"] = arguments.interface
    return RankCommand(
        file,
        arguments.arguments,
        plan,
        run_dir.parent,
        run_dir.name,
        nodes=nodes,
        ranks_per_node=per_node,
        environment=environment,
        python=arguments.python,
    )


def slurm_options(arguments: argparse.Namespace) -> SlurmOptions:
    """Return what sbatch is asked for."""
    return SlurmOptions(
        arguments.partition,
        arguments.account,
        arguments.qos,
        arguments.time,
        arguments.gpus_per_node,
        arguments.cpus_per_task,
        arguments.signal,
        more=tuple(arguments.sbatch_option),
    )


def rendered(arguments: argparse.Namespace, plan: Plan, run_dir: Path, file: Path) -> str:
    """Return what would be sent, as text."""
    if arguments.on == "ssh":
        return _rendered_ssh(arguments, plan, run_dir, file)
    if arguments.on == "mpi":
        command, environment = mpi_words(arguments, plan, run_dir, file)
        lines = [f"{name}={shlex.quote(value)}" for name, value in shown(environment).items()]
        return "\n".join([*lines, shlex.join(command)])
    if arguments.on == "ray":
        return _ray_job(arguments, plan, run_dir, file).text()
    if arguments.on == "slurm":
        return sbatch_script(rank_command(arguments, plan, run_dir, file), slurm_options(arguments))
    noun = "ranks" if plan.world_size > 1 else "rank"
    command_line = shlex.join([sys.executable, str(file), *arguments.arguments])
    return f"# {plan.world_size} {noun} on this host\n{command_line}"


def _rendered_ssh(arguments: argparse.Namespace, plan: Plan, run_dir: Path, file: Path) -> str:
    host_ranks = _seats(arguments, plan)
    options = fleet_options(arguments)
    replaced = Replaced(plan.world_size, plan.server)  # has the servers' names
    lines = []
    for at, host in enumerate(host_ranks):
        request = agent_request(host_ranks, at, file, run_dir, options)
        request["environment"] = shown(request["environment"])  # what is printed may end in a log
        processes = f"ranks {host.first} to {host.ranks[-1]}" if host.count > 1 else f"rank {host.first}"
        for server in host.servers:
            processes += f", {replaced.name(server)}"
        lines.append(f"# {host.host}: {processes}")
        lines.append(shlex.join(agent_command(host.host, options)))
        lines.append(f"# on its standard input: {json.dumps(request)}")
    return "\n".join(lines)


def send_to_slurm(arguments: argparse.Namespace, plan: Plan, run_dir: Path, file: Path) -> str:
    """Hand the job to Slurm, and return its number.

    Raises:
        UsageError: there is no Slurm here, or it refuses.
    """
    options = slurm_options(arguments)
    rank = rank_command(arguments, plan, run_dir, file)
    return submit(sbatch_script(rank, options), options, {**os.environ, **rank.environment})
