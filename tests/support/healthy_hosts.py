"""A host that nothing is wrong with: tests change one thing of it."""

from __future__ import annotations

from dataclasses import replace

from paceline.doctor.ask import FleetFacts, Offset
from paceline.doctor.facts import (
    Accelerator,
    Accelerators,
    Cores,
    Folder,
    HostFacts,
    Interface,
    Limits,
    MemoryFacts,
    Name,
    Network,
    Port,
    Shm,
    Versions,
)

GIB = 2**30
LO = Interface("lo", ("127.0.0.1", "::1"), True, True, False, 65536)


def healthy(number=1, others=()):
    """Host h1, h2, ... with two GPUs, as the doctor sees it."""
    address = f"10.0.0.{number}"
    names = {f"h{number}": Name((address,), (f"h{number}",), 0.01), "localhost": Name(("127.0.0.1",))}
    names |= {f"h{one}": Name((f"10.0.0.{one}",), (f"h{one}.lan",), 0.01) for one in others}
    return HostFacts(
        versions=Versions(
            "3.12.4", "/usr/bin/python", "0.1.0", "2.13.0+cu128", "", 2.0, "12.8", "", "2.27.3", "570.86", "12.8"
        ),
        cores=Cores(16, 16, None, 0.5),
        memory=MemoryFacts(64 * GIB, 60 * GIB, None, 0, 0, 0, "madvise"),
        accelerators=Accelerators(
            tuple(Accelerator("NVIDIA H200", 139 * GIB, 0, f"GPU-{number}{index}") for index in range(2)),
            {"GPU0-GPU1": "NV18"},
            ("NVIDIA H200", "NVIDIA H200"),
        ),
        network=Network(
            f"h{number}",
            (LO, Interface("eth0", (address,), True, False, False, 1500, 10000)),
            "eth0",
            {f"h{one}": address for one in others},
            names,
            {"29400": Port()},
            (32768, 60999),
            40000 + number,
        ),
        shm=Shm(True, 32 * GIB, 32 * GIB, True, 0o1777, ("rw", "nosuid", "nodev")),
        runs=Folder("runs", "/data/runs", "nfs4", 900 * GIB, 10**7, 10**6, False, "", 5e8),
        temporary=Folder("/tmp", "/tmp", "ext4", 90 * GIB, 10**7, 10**6),
        limits=Limits(65536, 65536, 100000, None, 0, "core"),
        is_clock_synchronised=True,
        boot=f"boot-{number}",
    )


def changed(facts, path, value):
    """The facts with `value` at `path`, such as "cores.cgroup"."""
    first, _, rest = path.partition(".")
    if isinstance(facts, dict):
        return {**facts, first: value}
    return replace(facts, **{first: changed(getattr(facts, first), rest, value) if rest else value})


def healthy_fleet(number=3):
    """A fleet of healthy hosts h1, h2, ... that all reach each other."""
    everyone = range(1, number + 1)
    names = [f"h{one}" for one in everyone]
    fleet = FleetFacts({f"h{one}": healthy(one, [n for n in everyone if n != one]) for one in everyone})
    fleet.offsets = {name: Offset(0.1, 0.3) for name in names}
    fleet.reached = {name: {other: "" for other in names if other != name} for name in names}
    fleet.marker = dict.fromkeys(names, True)
    fleet.ports = {f"h{one}": f"10.0.0.{one}:{40000 + one}" for one in everyone}
    return fleet
