"""Add up the fingerprints of pieces, and compare two fingerprints. `ranks/watch.py` makes them from tensors.

A few numbers stand for a tensor: two weighted sums with fixed weights by place, and the sum of squares. The weighted
sums are linear: those of a split tensor's pieces, each weighted by its places in the whole, add up to those of the
whole.
"""

from __future__ import annotations

import math

Print = list[float]  # first sum, second sum, sum of squares, elements


def added(prints: list[Print]) -> Print:
    """Return the fingerprint of a full tensor from those of its pieces."""
    return [math.fsum(column) for column in zip(*prints, strict=True)]


def differ(first: Print, second: Print, floor: float = 0.0) -> bool:
    """True if two fingerprints are of different tensors, rounding in float64 apart.

    Args:
        first: a fingerprint.
        second: another.
        floor: absolute tolerance of the sums, on top of the relative one.
    """
    if first[3] != second[3]:
        return True
    # NaN and infinities can't be subtracted: only whether both have them is compared.
    first_is_finite = [math.isfinite(number) for number in first]
    second_is_finite = [math.isfinite(number) for number in second]
    if not all(first_is_finite) or not all(second_is_finite):
        return first_is_finite != second_is_finite
    # By Cauchy-Schwarz a weighted sum is at most sqrt(sum of squares * elements), weights being cosines.
    largest_sum = math.sqrt(max(first[2], second[2]) * max(first[3], 1.0))
    allowed = 1e-10 * largest_sum + floor
    return any(abs(a - b) > allowed for a, b in zip(first[:2], second[:2], strict=True))


def times_of(first: Print, second: Print) -> float | None:
    """Return the factor f for which the first tensor is f times the second; None where it is no multiple of it."""
    if first[3] != second[3] or not all(math.isfinite(number) for number in (*first, *second)) or not second[2]:
        return None
    # The sums of squares give the size of the factor, the weighted sums its sign.
    factor = math.copysign(math.sqrt(first[2] / second[2]), first[0] * second[0])
    scaled = [second[0] * factor, second[1] * factor, first[2], first[3]]
    if differ(first, scaled):
        return None
    return factor
