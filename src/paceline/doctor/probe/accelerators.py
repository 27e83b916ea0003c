"""Look at the accelerators of a host: with nvidia-smi, and with torch in a child process.

The doctor itself never imports torch: a broken installation is one of the things that it reports.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from typing import Any

from paceline.doctor.facts import Accelerator, Accelerators, Versions
from paceline.nouns import module_names
from paceline.nouns.errors import ReadError, last_error_of
from paceline.nouns.reading import parse_json, parse_whole

_TOOL = "nvidia-smi"
_TOOL_LIMIT_S = 15
_TORCH_LIMIT_S = 120  # from a slow network disk, importing torch takes a minute and more
_MIB = 2**20
_MOST_MIB = 2**40
# The form of the line that `torch_facts.py` prints.
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
    """Return the versions of torch and of the driver, and the devices."""
    torch = _ask_torch()
    listed, error = _run(
        "--query-gpu=name,memory.total,memory.used,uuid,driver_version", "--format=csv,noheader,nounits"
    )
    devices, driver = read_devices(listed)
    # Each call takes a second or so where the driver is not resident: none is made in vain.
    overview = _run()[0] if devices else ""
    topology = _run("topo", "-m")[0] if len(devices) > 1 else ""
    # The overview has the CUDA version, such as "CUDA Version: 12.4".
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
    accelerators = Accelerators(
        devices=devices,
        links=read_links(topology),
        seen_by_torch=tuple(torch.get("devices", ())),
        torch_error=torch.get("device_error", ""),
        unsupported=tuple(torch.get("unsupported", ())),
        driver_error=error,
    )
    return versions, accelerators


def read_devices(text: str) -> tuple[tuple[Accelerator, ...], str]:
    """Return the devices and the driver's version from the output of `nvidia-smi --query-gpu`, one device a line."""
    devices = []
    driver = ""
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) == 5:  # other lines are no devices
            name, total, used, uuid, driver = cells
            devices.append(Accelerator(name, _mib(total), _mib(used), uuid))
    return tuple(devices), driver


def read_links(text: str) -> dict[str, str]:
    """Return the link of each pair of devices from the output of `nvidia-smi topo -m`, such as {"GPU0-GPU1": "NV18"}.

    Network cards, which the table has too, are left out.
    """
    plain = re.sub(r"\x1b\[[0-9;]*m", "", text)  # the heading is underlined
    links: dict[str, str] = {}
    columns: list[str] = []
    for line in plain.splitlines():
        cells = line.split()
        if not cells:
            continue
        # The heading has names only; a row has a name and then links.
        is_heading = not columns and all(cell.startswith(("GPU", "NIC", "mlx")) for cell in cells[:2])
        if is_heading:
            columns = [cell for cell in cells if re.fullmatch(r"GPU\d+", cell)]
        elif cells[0] in columns:
            row = columns.index(cells[0])
            # The cells after the devices' are those of network cards, and of the processor's cores.
            for column, (device, link) in enumerate(zip(columns, cells[1:], strict=False)):
                if column > row and _LINK.fullmatch(link):  # the table is symmetric
                    links[f"{cells[0]}-{device}"] = link
    return links


def _mib(text: str) -> int:
    """Return the bytes of a number of MiB; 0 where it is none ("[N/A]" on some devices)."""
    return (parse_whole(text, most=_MOST_MIB) or 0) * _MIB


def _run(*arguments: str) -> tuple[str, str]:
    """Return the output of nvidia-smi, and the reason why it failed; both are empty where there is no such tool."""
    program = shutil.which(_TOOL)
    if program is None:
        return "", ""
    try:
        command = [program, *arguments]
        completed = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=_TOOL_LIMIT_S)
    except subprocess.TimeoutExpired:
        return "", f"{_TOOL} did not answer within {_TOOL_LIMIT_S} s"
    except OSError as error:
        return "", f"{_TOOL} can't be started: {error.strerror}"
    if completed.returncode:
        lines = (completed.stdout + completed.stderr).strip().splitlines()  # it writes errors to stdout, too
        reason = lines[0] if lines else f"{_TOOL} ended with {completed.returncode}"
        return "", reason
    return completed.stdout, ""


def _ask_torch() -> dict[str, Any]:
    """Return the facts about torch, in the form `_ANSWER`; only `error` where its process failed."""
    command = [sys.executable, "-m", module_names.TORCH_FACTS]
    try:
        completed = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=_TORCH_LIMIT_S)
    except subprocess.TimeoutExpired:
        return {"error": f"importing it did not end within {_TORCH_LIMIT_S} s"}
    lines = completed.stdout.strip().splitlines()
    try:
        return dict(parse_json(lines[-1], "the answer", _ANSWER))  # importing torch may print lines before it
    except (IndexError, ReadError):  # IndexError: nothing was printed, as after a crash of a library
        reason = last_error_of(completed.stderr, f"it ended with {completed.returncode}")
        return {"error": f"its process failed: {reason}"}
