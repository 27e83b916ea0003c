"""Checks of Python, torch, NCCL, the driver and the accelerators of one host.

Each check takes the host's facts and yields rows of findings.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

from paceline.doctor.facts import Accelerators, HostFacts
from paceline.doctor.finding import GIB, Row, count, size

# As pyproject.toml has them.
_PYTHON = (3, 11)
_TORCH = (2, 11)
_NEWEST_TORCH = (2, 13)  # the newest version that was tried
_TORCH_RANGE = "torch>=2.11,<2.14"
_SLOW_IMPORT_S = 20.0
_IN_USE = 2 * GIB  # bytes of an accelerator's memory in use before training


def release(text: str) -> tuple[int, ...]:
    """Return the first two numbers of a version: "2.13.0+cpu" is (2, 13)."""
    public_version = text.partition("+")[0]
    return tuple(int(number) for number in re.findall(r"\d+", public_version)[:2])


def _python(host: HostFacts, is_fleet: bool) -> Iterator[Row]:
    text = host.versions.python
    if not text:
        yield "not checked", "python", "its version is not known", ""
    elif release(text) < _PYTHON:
        yield "error", "python", f"{text}, but Paceline needs 3.11 or newer", "make an environment of a newer Python"
    else:
        yield "ok", "python", f"{text}, {host.versions.system}", ""


def _torch(host: HostFacts, is_fleet: bool) -> Iterator[Row]:
    versions = host.versions
    if versions.torch_error or not versions.torch:
        problem = f"it can't be imported: {versions.torch_error or 'it gave no reason'}"
        yield "error", "torch", problem, f"pip install '{_TORCH_RANGE}' in the Python that trains"
        return
    if release(versions.torch) < _TORCH:
        problem = f"{versions.torch}, but Paceline needs 2.11 or newer"
        yield "error", "torch", problem, f"pip install --upgrade '{_TORCH_RANGE}'"
    elif release(versions.torch) > _NEWEST_TORCH:
        problem = f"{versions.torch}, but Paceline was tried with 2.11 to 2.13 only"
        yield "warning", "torch", problem, f"pip install '{_TORCH_RANGE}'"
    elif not versions.has_distributed:
        problem = f"{versions.torch} was built without torch.distributed: ranks can't meet"
        yield "error", "torch", problem, "install a build of pytorch.org"
    elif versions.torch_import_s > _SLOW_IMPORT_S:
        problem = (
            f"{versions.torch}; importing it took {versions.torch_import_s:.0f} s: every start of a job waits for that"
        )
        yield "warning", "torch", problem, "keep the environment on a local disk, and the host free of other work"
    else:
        yield "ok", "torch", versions.torch, ""


def _driver(host: HostFacts, is_fleet: bool) -> Iterator[Row]:
    versions = host.versions
    driver_error = host.accelerators.driver_error
    if driver_error:
        fix = "install the driver anew, or reboot after an update"  # a new library refuses the old kernel module
        yield "error", "driver", f"nvidia-smi fails: {driver_error}", fix
    if not host.accelerators.devices:
        return
    # Only major versions are compared: since CUDA 11 a driver runs every minor version of its own (NVIDIA's "CUDA
    # Compatibility", minor version compatibility).
    newest = release(versions.cuda_driver)[:1]
    is_too_old = bool(versions.cuda_build and versions.cuda_driver) and newest < release(versions.cuda_build)[:1]
    if not versions.cuda_build and versions.torch:
        problem = f"torch {versions.torch} is built without CUDA: training would leave the accelerators for the CPU"
        yield "error", "driver", problem, "install the build of torch for CUDA"
    elif is_too_old:
        problem = (
            f"{versions.driver} runs CUDA {versions.cuda_driver}, but torch is built with CUDA {versions.cuda_build}"
        )
        yield "error", "driver", problem, f"update the driver, or install torch for CUDA {versions.cuda_driver}"
    else:
        text = f"{versions.driver}, CUDA {versions.cuda_driver or 'unknown'}; torch has {versions.cuda_build}"
        yield "ok", "driver", text, ""


def _nccl(host: HostFacts, is_fleet: bool) -> Iterator[Row]:
    versions = host.versions
    if versions.cuda_build and not versions.nccl:
        problem = "this build of torch has CUDA but no NCCL: tensors on accelerators can't be added up between ranks"
        yield "error", "NCCL", problem, "install a build of pytorch.org for Linux"
    elif versions.nccl:
        yield "ok", "NCCL", versions.nccl, ""


def _accelerators(host: HostFacts, is_fleet: bool) -> Iterator[Row]:
    accelerators = host.accelerators
    if host.versions.hip_build and not accelerators.devices:
        text = ", ".join(accelerators.seen_by_torch) or "none seen"
        yield "not checked", "accelerators", f"ROCm's are asked through torch alone: {text}", ""
        return
    if not accelerators.devices and not accelerators.seen_by_torch:
        if not accelerators.driver_error:
            yield "ok", "accelerators", "none: training runs on the CPU", ""
        return
    kinds = Counter(f"{device.name} {size(device.memory_bytes)}" for device in accelerators.devices)
    text = _counts(kinds) or ", ".join(accelerators.seen_by_torch)
    if len(kinds) > 1:
        problem = f"{text}: the slowest and smallest of them sets the pace and the batch"
        yield "warning", "accelerators", problem, "choose equal ones with CUDA_VISIBLE_DEVICES"
    else:
        yield "ok", "accelerators", text, ""
    yield from _as_torch_sees(host)
    busy = []
    for index, device in enumerate(accelerators.devices):
        if device.used_bytes > _IN_USE:
            busy.append(f"{size(device.used_bytes)} of GPU {index}")
    if busy:
        problem = f"other processes hold {', '.join(busy)}: training may run out of memory"
        yield (
            "warning",
            "accelerator memory",
            problem,
            "see `nvidia-smi` for their processes, and end those of dead jobs",
        )


def _counts(kinds: Counter[str]) -> str:
    return ", ".join(f"{number}x {kind}" for kind, number in kinds.items())


def _as_torch_sees(host: HostFacts) -> Iterator[Row]:
    accelerators = host.accelerators
    if accelerators.unsupported:
        problem = f"this build of torch has no code for {accelerators.unsupported[0]}: `no kernel image is available`"
        yield "error", "accelerators", problem, "install the build of torch for a CUDA that knows it"
    if not host.versions.cuda_build or "CUDA_VISIBLE_DEVICES" in host.environment:
        return  # a build without CUDA, and devices that the user hid, have checks of their own
    if len(accelerators.seen_by_torch) < len(accelerators.devices):
        reason = accelerators.torch_error or "it does not say why"
        problem = f"torch sees {len(accelerators.seen_by_torch)} of {len(accelerators.devices)}: {reason}"
        fix = "let driver and torch fit each other; in a container, start it with --gpus all"
        yield "error", "accelerators", problem, fix


def _visible_devices(host: HostFacts, is_fleet: bool) -> Iterator[Row]:
    check = "CUDA_VISIBLE_DEVICES"
    text = host.environment.get(check)
    if text is None:
        return
    num_devices = len(host.accelerators.devices)
    selected = [word.strip() for word in text.split(",") if word.strip()]
    # CUDA stops reading at the first name that it does not know, so "-1" in front and "" hide all devices.
    if not selected or selected[0] == "-1":
        if num_devices:
            problem = f"it is {text!r}, which hides all {num_devices}: training runs on the CPU"
            yield "warning", check, problem, "unset it, unless that is what you want"
        return
    missing = [name for name in selected if not _names_a_device(name, host.accelerators)]
    if missing:
        problem = f"it names {', '.join(missing)}, but this host has {count(num_devices, 'accelerator')}"
        problem += ": torch then takes only those before it, and gives no error"
        fix = f"write numbers from 0 to {num_devices - 1}" if num_devices else "unset it"
        yield "error", check, problem, fix
    elif len(set(selected)) < len(selected):
        yield "error", check, f"it names a device twice ({text}): torch then sees none", "name each once"
    else:
        yield "ok", check, text, ""


def _names_a_device(name: str, accelerators: Accelerators) -> bool:
    if name.isdecimal():
        return int(name) < len(accelerators.devices)
    if name.startswith("MIG"):
        return True  # parts of a device are not listed here
    return any(device.uuid.startswith(name) for device in accelerators.devices)  # CUDA takes a prefix of the UUID


def _links(host: HostFacts, is_fleet: bool) -> Iterator[Row]:
    links = host.accelerators.links
    if len(host.accelerators.devices) < 2:
        return
    if not links:
        yield "not checked", "links", "nvidia-smi does not say what joins the accelerators", ""
        return
    # As `nvidia-smi topo -m` explains below its table: NV# is a number of NVLinks; SYS and NODE cross the processors'
    # interconnect or the host bridges of one.
    fast = [pair for pair, link in links.items() if link.startswith("NV")]
    far = [pair for pair, link in links.items() if link in ("SYS", "NODE")]
    text = _counts(Counter(links.values()))
    if fast and len(fast) < len(links):
        slow = next(pair for pair in links if pair not in fast)
        problem = (
            f"NVLink joins {len(fast)} of {count(len(links), 'pair')}; {slow} has {links[slow]}, and sets the pace"
        )
        yield (
            "warning",
            "links",
            problem,
            "put ranks that speak most (tensor) on joined pairs, with CUDA_VISIBLE_DEVICES",
        )
    elif far:
        problem = f"{text}: {far[0]} speak through the processor's sockets, the slowest way"
        yield (
            "warning",
            "links",
            problem,
            "choose accelerators of one socket (`nvidia-smi topo -m`), and no tensor axis",
        )
    else:
        yield "ok", "links", text, ""


# The effect of each variable when it is set, and the hardware on which it matters.
_SLOWING_SETTINGS = {
    "NCCL_P2P_DISABLE": ("accelerators of a host then speak through main memory instead of NVLink", "devices"),
    "NCCL_SHM_DISABLE": ("accelerators of a host without a link then speak through the network", "devices"),
    "NCCL_IB_DISABLE": ("NCCL then leaves InfiniBand for TCP", "infiniband"),
    "CUDA_LAUNCH_BLOCKING": ("every kernel then waits for the one before", "devices"),
}


def _settings(host: HostFacts, is_fleet: bool) -> Iterator[Row]:
    has = {"devices": bool(host.accelerators.devices), "infiniband": bool(host.network.infiniband)}
    for name, (effect, condition) in _SLOWING_SETTINGS.items():
        value = host.environment.get(name, "0")
        if value in ("", "0"):
            continue
        # Torch may see devices that nvidia-smi does not list, such as ROCm's.
        is_peer_setting = name.startswith("NCCL_P2P")
        if has[condition] or (is_peer_setting and host.accelerators.seen_by_torch):
            yield "warning", name, f"it is {value}: {effect}", f"unset {name}, unless it works around a known fault"
    debug_level = host.environment.get("NCCL_DEBUG", "").upper()
    if debug_level in ("INFO", "TRACE"):
        problem = f"it is {debug_level}: every rank writes pages of text, which hide what matters"
        yield "warning", "NCCL_DEBUG", problem, "write NCCL_DEBUG=WARN once the fault is found"
    if host.environment.get("TORCH_DISTRIBUTED_DEBUG", "").upper() == "DETAIL":
        problem = "it is DETAIL: every collective is preceded by another that compares the ranks"
        yield "warning", "TORCH_DISTRIBUTED_DEBUG", problem, "unset it once the fault is found"


TORCH_CHECKS = (_python, _torch, _driver, _nccl, _accelerators, _visible_devices, _links, _settings)
