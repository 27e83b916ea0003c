"""Group gradients into buckets that travel together: pure arithmetic, so that plan and strategy can't disagree."""

from __future__ import annotations

from collections.abc import Hashable, Sequence


def group_parameters(sizes: Sequence[tuple[int, Hashable]], limit_bytes: int) -> list[list[int]]:
    """Group parameters, last first, into buckets of one kind and at most `limit_bytes` (or one larger one).

    Backward passes reach the last parameters first, so the first bucket is complete first.

    Args:
        sizes: of each parameter its bytes and its kind (dtype and device).
        limit_bytes: most bytes of a bucket that has several parameters.

    Returns:
        The parameters' indices, bucket by bucket.
    """
    # Only neighbours share a bucket: with another order a bucket would wait for gradients from all over the model.
    buckets: list[list[int]] = []
    bucket_kind: Hashable = None  # of the last bucket
    held_bytes = 0
    for index in reversed(range(len(sizes))):
        nbytes, kind = sizes[index]
        if not buckets or kind != bucket_kind or held_bytes + nbytes > limit_bytes:
            buckets.append([])
            bucket_kind = kind
            held_bytes = 0
        buckets[-1].append(index)
        held_bytes += nbytes
    return buckets
