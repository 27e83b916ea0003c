"""Take and put back parts of tensors, and hash them so that the hash does not depend on how a tensor is cut.

The hash of a tensor is a sum over its elements of a number that depends on the element's position in the
full tensor and on its bits. So the hashes of parts that make up a tensor add up to the tensor's, however
it was cut; what one mesh saved can be held against what another has loaded, each rank hashing its own.
It finds accidents (a lost or exchanged part, a flipped bit), it is no signature.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

from paceline.checkpoint.manifest_merge import Hash, signed
from paceline.checkpoint.shard_geometry import boxes_of, move
from paceline.nouns.shard_spec import LocalShard, ShardSpec

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Elements hashed at a time: three tensors of 8 bytes each, which stay in a CPU's cache. torch splits calls of
# more than 2^15 elements over threads, and then each of these short ones would wait for cores that train: 8 ns
# an element became 40 on two busy cores. A GPU wants fewer, larger calls.
_CHUNK = {"cpu": 2**15, "cuda": 2**20}
# Odd multipliers: 2^64 / golden ratio (Weyl sequence), and those of MurmurHash3's fmix64 (Appleby 2011) and
# SplitMix64 (Steele et al. 2014), as signed numbers.
_STEP = 0x9E3779B97F4A7C15 - 2**64
_FIRST = 0xFF51AFD7ED558CCD - 2**64
_SECOND = 0xC4CEB9FE1A85EC53 - 2**64
_THIRD = 0xBF58476D1CE4E5B9 - 2**64


@dataclass(frozen=True, slots=True)
class LocalTensor:
    """The part of one tensor that this rank holds. `tensor` is the part itself, of the shard spec's local shape."""

    tensor: torch.Tensor
    shard: LocalShard

    def __post_init__(self) -> None:
        if tuple(self.tensor.shape) != self.shard.shard_spec.local_shape:
            raise ValueError(
                f"a part of shape {tuple(self.tensor.shape)} is said to be {self.shard.shard_spec}, "
                f"whose shape is {self.shard.shard_spec.local_shape}"
            )


def dtype_of(tensor: torch.Tensor) -> str:
    """Return the dtype's name, without `torch.`."""
    return str(tensor.dtype).removeprefix("torch.")


def bits_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return views of the same memory as integers: they can be copied and compared whatever the dtype.

    One, of the tensor's shape; of complex128 one of the real parts and one of the imaginary parts, as no integer has
    its 16 bytes.
    """
    values = tensor.detach()
    if values.dtype is torch.complex128:
        return list(torch.view_as_real(values).view(torch.int64).unbind(-1))
    return [values.view(_BITS[values.element_size()])]


def take(full: torch.Tensor, shard_spec: ShardSpec) -> torch.Tensor:
    """Return the part of `full` that `shard_spec` describes, as a new tensor."""
    local = torch.empty(shard_spec.local_shape, dtype=full.dtype, device=full.device)
    copy_common(local, shard_spec, full, ShardSpec(shard_spec.shape))
    return local


def put(full: torch.Tensor, shard_spec: ShardSpec, local: torch.Tensor) -> None:
    """Write a part to its place in `full`."""
    copy_common(full, ShardSpec(shard_spec.shape), local, shard_spec)


def copy_common(target: torch.Tensor, target_spec: ShardSpec, source: torch.Tensor, source_spec: ShardSpec) -> None:
    """Copy the elements that both parts of a tensor have, bit for bit, from `source` to `target`."""
    for target_bits, source_bits in zip(bits_of(target), bits_of(source), strict=True):
        move(target_bits, target_spec, source_bits, source_spec)


def hash_of(local: torch.Tensor, shard_spec: ShardSpec) -> Hash:
    """Return the hash of a part; those of all parts of a tensor add up to `hash_of(tensor, ShardSpec(shape))`."""
    sums = torch.zeros(2, dtype=torch.int64, device=local.device)
    for number, bits in enumerate(bits_of(local)):
        # Imaginary parts have positions of their own, after all real ones.
        _add_bits(sums, bits, shard_spec, number * shard_spec.numel)
    # The one point where a GPU is waited for.
    first, second = sums.tolist()
    return first, second


def _add_bits(sums: torch.Tensor, bits: torch.Tensor, shard_spec: ShardSpec, offset: int) -> None:
    strides = _strides(shard_spec.shape)
    # A part's own order of elements does not matter: each is hashed with its position in the full tensor.
    for box in boxes_of(shard_spec):
        first_position = offset  # of the box in the full tensor, flattened
        for (start, _), stride in zip(box.box, strides, strict=True):
            first_position += start * stride
        window, steps = _merged(box.of(bits, box.inside), shard_spec.shape, strides)
        for chunk, position, chunk_steps in _chunks(window, steps, first_position):
            _add_chunk(sums, chunk, position, chunk_steps)


def _strides(shape: Sequence[int]) -> list[int]:
    """Return the strides of a contiguous tensor of this shape, in elements."""
    return [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]


def _merged(window: torch.Tensor, sizes: Sequence[int], strides: Sequence[int]) -> tuple[torch.Tensor, list[int]]:
    """Merge dims of the window where memory allows it; return it, and its dims' strides in the full tensor.

    A dim of which the window has all continues the one before it, so the two can be one.
    """
    shape: list[int] = []
    steps: list[int] = []
    for length, size, stride in zip(window.shape, sizes, strides, strict=True):
        # Fewer dims make fewer, longer chunks.
        if shape and length == size:
            shape[-1] *= length
            steps[-1] = stride
        else:
            shape.append(length)
            steps.append(stride)
    try:
        return window.view(shape), steps
    except RuntimeError:
        return window, list(strides)


def _chunks(window: torch.Tensor, steps: list[int], at: int) -> Iterator[tuple[torch.Tensor, int, list[int]]]:
    """Yield the window in chunks that fit the cache, each with its first position; no memory is copied."""
    limit = _CHUNK.get(window.device.type, _CHUNK["cpu"])
    if window.numel() <= limit:
        yield window, at, steps
        return
    # 0 where one row is longer than a chunk: then each row is cut further.
    rows = limit // math.prod(window.shape[1:])
    if rows:
        for start in range(0, window.shape[0], rows):
            yield window[start : start + rows], at + start * steps[0], steps
    else:
        for index in range(window.shape[0]):
            yield from _chunks(window[index], steps[1:], at + index * steps[0])


@lru_cache(4)
def _ramp(device: torch.device) -> torch.Tensor:
    return torch.arange(_CHUNK.get(device.type, _CHUNK["cpu"]), device=device) * _STEP


def _add_chunk(sums: torch.Tensor, chunk: torch.Tensor, position: int, steps: Sequence[int]) -> None:
    # One number per position first: a Weyl sequence, so that sums along dims are enough.
    x = torch.full((), signed(position * _STEP), dtype=torch.int64, device=chunk.device)
    for dim, (size, step) in enumerate(zip(chunk.shape, steps, strict=True)):
        # position * _STEP, by dim: (i * stride) * _STEP adds up over dims, all modulo 2^64.
        along = _ramp(chunk.device)[:size]
        if step > 1:
            along = along * step
        x = x + along.view(size, *[1] * (chunk.dim() - dim - 1))
    # Then its bits, and MurmurHash3's finalizer: for one position a bijection of the bits in either lane,
    # so one changed element always changes both sums.
    x ^= chunk
    spare = torch.empty_like(x)
    _shift_in(x, 33, spare)
    x *= _FIRST
    _shift_in(x, 29, spare)
    x *= _SECOND
    sums[0] += x.sum()
    _shift_in(x, 32, spare)
    x *= _THIRD
    sums[1] += x.sum()


def _shift_in(x: torch.Tensor, places: int, spare: torch.Tensor) -> None:
    """Compute x ^= x >> places in place, with x as an unsigned number; `spare` is scratch memory of its shape."""
    # torch shifts int64 arithmetically: the mask clears the copies of the sign.
    torch.bitwise_right_shift(x, places, out=spare)
    spare &= 2 ** (64 - places) - 1
    x ^= spare
