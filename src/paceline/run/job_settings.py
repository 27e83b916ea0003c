"""List the settings of a job, each with its flag, its key in the cluster file, its default and where it applies.

`paceline run` and `paceline submit` make their flags from these tables. The cluster file's keys, the rows of `paceline
explain`, the completion of a shell and the table in docs/hosts.md come from them too.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from paceline.launch.kubernetes.kubernetes_job import GANGS, KINDS, POD_GROUP_APIS
from paceline.launch.ray import STRATEGIES
from paceline.nouns.plan import Plan
from paceline.run.supervise.stalls import DEFAULT_S, VARIABLE

# What starts a job's ranks: --on.
PLACES = ("local", "ssh", "mpi", "ray")
# Jobs that --on does not name: on hosts that come and go; in a process that a launcher started as one of its nodes, or
# as a rank, whose job has a name and a run directory or has neither.
ELASTIC = "elastic"
NODE = "node"
NAMED_RANK = "named rank"
RANK = "rank"
SLURM = "slurm"
KUBERNETES = "kubernetes"
GRACE_S = 30.0  # for a checkpoint after Ctrl-C or SIGTERM
RUNS = Path("runs")
RAY_ADDRESS = "RAY_ADDRESS"  # Ray's own variable: the cluster that this host is in

RUN_PLACES = frozenset({*PLACES, ELASTIC, NODE, NAMED_RANK, RANK})
_SENT = frozenset({SLURM, KUBERNETES})
_WITH_RUN_DIRECTORY = RUN_PLACES - {RANK}
_SUPERVISED = _WITH_RUN_DIRECTORY - {NAMED_RANK}  # `paceline run` itself ends the ranks
_WITH_HOSTS = frozenset({"ssh", "mpi", ELASTIC})
_OTHER_HOSTS = _WITH_HOSTS | {"ray"}
_COME_AND_GO = frozenset({ELASTIC})


@dataclass(frozen=True, slots=True)
class Setting:
    """A setting of a job, or of the program that starts its ranks.

    Args:
        name: of the value; in the cluster file its key.
        kind: the type of the value: str, int, float, bool, Path, or tuple for a list of texts.
        help: the sentence that describes it in a command's help, and in docs/hosts.md.
        metavar: the name of the value in a command's help.
        default: the value of a setting that no flag, file or variable has.
        choices: the texts that are allowed; (): every text is.
        flags: that set it; (): one with the setting's name.
        former_flag: the name of a flag of `paceline run` that set it in earlier versions.
        variable: the environment variable that is read where no flag and no file has a value.
        places: the programs that start the ranks of the jobs that it applies to.
        heading: the title in a command's help that its flag stands under.
        other_help: descriptions for the help of other commands, by place.
        reader: the function that reads the text of its flag; None: the one of its kind.
        row: the label of its row in `paceline explain`, the form of its value, and the text for a value of 0 or none.
    """

    name: str
    kind: type
    help: str
    metavar: str | None = None
    default: Any = None
    choices: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()
    former_flag: str = ""
    variable: str = ""
    places: frozenset[str] = frozenset()
    heading: str = ""
    other_help: dict[str, str] = field(default_factory=dict)
    reader: Callable[[str], Any] | None = None
    row: tuple[str, str, str] = ("", "", "")

    @property
    def flag(self) -> str:
        """The flag by which errors call it."""
        return self.flags[0] if self.flags else f"--{self.name.replace('_', '-')}"


def _table(*settings: Setting) -> dict[str, Setting]:
    return {setting.name: setting for setting in settings}


def _under(heading: str, *settings: Setting) -> list[Setting]:
    return [replace(setting, heading=heading) for setting in settings]


_PLAN = Plan()
_EVERYWHERE = RUN_PLACES | _SENT
_SAVING = _WITH_RUN_DIRECTORY | _SENT
_ON_FILES = _WITH_RUN_DIRECTORY | {SLURM}  # in pods the folder of the runs is /runs
_INTERFACE = Setting("interface", str, "network interface for torch's sockets", "IF", "")
_PYTHON = Setting("python", str, "Python on the hosts (default: this one)", "PATH", sys.executable)
# The settings that are about a job: only flags set them. A value of None: the flag was not given.
JOB: dict[str, Setting] = _table(
    Setting("n", int, "ranks (default: as many as --plan has, or 1)", "N", flags=("-n",), places=_EVERYWHERE),
    Setting(
        "plan",
        str,
        "axes and options, such as tensor=2, or replicate=2,compression=bf16; or a plan.json",
        "PLAN",
        places=_EVERYWHERE,
    ),
    Setting(
        "checkpoint_every",
        int,
        f"between saves; 0: at the end (default {_PLAN.checkpoint_every})",
        "STEPS",
        places=_SAVING,
        row=("checkpoint every", "{} steps", "the end only"),
    ),
    Setting(
        "keep",
        int,
        f"checkpoints that stay (default {_PLAN.keep})",
        "K",
        places=_SAVING,
        row=("checkpoints kept", "{}", "0"),
    ),
    Setting(
        "copy_to",
        str,
        "copies of checkpoints, as s3://bucket/runs",
        "URL",
        places=_SAVING,
        row=("copied to", "{}", "nowhere"),
    ),
    Setting("no_check", bool, "the first step is not compared with one process", places=_WITH_RUN_DIRECTORY),
    Setting(
        "job",
        str,
        "of the run (default: the file's and the time)",
        "NAME",
        places=_EVERYWHERE,
        other_help={KUBERNETES: "the job's name (default: the file's)"},
    ),
    Setting("runs", Path, "where runs are kept (default runs)", "DIR", RUNS, places=_ON_FILES),
    Setting("resume", bool, "go on with --job, or with this file's last run", places=_ON_FILES),
    Setting("resume_or_start", bool, "go on with --job if there is one, or start it", places=_ON_FILES),
    Setting(
        "grace",
        float,
        f"time to save after a stop (default {GRACE_S:g})",
        "SECONDS",
        GRACE_S,
        places=_SUPERVISED,
        row=("grace", "{:g} s", "0 s"),
    ),
    Setting(
        "stall_notice",
        float,
        f"without progress until a notice says where each rank is (default {DEFAULT_S:g}; 0: never)",
        "SECONDS",
        variable=VARIABLE,
        places=_SUPERVISED,
        reader=float,  # `stall_notice_of` refuses what is not finite, in the variable too
        row=("stall notice", "after {:g} s", "never"),
    ),
    Setting(
        "stall_timeout",
        float,
        "ends a job without progress (default: never)",
        "SECONDS",
        places=_SAVING,
        row=("stall timeout", "after {:g} s", "never"),
    ),
    Setting("profile", str, "steps that torch's profiler records, for the timeline", "FIRST:LAST", places=_SUPERVISED),
    Setting(
        "max_restarts",
        int,
        "when a rank dies, go on by itself, N times (default 0)",
        "N",
        0,
        places=frozenset({"local", "mpi", "ray"}),
        row=("restarts", "{}", "0"),
    ),
    Setting(
        "json",
        bool,
        "result as JSON on stdout, the rest on stderr",
        places=_SUPERVISED | {SLURM},
        other_help={SLURM: "print the job as JSON"},
    ),
    Setting(
        "dry_run",
        bool,
        "print what would be started, and start nothing",
        places=_SUPERVISED | _SENT,
        other_help={SLURM: "print the script, and send nothing", KUBERNETES: "print the manifests, and send nothing"},
    ),
    Setting("check", bool, "check the manifests in FILE, and send nothing", places=frozenset({KUBERNETES})),
    *_under(
        "hosts",
        Setting(
            "on",
            str,
            "what starts the ranks (default local)",
            f"{{{','.join(PLACES)}}}",
            choices=PLACES,
            places=RUN_PLACES,
        ),
        Setting(
            "shape",
            str,
            "hosts and ranks on each, such as 2x8",
            "NODESxRANKS",
            flags=("-j",),
            places=_SUPERVISED | _SENT,
        ),
        Setting(
            "env",
            tuple,
            "variable for the ranks; may repeat",
            "NAME[=VALUE]",
            (),
            flags=("-x", "--env"),
            places=_SUPERVISED | _SENT,
        ),
        Setting(
            "hosts", str, "hosts and their slots: ssh, or mpi", "H1:4,H2:4", flags=("-H", "--hosts"), places=_WITH_HOSTS
        ),
        Setting("hostfile", Path, "a host a line: `h1:4`, `h1 slots=4` or `h1`", "FILE", places=_WITH_HOSTS),
        replace(_INTERFACE, places=_OTHER_HOSTS | {NODE}),
        replace(_PYTHON, places=_OTHER_HOSTS),
        Setting("cluster", Path, "settings of what starts the ranks (TOML)", "FILE", places=_OTHER_HOSTS | _SENT),
    ),
    *_under(
        "hosts that come and go (ssh)",
        Setting("min_hosts", int, "fewest hosts to run on", "N", places=_COME_AND_GO),
        Setting("max_hosts", int, "most hosts to run on", "N", places=_COME_AND_GO),
        Setting("host_discovery_script", Path, "prints the hosts there are, a line each", "FILE", places=_COME_AND_GO),
    ),
    Setting("is_module", bool, "FILE is a module's name, as in python -m", flags=("-m",), places=RUN_PLACES | {SLURM}),
)
# Those that only a job of Paceline's can follow, and no script that makes its process group itself.
NEED_JOB = frozenset(
    {
        *("plan", "checkpoint_every", "keep", "copy_to", "no_check", "resume", "resume_or_start", "profile"),
        *("stall_notice", "stall_timeout", "min_hosts", "max_hosts", "host_discovery_script"),
    }
)


# The settings of the programs that start ranks, which are the tables of the cluster file. `submit` has a flag for each
# key of its target's table; `run` has flags for the keys that are in JOB too.
TABLES: dict[str, dict[str, Setting]] = {
    "ssh": _table(
        Setting("program", str, "the ssh program (default ssh)", default="ssh", former_flag="ssh_program"),
        Setting("options", tuple, "arguments for ssh", default=(), former_flag="ssh_option"),
        _PYTHON,
        _INTERFACE,
    ),
    "mpi": _table(
        Setting(
            "mpirun",
            str,
            "the mpirun program (default: the first mpirun or mpiexec in PATH)",
            default="",
            former_flag="mpirun",
        ),
        Setting("options", tuple, "arguments for mpirun", default=(), former_flag="mpi_option"),
    ),
    "ray": _table(
        Setting(
            "address",
            str,
            "HOST:PORT of a cluster, auto, or local (default local)",
            default="local",
            former_flag="ray_address",
            variable=RAY_ADDRESS,
        ),
        Setting("cpus_per_rank", float, "CPUs of a bundle (default 1)", default=1, former_flag="cpus_per_rank"),
        Setting("gpus_per_rank", float, "GPUs of a bundle (default 0)", default=0, former_flag="gpus_per_rank"),
        Setting(
            "strategy",
            str,
            f"{', '.join(STRATEGIES)} (default {STRATEGIES[0]})",
            default=STRATEGIES[0],
            choices=STRATEGIES,
            former_flag="strategy",
        ),
    ),
    SLURM: _table(
        *_under(
            "Slurm",
            Setting("partition", str, "passed to sbatch", "NAME", ""),
            Setting("account", str, "passed to sbatch", "NAME", ""),
            Setting("qos", str, "passed to sbatch", "NAME", ""),
            Setting("time", str, "time limit, passed to sbatch: 12:00:00", "TIME", ""),
            Setting("gpus_per_node", int, "passed to sbatch (default 0)", "N", 0),
            Setting("cpus_per_task", int, "passed to sbatch (default: the cluster's)", "N", 0),
            Setting("signal", int, "seconds before the limit to save (default 120)", "S", 120),
            Setting("sbatch_option", tuple, "an #SBATCH line, as --exclusive; may repeat", "WORD", ()),
            _INTERFACE,
            replace(_PYTHON, help="Python on the nodes (default: this one)"),
        )
    ),
    KUBERNETES: _table(
        *_under(
            "job",
            Setting("image", str, "container image with Paceline and FILE", "IMAGE", ""),
            Setting("kind", str, f"{', '.join(KINDS)} (default {KINDS[0]})", "KIND", KINDS[0], KINDS),
            Setting("namespace", str, "namespace (default: default)", "NAME", "default"),
            Setting("context", str, "kubectl's context (default: its current one)", "NAME", ""),
            Setting("runs_claim", str, "PersistentVolumeClaim for run folders", "NAME", ""),
            Setting("max_restarts", int, "restarts of the whole job (default 3)", "N", 3),
            Setting("runtime", str, "ClusterTrainingRuntime of a TrainJob", "NAME", ""),
        ),
        *_under(
            "gang scheduling",
            Setting("gang", str, f"{', '.join(GANGS)} (default {GANGS[0]})", "WORD", GANGS[0], GANGS),
            Setting("queue", str, "queue of the gang's scheduler", "NAME", ""),
            Setting("placeholder_timeout", int, "seconds to place a gang (default 600)", "S", 600),
            Setting(
                "pod_group_api",
                str,
                f"of native: {', '.join(POD_GROUP_APIS)}",
                "API",
                POD_GROUP_APIS[0],
                POD_GROUP_APIS,
            ),
            Setting("priority_class", str, "PriorityClass of the pods", "NAME", ""),
            Setting("scheduler", str, "schedulerName, if not the usual one", "NAME", ""),
        ),
        *_under(
            "pods",
            Setting("cpu", str, "CPUs of a pod: request and limit", "N", ""),
            Setting("memory", str, "memory of a pod: request and limit", "SIZE", ""),
            Setting("shm", str, "/dev/shm, part of the memory (default 1Gi)", "SIZE", "1Gi"),
            Setting("gpus", int, "accelerators of a node (default 0)", "N", 0),
            Setting("accelerator", str, "their resource (default nvidia.com/gpu)", "NAME", "nvidia.com/gpu"),
            Setting("server_cpu", str, "CPUs of a server's pod (default: --cpu)", "N", ""),
            Setting("server_memory", str, "memory of a server's pod (as --memory)", "SIZE", ""),
            Setting("user", int, "user in the pods (default 1000)", "UID", 1000),
            Setting("service_account", str, "ServiceAccount of the pods", "NAME", ""),
            Setting("node_selector", tuple, "label of the nodes; may repeat", "KEY=VALUE", ()),
            Setting("toleration", tuple, "KEY[=VALUE][:EFFECT]; may repeat", "TAINT", ()),
            Setting("image_pull_secret", tuple, "Secret for the registry; may repeat", "NAME", ()),
            Setting("egress", tuple, "network that the pods may reach; may repeat", "CIDR", ()),
        ),
    ),
}
