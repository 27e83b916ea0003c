"""Say of a tensor why its values can't be sent or written as they are, and what to do."""

from __future__ import annotations

import torch


def fault_of(tensor: torch.Tensor) -> tuple[str, str] | None:
    """Return what a tensor is that is not dense, with all of its values here, and the fix; None if it is.

    Args:
        tensor: of any class, layout, dtype and device.
    """
    if hasattr(tensor, "full_tensor"):  # torch's class takes long to import, and who has one has imported it
        return "it is a DTensor, of which this rank has a part", "hand in tensor.full_tensor(), called on every rank"
    if tensor.is_nested:
        return "it is nested", "hand in its values and lengths, or torch.nested.to_padded_tensor(tensor, 0.0)"
    if tensor.layout != torch.strided:
        return f"its layout is {tensor.layout}", "hand in tensor.to_dense()"
    if tensor.is_quantized:
        return f"it is quantized ({tensor.dtype})", "hand in tensor.dequantize()"
    if tensor.is_meta:
        return "it is on the device meta, where tensors have no values", "make it on the CPU or a GPU"
    return None
