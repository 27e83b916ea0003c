"""The environments of real launchers, for one rank of a job whose hosts have these numbers of ranks."""

from __future__ import annotations

import itertools


def seats(hosts):
    """(rank, local rank, local size, host) of every rank, host after host."""
    locals_ = [(local, many, host) for host, many in enumerate(hosts) for local in range(many)]
    return [(rank, *seat) for rank, seat in enumerate(locals_)]


def runs(counts):
    """Slurm's short form: 4(x2),3."""
    groups = [(count, len(list(group))) for count, group in itertools.groupby(counts)]
    return ",".join(f"{count}(x{many})" if many > 1 else str(count) for count, many in groups)


def _texts(**values):
    return {name: str(value) for name, value in values.items()}


def paceline(hosts, rank):
    """As `run/rank/forkserver.py` has it."""
    _, local, many, host = seats(hosts)[rank]
    meet = {"PACELINE_MASTER": "a1:29400"} if len(hosts) > 1 else {"PACELINE_RENDEZVOUS": "/run/job/rendezvous"}
    own = _texts(
        PACELINE_RANK=rank, PACELINE_WORLD_SIZE=sum(hosts), PACELINE_LOCAL_RANK=local, PACELINE_LOCAL_SIZE=many
    )
    return {
        **own,
        **_texts(PACELINE_CROSS_RANK=host, PACELINE_CROSS_SIZE=len(hosts), PACELINE_RUN_DIR="runs/a"),
        **meet,
    }


def torchrun(hosts, rank):
    """As torch 2.12's elastic agent has it."""
    _, local, many, host = seats(hosts)[rank]
    own = _texts(RANK=rank, WORLD_SIZE=sum(hosts), LOCAL_RANK=local, LOCAL_WORLD_SIZE=many, GROUP_RANK=host)
    more = _texts(GROUP_WORLD_SIZE=len(hosts), ROLE_RANK=rank, ROLE_WORLD_SIZE=sum(hosts), ROLE_NAME="default")
    store = {"MASTER_ADDR": "a1", "MASTER_PORT": "43411", "TORCHELASTIC_RUN_ID": "none", "OMP_NUM_THREADS": "1"}
    return {**own, **more, **store, "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}


def horovod(hosts, rank):
    """As Horovod's gloo_run.py has it: the cross communicator joins the ranks of one local rank."""
    _, local, many, host = seats(hosts)[rank]
    peers = [number for number, count in enumerate(hosts) if count > local]
    own = _texts(HOROVOD_RANK=rank, HOROVOD_SIZE=sum(hosts), HOROVOD_LOCAL_RANK=local, HOROVOD_LOCAL_SIZE=many)
    cross = _texts(HOROVOD_CROSS_RANK=peers.index(host), HOROVOD_CROSS_SIZE=len(peers), HOROVOD_HOSTNAME=f"a{host + 1}")
    gloo = {"HOROVOD_GLOO_RENDEZVOUS_ADDR": "10.0.0.1", "HOROVOD_GLOO_RENDEZVOUS_PORT": "38127"}
    return {**own, **cross, **gloo, "HOROVOD_CONTROLLER": "gloo", "HOROVOD_CPU_OPERATIONS": "gloo"}


def open_mpi(hosts, rank):
    """As read off Open MPI 4.1.4."""
    _, local, many, _ = seats(hosts)[rank]
    own = {"RANK": rank, "SIZE": sum(hosts), "LOCAL_RANK": local, "LOCAL_SIZE": many, "NODE_RANK": local}
    job = {"PMIX_NAMESPACE": "1695350785", "PMIX_RANK": str(rank), "PMIX_ID": f"1695350785.{rank}"}
    more = {"OMPI_UNIVERSE_SIZE": "16", "OMPI_MCA_ess_base_jobid": "1695350785", "OMPI_COMMAND": "python3"}
    return {**{f"OMPI_COMM_WORLD_{name}": str(value) for name, value in own.items()}, **job, **more}


def mvapich(hosts, rank):
    """As MVAPICH2's mpirun_rsh has it."""
    _, local, many, _ = seats(hosts)[rank]
    own = {"RANK": rank, "SIZE": sum(hosts), "LOCAL_RANK": local, "LOCAL_SIZE": many}
    return {**{f"MV2_COMM_WORLD_{name}": str(value) for name, value in own.items()}, "MPIRUN_ID": "31337"}


def hydra(hosts, rank):
    """As read off MPICH 5.0 with Hydra, which names no job."""
    _, local, many, _ = seats(hosts)[rank]
    own = _texts(PMI_RANK=rank, PMI_SIZE=sum(hosts), MPI_LOCALRANKID=local, MPI_LOCALNRANKS=many)
    return {**own, "PMI_FD": "9", "PMI_HOSTNAME": "a1"}


def intel_mpi(hosts, rank):
    """Hydra again, with Intel's own variables beside it."""
    return {**hydra(hosts, rank), "I_MPI_MPIRUN": "mpirun", "I_MPI_HYDRA_BOOTSTRAP": "ssh", "PMI_JOBID": "77"}


def pals(hosts, rank):
    """As Cray's PALS has it, with Cray MPICH."""
    _, local, many, host = seats(hosts)[rank]
    own = _texts(PMI_RANK=rank, PMI_SIZE=sum(hosts), PMI_LOCAL_RANK=local, PMI_LOCAL_SIZE=many, PALS_RANKID=rank)
    return {**own, **_texts(PALS_LOCAL_RANKID=local, PALS_NODEID=host, PALS_APID="a1b2-c3")}


def allocation(hosts):
    """As `sbatch` has it in the script: Slurm's variables, outside of a step."""
    names = "a1" if len(hosts) == 1 else f"a[1-{len(hosts)}]"
    own = {"SLURM_JOB_ID": "4711", "SLURM_JOB_NODELIST": names, "SLURM_NODELIST": names, "SLURM_PROCID": "0"}
    counts = _texts(SLURM_NTASKS=sum(hosts), SLURM_NPROCS=sum(hosts), SLURM_NNODES=len(hosts), SLURM_LOCALID=0)
    more = _texts(SLURM_JOB_NUM_NODES=len(hosts), SLURM_NODEID=0, SLURM_TASKS_PER_NODE=runs(hosts), SLURM_GTIDS=0)
    return {**own, **counts, **more, "SLURM_JOB_NAME": "train"}


def slurm(hosts, rank):
    """As `srun` has it in a step."""
    _, local, _, host = seats(hosts)[rank]
    names = allocation(hosts)["SLURM_NODELIST"]
    own = _texts(SLURM_PROCID=rank, SLURM_LOCALID=local, SLURM_NODEID=host, SLURM_STEP_ID=0, SLURM_STEPID=0)
    step = _texts(SLURM_STEP_NUM_TASKS=sum(hosts), SLURM_STEP_NUM_NODES=len(hosts), SLURM_STEP_NODELIST=names)
    more = {"SLURM_STEP_TASKS_PER_NODE": runs(hosts), "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.254"}  # the login node's
    return {**allocation(hosts), **own, **step, **more}


def slurm_pmi2(hosts, rank):
    """As `srun --mpi=pmi2` has it: PMI's rank and size, and no local rank."""
    return {**slurm(hosts, rank), **_texts(PMI_RANK=rank, PMI_SIZE=sum(hosts), PMI_FD=7, PMI_JOBID="4711.0")}


def slurm_pmix(hosts, rank):
    """As `srun --mpi=pmix` has it."""
    return {**slurm(hosts, rank), **_texts(PMIX_RANK=rank, PMIX_NAMESPACE="slurm.pmix.4711.0")}


def slurm_cray(hosts, rank):
    """As `srun` on a Cray has it: PALS's numbers without the number of ranks."""
    _, local, _, host = seats(hosts)[rank]
    return {
        **slurm(hosts, rank),
        **_texts(PALS_RANKID=rank, PALS_LOCAL_RANKID=local, PALS_NODEID=host, PALS_APID="4711"),
    }


def jsrun(hosts, rank):
    """As LSF's jsrun has it, which runs Spectrum MPI's variables along; the script's host is the first."""
    _, local, many, _ = seats(hosts)[rank]
    own = {"RANK": rank, "SIZE": sum(hosts), "LOCAL_RANK": local, "LOCAL_SIZE": many}
    words = " ".join(["batch5", *(f"a{host + 1}" for host, count in enumerate(hosts) for _ in range(42))])
    lsf = {"LSB_JOBID": "815", "LSB_HOSTS": words, "LSB_DJOB_NUMPROC": str(1 + 42 * len(hosts))}
    own_texts = {f"JSM_NAMESPACE_{name}": str(value) for name, value in own.items()}
    return {**own_texts, **lsf, **open_mpi(hosts, rank)}


LAUNCHERS = {
    "paceline run": paceline,
    "torchrun": torchrun,
    "Horovod": horovod,
    "Open MPI": open_mpi,
    "MVAPICH2": mvapich,
    "MPICH": hydra,
    "Intel MPI": intel_mpi,
    "Cray PALS": pals,
    "Slurm": slurm,
    "Slurm with PMI-2": slurm_pmi2,
    "Slurm with PMIx": slurm_pmix,
    "Slurm on a Cray": slurm_cray,
    "jsrun": jsrun,
}
SOURCES = {
    **{name: name for name in LAUNCHERS},
    **dict.fromkeys(("MPICH", "Intel MPI", "Cray PALS", "Slurm with PMI-2"), "MPICH (PMI)"),
    **dict.fromkeys(("Slurm with PMIx", "Slurm on a Cray"), "Slurm"),
    "jsrun": "Open MPI",  # Spectrum MPI is one, and says as much as jsrun
}
NEEDS_MASTER = ("Horovod", "Open MPI", "MVAPICH2", "MPICH", "Intel MPI", "Cray PALS")  # on several hosts
