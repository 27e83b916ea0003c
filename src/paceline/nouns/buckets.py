"""Which gradients travel together: pure arithmetic, so that the plan and the strategy can't disagree."""

from __future__ import annotations

from collections.abc import Hashable, Sequence


def group_parameters(sizes: Sequence[tuple[int, Hashable]], limit_bytes: int) -> list[list[int]]:
    """Group parameters, last first, into buckets of one kind and at most `limit_bytes` (or one larger one).

    Backward passes reach the last parameters first, so the first bucket is complete first.

    Args:
        sizes: of each parameter its bytes and its kind (dtype and device).
        limit_bytes: what a bucket may hold.

    Returns:
        The parameters' indices, bucket by bucket.
    """
    buckets: list[list[int]] = []
    held_bytes = 0
    for index in reversed(range(len(sizes))):
        own_bytes, kind = sizes[index]
        same_kind = bool(buckets) and sizes[buckets[-1][0]][1] == kind
        if not same_kind or held_bytes + own_bytes > limit_bytes:
            buckets.append([])
            held_bytes = 0
        buckets[-1].append(index)
        held_bytes += own_bytes
    return buckets
