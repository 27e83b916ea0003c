"""Every reader of Paceline with inputs that it accepts, and what is then done with what it has read."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

from paceline.checkpoint import manifest as manifests
from paceline.checkpoint.export import plan_export, write_export
from paceline.checkpoint.load import read_own, read_parts
from paceline.checkpoint.owner import read_owner
from paceline.checkpoint.save import _wait_for_notes
from paceline.checkpoint.tensor_file import TensorFile
from paceline.cli.server_command import _coordinator
from paceline.dashboard.charts import curves_of
from paceline.dashboard.run_facts import checkpoints, end_of, history, ledger
from paceline.demo.corpus import Corpus, read_corpus
from paceline.doctor import ask
from paceline.doctor.checks.host_checks import check_host
from paceline.doctor.facts import HostFacts, Leftover
from paceline.doctor.probe.accelerators import read_devices, read_links
from paceline.doctor.probe.disk import mount_of
from paceline.doctor.probe.host_facts import _cgroup_cores, look_at_memory
from paceline.doctor.probe.network_facts import default_interface, look_at_interfaces
from paceline.launch.hosts import parse_hosts, read_hostfile
from paceline.launch.kubernetes.quantities import read_quantity
from paceline.launch.kubernetes.submit import check, read_manifests
from paceline.launch.local import RankSettings
from paceline.launch.rank_assignment import HostRanks, Rendezvous
from paceline.launch.simulators import _read_answer
from paceline.launch.workload_file import read_workload_file
from paceline.nouns.device import Device
from paceline.nouns.errors import CheckpointError, UsageError
from paceline.nouns.mesh import Mesh
from paceline.nouns.plan import Plan
from paceline.nouns.profile import KINDS, Block, Profile, Recording, Work
from paceline.nouns.reading import parse_json
from paceline.plan.memory import memory_of
from paceline.rendezvous.hostlist import hosts_of, tasks_per_host
from paceline.rendezvous.launcher_env import find_node, find_position
from paceline.run.cluster_file import displayed, read_cluster_file
from paceline.run.directory import find_run
from paceline.run.failures import (
    UNWRITTEN,
    first_cause,
    format_failure,
    read_failures,
    silent_death,
    unwritten_failure,
)
from paceline.run.job_settings import TABLES
from paceline.run.plain_values import RETURNED, read_value, write_value
from paceline.run.rank_output import FILE, last_lines, read_lines
from paceline.run.read.event_columns import EventIndex
from paceline.run.read.runs import failure_lines, read_details, read_run, speed_of
from paceline.run.read.times import newest_process, recent_splits, slow_rank
from paceline.run.read.times import table as table_of_times
from paceline.run.supervise.agent import _SUPERVISOR_MESSAGES
from paceline.run.supervise.elastic import last_generation, script_hosts
from paceline.run.supervise.host_backend import RemoteBackend
from paceline.run.supervise.progress import Progress
from paceline.run.supervise.supervise_servers import ServerNews
from paceline.run.supervise.supervised_job import result_of
from paceline.run.supervise.supervisor import Ending
from paceline.run.timeline import make_trace
from paceline.server import setup
from paceline.server.coordinator.decision_log import Log
from paceline.server.coordinator.process import _layout_of
from paceline.server.protocol import messages
from paceline.server.range_tensors import Segments, states_of
from paceline.server.server_layout import Entry, ServerLayout
from paceline.server.settings import JobSettings
from paceline.server.status import NODE, fault_of_facts
from paceline.server.status_table import table, why_waiting
from paceline.server.transport import frames
from paceline.server.transport.address import Address
from paceline.server.transport.peers import addresses_of, facts_of
from paceline.train.agree import _newest_step
from paceline.train.alike import check_groups, load_scheduler, scheduler_state
from paceline.train.event_log import Events
from paceline.train.seed import random_state, restore_random_state

Read = Callable[[bytes, Path], Any]


@dataclass(frozen=True)
class Target:
    """One reader.

    Args:
        name: what it reads.
        source: where that comes from: disk, socket, variable, argument, child or kernel.
        seeds: inputs that it accepts.
        read: reads an input, and uses what was read. It may keep files in the folder, which is empty before.
        allowed: the errors, beside PacelineError, that its caller turns into one of ours.
    """

    name: str
    source: str
    seeds: Sequence[bytes]
    read: Read
    allowed: tuple[type[Exception], ...] = ()


def _text(content: bytes) -> str:
    """As a variable or an argument of a command has it."""
    return os.fsdecode(content).replace("\0", "")


def _of_text(read: Callable[[str], Any]) -> Read:
    return lambda content, folder: read(_text(content))


def _of_file(name: str, read: Callable[[Path], Any]) -> Read:
    """Write the input to a file of the folder first; `read` gets its path."""

    def at(content: bytes, folder: Path) -> Any:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        return read(path)

    return at


def _encoded(value: Any) -> bytes:
    return json.dumps(value).encode()


# --- plans, hosts, launchers


def _used_plan(plan: Plan) -> None:
    assert Plan.parse(plan.line()).world_size == plan.world_size


def _environment(content: bytes, folder: Path) -> None:
    """Variables as an object; of what is none, and of other values, the text."""
    try:
        found = json.loads(content)
        pairs = found.items() if isinstance(found, dict) else []
    except (ValueError, RecursionError):
        pairs = [(name, _text(content)) for name in ("RANK", "WORLD_SIZE", "SLURM_STEP_NODELIST")]
    environment = {}
    for name, value in pairs:
        text = value if isinstance(value, str) else str(value) if type(value) is not int else "9" * 6000
        environment[name.replace("\0", "")] = text.replace("\0", "")
    with contextlib.suppress(UsageError):
        find_node(environment)
    find_position(environment)


def _cluster_file(path: Path) -> None:
    file = read_cluster_file(path)
    for name in TABLES:
        for value in file.settings(name, {}).values.values():
            displayed(value)


def _discovered(content: bytes, folder: Path) -> None:
    (folder / "hosts").write_bytes(content)
    script = folder / "script"
    script.write_text(f"#!/bin/sh\ncat {folder}/hosts\n")
    script.chmod(0o700)
    script_hosts(script)()


ENVIRONMENTS = [
    {
        "RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "a",
        "MASTER_PORT": "1",
    },
    {"PET_NNODES": "2", "PET_NODE_RANK": "0", "PET_NPROC_PER_NODE": "8", "PET_MASTER_ADDR": "a"},
    {"PET_NNODES": "1:4", "JOB_COMPLETION_INDEX": "0", "PET_RDZV_ENDPOINT": "a:29400", "PET_NPROC_PER_NODE": "gpu"},
    {
        "SLURM_PROCID": "1",
        "SLURM_STEP_ID": "0",
        "SLURM_JOB_ID": "77",
        "SLURM_STEP_NUM_TASKS": "4",
        "SLURM_STEP_NUM_NODES": "2",
        "SLURM_LOCALID": "1",
        "SLURM_NODEID": "0",
        "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
        "SLURM_STEP_NODELIST": "a[01-02]",
    },
    {
        "OMPI_COMM_WORLD_RANK": "0",
        "OMPI_COMM_WORLD_SIZE": "2",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
        "PMIX_NAMESPACE": "x",
    },
    {
        "JSM_NAMESPACE_RANK": "3",
        "JSM_NAMESPACE_SIZE": "4",
        "JSM_NAMESPACE_LOCAL_SIZE": "2",
        "LSB_JOBID": "5",
        "LSB_HOSTS": "b h1 h1 h2 h2",
    },
    {
        "PACELINE_RANK": "0",
        "PACELINE_WORLD_SIZE": "2",
        "PACELINE_LOCAL_SIZE": "2",
        "PACELINE_MASTER": "[fd00::1]:29500",
    },
    {"SLURM_NTASKS": "3", "LSB_DJOB_NUMPROC": "1"},
]
PLANS = [b"shard=4,zero=2", b"pipeline=2,tensor=2,schedule=gpipe", b"dp=3,server=2,mode=deadline,deadline=0.5"]


def _plans() -> Iterator[Target]:
    plan = _encoded(dataclasses.asdict(Plan(mesh="replicate=2", server=2, mode="quorum", quorum=1)))
    yield Target("--plan", "argument", PLANS, _of_text(lambda text: _used_plan(Plan.parse(text))))
    yield Target("plan.json", "disk", [plan], _of_file("plan.json", lambda path: _used_plan(Plan.read(path))))
    yield Target("PACELINE_PLAN", "variable", [plan], _of_text(lambda text: _used_plan(Plan.of_variable(text))))
    yield Target("mesh", "argument", [b"replicate=2,tensor=4", b"dp=1"], _of_text(lambda text: str(Mesh.parse(text))))
    yield Target("--device", "argument", [b"V100-16GB", b"0.5GiB", b"cpu"], _of_text(Device.parse))
    yield Target("-H", "argument", [b"h1:4,h2:4", b"[fd00::1]:8,u@h"], _of_text(parse_hosts))
    hostfile = [b"h1 slots=4 max_slots=8\n# all\nh2:4\n", b"h1\nh1\nh2\n"]
    cluster = [
        b'[ssh]\nprogram = "ssh"\noptions = ["-p22"]\n[slurm]\ngpus_per_node = 8\ntime = "1:00"\n',
        b'[ray]\ncpus_per_rank = 0.5\nstrategy = "SPREAD"\n[kubernetes]\nkind = "job"\ngpus = 1\n',
        b'[ssh]\noptions = ["""a""\\"b.c"""", "d.e"] # "f"\n[slurm]\n"time" = "2.5"\nsignal = 1_0\n',
    ]
    yield Target("--cluster", "disk", cluster, _of_file("cluster.toml", _cluster_file))
    yield Target("--hostfile", "disk", hostfile, _of_file("hosts", read_hostfile))
    yield Target("--discover", "child", [b"h1:4\nh2\n"], _discovered)
    yield Target("launchers", "variable", [_encoded(one) for one in ENVIRONMENTS], _environment)
    lists = [b"a[01-03,7],b-gpu[1-2]-x,c", b"r[1,3]-n[01-02]x", b"a[1-1000],b[1-1000],c[1-1000]"]
    yield Target("node list", "variable", lists, _of_text(hosts_of))
    yield Target("tasks per host", "variable", [b"4(x2),3", b"2(x1000),1"], _of_text(tasks_per_host))
    yield Target("quantity", "disk", [b"500m", b"200Gi", b"1.5e3"], _of_text(lambda text: str(read_quantity(text))))
    workload = b"import paceline\nworkload = paceline.Workload(model=f, data=d, loss=l, optimizer=o, batch_size=8)\n"
    yield Target("workload file", "disk", [workload], _of_file("f.py", lambda path: read_workload_file(str(path), 2)))
    yield Target("yaml manifests", "disk", [_yaml()], _of_file("m.yaml", lambda path: check(read_manifests(path))))


def _yaml() -> bytes:
    groups = json.dumps([{"name": "worker", "minMember": 2, "minResource": {"cpu": "1", "memory": "2Gi"}}])
    mark = "yunikorn.apache.org"
    return f"""apiVersion: batch/v1
kind: Job
metadata: {{name: a, namespace: b}}
spec:
  completionMode: Indexed
  completions: 2
  parallelism: 2
  template:
    metadata:
      labels: {{{mark}/app-id: a, {mark}/queue: root.x}}
      annotations:
        {mark}/task-group-name: worker
        {mark}/task-groups: '{groups}'
        {mark}/schedulingPolicyParameters: placeholderTimeoutInSeconds=600 gangSchedulingStyle=Hard
    spec:
      schedulerName: yunikorn
      containers:
        - name: worker
          command: [paceline, run, -j, 2x1, --plan, replicate=2, train.py]
          resources: {{requests: {{cpu: "1", memory: 2Gi}}, limits: {{cpu: 500m}}}}
""".encode()


# --- checkpoints


def _checkpoint(folder: Path) -> tuple[dict[str, Any], bytes]:
    """A whole checkpoint of one rank: its manifest, sealed, and its file of tensors."""
    import safetensors.torch

    from paceline.checkpoint.manifest_merge import as_hex
    from paceline.checkpoint.reshard import hash_of
    from paceline.nouns.shard_spec import ShardSpec

    weight = torch.arange(6, dtype=torch.float32).view(2, 3)
    random = {f"own/random/{name}": state for name, state in random_state(torch.device("cpu")).items()}
    step = torch.tensor(5.0)
    content = safetensors.torch.save({"model/weight": weight, "optimizer/step/weight": step, **random})
    tensors = {}
    for name, tensor in (("model/weight", weight), ("optimizer/step/weight", step)):
        shard_spec = ShardSpec(tuple(tensor.shape))
        part = {"file": manifests.file_name(0), "key": name, "placement": shard_spec.to_json()}
        form = {"shape": list(tensor.shape), "dtype": "float32", "hash": as_hex(hash_of(tensor, shard_spec))}
        tensors[name] = {**form, "parts": [part]}
    path = folder / manifests.file_name(0)
    path.write_bytes(content)
    entry = {"name": path.name, "bytes": len(content), "sha256": manifests.file_hash(path)}
    group = {"parameters": ["weight"], "lr": 0.1, "betas": [0.9, 0.99], "foreach": None}
    scheduler = torch.optim.lr_scheduler.MultiStepLR(_optimizer(), [2, 5]).state_dict()
    manifest = {
        "format": manifests.FORMAT,
        "version": manifests.VERSION,
        "step": 5,
        "position": 40,
        "seed": 0,
        "samples": 24,
        "batch_size": 8,
        "world_size": 1,
        "mesh": "replicate=1",
        "files": [entry],
        "tensors": tensors,
        "optimizer": {"class": "AdamW", "groups": [group], "numbers": {"optimizer/lag/weight": 1}},
        "scheduler": scheduler,
        "config": {"hidden": 8},
    }
    return manifest, content


def _optimizer() -> torch.optim.Optimizer:
    return torch.optim.AdamW([torch.nn.Parameter(torch.zeros(2, 3))], lr=0.1)


def _read_sealed(content: bytes, folder: Path, tensors: bytes) -> None:
    """A manifest whose hash fits what it says, read as --resume and export read it."""
    try:
        value = json.loads(content)
        content = _encoded(manifests.sealed(value)) if isinstance(value, dict) else content
    except (ValueError, RecursionError):
        pass  # it can't be sealed
    (folder / manifests.MANIFEST).write_bytes(content)
    (folder / manifests.file_name(0)).write_bytes(tensors)
    manifest = manifests.read_manifest(folder)
    manifests.check_files(folder, manifest)
    read_parts(folder, manifest, dict.fromkeys(manifest["tensors"]))
    read_own(folder, manifest, 0)
    optimizer = _optimizer()
    groups = manifest["optimizer"]["groups"]
    if len(groups) == 1:  # else `restore_optimizer` refuses it before
        check_groups(groups, optimizer.param_groups)
    if manifest["scheduler"] is not None:
        scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 5])
        load_scheduler(scheduler, scheduler_state(scheduler, manifest["scheduler"]))
        optimizer.step()
        scheduler.step()
    export = plan_export(folder, "hf", lambda text: None)
    write_export(export, folder / "out")


def _read_tensors(path: Path) -> None:
    file = TensorFile.open(path)
    for key, form in file.forms().items():
        file.place(key, form)
    manifest = {"world_size": 1}
    own = read_own(path.parent, manifest, 0)
    random = {name.removeprefix("random/"): state for name, state in own.items()}
    before = random_state(torch.device("cpu"))
    try:
        restore_random_state(random, torch.device("cpu"))
    finally:
        restore_random_state(before, torch.device("cpu"))


def _folder_names(content: bytes, folder: Path) -> None:
    for name in content.split(b"\n")[:20]:
        with contextlib.suppress(OSError, ValueError):
            (folder / os.fsdecode(name.replace(b"/", b"_"))).mkdir(exist_ok=True)
    torch.tensor([_newest_step(str(folder))])
    with contextlib.suppress(CheckpointError):  # none of them holds a checkpoint
        manifests.find_good(folder, lambda text: None)


def _notes(content: bytes, folder: Path) -> None:
    (folder / "note-00000.json").write_bytes(content)
    _wait_for_notes(folder, 1)


def _as_version_2(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """The manifest as a Paceline wrote it whose tensors lay whole in a file."""
    tensors = {name: {"shape": one["shape"], "dtype": one["dtype"]} for name, one in manifest["tensors"].items()}
    return {**manifest, "version": 2, "tensors": tensors}


def _checkpoints(folder: Path) -> Iterator[Target]:
    manifest, content = _checkpoint(folder)
    file = manifests.file_name(0)
    sealed = _encoded(manifests.sealed(manifest))
    at = _of_file(manifests.MANIFEST, lambda path: manifests.read_manifest(path.parent))
    yield Target("manifest", "disk", [sealed], at)
    seeds = [_encoded(manifest), _encoded(_as_version_2(manifest))]
    yield Target("sealed manifest", "disk", seeds, lambda one, at: _read_sealed(one, at, content))
    yield Target("safetensors", "disk", [content], _of_file(file, _read_tensors))
    names = b"step-00000020\nstep-00000040\n.replaced-step-00000010\n.partial-step-00000030"
    yield Target("names of checkpoints", "disk", [names], _folder_names)
    note = {"name": file, "bytes": 3, "sha256": "0" * 64, "tensors": {}, "groups": [["weight"]], "numbers": {}}
    note["owners"] = {"optimizer/lag/weight": 1}
    yield Target("notes of ranks", "disk", [_encoded(note), b'{"error": "full"}'], _notes)


# --- run directories


EVENTS = [
    {"event": "start", "total_steps": 9, "samples": 24, "at": 1.5},
    {"event": "step", "step": 1, "position": 8, "loss": 1.5, "samples": 8, "at": 2.5, "memory_bytes": 9},
    {"event": "step", "step": 2, "position": 16, "loss": 1.25, "samples": 8, "at": 3.5, "memory_bytes": 9},
    {"event": "checkpoint", "path": "a", "step": 2, "seconds": 0.1, "at": 4},
    {"event": "evaluation", "step": 2, "loss": 1.0, "at": 5},
    {"event": "stopped", "step": 2, "at": 6},
]


def _followed(content: bytes, folder: Path) -> None:
    progress = Progress(folder)
    (folder / "events.jsonl").write_bytes(content)
    progress.read()
    progress.line()
    json.dumps(result_of(folder, Ending("done", 0), progress))


def _shown_events(path: Path) -> None:
    """As `paceline runs`, `top` and `timeline` read them, the dashboard, and a rank that goes on."""
    folder = path.parent
    json.dumps(read_run(folder).to_json())
    dataclasses.asdict(read_details(folder))
    speed_of(folder, read_run(folder))
    json.dumps(make_trace(folder).events)
    index = EventIndex(path)
    index.read_on(0.2)
    json.dumps([curve.mean.tolist() for curve in curves_of(index, 10).values()])
    events = index.events(None, 0, 100)
    history(events, folder, read_run(folder))
    checkpoints(folder, events)
    ledger(events)
    writer = Events(folder)
    writer.last_step()
    writer.close()


def _times(content: bytes, folder: Path) -> None:
    for rank in (0, 1):
        (folder / "times").mkdir(exist_ok=True)
        (folder / f"times/{rank}.jsonl").write_bytes(content)
        newest_process(folder / f"times/{rank}.jsonl")
    splits = recent_splits(folder, 2)
    slow_rank(splits)
    table_of_times(splits)
    json.dumps(make_trace(folder).events)


def _printed(path: Path) -> None:
    list(read_lines(path))
    last_lines(path, 10)


def _told_by_servers(content: bytes, folder: Path) -> None:
    news = ServerNews(folder, lambda text: None, lambda rank, pid, seconds: None)
    (folder / "servers.jsonl").write_bytes(content)
    news.read()
    news.say_end()


def _ended(path: Path) -> None:
    run = read_run(path.parent)
    failure_lines(path.parent)
    end_of(run)


def _started(content: bytes, folder: Path) -> None:
    (folder / "job.json").write_bytes(content)
    (folder / "result.json").write_text('{"status": "failed"}')
    json.dumps(read_run(folder).to_json())
    assert end_of(read_run(folder)) is not None


SERVER_EVENTS = [
    {"event": "servers_started", "servers": 1, "workers": 2, "mode": "async"},
    {"event": "waiting", "worker": 1, "step": 3, "silent_s": 2.5, "is_connected": True},
    {"event": "back", "worker": 1, "waited_s": 2.5},
    {"event": "given_up", "worker": 1, "pid": 7, "silent_s": 20.5},
    {"event": "notice", "text": "a"},
    {"event": "servers_ended", "mode": "async", "counted": 5, "gradients": 6},
]
TIMES = [
    {"version": 1, "rank": 0, "host": "h1", "pid": 7, "boot": "b", "monotonic_ns": 5, "wall_ns": 6},
    {"step": 1, "begin_ns": 5, "ns": {"forward": 7, "communication replicate": 9}, "spans": []},
    {"step": 2, "begin_ns": 5, "ns": {"forward": 7}, "spans": [["forward", "a", 5, 9, -1, 0]]},
    {"step": None, "begin_ns": 50, "ns": {"other": 7}},
]


def _failed(content: bytes, folder: Path) -> None:
    (folder / "failures").mkdir()
    for name in ("0", "1", "x", "9" * 200):
        (folder / "failures" / f"{name}.json").write_bytes(content)
    found = read_failures(folder)
    cause = first_cause(found.values())
    format_failure(cause, len(found) - 1)
    printed = unwritten_failure(UNWRITTEN + content.decode(errors="replace"))
    if printed is not None:
        format_failure(printed, 0)


def _resumed(path: Path) -> None:
    find_run(path.parent.parent, None, Path("/x/train.py"))


class _Hearer:
    """Takes what a station hears as the supervisor does."""

    def on_started(self, pids: dict[int, int]) -> None:
        assert all(type(pid) is int for pid in pids.values())

    def on_ended(self, rank: int, status: int) -> None:
        silent_death(rank, status, 0.0)

    def on_output(self, rank: int, text: str) -> None:
        assert isinstance(text, str)

    def on_lost(self, station: Any) -> None:
        raise AssertionError("nothing was lost")


class _Lines:
    is_over = False

    def __init__(self, content: bytes) -> None:
        self.content = content

    def read(self) -> list[str]:
        return [line.decode(errors="replace") for line in self.content.split(b"\n")]


def _station(content: bytes) -> RemoteBackend:
    station = RemoteBackend.__new__(RemoteBackend)
    station.host, station.processes, station.errors = "h1", (0, 1), b""
    station.events, station.lines = _Hearer(), _Lines(content)  # type: ignore[assignment]
    return station


def _hear(content: bytes, folder: Path) -> None:
    station = _station(content)
    for line in station.lines.read():
        station._take_message(line)


AGENT = [
    {"started": {"0": 77, "1": 78}},
    {"output": 1, "text": "aGVsbG8="},
    {"ended": 1, "status": -9},
    {"error": {"asked": "a", "found": "b", "fix": "c"}},
]
ANSWER = {"address": "10.0.0.1", "port": 5, "interface": "eth0"}


def _runs() -> Iterator[Target]:
    events = b"".join(_encoded(one) + b"\n" for one in EVENTS)
    yield Target("events.jsonl", "disk", [events], _followed)
    others = [
        {"event": "text", "name": "n", "text": "t", "step": 2, "at": 4},
        {"event": "logged", "lr": 0.1, "step": 2, "at": 4},
        {"event": "end", "step": 2, "ledger": [{"collective": "a", "axis": "b", "calls": 1, "bytes": 2}], "at": 4},
    ]
    more = events + b"".join(_encoded(one) + b"\n" for one in others)
    yield Target("events.jsonl, shown", "disk", [more], _of_file("events.jsonl", _shown_events))
    news = b"".join(_encoded(one) + b"\n" for one in SERVER_EVENTS)
    yield Target("servers.jsonl", "disk", [news], _told_by_servers)
    times = b"".join(json.dumps(one, separators=(",", ":")).encode() + b"\n" for one in TIMES)
    yield Target("times/RANK.jsonl", "disk", [times], _times)
    yield Target("output.log", "disk", [b"1.5 0\tsaid\n2.5 server 1\tso\n"], _of_file(FILE, _printed))
    failure = {
        "rank": 0,
        "step": 3,
        "at": 1.5,
        "type": "KeyError",
        "message": "'x'",
        "is_peer_loss": False,
        "is_paceline": False,
        "where": "train.py:3",
        "traceback": "Traceback ...",
        "exit_code": 1,
        "parts": None,
    }
    yield Target("failures/RANK.json", "disk", [_encoded(failure)], _failed)
    result = _encoded({"status": "failed", "failure": failure, "evaluation": {"loss": 1.0}})
    yield Target("result.json", "disk", [result], _of_file("result.json", _ended))
    job = {"script": "/x/train.py", "arguments": [], "ranks": 2}
    yield Target("job.json", "disk", [_encoded(job)], _of_file("a/job.json", _resumed))
    yield Target("job.json, shown", "disk", [_encoded(job)], _started)
    servers = _encoded({"coordinator": "unix:/tmp/a"})
    yield Target(
        "servers.json", "disk", [servers], _of_file("servers.json", lambda path: _coordinator(str(path.parent)))
    )
    owner = {
        "token": "a",
        "launch": "",
        "host": "h1",
        "boot": "b",
        "pid": 7,
        "started": "9",
        "since": 5,
        "command": "x",
    }
    read = _of_file("owner.json", lambda path: str(read_owner(path.parent)))
    yield Target("owner.json", "disk", [_encoded(owner)], read)
    yield Target("generation", "disk", [b"3"], _of_file("generation", lambda path: last_generation(path.parent)))
    yield Target(
        "corpus.json", "disk", [_encoded(_corpus())], _of_file("corpus.json", lambda at: read_corpus(at.parent))
    )
    yield Target("agent's lines", "child", [b"\n".join(map(_encoded, AGENT)) + b"\n"], _hear)
    first = b"Welcome!\n" + _encoded(ANSWER) + b"\n"
    yield Target("agent's answer", "child", [first], lambda content, folder: _station(content).answer())
    heard = [_encoded(one) for one in ({"signal": 15, "ranks": [0]}, {"kill": True}, {"start": "{}"})]
    yield Target(
        "supervisor's lines",
        "child",
        heard,
        lambda content, folder: parse_json(content, "a line", _SUPERVISOR_MESSAGES),
    )
    seats = HostRanks("", 0, 2, 0, 1)
    settings = RankSettings("f.py", [], 2, seats, Rendezvous(), "runs/a", None, ["torch"], 0, "/tmp/x").to_json()
    yield Target("rank's settings", "child", [settings.encode()], _of_text(RankSettings.from_json))


def _corpus() -> dict[str, Any]:
    return dataclasses.asdict(Corpus("a", 1, 1, 1, 1, 1, "the", 5, 9, 8))


# --- parameter servers

JOB = JobSettings(2, 2, steps=5)
LAYOUT = ServerLayout((Entry("w", (8, 8), "float32", 0), Entry("b", (8,), "float32", 0)), "AdamW", ({"lr": 0.1},), 24)
FACTS = {
    "job": json.loads(JOB.to_json()),
    "state": "training",
    "servers": {"0": "unix:/tmp/a", "1": "h1:5"},
    "workers": [
        {
            "worker": 0,
            "incarnation": 0,
            "clock": 3,
            "is_in": True,
            "is_done": False,
            "silent_s": 0.5,
            "is_waiting": True,
        },
        {"worker": 1, "incarnation": 1, "clock": 2, "is_in": True, "is_done": False, "silent_s": 0.5, "bytes_sent": 9},
    ],
    "chains": [{"range": 0, "epoch": 3, "chain": [0, 1], "is_whole": True}],
    "pid": 7,
}
SERVER = {
    "ranges": [
        {
            "range": 0,
            "role": "head",
            "updates": 5,
            "behind": 1,
            "duplicates": 0,
            "waits_for": [1],
            "staleness": {"0": 5, "2": 1},
        }
    ]
}
LOG = [
    {"node": 0},
    {"worker": [5, 0]},
    {"job": [JOB.to_json(), LAYOUT.to_json()]},
    {
        "configurations": [
            {
                "epoch": 3,
                "chain": [0, 1],
                "workers": [[5, 0, 2]],
                "joining": [1, 2],
                "confirmed": 2,
                "holders": [0],
            }
        ]
    },
]


def _looked_at(content: bytes, folder: Path) -> None:
    facts = facts_of(content)
    if fault_of_facts(facts) is None:
        facts["nodes"] = [SERVER]
        table(facts)
        why_waiting(facts)


def _server_looked_at(content: bytes, folder: Path) -> None:
    facts = {**json.loads(_encoded(FACTS)), "nodes": []}
    answer = parse_json(content, "a server's answer", NODE)
    facts["nodes"] = [answer]
    table(facts)
    why_waiting(facts)


def _frame(content: bytes, folder: Path) -> None:
    size = frames.PREFIX.size
    if len(content) < size:
        return  # the connection waits for the rest
    prefix = frames.read_prefix(content[:size])
    frames.read_header(prefix, content[size : size + prefix.header_bytes])


def _logged(path: Path) -> None:
    log = Log.open(path)
    try:
        log.name_node()
        if log.job is not None:
            JobSettings.of_json(log.job[0])
            ServerLayout.of_json(log.job[1])
    finally:
        log.close()


def _segments() -> Segments:
    own = LAYOUT.ranges(1)[0]
    return Segments(LAYOUT, own, {}, None, 2, JOB.admission())


def _restored(content: bytes, folder: Path) -> None:
    store = _segments()
    store.restore(content)
    for optimizer, parameters in zip(store.optimizers, store.parameters, strict=True):
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        assert optimizer is not None
        optimizer.step()


def _messages() -> list[bytes]:
    worker, update = (0, 1), messages.Update(0, (((0, 1), 3),), {"loss": 1.0, "absent": []}, None, 1.0, 0.0)
    configuration = messages.Configuration(3, (1, 2), {worker: 4}, (2, 3), 2, (1,))
    all_of_them = [
        setup.Hello("worker", 0, 0, "", "digest"),
        setup.Welcome(1, 2),
        setup.StartServers("{}", None),
        setup.Addresses('{"0": "h1:5"}'),
        setup.Refused("PlanError", "a", "b", "c"),
        configuration,
        messages.Push(3, worker, 4, 0, 2, {"loss": 1.0, "weight": 2.0, "flags": 0, "settings": {"lr": 0.1}}, None),
        messages.Forward(3, 5, update),
        messages.State(3, 5, {0: {worker: 3}}, {0: 2}, {0: 0.5}, None, None),
        messages.Heartbeat(3, 5, 1),
    ]
    return [frames.write_frame(0, message, 0) for message in all_of_them]


def _servers() -> Iterator[Target]:
    yield Target("frames", "socket", _messages(), _frame, (frames.FrameError,))
    gathering = {"job": FACTS["job"], "state": "gathering", "servers": {}, "here": ["0", "(0, 1)"]}
    seeds = [_encoded(FACTS), _encoded(gathering), b"{}"]
    yield Target("coordinator's answer", "socket", seeds, _looked_at, (frames.FrameError,))
    yield Target("server's answer", "socket", [_encoded(SERVER)], _server_looked_at)
    where = _encoded(FACTS["servers"])
    yield Target("addresses", "socket", [where], _of_text(addresses_of), (frames.FrameError,))
    yield Target("address", "argument", [b"unix:/tmp/a", b"h1:29500", b"[::1]:5"], _of_text(Address.parse))
    settings = JOB.to_json().encode()
    yield Target("job's settings", "socket", [settings], _of_text(lambda text: JobSettings.of_json(text).gates))
    layout = LAYOUT.to_json().encode()
    yield Target("layout", "socket", [layout], _of_text(lambda text: ServerLayout.of_json(text).ranges(1)))
    own = {"steps": 5, "clip_norm": None, "implementation": {}, "is_strict": True}
    hello = _encoded({"layout": json.loads(layout), "settings": own})
    read = lambda content, folder: _layout_of(setup.Hello("worker", 0, 0, "", "", content))  # noqa: E731
    yield Target("worker's hello", "socket", [hello], read)
    log = b"".join(_encoded(one) + b"\n" for one in LOG)
    yield Target("coordinator's log", "disk", [log], _of_file("log", _logged))
    state = _segments().content()
    yield Target("range's state", "socket", [state], _restored)
    own_ranges = LAYOUT.ranges(1)
    yield Target("optimizer's state", "socket", [state], lambda one, folder: states_of(LAYOUT, own_ranges, [one]))


# --- doctor, profiles


def _host_facts(content: bytes, folder: Path) -> None:
    check_host(HostFacts.from_json(ask._parse("h1", content)["facts"]), "h1", is_fleet=True)


def _variables(text: str) -> None:
    environment = {"MASTER_PORT": text, "OMP_NUM_THREADS": text}
    check_host(dataclasses.replace(HostFacts(), environment=environment), "h1")


def _asked(content: bytes, folder: Path) -> None:
    """Without looking or meeting: what is read is the request."""
    look, meet = ask.look, ask.meet
    ask.look, ask.meet = lambda question: HostFacts(), lambda own, seats, seconds: {}  # type: ignore[assignment]
    try:
        ask.answer(content, 0)
    finally:
        ask.look, ask.meet = look, meet


@contextlib.contextmanager
def _psutil_at(folder: Path) -> Iterator[None]:
    """Have psutil read this folder in place of /proc."""
    psutil.PROCFS_PATH = str(folder)
    try:
        yield
    finally:
        psutil.PROCFS_PATH = "/proc"


def _kernel_files(content: bytes, folder: Path) -> None:
    """One content in place of every file that is read of /proc and /sys."""
    names = [
        *("proc/meminfo", "proc/vmstat", "proc/zoneinfo", "proc/net/dev"),  # psutil reads these
        *("proc/self/cgroup", "proc/self/mountinfo", "proc/net/route"),
        *("sys/fs/cgroup/cpu.max", "sys/fs/cgroup/memory.max", "sys/fs/cgroup/memory.current"),
        "sys/fs/cgroup/memory.stat",
    ]
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    (folder / "proc/self/cgroup").write_bytes(b"0::/\n")
    with _psutil_at(folder / "proc"):
        look_at_memory(folder)
        look_at_interfaces()
    _cgroup_cores(folder)
    (folder / "proc/self/cgroup").write_bytes(content)
    with contextlib.suppress(OSError):  # a name of a folder that is too long
        _cgroup_cores(folder)
    default_interface(folder)
    mount_of(str(folder), folder)


def _profile() -> bytes:
    recording = Recording(
        [Block(64, KINDS[0], "w", "start"), Block(8, KINDS[4], "m", "forward")], [1, 2, -2], [(0, "start")]
    )
    work = {"aten.mm": Work(1, 10, 10)}
    profile = Profile("replicate=2", 0, "cpu", 4, "float32", recording, work, dict(work), [])
    return _encoded(profile.to_json())


def _hosts() -> Iterator[Target]:
    facts = dataclasses.replace(HostFacts(), leftovers=(Leftover("/tmp/a", 3),))
    answer = _encoded({"facts": facts.to_json(), "heard_ns": 5, "said_ns": 6})
    yield Target("host's facts", "child", [b"Welcome\n" + answer], _host_facts, (ValueError, KeyError))
    yield Target("doctor's variables", "variable", [b"29500", b"4,2"], _of_text(_variables))
    question = {"names": ["h1"], "runs": "runs", "ports": [29400], "is_quick": True, "marker": ""}
    seat = {"host": "h1", "address": "10.0.0.1", "port": 5, "token": "x"}
    meet = {"kind": "meet", "own": "h1", "seats": [seat], "seconds": 5.0, "folder": "/nowhere", "marker": "0" * 32}
    requests = [
        _encoded({"kind": "look", "question": question}),
        _encoded(meet),
        _encoded({"kind": "tidy", "folder": "/nowhere", "marker": "0" * 32}),
    ]
    yield Target("doctor's request", "child", requests, _asked)
    devices = b"NVIDIA H100, 81559, 4, GPU-1, 550.54\nNVIDIA H100, 81559, 4, GPU-2, 550.54\n"
    yield Target("nvidia-smi devices", "child", [devices], _of_text(read_devices))
    links = b"\tGPU0\tGPU1\tNIC0\nGPU0\t X \tNV18\tSYS\nGPU1\tNV18\t X \tSYS\n"
    yield Target("nvidia-smi links", "child", [links], _of_text(read_links))
    kernel = [
        b"MemTotal: 16 kB\nMemAvailable: 8 kB\nSwapTotal: 0 kB\n",
        b"0::/a/b\n4:cpu,cpuacct:/\n",
        b"200000 100000",
        b"Iface Destination Gateway Flags RefCnt Use Metric Mask\neth0 00000000 0 3 0 0 100 00000000\n",
        b"Inter-|\n face |\n    lo: 5 5 0 0 0 0 0 0 5 5 0 0 0 0 0 0\n",
        b"36 35 98:0 / /a\\040b rw,noatime - ext4 /dev/a rw\n",
        b"inactive_file 4096\n",
    ]
    yield Target("files of the kernel", "kernel", kernel, _kernel_files)
    read = _of_file("profile.json", lambda path: memory_of(Profile.read(path)))
    yield Target("profile.json", "disk", [_profile()], read)
    lines = [b'{"number": 0, "path": "a"}', b'{"number": 1, "error": {"asked": "a", "found": "b", "fix": "c"}}']
    yield Target("profile's answer", "child", lines, _of_text(_read_answer))


def _returned(folder: Path) -> Target:
    value = {"a": [1, 2.5, None, True], (1, "b"): b"c", "w": torch.ones(2, 3), "n": torch.ones(2).numpy()}
    write_value(folder / RETURNED, value, "train")
    return Target(
        "what a function returned", "child", [(folder / RETURNED).read_bytes()], _of_file(RETURNED, read_value)
    )


def all_targets(folder: Path) -> list[Target]:
    """Every reader; `folder` is for what their first inputs are made of."""
    return [*_plans(), *_checkpoints(folder), *_runs(), *_servers(), *_hosts(), _returned(folder)]
