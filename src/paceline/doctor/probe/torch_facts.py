"""What torch says of itself and of its devices: a child process of the doctor, which has no torch.

Prints one line of JSON. `python -m paceline.doctor.probe.torch_facts` also runs alone.
"""

from __future__ import annotations

import json
import sys
import time
import warnings
from typing import Any


def torch_facts() -> dict[str, Any]:
    """Versions and devices; `error` alone when torch can't be imported."""
    began_s = time.monotonic()
    try:
        import torch
    except Exception as error:  # a broken installation raises anything: OSError of a library, ImportError, ...
        return {"error": f"{type(error).__name__}: {error}"}
    facts: dict[str, Any] = {
        "torch": torch.__version__,
        "seconds": time.monotonic() - began_s,
        "cuda_build": torch.version.cuda or "",
        "hip_build": torch.version.hip or "",
        "has_distributed": hasattr(torch._C, "_c10d_init"),  # what torch.distributed.is_available() looks at
        "nccl": "",
        "devices": [],
        "unsupported": [],
        "device_error": "",
    }
    if facts["cuda_build"] or facts["hip_build"]:
        _add_devices(facts)
    return facts


def _add_devices(facts: dict[str, Any]) -> None:
    import torch

    try:
        facts["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    except Exception:  # this build has none: said by its absence
        facts["nccl"] = ""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            number = torch.cuda.device_count()
            facts["devices"] = [torch.cuda.get_device_name(index) for index in range(number)]
            built = torch.cuda.get_arch_list()
            for index in range(number):
                if facts["cuda_build"] and not _runs_on(torch.cuda.get_device_capability(index), built):
                    facts["unsupported"].append(facts["devices"][index])
        except Exception as error:  # the driver's: told as it is
            facts["device_error"] = str(error).strip().split("\n")[0]
    if said and not facts["devices"] and not facts["device_error"]:
        facts["device_error"] = str(said[0].message).strip().split("\n")[0]


def _runs_on(capability: tuple[int, int], built: list[str]) -> bool:
    """Whether code for one of `built` ("sm_90", "compute_90") runs on a device of this capability."""
    major, minor = capability
    for name in built:
        kind, _, digits = name.partition("_")
        digits = "".join(c for c in digits if c.isdigit())
        if not digits:
            continue
        built_major, built_minor = int(digits[:-1]), int(digits[-1])
        if kind == "sm" and built_major == major and built_minor <= minor:
            return True
        if kind == "compute" and (built_major, built_minor) <= (major, minor):  # compiled again by the driver
            return True
    return not built


if __name__ == "__main__":
    print(json.dumps(torch_facts()))
    sys.stdout.flush()
