"""Dtypes and forms of tensors: wide dtypes, complex numbers as two parts, tensors that can't be sent as they are."""

from __future__ import annotations

import torch

# Of a complex tensor's imaginary parts in `checksum`: an exchange of the two parts then shows.
_IMAGINARY_WEIGHT = 1.7


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return float64 for a floating dtype, complex128 for a complex one, and any other as it is."""
    if dtype.is_complex:
        return torch.complex128
    return torch.float64 if dtype.is_floating_point else dtype


def widen(model: torch.nn.Module) -> torch.nn.Module:
    """Have a model's parameters and buffers in float64, complex ones in complex128; return the model.

    `Module.double` leaves complex ones as they are, and torch multiplies no matrices of two dtypes.
    """
    model._apply(lambda tensor: tensor.to(wide_dtype(tensor.dtype)))
    return model


def has_fractions(tensor: torch.Tensor) -> bool:
    """True for floating and complex tensors."""
    return tensor.is_floating_point() or tensor.is_complex()


def as_real(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of complex numbers as pairs, along one dimension more; any other tensor as it is."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def checksum(tensor: torch.Tensor) -> torch.Tensor:
    """Return the sum of a tensor's numbers in float64, of complex ones with another weight for each part."""
    values = as_real(tensor.detach()).double()
    if tensor.is_complex():
        return values[..., 0].sum() + _IMAGINARY_WEIGHT * values[..., 1].sum()
    return values.sum()


def fault_of(tensor: torch.Tensor) -> tuple[str, str] | None:
    """Return the reason that a tensor's values can't be sent or written as they are, and the fix; None where they can.

    Args:
        tensor: a tensor of any class, layout, dtype and device.
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
