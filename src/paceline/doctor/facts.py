"""What one host is: plain values that `look*.py` gathers, `checks*.py` judges, and that travel between hosts as JSON.

Every value may be unknown: another operating system, a container that hides it, or a host with another version of
Paceline. Then it has its default, and the check says "not checked".
"""

from __future__ import annotations

import types
import typing
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Versions:
    """What software is there. A version that is not known is "" (not there, or the child could not say)."""

    python: str = ""
    executable: str = ""
    paceline: str = ""
    torch: str = ""
    torch_error: str = ""  # why torch could not be imported
    torch_import_s: float = 0.0
    cuda_build: str = ""  # the CUDA that torch was built with
    hip_build: str = ""
    nccl: str = ""
    driver: str = ""  # of the accelerators
    cuda_driver: str = ""  # the newest CUDA that the driver can run
    has_distributed: bool = True
    architecture: str = ""
    system: str = ""


@dataclass(frozen=True, slots=True)
class Cores:
    """Processor cores, and how many of them this process may use."""

    online: int = 0
    affinity: int = 0
    cgroup: float | None = None  # None: no limit
    load: float | None = None  # processes that wanted to run, mean of the last minute


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Main memory in bytes; None is unknown or without limit."""

    total_bytes: int | None = None
    available_bytes: int | None = None
    limit_bytes: int | None = None  # of the control group
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
    """The devices of a host, and what joins them."""

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
    """What a name resolves to on this host, and back."""

    addresses: tuple[str, ...] = ()
    names_back: tuple[str, ...] = ()  # what the first address that is not loopback resolves back to
    seconds: float = 0.0
    error: str = ""


@dataclass(frozen=True, slots=True)
class Port:
    """Whether a port can be listened on."""

    error: str = ""  # "" is free
    holder: str = ""  # the process that has it, where that can be seen


@dataclass(frozen=True, slots=True)
class Network:
    """Interfaces, names, ports."""

    hostname: str = ""
    interfaces: tuple[Interface, ...] = ()
    default_interface: str = ""  # of the default route
    routes: dict[str, str] = field(default_factory=dict)  # another host's name: this host's address towards it
    names: dict[str, Name] = field(default_factory=dict)
    ports: dict[str, Port] = field(default_factory=dict)
    ephemeral_ports: tuple[int, ...] = ()  # the first and the last
    free_port: int = 0
    infiniband: tuple[str, ...] = ()
    has_ssh: bool = True


@dataclass(frozen=True, slots=True)
class Shm:
    """`/dev/shm`."""

    exists: bool | None = None  # None: not looked
    size_bytes: int = 0
    free_bytes: int = 0
    is_writable: bool = True
    mode: int = 0o1777
    flags: tuple[str, ...] = ()  # of the mount


@dataclass(frozen=True, slots=True)
class Folder:
    """Where something is written; `path` is the nearest folder that exists."""

    asked: str = ""
    path: str = ""
    file_system: str = ""
    free_bytes: int | None = None
    files: int = 0  # that the file system can hold; 0: it does not say
    free_files: int = 0
    is_read_only: bool = False
    error: str = ""  # why a file could not be written
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
    """Something that a job which is no more left behind."""

    path: str = ""
    num_bytes: int = 0


@dataclass(frozen=True, slots=True)
class HostFacts:
    """Everything that is known of one host."""

    versions: Versions = Versions()
    cores: Cores = Cores()
    memory: HostMemory = HostMemory()
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
        """This as values that `json` knows."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: object) -> HostFacts:
        """The facts that another host sent. What this version does not know is left out.

        Raises:
            ValueError: a value has another type than it should.
        """
        facts = _read(cls, value, "facts")
        assert isinstance(facts, HostFacts)
        return facts


def _read(kind: Any, value: object, where: str) -> Any:
    """`value` as a `kind`, for the kinds that the fields above have."""
    origin, inside = typing.get_origin(kind), typing.get_args(kind)
    if is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        given = _expect(dict, value, where)
        known = [one.name for one in fields(kind) if one.name in given]
        values = {name: _read(hints[name], given[name], f"{where}.{name}") for name in known}
        return typing.cast(Any, kind)(**values)
    if origin is types.UnionType:
        chosen = next(part for part in inside if part is not type(None))
        return None if value is None else _read(chosen, value, where)
    if origin is tuple:
        return tuple(_read(inside[0], one, where) for one in _expect(list | tuple, value, where))
    if origin is dict:
        return {str(key): _read(inside[1], one, f"{where}.{key}") for key, one in _expect(dict, value, where).items()}
    if kind is float:
        return float(_expect(int | float, value, where))
    if kind is int and isinstance(value, bool):
        raise ValueError(f"{where} should be a number")
    return _expect(kind, value, where)


def _expect(kind: Any, value: object, where: str) -> Any:
    if not isinstance(value, kind):
        raise ValueError(f"{where} should be {getattr(kind, '__name__', kind)}, it is {type(value).__name__}")
    return value
