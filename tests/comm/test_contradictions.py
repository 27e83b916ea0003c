"""What can't be true is an error that names both sides and what to do, whichever launchers it is between."""

# ruff: noqa: E501 (a table, a case a line)
from __future__ import annotations

import re

import pytest

from paceline.nouns.errors import UsageError
from paceline.rendezvous.launcher_env import find_node, find_position

from support.environments import (
    LAUNCHERS,
    allocation,
    horovod,
    hydra,
    jsrun,
    mvapich,
    open_mpi,
    paceline,
    pals,
    slurm,
    torchrun,
)

MASTER = {"MASTER_ADDR": "a1", "MASTER_PORT": "29511"}
POD = {"PET_NNODES": "4", "PET_NODE_RANK": "2", "PET_NPROC_PER_NODE": "8", **MASTER}


def without(environment, *names):
    return {name: text for name, text in environment.items() if name not in names}


# Two launchers that name different ranks, or another number of them: both names and both values are told.
BETWEEN = {
    "paceline run, torchrun: rank": ({**torchrun((2,), 0), **paceline((2,), 1)}, "paceline run says rank 1 of 2", "torchrun says rank 0 of 2", "PACELINE_RANK=1", "RANK=0"),
    "paceline run, torchrun: size": ({**torchrun((4,), 1), **paceline((2,), 1)}, "paceline run says rank 1 of 2", "torchrun says rank 1 of 4"),
    "paceline run, Horovod": ({**horovod((4,), 2), **paceline((4,), 1)}, "paceline run says rank 1 of 4", "Horovod says rank 2 of 4"),
    "paceline run, Open MPI": ({**open_mpi((4,), 2), **paceline((4,), 1)}, "paceline run says", "Open MPI says rank 2 of 4"),
    "paceline run, MVAPICH2": ({**mvapich((2, 2), 3), **paceline((4,), 1)}, "paceline run says", "MVAPICH2 says rank 3 of 4"),
    "paceline run, MPICH": ({**hydra((2,), 1), **paceline((4,), 1)}, "paceline run says", "MPICH (PMI) says rank 1 of 2"),
    "paceline run, Slurm": ({**slurm((4,), 2), **paceline((4,), 1)}, "paceline run says", "Slurm says rank 2 of 4", "SLURM_PROCID=2"),
    "paceline run, jsrun": ({**without(jsrun((4,), 2), *open_mpi((4,), 2)), **paceline((4,), 1)}, "paceline run says", "jsrun says rank 2 of 4"),
    "paceline run alone in each of srun's": ({**slurm((4,), 2), **paceline((1,), 0)}, "paceline run says rank 0 of 1", "Slurm says rank 2 of 4"),
    "paceline run on another host than srun's": ({**slurm((1, 1), 0), **paceline((2, 2), 3)}, "host 1 of 2", "Slurm says rank 0 of 2"),
    "torchrun, Horovod": ({**horovod((4,), 2), **torchrun((4,), 1)}, "torchrun says rank 1 of 4", "Horovod says rank 2 of 4"),
    "torchrun, Open MPI: rank": ({**open_mpi((4,), 2), **torchrun((4,), 1)}, "torchrun says rank 1 of 4", "Open MPI says rank 2 of 4"),
    "torchrun, Open MPI: size": ({**open_mpi((2,), 1), **torchrun((4,), 1)}, "torchrun says", "OMPI_COMM_WORLD_SIZE=2"),
    "torchrun alone in each of mpirun's": ({**open_mpi((2,), 1), **torchrun((1,), 0)}, "torchrun says rank 0 of 1", "Open MPI says rank 1 of 2"),
    "torchrun, MVAPICH2": ({**mvapich((4,), 2), **torchrun((4,), 1)}, "torchrun says", "MVAPICH2 says rank 2 of 4"),
    "torchrun, MPICH": ({**hydra((4,), 2), **torchrun((4,), 1)}, "torchrun says", "MPICH (PMI) says rank 2 of 4", "PMI_RANK=2"),
    "torchrun, PALS": ({**pals((4,), 2), **torchrun((4,), 1)}, "torchrun says", "MPICH (PMI) says rank 2 of 4"),
    "torchrun, Slurm: two tasks a host": ({**slurm((2, 2), 3), **torchrun((4, 4), 6)}, "torchrun says rank 6 of 8", "Slurm says rank 3 of 4"),
    "torchrun, Slurm: another host": ({**slurm((1, 1), 0), **torchrun((4, 4), 6)}, "torchrun says rank 6 of 8", "host 1 of 2", "Slurm says rank 0 of 2"),
    "torchrun, Slurm: more hosts": ({**slurm((1, 1, 1), 1), **torchrun((4, 4), 6)}, "torchrun says", "Slurm says rank 1 of 3"),
    "torchrun, Slurm: RANK left from before": ({**slurm((2, 2), 3), "RANK": "0", "WORLD_SIZE": "4", **MASTER}, "torchrun says rank 0 of 4", "Slurm says rank 3 of 4"),
    "torchrun, Slurm: groups are filled in turn": ({**slurm((1, 1), 1), **without(torchrun((2, 2), 1), "GROUP_RANK", "GROUP_WORLD_SIZE")}, "torchrun says rank 1 of 4", "Slurm says rank 1 of 2"),
    "torchrun, jsrun": ({**without(jsrun((4,), 2), *open_mpi((4,), 2)), **torchrun((4,), 1)}, "torchrun says", "jsrun says rank 2 of 4"),
    "Horovod, Slurm": ({**slurm((4,), 2), **horovod((4,), 1)}, "Horovod says rank 1 of 4", "Slurm says rank 2 of 4"),
    "Horovod, Open MPI": ({**open_mpi((4,), 2), **horovod((4,), 1)}, "Horovod says rank 1 of 4", "Open MPI says rank 2 of 4"),
    "Open MPI, MPICH": ({**hydra((4,), 2), **open_mpi((4,), 1)}, "Open MPI says rank 1 of 4", "MPICH (PMI) says rank 2 of 4"),
    "Open MPI, PMIx": ({**open_mpi((4,), 1), "PMIX_RANK": "3"}, "PMIx says rank 3", "Open MPI says rank 1 of 4", "PMIX_RANK=3"),
    "Open MPI in each task of srun": ({**slurm((1, 1), 1), **open_mpi((4,), 1)}, "Open MPI says rank 1 of 4", "Slurm says rank 1 of 2"),
    "Open MPI, Slurm: two tasks a host": ({**slurm((2, 2), 1), **open_mpi((2, 2), 2)}, "Open MPI says rank 2 of 4", "Slurm says rank 1 of 4"),
    "Open MPI, Slurm: no step of daemons": ({**slurm((2, 2), 3), **open_mpi((4, 4), 6)}, "Open MPI says rank 6 of 8", "Slurm says rank 3 of 4"),
    "MPICH, Slurm": ({**slurm((2, 2), 1), **hydra((2, 2), 2)}, "MPICH (PMI) says rank 2 of 4", "Slurm says rank 1 of 4"),
    "PALS without a size, Slurm": ({**LAUNCHERS["Slurm on a Cray"]((2, 2), 1), "PALS_RANKID": "2"}, "MPICH (PMI) says rank 2", "Slurm says rank 1 of 4"),
    "PMIx, Slurm": ({**LAUNCHERS["Slurm with PMIx"]((2, 2), 1), "PMIX_RANK": "2"}, "PMIx says rank 2", "Slurm says rank 1 of 4"),
    "jsrun, Open MPI": ({**jsrun((4,), 1), "JSM_NAMESPACE_RANK": "3"}, "Open MPI says rank 1 of 4", "jsrun says rank 3 of 4"),
    "WORLD_SIZE alone, Slurm": ({**slurm((2, 2), 1), "WORLD_SIZE": "8"}, "torchrun says rank ? of 8", "Slurm says rank 1 of 4", "WORLD_SIZE=8"),
    "LOCAL_WORLD_SIZE alone, Slurm": ({**slurm((2, 2), 1), "LOCAL_WORLD_SIZE": "4"}, "LOCAL_WORLD_SIZE=4", "Slurm says rank 1 of 4, local rank 1 of 2"),
    "PACELINE_LOCAL_SIZE alone, torchrun": ({**torchrun((2, 2), 1), "PACELINE_LOCAL_SIZE": "4"}, "PACELINE_LOCAL_SIZE=4", "torchrun says rank 1 of 4, local rank 1 of 2"),
    "PACELINE_RANK alone, Open MPI": ({**open_mpi((4,), 1), "PACELINE_RANK": "2"}, "paceline run says rank 2", "Open MPI says rank 1 of 4"),
    "two places to meet": ({**open_mpi((4,), 1), **MASTER, "PACELINE_MASTER": "b1:29400"}, "PACELINE_MASTER=b1:29400", "MASTER_ADDR=a1", "MASTER_PORT=29511"),
}  # fmt: skip

# One launcher whose variables can't all be true, and what the error names.
WITHIN = {
    "paceline run: rank and size": ({**paceline((2,), 1), "PACELINE_RANK": "2"}, "rank 2 of 2", "PACELINE_RANK=2", "PACELINE_WORLD_SIZE=2"),
    "torchrun: rank and size": ({"RANK": "2", "WORLD_SIZE": "2"}, "rank 2 of 2", "RANK=2", "WORLD_SIZE=2"),
    "Horovod: rank and size": ({**horovod((2,), 1), "HOROVOD_SIZE": "1"}, "rank 1 of 1", "HOROVOD_RANK=1", "HOROVOD_SIZE=1"),
    "Open MPI: rank and size": ({**open_mpi((2,), 1), "OMPI_COMM_WORLD_RANK": "7"}, "rank 7 of 2"),
    "MVAPICH2: rank and size": ({**mvapich((2,), 1), "MV2_COMM_WORLD_RANK": "7"}, "rank 7 of 2"),
    "MPICH: rank and size": ({**hydra((2,), 1), "PMI_SIZE": "1"}, "rank 1 of 1", "PMI_SIZE=1"),
    "Slurm: rank and size": ({**slurm((2,), 1), "SLURM_PROCID": "4"}, "rank 4 of 2", "SLURM_PROCID=4"),
    "jsrun: rank and size": ({**jsrun((2,), 1), "JSM_NAMESPACE_SIZE": "1"}, "rank 1 of 1"),
    "a world of none": ({**hydra((1,), 0), "PMI_SIZE": "0"}, "rank 0 of 0"),
    "paceline run: local": ({**paceline((2,), 1), "PACELINE_LOCAL_RANK": "2"}, "local rank 2 of 2", "PACELINE_LOCAL_RANK=2"),
    "torchrun: local": ({**torchrun((2,), 1), "LOCAL_RANK": "5"}, "local rank 5 of 2"),
    "Open MPI: local": ({**open_mpi((2, 2), 1), "OMPI_COMM_WORLD_LOCAL_RANK": "2"}, "local rank 2 of 2"),
    "MPICH: local": ({**hydra((2, 2), 1), "MPI_LOCALNRANKS": "1"}, "local rank 1 of 1", "MPI_LOCALNRANKS=1"),
    "jsrun: local": ({**without(jsrun((2,), 1), *open_mpi((2,), 0)), "JSM_NAMESPACE_LOCAL_SIZE": "3"}, "JSM_NAMESPACE_LOCAL_SIZE=3"),
    "MVAPICH2: more on the host than in all": ({**mvapich((2,), 1), "MV2_COMM_WORLD_LOCAL_SIZE": "4"}, "rank 1 of 2, local rank 1 of 4"),
    "Horovod: more on the host than in all": ({**horovod((2,), 1), "HOROVOD_LOCAL_SIZE": "4"}, "local rank 1 of 4", "HOROVOD_SIZE=2"),
    "Horovod: hosts": ({**horovod((1, 1), 1), "HOROVOD_CROSS_RANK": "2"}, "host 2 of 2"),
    "paceline run: hosts": ({**paceline((1, 1), 1), "PACELINE_CROSS_SIZE": "1"}, "host 1 of 1", "PACELINE_CROSS_SIZE=1"),
    "paceline run: all on one of two hosts": ({**paceline((2,), 1), "PACELINE_CROSS_SIZE": "2"}, "rank 1 of 2, local rank 1 of 2, host 0 of 2"),
    "paceline run: half on one host": ({**paceline((4,), 1), "PACELINE_LOCAL_SIZE": "2"}, "local rank 1 of 2, host 0 of 1"),
    "paceline run: two places": ({**paceline((2,), 1), "PACELINE_MASTER": "a:1"}, "PACELINE_RENDEZVOUS=", "PACELINE_MASTER=a:1"),
    "torchrun: rank 5 in the first group of 4": ({**torchrun((4, 4), 1), "RANK": "5"}, "rank 5 of 8, local rank 1 of 4, host 0 of 2", "RANK=5"),
    "torchrun: the same without the number of groups": ({**without(torchrun((4, 4), 1), "GROUP_WORLD_SIZE"), "RANK": "5"}, "rank 5 of 8"),
    "torchrun: rank 1 in the second group": ({**torchrun((4, 4), 5), "RANK": "1"}, "rank 1 of 8", "GROUP_RANK=1"),
    "torchrun: rank 6 of three groups where 5 would be": ({**torchrun((4, 4, 4), 5), "RANK": "6"}, "rank 6 of 12, local rank 1 of 4"),
    "torchrun: a last group that has not room": ({**torchrun((4, 4), 4), "RANK": "7", "GROUP_WORLD_SIZE": "3"}, "rank 7 of 8, local rank 0 of 4", "host 1 of 3"),
    "torchrun: rank 6 where 5 would be": ({**torchrun((4, 4), 5), "RANK": "6"}, "rank 6 of 8, local rank 1 of 4"),
    "torchrun: groups": ({**torchrun((4, 4), 5), "GROUP_RANK": "2"}, "host 2 of 2", "GROUP_WORLD_SIZE=2"),
    "torchrun: more groups than ranks": ({**torchrun((1, 1), 1), "GROUP_WORLD_SIZE": "3"}, "host 1 of 3"),
    "torchrun: PET_NNODES": ({**torchrun((1, 1, 1), 1), "PET_NNODES": "2"}, "PET_NNODES=2", "GROUP_WORLD_SIZE=3"),
    "torchrun: PET_NNODES as a range": ({**torchrun((1, 1, 1), 1), "PET_NNODES": "1:2"}, "PET_NNODES=1:2", "GROUP_WORLD_SIZE=3"),
    "torchrun: PET_NPROC_PER_NODE": ({**torchrun((2,), 1), "PET_NPROC_PER_NODE": "8"}, "PET_NPROC_PER_NODE=8", "LOCAL_WORLD_SIZE=2"),
    "PALS: two names of the rank": ({**pals((4,), 2), "PALS_RANKID": "3"}, "PMI_RANK=2", "PALS_RANKID=3"),
    "PALS: two names of the local rank": ({**pals((4,), 2), "PALS_LOCAL_RANKID": "3"}, "PMI_LOCAL_RANK=2", "PALS_LOCAL_RANKID=3"),
    "MPICH: two names of the local size": ({**hydra((4,), 2), "PMI_LOCAL_SIZE": "3"}, "MPI_LOCALNRANKS=4", "PMI_LOCAL_SIZE=3"),
    "Slurm: node id": ({**slurm((1, 1), 1), "SLURM_NODEID": "2"}, "host 2 of 2", "SLURM_NODEID=2"),
    "Slurm: node id by the old name": ({**without(slurm((1, 1), 1), "SLURM_STEP_NUM_NODES"), "SLURM_NODEID": "2"}, "SLURM_NNODES=2"),
    "Slurm: tasks add up to another number": ({**slurm((2, 2), 1), "SLURM_STEP_TASKS_PER_NODE": "3,2"}, "SLURM_STEP_TASKS_PER_NODE=3,2", "SLURM_STEP_NUM_TASKS=4"),
    "Slurm: tasks of more hosts": ({**slurm((2, 2), 1), "SLURM_STEP_TASKS_PER_NODE": "2,1(x2)"}, "SLURM_STEP_TASKS_PER_NODE=2,1(x2)", "SLURM_STEP_NUM_NODES=2"),
    "Slurm: local id": ({**slurm((2, 2), 1), "SLURM_LOCALID": "2"}, "SLURM_LOCALID=2", "SLURM_STEP_TASKS_PER_NODE=2(x2)"),
    "Slurm: a list of more hosts": ({**slurm((2, 2), 1), "SLURM_STEP_NODELIST": "a[1-3]"}, "SLURM_STEP_NODELIST=a[1-3] names 3", "say 2"),
    "filled in: local size and local rank": ({"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "3", "LOCAL_WORLD_SIZE": "2"}, "MPI_LOCALRANKID=3", "LOCAL_WORLD_SIZE=2"),
    "MASTER_ADDR without MASTER_PORT": ({**slurm((2, 2), 1), "MASTER_ADDR": "a"}, "MASTER_ADDR=a is set and MASTER_PORT is not"),
    "MASTER_PORT without MASTER_ADDR": ({**torchrun((2,), 1), "MASTER_ADDR": ""}, "MASTER_PORT=43411 is set and MASTER_ADDR is not"),
    "MASTER_PORT of 0": ({**torchrun((2,), 1), "MASTER_PORT": "0"}, "MASTER_PORT", "1 to 65535", "it is '0'"),
    "MASTER_PORT of 70000": ({**torchrun((2,), 1), "MASTER_PORT": "70000"}, "MASTER_PORT", "it is '70000'"),
    "MASTER_PORT in words": ({**torchrun((2,), 1), "MASTER_PORT": "http"}, "MASTER_PORT", "it is 'http'"),
    "PACELINE_MASTER without a port": ({**paceline((1, 1), 1), "PACELINE_MASTER": "a1"}, "PACELINE_MASTER", "HOST:PORT", "it is 'a1'"),
    "PACELINE_MASTER without a host": ({**paceline((1, 1), 1), "PACELINE_MASTER": ":29400"}, "HOST:PORT", "it is ':29400'"),
    "PACELINE_MASTER: IPv6 without brackets": ({**paceline((1, 1), 1), "PACELINE_MASTER": "fd00::1:29400"}, "in brackets"),
    "PACELINE_MASTER with no port": ({**paceline((1, 1), 1), "PACELINE_MASTER": "a1:x"}, "PACELINE_MASTER", "it is 'x'"),
    "no number": ({"RANK": "x", "WORLD_SIZE": "2"}, "RANK from torchrun", "it is 'x'"),
    "below zero": ({**hydra((2,), 1), "PMI_RANK": "-1"}, "PMI_RANK", "it is '-1'"),
    "a fraction": ({**open_mpi((2,), 1), "OMPI_COMM_WORLD_SIZE": "2.0"}, "OMPI_COMM_WORLD_SIZE", "it is '2.0'"),
    "digits of another script": ({**slurm((2,), 1), "SLURM_PROCID": "\u0661"}, "SLURM_PROCID", "should be a whole number"),
    "a step without a number": ({**slurm((2,), 1), "SLURM_STEP_ID": "x"}, "SLURM_STEP_ID", "it is 'x'"),
    "no tasks per node": ({**slurm((2,), 1), "SLURM_STEP_TASKS_PER_NODE": "two"}, "SLURM_STEP_TASKS_PER_NODE", "it is 'two'"),
}  # fmt: skip

# A launcher that says too little: what is there, what is missing, what to do.
TOO_LITTLE = {
    "PACELINE_RANK": ({"PACELINE_RANK": "0"}, "only PACELINE_RANK is set, and PACELINE_WORLD_SIZE is not"),
    "PACELINE_LOCAL_SIZE": ({"PACELINE_LOCAL_SIZE": "2"}, "PACELINE_RANK and PACELINE_WORLD_SIZE are not"),
    "RANK": ({"RANK": "0", **MASTER}, "only RANK is set, and WORLD_SIZE is not"),
    "WORLD_SIZE": ({"WORLD_SIZE": "2", **MASTER}, "only WORLD_SIZE is set, and RANK is not"),
    "LOCAL_RANK": ({"LOCAL_RANK": "0"}, "only LOCAL_RANK is set, and RANK and WORLD_SIZE are not"),
    "HOROVOD_SIZE": ({"HOROVOD_SIZE": "2"}, "only HOROVOD_SIZE is set, and HOROVOD_RANK is not"),
    "OMPI_COMM_WORLD_RANK": ({"OMPI_COMM_WORLD_RANK": "1"}, "OMPI_COMM_WORLD_SIZE is not"),
    "MV2_COMM_WORLD_SIZE": ({"MV2_COMM_WORLD_SIZE": "2"}, "MV2_COMM_WORLD_RANK is not"),
    "PMI_SIZE": ({"PMI_SIZE": "2"}, "only PMI_SIZE is set, and PMI_RANK is not"),
    "PALS_RANKID": ({"PALS_RANKID": "2", "PALS_NODEID": "0"}, "PMI_SIZE is not"),
    "JSM_NAMESPACE_RANK": ({"JSM_NAMESPACE_RANK": "2"}, "JSM_NAMESPACE_SIZE is not"),
    "PMIX_RANK, as prterun": ({"PMIX_RANK": "2", "PMIX_NAMESPACE": "prterun-a1-7@1"}, "only PMIX_RANK is set, and the number of ranks is not"),
    "a step without SLURM_PROCID": (without(slurm((2,), 1), "SLURM_PROCID"), "SLURM_PROCID is not"),
    "MPI without a local size": ({"PMI_RANK": "1", "PMI_SIZE": "2"}, "set LOCAL_WORLD_SIZE (or PACELINE_LOCAL_SIZE)"),
    "RANK and WORLD_SIZE alone": ({"RANK": "1", "WORLD_SIZE": "2", **MASTER}, "set LOCAL_WORLD_SIZE (or PACELINE_LOCAL_SIZE)"),
    "no local rank on uneven hosts": ({"RANK": "1", "WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "2", **MASTER}, "set LOCAL_RANK"),
    "torchrun without a place to meet": (without(torchrun((2,), 1), *MASTER), "MASTER_ADDR and MASTER_PORT is not set"),
    "paceline run without a place to meet": (without(paceline((2,), 1), "PACELINE_RENDEZVOUS"), "PACELINE_RENDEZVOUS or PACELINE_MASTER is not set"),
    "mpirun on two hosts": (open_mpi((2, 2), 1), "mpirun -x MASTER_ADDR=... -x MASTER_PORT=..."),
    "Hydra on two hosts": (hydra((2, 2), 1), "set MASTER_ADDR to rank 0's host"),
    "horovodrun on two hosts": (horovod((2, 2), 1), "set MASTER_ADDR to rank 0's host"),
    "a step without a list": (without(slurm((2, 2), 1), "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"), "set MASTER_ADDR to rank 0's host"),
    "jsrun without a list": (without(jsrun((2, 2), 1), "LSB_HOSTS"), "set MASTER_ADDR to rank 0's host"),
}  # fmt: skip

# A world of one where many were promised: what promised them, and how to start them.
PROMISES = {
    "a batch script's tasks": (allocation((4,)), "SLURM_NTASKS=4", "srun python FILE"),
    "a batch script's hosts": (without(allocation((1, 1)), "SLURM_NTASKS", "SLURM_NPROCS"), "SLURM_JOB_NUM_NODES=2", "srun python FILE"),
    "the shell of salloc": ({**slurm((1,), 0), "SLURM_STEP_ID": "4294967290", "SLURM_NTASKS": "4"}, "SLURM_NTASKS=4", "srun python FILE"),
    "the same with PMIx": ({**slurm((1,), 0), "SLURM_STEP_ID": "4294967290", "SLURM_NTASKS": "4", "PMIX_RANK": "0"}, "SLURM_NTASKS=4", "srun python FILE"),
    "LSF's slots": ({"LSB_JOBID": "815", "LSB_DJOB_NUMPROC": "84"}, "LSB_DJOB_NUMPROC=84", "jsrun python FILE"),
    "a pod of TrainJob": (POD, "PET_NNODES=4", "paceline run FILE"),
    "a pod's own promise before the allocation's": ({**allocation((8,)), **POD}, "PET_NNODES=4, PET_NPROC_PER_NODE=8", "start the ranks: `paceline run FILE`"),
    "a pod of TrainJob, its ranks": ({"PET_NPROC_PER_NODE": "8"}, "PET_NPROC_PER_NODE=8", "paceline run FILE"),
    "a pod of an indexed Job": ({"PET_NNODES": "2", "JOB_COMPLETION_INDEX": "1", **MASTER}, "PET_NNODES=2", "paceline run FILE"),
}  # fmt: skip

# A host among hosts whose variables can't be true.
HOSTS = {
    "a range of hosts": ({**POD, "PET_NNODES": "2:4"}, "PET_NNODES=2:4", "--min-hosts"),
    "no hosts": ({**POD, "PET_NNODES": "0"}, "at least 1", "it is '0'"),
    "hosts in words": ({**POD, "PET_NNODES": "four"}, "PET_NNODES", "it is 'four'"),
    "the host's number is too high": ({**POD, "PET_NODE_RANK": "4"}, "PET_NODE_RANK=4", "PET_NNODES=4"),
    "a number, and one host": ({"PET_NODE_RANK": "1"}, "PET_NODE_RANK=1", "not set, which is 1"),
    "the index is too high": ({**without(POD, "PET_NODE_RANK"), "JOB_COMPLETION_INDEX": "4"}, "JOB_COMPLETION_INDEX=4", "PET_NNODES=4"),
    "no number": (without(POD, "PET_NODE_RANK"), "neither PET_NODE_RANK nor JOB_COMPLETION_INDEX", "completionMode: Indexed"),
    "a number in words": ({**POD, "PET_NODE_RANK": "first"}, "PET_NODE_RANK", "it is 'first'"),
    "ranks in words": ({**POD, "PET_NPROC_PER_NODE": "tpu"}, "PET_NPROC_PER_NODE", "it is 'tpu'"),
    "no ranks": ({**POD, "PET_NPROC_PER_NODE": "0"}, "PET_NPROC_PER_NODE", "it is '0'"),
    "two places to meet": ({**POD, "PET_MASTER_ADDR": "b1", "PET_MASTER_PORT": "29511"}, "PET_MASTER_ADDR=b1", "MASTER_ADDR=a1"),
    "no place to meet": (without(POD, *MASTER), "neither PET_MASTER_ADDR nor MASTER_ADDR", "<jobset>-<replicated job>-0-0.<jobset>"),
    "half a place to meet": (without(POD, "MASTER_ADDR"), "MASTER_PORT=29511 is set and MASTER_ADDR is not"),
    "no port": ({**POD, "PET_MASTER_ADDR": "a1", "PET_MASTER_PORT": "x"}, "PET_MASTER_PORT", "it is 'x'"),
}  # fmt: skip


def said_of(find, environment):
    with pytest.raises(UsageError) as raised:
        find(environment)
    text = str(raised.value)
    assert re.match(r"^.+\n  found: .+\n  fix: .+$", text), text
    return text


@pytest.mark.parametrize("case", BETWEEN)
def test_two_launchers_that_disagree_are_both_named(case):
    environment, *words = BETWEEN[case]
    text = said_of(find_position, environment)
    assert [word for word in words if word not in text] == [], text
    assert "unset" in text.split("fix: ")[1]


@pytest.mark.parametrize("case", WITHIN)
def test_a_launcher_that_contradicts_itself(case):
    environment, *words = WITHIN[case]
    text = said_of(find_position, environment)
    assert [word for word in words if word not in text] == [], text


@pytest.mark.parametrize("case", TOO_LITTLE)
def test_a_launcher_that_says_too_little(case, monkeypatch):
    monkeypatch.setattr("paceline.rendezvous.store_address._launcher_process", lambda names, is_outermost: [])
    environment, words = TOO_LITTLE[case]
    assert words in said_of(find_position, environment)


@pytest.mark.parametrize("case", PROMISES)
def test_a_world_of_one_where_many_were_promised(case):
    environment, promise, fix = PROMISES[case]
    text = said_of(find_position, environment)
    assert f"{promise}" in text.split("\n  found: ")[0]
    assert "this process is a world of one" in text
    assert fix in text.split("fix: ")[1]


@pytest.mark.parametrize("case", HOSTS)
def test_a_host_that_contradicts_itself(case):
    environment, *words = HOSTS[case]
    text = said_of(find_node, environment)
    assert [word for word in words if word not in text] == [], text


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_contradiction_of_each_launcher_and_paceline_is_refused(launcher):
    """Whatever else is set, `paceline run` on two ranks and another launcher on four do not fit together."""
    environment = {**LAUNCHERS[launcher]((4,), 2), **paceline((2,), 1)}
    if launcher != "paceline run":
        assert "paceline run says rank 1 of 2" in said_of(find_position, environment)


def test_there_are_many_contradictions():
    assert len(BETWEEN) + len(WITHIN) + len(HOSTS) >= 40
