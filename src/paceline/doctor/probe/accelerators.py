"""What accelerators a host has: from the driver's own tool, and from torch in a child process."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from typing import Any

from paceline.doctor.facts import Accelerator, Accelerators, Versions
from paceline.nouns import module_names
from paceline.nouns.errors import ReadError
from paceline.nouns.reading import parse_json, parse_whole

_TOOL = "nvidia-smi"
_TOOL_LIMIT_S = 15
_TORCH_LIMIT_S = 120  # from a slow network disk, importing torch takes a minute and more
_MIB = 2**20
_MOST_MIB = 2**40
# What `torch_facts.py` says.
_ANSWER = {
    "torch?": str,
    "error?": str,
    "seconds?": float,
    "cuda_build?": str,
    "hip_build?": str,
    "nccl?": str,
    "has_distributed?": bool,
    "devices?": [str],
    "device_error?": str,
    "unsupported?": [str],
}
_LINK = re.compile(r"NV\d+|SYS|NODE|PHB|PXB|PIX|X|OK")


def look_at_accelerators() -> tuple[Versions, Accelerators]:
    """The versions of torch and of the driver, and the devices."""
    torch = _ask_torch()
    listed, error = _run(
        "--query-gpu=name,memory.total,memory.used,uuid,driver_version", "--format=csv,noheader,nounits"
    )
    devices, driver = read_devices(listed)
    overview = _run()[0] if devices else ""
    topology = _run("topo", "-m")[0] if len(devices) > 1 else ""
    cuda = re.search(r"CUDA (?:\w+ )?Version:\s*([\d.]+)", overview)
    versions = Versions(
        torch=torch.get("torch", ""),
        torch_error=torch.get("error", ""),
        torch_import_s=torch.get("seconds", 0.0),
        cuda_build=torch.get("cuda_build", ""),
        hip_build=torch.get("hip_build", ""),
        nccl=torch.get("nccl", ""),
        driver=driver,
        cuda_driver=cuda[1] if cuda else "",
        has_distributed=torch.get("has_distributed", True),
    )
    return versions, Accelerators(
        devices,
        read_links(topology),
        tuple(torch.get("devices", ())),
        torch.get("device_error", ""),
        tuple(torch.get("unsupported", ())),
        error,
    )


def read_devices(text: str) -> tuple[tuple[Accelerator, ...], str]:
    """The devices and the driver's version of `nvidia-smi --query-gpu`, one device a line."""
    devices, driver = [], ""
    for line in text.splitlines():
        words = [word.strip() for word in line.split(",")]
        if len(words) == 5:
            name, total, used, uuid, driver = words
            devices.append(Accelerator(name, _mib(total), _mib(used), uuid))
    return tuple(devices), driver


def read_links(text: str) -> dict[str, str]:
    """What joins each pair of devices, of `nvidia-smi topo -m`: {"GPU0-GPU1": "NV18"}; network cards are left out."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", text)  # the heading is underlined
    links: dict[str, str] = {}
    columns: list[str] = []
    for line in plain.splitlines():
        words = line.split()
        if words and not columns and all(word.startswith(("GPU", "NIC", "mlx")) for word in words[:2]):
            columns = [word for word in words if re.fullmatch(r"GPU\d+", word)]
        elif words and words[0] in columns:
            for other, link in zip(columns, words[1:], strict=False):
                if columns.index(other) > columns.index(words[0]) and _LINK.fullmatch(link):
                    links[f"{words[0]}-{other}"] = link
    return links


def _mib(word: str) -> int:
    return (parse_whole(word, most=_MOST_MIB) or 0) * _MIB


def _run(*words: str) -> tuple[str, str]:
    """What the driver's tool prints, and why it failed; both are empty where there is no such tool."""
    program = shutil.which(_TOOL)
    if program is None:
        return "", ""
    try:
        command = [program, *words]
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=_TOOL_LIMIT_S)
    except subprocess.TimeoutExpired:
        return "", f"{_TOOL} did not answer within {_TOOL_LIMIT_S} s"
    except OSError as error:
        return "", f"{_TOOL} can't be started: {error.strerror}"
    if done.returncode:
        said = (done.stdout + done.stderr).strip().splitlines()
        return "", said[0] if said else f"{_TOOL} ended with {done.returncode}"
    return done.stdout, ""


def _ask_torch() -> dict[str, Any]:
    command = [sys.executable, "-m", module_names.TORCH_FACTS]
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=_TORCH_LIMIT_S)
    except subprocess.TimeoutExpired:
        return {"error": f"importing it did not end within {_TORCH_LIMIT_S} s"}
    lines = done.stdout.strip().splitlines()
    try:
        return dict(parse_json(lines[-1], "the answer", _ANSWER))
    except (IndexError, ReadError):
        last = (done.stderr.strip().splitlines() or [f"it ended with {done.returncode}"])[-1]
        return {"error": f"its process failed: {last}"}
