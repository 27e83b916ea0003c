"""Every launcher's environment is understood: each rank finds its own place, and all find one place to meet."""

# ruff: noqa: E501 (a table, a case a line)
from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import psutil
import pytest

from paceline.nouns.errors import UsageError
from paceline.rendezvous.launcher_env import LauncherPosition, NodeInfo, find_node, find_position, meeting_file
from paceline.rendezvous.store_address import _launcher_process

from support.environments import (
    LAUNCHERS,
    NEEDS_MASTER,
    SOURCES,
    allocation,
    hydra,
    open_mpi,
    paceline,
    seats,
    slurm,
    torchrun,
)

MASTER = {"MASTER_ADDR": "a1", "MASTER_PORT": "29511"}


@pytest.fixture(autouse=True)
def hydra_above(monkeypatch):
    """Hydra names its job by its process alone, which is not above this test."""
    monkeypatch.setattr(
        "paceline.rendezvous.store_address._launcher_process", lambda names, is_outermost: ["77", "88"] if names else []
    )


@pytest.mark.parametrize("hosts", [(1,), (2,), (4,), (2, 2), (1, 1, 1), (4, 4)], ids=str)
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_every_rank_of_every_launcher_finds_its_place(launcher, hosts):
    meetings = set()
    for rank, local_rank, local_size, host in seats(hosts):
        environment = LAUNCHERS[launcher](hosts, rank)
        if len(hosts) > 1 and launcher in NEEDS_MASTER:
            environment |= MASTER
        at = find_position(environment)
        assert (at.rank, at.size) == (rank, sum(hosts))
        assert (at.local_rank, at.local_size) == (local_rank, local_size)
        assert (at.cross_rank, at.cross_size) == (host, len(hosts))
        assert at.source == SOURCES[launcher]
        assert at.has_own_store == (launcher == "torchrun" and sum(hosts) > 1)
        assert (at.file is not None) + (at.master is not None) == (sum(hosts) > 1)
        assert at.origins.keys() >= {"rank", "size", "local_rank", "local_size", "cross_rank", "cross_size", "meeting"}
        meetings.add((at.file, at.master))
    assert len(meetings) == 1
    if len(hosts) > 1:
        assert meetings.pop()[1][0] == "a1"


@pytest.mark.parametrize("hosts", [(2, 1), (1, 2), (4, 2, 2)], ids=str)
@pytest.mark.parametrize(
    "launcher", ["paceline run", "torchrun", "Slurm", "Slurm with PMI-2", "Slurm with PMIx", "Cray PALS"]
)
def test_hosts_may_have_unequal_numbers_of_ranks(launcher, hosts):
    for rank, local_rank, local_size, host in seats(hosts):
        at = find_position(LAUNCHERS[launcher](hosts, rank) | ({} if launcher == "torchrun" else MASTER))
        assert (at.local_rank, at.local_size, at.cross_rank) == (local_rank, local_size, host)
        assert launcher == "Cray PALS" or at.cross_size == len(hosts)
        assert not at.is_cross_computed


def test_horovods_cross_ranks_are_its_own():
    at = find_position(LAUNCHERS["Horovod"]((2, 1), 1) | MASTER)
    assert (at.local_rank, at.local_size, at.cross_rank, at.cross_size) == (1, 2, 0, 1)


def test_mpi_ranks_that_go_round_the_hosts():
    """`mpirun --map-by node`, and Hydra by default: ranks 0 and 2 are on the first host."""
    for rank in range(4):
        own = {"PMI_RANK": str(rank), "MPI_LOCALRANKID": str(rank // 2)}
        at = find_position({**hydra((2, 2), 0), **own, **MASTER})
        assert (at.local_rank, at.cross_rank, at.cross_size) == (rank // 2, rank % 2, 2)
        assert at.is_cross_computed


def test_launcher_without_a_host_has_cross_rank_marked_computed():
    at = find_position(open_mpi((2, 2), 3) | MASTER)
    assert at.origins["rank"] == "OMPI_COMM_WORLD_RANK=3"
    assert at.origins["cross_rank"] == "computed: rank / local size"
    assert at.is_cross_computed
    assert not find_position(open_mpi((2,), 1)).is_cross_computed  # one host: there is no doubt


def test_alone():
    at = find_position({"PATH": "/bin", "RANK": "", "PACELINE_INTERFACE": "eth1"})
    assert at == LauncherPosition(origins=at.origins, interface="eth1")
    assert find_node({}) is None


# What is missing and can be computed, or is given beside: the environment, local rank, local size, host, hosts.
FILLED_IN = {
    "Slurm of old names": ({"SLURM_STEP_ID": "0", "SLURM_PROCID": "3", "SLURM_NTASKS": "4", "SLURM_LOCALID": "1", "SLURM_NODEID": "1",
                            "SLURM_NNODES": "2", "SLURM_TASKS_PER_NODE": "2(x2)"}, (1, 2, 1, 2)),
    "Slurm without tasks per node": ({"SLURM_STEP_ID": "0", "SLURM_PROCID": "3", "SLURM_NTASKS": "4", "SLURM_LOCALID": "1",
                                      "SLURM_NODEID": "1", "SLURM_NNODES": "2"}, (1, 2, 1, 2)),
    "a step of a part of the job": ({**slurm((1, 1), 1), "SLURM_TASKS_PER_NODE": "8(x4)"}, (0, 1, 1, 2)),
    "tasks per node of the job alone": ({**slurm((4, 4), 5), "SLURM_STEP_TASKS_PER_NODE": "", "SLURM_TASKS_PER_NODE": "4(x3)"}, (1, 4, 1, 2)),
    "MPI with LOCAL_WORLD_SIZE": ({"PMI_RANK": "5", "PMI_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}, (1, 4, 1, 2)),
    "MPI with PACELINE_LOCAL_SIZE": ({"PMI_RANK": "5", "PMI_SIZE": "8", "PACELINE_LOCAL_SIZE": "4"}, (1, 4, 1, 2)),
    "MPI with LOCAL_RANK too": ({"PMI_RANK": "1", "PMI_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": "0"}, (0, 2, 1, 2)),
    "RANK and WORLD_SIZE by hand": ({"RANK": "3", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}, (1, 2, 1, 2)),
    "a pod of PyTorchJob": ({"RANK": "1", "WORLD_SIZE": "3", "PET_NPROC_PER_NODE": "1", "PET_NNODES": "3"}, (0, 1, 1, 3)),
    "torchrun without GROUP_WORLD_SIZE": ({"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "1"}, (1, 2, 1, 2)),
    "WORLD_SIZE exported around srun": ({**slurm((2, 2), 3), "WORLD_SIZE": "4"}, (1, 2, 1, 2)),
    "a name that is twice there": ({"PMI_RANK": "1", "PALS_RANKID": "1", "PMI_SIZE": "2", "PMI_LOCAL_SIZE": "1"}, (0, 1, 1, 2)),
    "torchrun in the range of PET_NNODES": ({**torchrun((2, 2), 3), "PET_NNODES": "1:4"}, (1, 2, 1, 2)),
}  # fmt: skip


@pytest.mark.parametrize("case", FILLED_IN)
def test_what_is_missing_is_filled_in(case):
    environment, expected = FILLED_IN[case]
    at = find_position({**MASTER, **environment})
    assert (at.local_rank, at.local_size, at.cross_rank, at.cross_size) == expected


# Two launchers of which the outer starts one process per host, or one alone: what the rank sees, its rank, its source.
NESTED = {
    "srun, torchrun": ({**slurm((1, 1), 1), **torchrun((4, 4), 6)}, 6, "torchrun"),
    "srun with PMIx, torchrun": ({**LAUNCHERS["Slurm with PMIx"]((1, 1), 1), **torchrun((4, 4), 6)}, 6, "torchrun"),
    "srun on a Cray, torchrun": ({**LAUNCHERS["Slurm on a Cray"]((1, 1), 1), **torchrun((4, 4), 6)}, 6, "torchrun"),
    "srun with PMI-2, torchrun": ({**LAUNCHERS["Slurm with PMI-2"]((1, 1), 1), **torchrun((4, 4), 6)}, 6, "torchrun"),
    "srun of one, paceline run": ({**slurm((1,), 0), **paceline((4,), 3)}, 3, "paceline run"),
    "srun, paceline run": ({**slurm((1, 1), 1), **paceline((4, 4), 6)}, 6, "paceline run"),
    "srun of one, paceline run over ssh": ({**slurm((1,), 0), **paceline((4, 4), 6)}, 6, "paceline run"),
    "mpirun of one, paceline run": ({**open_mpi((1,), 0), **paceline((2,), 1)}, 1, "paceline run"),
    "mpirun, torchrun": ({**open_mpi((1, 1), 1), **torchrun((2, 2), 2)}, 2, "torchrun"),
    "srun of one, mpirun": ({**slurm((1,), 0), **open_mpi((4,), 2)}, 2, "Open MPI"),
    "mpiexec.hydra by srun": ({**slurm((1, 1), 1), **hydra((2, 2), 3), **MASTER}, 3, "MPICH (PMI)"),
    "mpiexec.hydra by srun, round the hosts": ({**slurm((1, 1), 1), **hydra((2, 2), 0), "PMI_RANK": "1", **MASTER}, 1, "MPICH (PMI)"),
    "mpirun's daemons by srun, third host": ({**slurm((1, 1), 1), **open_mpi((2, 2, 2), 5), **MASTER}, 5, "Open MPI"),
    "mpirun's daemons by srun, uneven": ({**slurm((1, 1), 0), **open_mpi((3, 2, 2), 3), **MASTER}, 3, "Open MPI"),
    "mpirun in a batch script": ({**allocation((4,)), **open_mpi((4,), 2)}, 2, "Open MPI"),
    "paceline run in a batch script": ({**allocation((4, 4)), **paceline((4, 4), 2)}, 2, "paceline run"),
    "one process of verify in a batch script": ({**allocation((4,)), **paceline((1,), 0)}, 0, "paceline run"),
    "torchrun in a pod of TrainJob": ({**torchrun((2, 2), 3), "PET_NNODES": "2", "PET_NPROC_PER_NODE": "2", "PET_NODE_RANK": "1"}, 3, "torchrun"),
    "torchrun's own variables, exported, and paceline run": ({**torchrun((2,), 1), **paceline((2,), 1)}, 1, "paceline run"),
    "mpirun in the shell of salloc": ({**slurm((1,), 0), "SLURM_STEP_ID": "4294967290", **open_mpi((4,), 2)}, 2, "Open MPI"),
}  # fmt: skip


@pytest.mark.parametrize("case", NESTED)
def test_launchers_that_agree_may_be_nested(case):
    environment, rank, source = NESTED[case]
    at = find_position(environment)
    assert (at.rank, at.source) == (rank, source)


# Where ranks meet: the environment, the file or the host and port, and what says so.
MEETINGS = {
    "paceline run's file": (paceline((2,), 0), "/run/job/rendezvous", "PACELINE_RENDEZVOUS="),
    "paceline run's store": (paceline((2, 2), 0), ("a1", 29400), "PACELINE_MASTER=a1:29400"),
    "IPv6": ({**paceline((2, 2), 0), "PACELINE_MASTER": "[fd00::1]:29400"}, ("fd00::1", 29400), "PACELINE_MASTER"),
    "a batch script's MASTER_ADDR is not paceline run's": ({**paceline((2,), 0), "MASTER_ADDR": "b"}, "/run/job/rendezvous", "PACELINE_"),
    "MASTER_ADDR wins over a computed one": ({**slurm((2, 2), 0), **MASTER}, ("a1", 29511), "MASTER_ADDR=a1"),
    "MASTER_ADDR on one host": ({**slurm((2,), 0), **MASTER}, ("a1", 29511), "MASTER_ADDR=a1"),
    "IPv6 in MASTER_ADDR": ({**slurm((2,), 0), "MASTER_ADDR": "fd00::1", "MASTER_PORT": "1"}, ("fd00::1", 1), "MASTER_ADDR"),
    "PACELINE_MASTER under mpirun": ({**open_mpi((1, 1), 0), "PACELINE_MASTER": "a1:29400"}, ("a1", 29400), "PACELINE_MASTER"),
    "Slurm's list": (slurm((2, 2), 0), ("a1", 12000 + 4711 * 31 % 18000), "SLURM_STEP_NODELIST=a[1-2]"),
    "the next step has another port": ({**slurm((2, 2), 0), "SLURM_STEP_ID": "1"}, ("a1", 12001 + 4711 * 31 % 18000), "SLURM_STEP_ID=1"),
    "the job's list": ({**slurm((2, 2), 0), "SLURM_STEP_NODELIST": "", "SLURM_JOB_NODELIST": "b[07-09]"}, ("b07", 12000 + 4711 * 31 % 18000), "JOB_NODELIST"),
    "LSF's list without the script's host": (LAUNCHERS["jsrun"]((2, 2), 0), ("a1", 12000 + 815 * 31 % 18000), "LSB_HOSTS"),
    "LSF's list of hosts alone": ({**LAUNCHERS["jsrun"]((1, 1), 0), "LSB_HOSTS": "c c d d"}, ("c", 12000 + 815 * 31 % 18000), "LSB_HOSTS"),
    "LSF's list of hosts of which not all are used": ({**LAUNCHERS["jsrun"]((1, 1), 0), "LSB_HOSTS": "c c d d e e"}, ("c", 12000 + 815 * 31 % 18000), "LSB_HOSTS"),
    "workers of servers": ({**paceline((2,), 0), "PACELINE_RENDEZVOUS": "", "PACELINE_COORDINATOR": "unix:/x"}, None, "do not meet"),
}  # fmt: skip


@pytest.mark.parametrize("case", MEETINGS)
def test_where_ranks_meet(case):
    environment, meeting, said = MEETINGS[case]
    at = find_position(environment)
    assert (at.file or at.master) == meeting
    assert said in at.origins["meeting"]


def test_lsfs_file_of_hosts_comes_before_its_variable(tmp_path):
    path = tmp_path / "ranks"
    path.write_text("batch5\n" + "h7\n" * 42 + "h9\n" * 42)
    assert find_position({**LAUNCHERS["jsrun"]((2, 2), 3), "LSB_DJOB_RANKFILE": str(path)}).master[0] == "h7"


@pytest.mark.parametrize("launcher", ["Horovod", "Open MPI", "MVAPICH2", "MPICH", "Cray PALS", "Slurm", "jsrun"])
def test_a_meeting_file_is_this_users_and_this_starts(launcher):
    environment = {**LAUNCHERS[launcher]((2,), 0), "TMPDIR": "/scratch"}
    file = find_position(environment).file
    assert file.startswith(f"/scratch/paceline-{os.getuid()}/")
    assert file.removeprefix(f"/scratch/paceline-{os.getuid()}/").replace("_", "").isalnum()
    other = {
        name: f"{text}9"
        for name, text in environment.items()
        if name.endswith(("NAMESPACE", "JOB_ID", "JOBID", "APID", "PORT", "N_ID"))
    }
    assert launcher == "MPICH" or find_position({**environment, **other}).file != file


def test_a_requeued_job_meets_elsewhere():
    first = find_position(slurm((2,), 0)).file
    assert find_position({**slurm((2,), 0), "SLURM_RESTART_COUNT": "1"}).file != first
    assert find_position({**slurm((2,), 0), "SLURM_STEP_ID": "1"}).file != first


ABOVE = """
    import os, subprocess, sys
    source, process = sys.argv[1:]
    open("/proc/self/comm", "w").write(process)
    code = f"from paceline.rendezvous.store_address import meeting_file; print(meeting_file({source!r}, {{}}))"
    rename = f"open('/proc/self/comm', 'w').write('{process if source == 'Horovod' else 'python'}')"
    fork = f"import subprocess, sys; {rename}; subprocess.run([sys.executable, '-c', sys.argv[1]])"
    shells = [["sh", "-c", f'"{sys.executable}" -c "{code}"; true'], [sys.executable, "-c", fork, code]]
    print(*{subprocess.run(words, capture_output=True, text=True).stdout for words in shells})
"""
PROCESSES = {"MPICH (PMI)": "hydra_pmi_proxy", "Horovod": "horovodrun"}


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_the_launchers_process_is_found_above_a_shell():
    """A rank in a shell of its own, as `mpirun sh script` starts it, finds what one without finds, and the next start another.

    `horovodrun` stands above each rank twice.
    """
    words = [sys.executable, "-c", textwrap.dedent(ABOVE)]
    many = [(*both, subprocess.Popen([*words, *both], stdout=subprocess.PIPE, text=True)) for both in PROCESSES.items()]
    for source, _, start in many:
        (file,) = start.communicate()[0].split()  # the same for both
        assert f"_{start.pid}_" in file, source


@pytest.mark.parametrize(("is_outermost", "found"), [(False, ["40", "440"]), (True, ["20", "220"])])
def test_of_two_launchers_the_nearest_or_the_farthest_is_taken(is_outermost, found, tmp_path, monkeypatch):
    monkeypatch.undo()
    for process, parent, name in ((50, 40, "sh"), (40, 30, "mpirun"), (30, 20, "a (b) c"), (20, 9, "mpirun")):
        (tmp_path / str(process)).mkdir()
        fields = ["S", str(parent), *map(str, range(5, 22)), str(process * 11), "0"]
        (tmp_path / str(process) / "stat").write_text(f"{process} ({name}) {' '.join(fields)}\n")
    monkeypatch.setattr("paceline.rendezvous.store_address._PROCESSES", tmp_path)
    monkeypatch.setattr("os.getppid", lambda: 50)
    assert _launcher_process(("mpirun",), is_outermost) == found
    assert _launcher_process(("orted",), is_outermost) == []


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_a_process_id_that_is_used_again_is_another_start(monkeypatch):
    monkeypatch.undo()
    with open(f"/proc/{os.getppid()}/comm") as file:
        name = file.read().rstrip("\n")
    process, ticks = _launcher_process((name,), is_outermost=False)
    assert process == str(os.getppid())
    since_boot = psutil.Process(os.getppid()).create_time() - psutil.boot_time()
    assert abs(int(ticks) / os.sysconf("SC_CLK_TCK") - since_boot) < 5


def test_a_start_without_any_name_is_refused(monkeypatch):
    monkeypatch.setattr("paceline.rendezvous.store_address._launcher_process", lambda names, is_outermost: [])
    with pytest.raises(UsageError, match="set MASTER_ADDR and MASTER_PORT for all ranks"):
        meeting_file("MPICH (PMI)", {})


POD = {
    "PET_NNODES": "4",
    "PET_NODE_RANK": "2",
    "PET_NPROC_PER_NODE": "8",
    "PET_MASTER_ADDR": "t-0.t",
    "PET_MASTER_PORT": "29400",
}
INDEXED = {"PET_NNODES": "2", "JOB_COMPLETION_INDEX": "1"}
PET = "torchrun's PET_* variables"
# What a pod has, and (host, hosts, ranks per host, master, source) or None.
NODES = {
    "TrainJob": (POD, (2, 4, 8, ("t-0.t", 29400), PET)),
    "TrainJob's first pod counts devices": ({**POD, "PET_NODE_RANK": "0", "PET_NPROC_PER_NODE": "gpu"}, (0, 4, 0, ("t-0.t", 29400), PET)),
    "torchrun's own port": ({**POD, "PET_MASTER_PORT": ""}, (2, 4, 8, ("t-0.t", 29500), PET)),
    "one host of eight": ({"PET_NPROC_PER_NODE": "8"}, (0, 1, 8, None, PET)),
    "one host, counted": ({"PET_NNODES": "1", "PET_NPROC_PER_NODE": "auto"}, (0, 1, 0, None, PET)),
    "a range of one number": ({**POD, "PET_NNODES": "4:4"}, (2, 4, 8, ("t-0.t", 29400), PET)),
    "indexed Job": ({**INDEXED, **MASTER}, (1, 2, 0, ("a1", 29511), "Kubernetes indexed Job")),
    "indexed Job at a rendezvous": ({**INDEXED, "PET_RDZV_ENDPOINT": "t-0.t"}, (1, 2, 0, ("t-0.t", 29400), "Kubernetes indexed Job")),
    "a rendezvous beside a master": ({**POD, "PET_RDZV_ENDPOINT": "b:29400"}, (2, 4, 8, ("t-0.t", 29400), PET)),
    "JobSet": ({**INDEXED, "JOBSET_NAME": "train", "REPLICATED_JOB_NAME": "w"}, (1, 2, 0, ("train-w-0-0.train", 29500), "JobSet")),
    "JobSet with a port": ({**INDEXED, "JOBSET_NAME": "train", "REPLICATED_JOB_NAME": "w", "PET_MASTER_PORT": "81"}, (1, 2, 0, ("train-w-0-0.train", 81), "JobSet")),
    "both addresses are one": ({**POD, "MASTER_ADDR": "t-0.t", "MASTER_PORT": "29400"}, (2, 4, 8, ("t-0.t", 29400), PET)),
    "an index alone counts nothing": ({"JOB_COMPLETION_INDEX": "3"}, None),
    "one host": ({"PET_NNODES": "1"}, None),
    "one host of a Job of many": ({"PET_NNODES": "1", "JOB_COMPLETION_INDEX": "3"}, None),
    "torchrun has started the ranks": ({**POD, **torchrun((8, 8, 8, 8), 17)}, None),
    "paceline run has started the ranks": ({**POD, **paceline((8,), 1)}, None),
}  # fmt: skip


@pytest.mark.parametrize("case", NODES)
def test_a_host_among_hosts(case):
    environment, expected = NODES[case]
    at = find_node(environment)
    assert at == (None if expected is None else NodeInfo(*expected, at.origins))


def test_no_torch_is_needed():
    code = (
        "import sys, paceline.rendezvous.launcher_env, paceline.cli.explain_command; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
