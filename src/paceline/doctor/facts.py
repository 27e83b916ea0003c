"""Define the facts of one host: plain values that `probe/` gathers, `checks/` judges, and hosts exchange as JSON.

Every value may be unknown: another operating system, a container that hides it, or a host with another version of
Paceline. Then it has its default, and the check says "not checked".
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from paceline.nouns.reading import as_type


@dataclass(frozen=True, slots=True)
class Versions:
    """Versions of the software. One that is not known is "" (not there, or the child could not say)."""

    python: str = ""
    executable: str = ""
    paceline: str = ""
    torch: str = ""
    torch_error: str = ""  # why torch could not be imported
    torch_import_s: float = 0.0
    cuda_build: str = ""  # the CUDA that torch was built with
    hip_build: str = ""
    nccl: str = ""
    driver: str = ""  # the version of the accelerators' driver
    cuda_driver: str = ""  # the newest CUDA that the driver can run
    has_distributed: bool = True
    architecture: str = ""
    system: str = ""


@dataclass(frozen=True, slots=True)
class Cores:
    """Processor cores, and the number that this process may use."""

    online: int = 0
    affinity: int = 0
    cgroup: float | None = None  # None: no limit
    load: float | None = None  # processes that wanted to run, mean of the last minute


@dataclass(frozen=True, slots=True)
class MemoryFacts:
    """Main memory in bytes; None is unknown or without limit."""

    total_bytes: int | None = None
    available_bytes: int | None = None
    limit_bytes: int | None = None  # the limit of the control group
    used_of_limit_bytes: int = 0
    swap_bytes: int = 0
    swap_used_bytes: int = 0
    huge_pages: str = ""  # always, madvise or never


@dataclass(frozen=True, slots=True)
class Accelerator:
    """One device as its driver sees it."""

    name: str = ""
    memory_bytes: int = 0
    used_bytes: int = 0
    uuid: str = ""


@dataclass(frozen=True, slots=True)
class Accelerators:
    """The devices of a host, and the links between them."""

    devices: tuple[Accelerator, ...] = ()
    links: dict[str, str] = field(default_factory=dict)  # "GPU0-GPU1": "NV18"
    seen_by_torch: tuple[str, ...] = ()  # the names that torch gives them
    torch_error: str = ""
    unsupported: tuple[str, ...] = ()  # devices that this build of torch has no code for
    driver_error: str = ""  # nvidia-smi is there and fails


@dataclass(frozen=True, slots=True)
class Interface:
    """One network interface."""

    name: str = ""
    addresses: tuple[str, ...] = ()
    is_up: bool = False
    is_loopback: bool = False
    is_virtual: bool = False  # a bridge, a tunnel, a container's
    mtu: int = 0
    megabits_per_s: int = 0  # 0: the driver does not say


@dataclass(frozen=True, slots=True)
class Name:
    """A name as this host resolves it, and the names that its address resolves back to."""

    addresses: tuple[str, ...] = ()
    names_back: tuple[str, ...] = ()  # the names to which the first address that is not loopback resolves back
    seconds: float = 0.0
    error: str = ""


@dataclass(frozen=True, slots=True)
class Port:
    """A port on which a rank could listen, unless `error` has a reason against it."""

    error: str = ""  # "" is free
    holder: str = ""  # the process that has it, where that can be seen


@dataclass(frozen=True, slots=True)
class Network:
    """Interfaces, names and ports of a host."""

    hostname: str = ""
    interfaces: tuple[Interface, ...] = ()
    default_interface: str = ""  # the interface of the default route
    routes: dict[str, str] = field(default_factory=dict)  # another host's name: this host's address towards it
    names: dict[str, Name] = field(default_factory=dict)
    ports: dict[str, Port] = field(default_factory=dict)
    ephemeral_ports: tuple[int, ...] = ()  # the first and the last
    free_port: int = 0
    infiniband: tuple[str, ...] = ()
    has_ssh: bool = True


@dataclass(frozen=True, slots=True)
class Shm:
    """`/dev/shm`, the file system of shared memory."""

    exists: bool | None = None  # None: it was not checked
    size_bytes: int = 0
    free_bytes: int = 0
    is_writable: bool = True
    mode: int = 0o1777
    flags: tuple[str, ...] = ()  # the flags of the mount


@dataclass(frozen=True, slots=True)
class Folder:
    """A folder that a job writes to; `path` is the nearest one that exists."""

    asked: str = ""
    path: str = ""
    file_system: str = ""
    free_bytes: int | None = None
    files: int = 0  # the number that the file system can hold; 0: it does not say
    free_files: int = 0
    is_read_only: bool = False
    error: str = ""  # the reason why a file could not be written
    bytes_per_s: float | None = None  # None: not measured


@dataclass(frozen=True, slots=True)
class Limits:
    """Soft limits of this process; None is unlimited, -1 unknown. Sizes in bytes."""

    files: int | None = -1
    files_hard: int | None = -1
    processes: int | None = -1
    locked_bytes: int | None = -1
    core_bytes: int | None = -1
    core_pattern: str = ""


@dataclass(frozen=True, slots=True)
class Leftover:
    """A file or folder that a job left behind when it ended."""

    path: str = ""
    num_bytes: int = 0


@dataclass(frozen=True, slots=True)
class HostFacts:
    """All known facts of one host."""

    versions: Versions = Versions()
    cores: Cores = Cores()
    memory: MemoryFacts = MemoryFacts()
    accelerators: Accelerators = Accelerators()
    network: Network = Network()
    shm: Shm = Shm()
    runs: Folder = Folder()
    temporary: Folder = Folder()
    limits: Limits = Limits()
    is_clock_synchronised: bool | None = None
    boot: str = ""  # the same for all names and containers of one machine
    environment: dict[str, str] = field(default_factory=dict)  # only variables that matter to training
    missing_preloads: tuple[str, ...] = ()  # libraries of LD_PRELOAD that are not there
    leftovers: tuple[Leftover, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return the facts as values that `json` can write."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: object) -> HostFacts:
        """Return the facts that another host sent. Fields that this version does not know are left out.

        Raises:
            ValueError: a value has another type than it should.
        """
        return as_type(value, cls, "facts")
