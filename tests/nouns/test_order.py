"""One integer says where training is; ranks and workers can't change which sample comes when."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from paceline.nouns.data_order import DataOrder, cut, mix, share

sizes = st.integers(1, 300)


@given(st.integers(0, 2**40), sizes, st.integers(0, 5))
def test_an_epoch_is_a_permutation(seed, samples, epoch):
    order = DataOrder(seed, samples, 8)
    seen = [order.index(position) for position in range(epoch * samples, (epoch + 1) * samples)]
    assert sorted(seen) == list(range(samples))


@given(sizes, sizes, st.integers(1, 9), st.integers(1, 20), st.integers(1, 40))
def test_any_split_of_any_run_sees_each_sample_once_per_epoch(samples, batch, ranks, micro, steps):
    order = DataOrder(7, samples, batch)
    end = order.position_after(steps)
    batches = list(order.batches(0, end))
    assert len(batches) == steps
    positions = [p for b in batches for r in range(ranks) for piece in cut(share(b, r, ranks), micro) for p in piece]
    assert sorted(positions) == list(range(end))
    assert all(len(b) == batch or b.stop % samples == 0 for b in batches)


def test_resuming_at_any_batch_gives_the_same_batches():
    order = DataOrder(3, 37, 8)
    whole = list(order.batches(0, order.position_after(20)))
    for number, batch in enumerate(whole):
        assert list(order.batches(batch.start, order.position_after(20))) == whole[number:]


@given(sizes, sizes, st.integers(0, 900), st.integers(0, 40))
def test_batches_are_counted_from_any_position(samples, batch, position, steps):
    order = DataOrder(3, samples, batch)
    end = order.position_after(steps, position)
    assert len(list(order.batches(position, end))) == steps
    last = (position // samples + 3) * samples
    assert order.steps_between(position, last) == len(list(order.batches(position, last)))


def test_epochs_and_seeds_differ():
    first, second = ([DataOrder(0, 100, 8).index(e * 100 + i) for i in range(100)] for e in (0, 1))
    other = [DataOrder(1, 100, 8).index(i) for i in range(100)]
    assert first != second
    assert first != other


@given(st.integers(-1, 2**70), sizes, st.integers(0, 5), st.booleans(), st.data())
def test_a_batch_is_looked_up_in_one_call(seed, samples, epoch, shuffle, data):
    """The formula, a sample at a time: `DataOrder.indices` writes its hash out."""
    order = DataOrder(seed, samples, 8, shuffle)
    start = data.draw(st.integers(0, samples - 1))
    positions = range(epoch * samples + start, epoch * samples + data.draw(st.integers(start, samples)))
    expected = [permuted(position % samples, samples, mix(seed, epoch)) for position in positions]
    assert order.indices(positions) == (expected if shuffle else [position % samples for position in positions])


def permuted(place, samples, key):
    half_bits = max(1, ((samples - 1).bit_length() + 1) // 2)
    low = (1 << half_bits) - 1
    while True:
        left, right = place >> half_bits, place & low
        for number in range(6):
            left, right = right, left ^ (mix(key, number, right) & low)
        place = left << half_bits | right
        if place < samples:
            return place


def test_places_are_evenly_spread():
    # 2,000 seeds: each of 10 samples should come first about 200 times; chi-square of 9 degrees at 0.1 % is 27.9.
    firsts = Counter(DataOrder(seed, 10, 1).index(0) for seed in range(2000))
    chi_square = sum((firsts[index] - 200) ** 2 / 200 for index in range(10))
    assert chi_square < 27.9


def test_the_order_never_changes_between_versions():
    assert [DataOrder(0, 10, 4).index(position) for position in range(20)] == GOLDEN


GOLDEN = [7, 0, 2, 9, 6, 1, 8, 4, 3, 5, 7, 4, 3, 2, 1, 9, 0, 8, 6, 5]
