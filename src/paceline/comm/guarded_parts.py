"""What a loop may do with a parameter of which this rank has a part, outside of its model's calls.

torch would compute with the part as if it were the parameter, or end in an error about DTensors. So such parameters get
a class that hears of each operation. What is done to each element by itself is right on a part too. The rest is
refused: it is done inside `job.gathered()`.

A parameter's `data` and `detach()` are not heard of.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from paceline.nouns.errors import UsageError
from paceline.torch_private.autograd import is_in_backward
from paceline.torch_private.operations import DisableTorchFunctionSubclass

# These compute nothing from values. Names that begin with one underscore are torch's own, such as `_foreach_add_`.
_HARMLESS = """
    __get__ __set__ __delete__ __hash__ __repr__ __format__ __len__ __deepcopy__ __reduce_ex__ __setstate__ detach dim
    ndimension numel nelement size stride element_size data_ptr is_complex is_floating_point is_contiguous is_pinned
    is_same_size is_shared is_signed is_conj is_neg is_inference requires_grad_ register_hook retain_grad
    register_post_accumulate_grad_hook storage_offset untyped_storage get_device to_local full_tensor empty_like
    zeros_like ones_like full_like type result_type can_cast constant_
"""
# Of some places, of all of them together, or drawn: a part has other places, not all, and other draws.
_NOT_BY_ELEMENT = """
    __getitem__ __setitem__ __iter__ T mT H mH select narrow chunk split unbind tensor_split index_add_ index_copy_
    index_fill_ index_put_ index_select masked_fill_ masked_scatter_ masked_select scatter_ scatter_add_ gather take
    put_ flatten fill_diagonal_ tril_ triu_ diagonal view reshape t transpose unflatten ravel view_as reshape_as permute
    squeeze unsqueeze expand sort flip roll topk cumsum sum mean norm vector_norm linalg_vector_norm linalg_norm
    matrix_norm linalg_matrix_norm max min amax amin std var prod all any argmax argmin median quantile logsumexp
    softmax log_softmax renorm renorm_ dist count_nonzero dot mm matmul __matmul__ __rmatmul__ linear bmm addmm einsum
    svd linalg_svd linalg_qr linalg_svdvals linalg_inv linalg_det tolist item equal allclose mv outer embedding conv1d
    conv2d conv3d cosine_similarity normalize uniform_ normal_ random_ bernoulli_ exponential_ cauchy_ geometric_
    log_normal_ kaiming_uniform_ rand_like randn_like bernoulli
"""
_harmless = frozenset(_HARMLESS.split())
_not_by_element = frozenset(_NOT_BY_ELEMENT.split())


def _call(function: Any, args: Any, named: Any) -> Any:
    """Call an operation on parts, unless it is refused."""
    if not is_in_backward():  # a backward pass has its own way with them
        _check(function, args, named or {})
    with DisableTorchFunctionSubclass():
        return function(*args, **(named or {}))


def _check(function: Any, args: Any, named: dict[str, Any]) -> None:
    """Raise UsageError if an operation on a part does not do what it would do on the whole parameter."""
    name = function.__name__
    if name == "__get__":
        name = getattr(function.__self__, "__name__", name)  # of the property
        if name not in _not_by_element:
            return
    is_private = name.startswith("_") and not name.startswith("__")
    if name in _harmless or is_private:
        return
    tensors = [value for value in [*args, *named.values()] if isinstance(value, torch.Tensor)]
    parts = [value for value in tensors if isinstance(value, Rows | Cut | Uncut)]
    is_cut = not all(isinstance(part, Uncut) for part in parts)
    if is_cut and name in _not_by_element:
        raise _refused(name, "which is not by element")
    if torch.is_grad_enabled() and any(part.requires_grad for part in parts):
        raise _refused(name, "with gradients")
    for part in parts if is_cut else []:
        for operand in tensors:
            if operand.numel() > 1 and not _is_cut_alike(part, operand):
                raise _refused(name, f"together with a tensor of shape {tuple(operand.shape)}, which is not cut so")


def _is_cut_alike(part: torch.Tensor, operand: torch.Tensor) -> bool:
    return isinstance(operand, DTensor) == isinstance(part, DTensor) and operand.shape == part.shape


class Rows(DTensor):
    """A parameter of which this rank has rows."""

    @classmethod
    def __torch_function__(cls, func: object, types: object, args: object = (), kwargs: object = None) -> Any:
        """Call an operation that takes such a parameter."""
        return _call(func, args, kwargs)


class Cut(torch.nn.Parameter):
    """A parameter of which this rank has a piece, as a plain tensor."""

    @classmethod
    def __torch_function__(cls, func: object, types: object, args: object = (), kwargs: object = None) -> Any:
        """Call an operation that takes such a parameter."""
        return _call(func, args, kwargs)


class Uncut(torch.nn.Parameter):
    """A parameter that is whole until its model is called first: what is computed from it would be the whole one's."""

    @classmethod
    def __torch_function__(cls, func: object, types: object, args: object = (), kwargs: object = None) -> Any:
        """Call an operation that takes such a parameter."""
        return _call(func, args, kwargs)


def _refused(name: str, situation: str) -> UsageError:
    return UsageError(
        "a parameter of which this rank has a part may be computed with element by element, and without gradients, "
        "outside of its model's calls",
        f"the loop calls {name} on one, {situation}",
        "write `with job.gathered():` around it, on every rank: parameters are whole there, may be changed, and losses "
        "may be computed from them",
    )
