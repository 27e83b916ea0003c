"""Judges Python, torch, NCCL, the driver and the accelerators of one host: facts in, rows of findings out."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

from paceline.doctor.facts import Accelerators, HostFacts
from paceline.doctor.finding import GIB, Row, count, size

_PYTHON, _TORCH = (3, 11), (2, 11)  # as pyproject.toml has them
_SLOW_IMPORT_S = 20.0
_IN_USE = 2 * GIB  # of an accelerator's memory, before training


def release(text: str) -> tuple[int, ...]:
    """The first two numbers of a version: "2.13.0+cpu" is (2, 13)."""
    return tuple(int(number) for number in re.findall(r"\d+", text.partition("+")[0])[:2])


def _python(facts: HostFacts, is_fleet: bool) -> Iterator[Row]:
    text = facts.versions.python
    if not text:
        yield "not checked", "python", "its version is not known", ""
    elif release(text) < _PYTHON:
        yield "error", "python", f"{text}, but Paceline needs 3.11 or newer", "make an environment of a newer Python"
    else:
        yield "ok", "python", f"{text}, {facts.versions.system}", ""


def _torch(facts: HostFacts, is_fleet: bool) -> Iterator[Row]:
    versions = facts.versions
    if versions.torch_error or not versions.torch:
        found = f"it can't be imported: {versions.torch_error or 'it gave no reason'}"
        yield "error", "torch", found, "pip install 'torch>=2.11' in the Python that trains"
        return
    if release(versions.torch) < _TORCH:
        found = f"{versions.torch}, but Paceline needs 2.11 or newer"
        yield "error", "torch", found, "pip install --upgrade 'torch>=2.11'"
    elif not versions.has_distributed:
        found = f"{versions.torch} was built without torch.distributed: ranks can't meet"
        yield "error", "torch", found, "install a build of pytorch.org"
    elif versions.torch_import_s > _SLOW_IMPORT_S:
        found = (
            f"{versions.torch}; importing it took {versions.torch_import_s:.0f} s: every start of a job waits for that"
        )
        yield "warning", "torch", found, "keep the environment on a local disk, and the host free of other work"
    else:
        yield "ok", "torch", versions.torch, ""


def _driver(facts: HostFacts, is_fleet: bool) -> Iterator[Row]:
    versions, here = facts.versions, facts.accelerators
    if here.driver_error:
        yield (
            "error",
            "driver",
            f"nvidia-smi fails: {here.driver_error}",
            "install the driver anew, or reboot after an update",
        )
    if not here.devices:
        return
    if not versions.cuda_build and versions.torch:
        found = f"torch {versions.torch} is built without CUDA: training would leave the accelerators for the CPU"
        yield "error", "driver", found, "install the build of torch for CUDA"
    elif (
        versions.cuda_build
        and versions.cuda_driver
        and release(versions.cuda_driver)[:1] < release(versions.cuda_build)[:1]
    ):
        found = (
            f"{versions.driver} runs CUDA {versions.cuda_driver}, but torch is built with CUDA {versions.cuda_build}"
        )
        yield "error", "driver", found, f"update the driver, or install torch for CUDA {versions.cuda_driver}"
    else:
        yield (
            "ok",
            "driver",
            f"{versions.driver}, CUDA {versions.cuda_driver or 'unknown'}; torch has {versions.cuda_build}",
            "",
        )


def _nccl(facts: HostFacts, is_fleet: bool) -> Iterator[Row]:
    versions = facts.versions
    if versions.cuda_build and not versions.nccl:
        found = "this build of torch has CUDA but no NCCL: tensors on accelerators can't be added up between ranks"
        yield "error", "NCCL", found, "install a build of pytorch.org for Linux"
    elif versions.nccl:
        yield "ok", "NCCL", versions.nccl, ""


def _accelerators(facts: HostFacts, is_fleet: bool) -> Iterator[Row]:
    here = facts.accelerators
    if facts.versions.hip_build and not here.devices:
        text = ", ".join(here.seen_by_torch) or "none seen"
        yield "not checked", "accelerators", f"ROCm's are asked through torch alone: {text}", ""
        return
    if not here.devices and not here.seen_by_torch:
        if not here.driver_error:
            yield "ok", "accelerators", "none: training runs on the CPU", ""
        return
    kinds = Counter(f"{one.name} {size(one.memory_bytes)}" for one in here.devices)
    text = ", ".join(f"{number}x {kind}" for kind, number in kinds.items()) or ", ".join(here.seen_by_torch)
    if len(kinds) > 1:
        found = f"{text}: the slowest and smallest of them sets the pace and the batch"
        yield "warning", "accelerators", found, "choose equal ones with CUDA_VISIBLE_DEVICES"
    else:
        yield "ok", "accelerators", text, ""
    yield from _as_torch_sees(facts)
    busy = [index for index, one in enumerate(here.devices) if one.used_bytes > _IN_USE]
    if busy:
        held = ", ".join(f"{size(here.devices[index].used_bytes)} of GPU {index}" for index in busy)
        found = f"other processes hold {held}: training may run out of memory"
        yield "warning", "accelerator memory", found, "see `nvidia-smi` for their processes, and end those of dead jobs"


def _as_torch_sees(facts: HostFacts) -> Iterator[Row]:
    here = facts.accelerators
    if here.unsupported:
        found = f"this build of torch has no code for {here.unsupported[0]}: `no kernel image is available`"
        yield "error", "accelerators", found, "install the build of torch for a CUDA that knows it"
    chosen = facts.environment.get("CUDA_VISIBLE_DEVICES")
    if facts.versions.cuda_build and chosen is None and len(here.seen_by_torch) < len(here.devices):
        why = here.torch_error or "it does not say why"
        found = f"torch sees {len(here.seen_by_torch)} of {len(here.devices)}: {why}"
        yield (
            "error",
            "accelerators",
            found,
            "let driver and torch fit each other; in a container, start it with --gpus all",
        )


def _visible_devices(facts: HostFacts, is_fleet: bool) -> Iterator[Row]:
    text, check = facts.environment.get("CUDA_VISIBLE_DEVICES"), "CUDA_VISIBLE_DEVICES"
    here = facts.accelerators
    if text is None:
        return
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not words or words[0] == "-1":
        if here.devices:
            hidden = f"it is {text!r}, which hides all {len(here.devices)}: training runs on the CPU"
            yield "warning", check, hidden, "unset it, unless that is what you want"
        return
    missing = [word for word in words if not _names_a_device(word, here)]
    if missing:
        found = f"it names {', '.join(missing)}, but this host has {count(len(here.devices), 'accelerator')}"
        found += ": torch then takes only those before it, and gives no error"
        yield "error", check, found, f"write numbers from 0 to {len(here.devices) - 1}" if here.devices else "unset it"
    elif len({*words}) < len(words):
        yield "error", check, f"it names a device twice ({text}): torch then sees none", "name each once"
    else:
        yield "ok", check, text, ""


def _names_a_device(word: str, here: Accelerators) -> bool:
    if word.isdecimal():
        return int(word) < len(here.devices)
    if word.startswith("MIG"):
        return True  # parts of a device are not listed here
    return any(one.uuid.startswith(word) for one in here.devices)


def _links(facts: HostFacts, is_fleet: bool) -> Iterator[Row]:
    links = facts.accelerators.links
    if len(facts.accelerators.devices) < 2:
        return
    if not links:
        yield "not checked", "links", "nvidia-smi does not say what joins the accelerators", ""
        return
    fast = [pair for pair, link in links.items() if link.startswith("NV")]
    far = [pair for pair, link in links.items() if link in ("SYS", "NODE")]
    text = ", ".join(f"{number}x {kind}" for kind, number in Counter(links.values()).items())
    if fast and len(fast) < len(links):
        slow = next(pair for pair in links if pair not in fast)
        found = f"NVLink joins {len(fast)} of {count(len(links), 'pair')}; {slow} has {links[slow]}, and sets the pace"
        yield "warning", "links", found, "put ranks that speak most (tensor) on joined pairs, with CUDA_VISIBLE_DEVICES"
    elif far:
        found = f"{text}: {far[0]} speak through the processor's sockets, the slowest way"
        yield "warning", "links", found, "choose accelerators of one socket (`nvidia-smi topo -m`), and no tensor axis"
    else:
        yield "ok", "links", text, ""


_HURTS = {  # variable: (values, what it does, whether it matters on this host)
    "NCCL_P2P_DISABLE": ("accelerators of a host then speak through main memory instead of NVLink", "devices"),
    "NCCL_SHM_DISABLE": ("accelerators of a host without a link then speak through the network", "devices"),
    "NCCL_IB_DISABLE": ("NCCL then leaves InfiniBand for TCP", "infiniband"),
    "CUDA_LAUNCH_BLOCKING": ("every kernel then waits for the one before", "devices"),
}


def _settings(facts: HostFacts, is_fleet: bool) -> Iterator[Row]:
    has = {"devices": bool(facts.accelerators.devices), "infiniband": bool(facts.network.infiniband)}
    for name, (effect, what) in _HURTS.items():
        value = facts.environment.get(name, "0")
        if value not in ("", "0") and (has[what] or (name.startswith("NCCL_P2P") and facts.accelerators.seen_by_torch)):
            yield "warning", name, f"it is {value}: {effect}", f"unset {name}, unless it works around a known fault"
    loud = facts.environment.get("NCCL_DEBUG", "").upper()
    if loud in ("INFO", "TRACE"):
        found = f"it is {loud}: every rank writes pages of text, which hide what matters"
        yield "warning", "NCCL_DEBUG", found, "write NCCL_DEBUG=WARN once the fault is found"
    if facts.environment.get("TORCH_DISTRIBUTED_DEBUG", "").upper() == "DETAIL":
        found = "it is DETAIL: every collective is preceded by another that compares the ranks"
        yield "warning", "TORCH_DISTRIBUTED_DEBUG", found, "unset it once the fault is found"


TORCH_CHECKS = (_python, _torch, _driver, _nccl, _accelerators, _visible_devices, _links, _settings)
