"""Read a device such as `cpu`, `16GB` or `V100-16GB`, and compute the memory that a job has there."""

from __future__ import annotations

import re
from dataclasses import dataclass

from paceline.nouns.errors import PlanError
from paceline.nouns.reading import parse_number, shown

# Of a GPU's nominal memory the driver keeps a part: nvidia-smi says 16160 MiB of a V100-16GB, 81559 of an H100-80GB.
USABLE = 0.985
# The CUDA context, cuBLAS' workspace and the kernels themselves: reported from 0.3 to 0.6 GiB, not measured here.
CONTEXT_BYTES = 2**29
# NCCL's buffers for each communicator: reported from 0.1 to 1 GiB, not measured here.
COMMUNICATOR_BYTES = 2**28
_MOST_GIGABYTES = 2**20
# GPUs by the words of their names. bf16 matrix products, and flash attention, take compute capability 8.0: NVIDIA's
# table of compute capabilities, https://developer.nvidia.com/cuda-gpus; AMD's have bf16 from the MI100 on.
_WITHOUT_BF16 = re.compile(
    r"[KM]\d\d|P4|P6|P40|P100|V100S?|T4G?|T10|QUADRO|TITAN|MI(8|25|50|60)"
    r"|GTX(\d+(TI|SUPER)?)?|RTX20\d\d(TI|SUPER)?|(1[06][5678]0|20[678]0)(TI|SUPER)?"
)
_WITH_BF16 = re.compile(
    r"A(2|10G?|16|30|40|100|800|[2456]000|5500)|L(2|4|20|40S?)|G?H(20|100|200|800)|G?B(100|200|300)"
    r"|RTX[345]0\d\d(TI|SUPER)?|[345]0[56789]0(TI|SUPER)?|MI\d{3}[AX]?"
)
# Operations per second of dense matrix products in bf16 or fp16 with tensor cores, and in float32 without TF32, by the
# vendors' data sheets. A name is looked for in this order.
_PEAKS: tuple[tuple[str, float, float], ...] = (
    (r"\bV100\b.*PCIE", 112e12, 14e12),
    (r"\bV100\b", 125e12, 15.7e12),
    (r"\bT4\b", 65e12, 8.1e12),
    (r"\bA10\b", 125e12, 31.2e12),
    (r"\bA30\b", 165e12, 10.3e12),
    (r"\bA40\b", 149.7e12, 37.4e12),
    (r"\bA[18]00\b", 312e12, 19.5e12),
    (r"\bL4\b", 121e12, 30.3e12),
    (r"\bL40S\b", 362e12, 91.6e12),
    (r"\bL40\b", 181e12, 90.5e12),
    (r"\bH[18]00.*PCIE", 756e12, 51e12),
    (r"\bH[12]00.*NVL", 835e12, 60e12),
    (r"\b(G?H[12]00|H800)\b", 989e12, 66.9e12),
    (r"\bMI250X\b", 383e12, 47.9e12),
    (r"\bMI300X\b", 1307e12, 163.4e12),
)


def peak_flops(name: str, precision: str) -> float | None:
    """Return the operations per second that a GPU can do at most; None where that is not known.

    Args:
        name: the name of the GPU as torch gives it, such as "NVIDIA A100-SXM4-80GB".
        precision: the precision of the workload.
    """
    for pattern, half, single in _PEAKS:
        if re.search(pattern, name.upper()):
            return {"bf16": half, "fp16": half, "float32": single}.get(precision)
    return None


@dataclass(frozen=True, slots=True)
class Device:
    """A device that a rank computes on.

    Attributes:
        name: the name as the user wrote it.
        kind: the kind of device, "cpu" or "cuda".
        memory: the bytes that a process can have; None where that does not matter.
        expandable_segments: True where torch's allocator has them there (PYTORCH_ALLOC_CONF=expandable_segments:True).
    """

    name: str
    kind: str
    memory: int | None
    expandable_segments: bool = False

    @classmethod
    def parse(cls, text: str) -> Device:
        """Read `cpu`, `cuda`, `16GB` or `V100-16GB`.

        Raises:
            PlanError: the text is none of these.
        """
        if text in ("cpu", "cuda"):
            return cls(text, text, None)
        _, _, size = text.rpartition("-")
        number = size.upper().removesuffix("GB").removesuffix("GIB")
        gigabytes = parse_number(number) if number != size else None
        if gigabytes is None or not 0 < gigabytes <= _MOST_GIGABYTES:
            raise PlanError(
                f"can't use the device {shown(text)}",
                "its memory is not known",
                "write cpu, cuda, 16GB or a name such as V100-16GB",
            )
        return cls(text, "cuda", int(gigabytes * 2**30 * USABLE))

    @property
    def has_bf16(self) -> bool | None:
        """Return True if its matrix units compute in bf16; None where the name does not say.

        A GPU without it computes bf16 by other means, slowly, or refuses, and has no flash attention.
        """
        if self.kind == "cpu":
            return True
        name_parts = re.split(r"[-_ ]+", self.name.upper())
        if any(_WITHOUT_BF16.fullmatch(part) for part in name_parts):
            return False
        if any(_WITH_BF16.fullmatch(part) for part in name_parts):
            return True
        return None

    def beside(self, communicators: int) -> int:
        """Return the bytes that a process takes beside torch's allocator."""
        if self.kind != "cuda":
            return 0
        return CONTEXT_BYTES + communicators * COMMUNICATOR_BYTES

    def capacity(self, communicators: int) -> int | None:
        """Return the bytes that torch's allocator can have; None where that is not known."""
        if self.memory is None:
            return None
        return self.memory - self.beside(communicators)
