"""Fingerprints as numbers: those of pieces added up, and whether two are of the same tensor. See `fingerprint.py`."""

from __future__ import annotations

import math

Print = list[float]  # first sum, second sum, sum of squares, elements


def added(prints: list[Print]) -> Print:
    """The numbers of the whole, from its pieces'."""
    return [math.fsum(column) for column in zip(*prints, strict=True)]


def differ(one: Print, other: Print, floor: float = 0.0) -> bool:
    """Whether two tensors are not the same, rounding in float64 apart."""
    if one[3] != other[3]:
        return True
    if not all(math.isfinite(number) for number in (*one, *other)):
        return [math.isfinite(n) for n in one] != [math.isfinite(n) for n in other]
    allowed = 1e-10 * math.sqrt(max(one[2], other[2]) * max(one[3], 1.0)) + floor
    return any(abs(a - b) > allowed for a, b in zip(one[:2], other[:2], strict=True))


def times_of(one: Print, other: Print) -> float | None:
    """How many times `other` is `one`, where it is a multiple of it; else None."""
    if one[3] != other[3] or not all(math.isfinite(number) for number in (*one, *other)) or not other[2]:
        return None
    factor = math.copysign(math.sqrt(one[2] / other[2]), one[0] * other[0])
    scaled = [other[0] * factor, other[1] * factor, one[2], one[3]]
    return None if differ(one, scaled) else factor
