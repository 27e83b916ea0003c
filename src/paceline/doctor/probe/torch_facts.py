"""Print the facts about torch and its devices: a child process of the doctor, which does not import torch.

The output is one line of JSON. `python -m paceline.doctor.probe.torch_facts` also runs by itself.
"""

from __future__ import annotations

import json
import sys
import time
import warnings
from typing import Any


def torch_facts() -> dict[str, Any]:
    """Return versions and devices; only `error` where torch can't be imported."""
    began_s = time.monotonic()
    try:
        import torch
    except Exception as error:  # a broken installation raises anything: OSError of a library, ImportError, ...
        return {"error": f"{type(error).__name__}: {error}"}
    answer: dict[str, Any] = {
        "torch": torch.__version__,
        "seconds": time.monotonic() - began_s,
        "cuda_build": torch.version.cuda or "",
        "hip_build": torch.version.hip or "",
        "has_distributed": torch.distributed.is_available(),  # noqa: TID251  (it asks about the build)
        "nccl": "",
        "devices": [],
        "unsupported": [],
        "device_error": "",
    }
    if answer["cuda_build"] or answer["hip_build"]:
        _add_devices(answer)
    return answer


def _add_devices(answer: dict[str, Any]) -> None:
    import torch

    try:
        answer["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    except Exception:  # this build has none: said by its absence
        answer["nccl"] = ""
    # torch only warns where the driver is too old, and then says that there are no devices.
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            number = torch.cuda.device_count()
            answer["devices"] = [torch.cuda.get_device_name(index) for index in range(number)]
            built = torch.cuda.get_arch_list()
            for index in range(number):
                # ROCm has no compute capabilities; its architectures are names such as gfx90a.
                if answer["cuda_build"] and not _runs_on(torch.cuda.get_device_capability(index), built):
                    answer["unsupported"].append(answer["devices"][index])
        except Exception as error:  # the driver's: reported as it is
            answer["device_error"] = _first_line(str(error))
    if caught and not answer["devices"] and not answer["device_error"]:
        answer["device_error"] = _first_line(str(caught[0].message))


def _first_line(text: str) -> str:
    return text.strip().split("\n")[0]


def _runs_on(capability: tuple[int, int], built: list[str]) -> bool:
    """Return True if code for one of `built` ("sm_90", "compute_90") runs on a device of this capability.

    Machine code (sm) runs on devices of the same major version and the same minor one or a later one; PTX (compute) on
    all later devices, since the driver compiles it for them.

    Source: NVIDIA, CUDA C++ Programming Guide, binary and PTX compatibility.
    """
    major, minor = capability
    for name in built:
        kind, _, digits = name.partition("_")
        digits = "".join(c for c in digits if c.isdigit())  # "sm_90a"
        if not digits:
            continue
        built_major, built_minor = int(digits[:-1]), int(digits[-1])
        if kind == "sm" and built_major == major and built_minor <= minor:
            return True
        if kind == "compute" and (built_major, built_minor) <= (major, minor):
            return True
    return not built  # a build that does not list its architectures: nothing is known against it


if __name__ == "__main__":
    print(json.dumps(torch_facts()))
    sys.stdout.flush()
