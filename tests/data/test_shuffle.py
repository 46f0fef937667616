"""The stateless shuffle: a bijection, random enough, and the same everywhere."""

import numpy as np
import pytest

from titan.data.shuffle import Permutation, derive_key


@pytest.mark.parametrize("n", [*range(1, 70), 127, 128, 129, 255, 256, 257, 1000, 1023, 1024, 1025, 65_537])
def test_every_number_comes_once(n: int) -> None:
    for key in (0, 1, 2**64 - 1):
        order = Permutation(n, key)
        assert len(order) == n
        assert sorted(order.take(np.arange(n)).tolist()) == list(range(n))


@pytest.mark.parametrize("n", [1, 2, 3, 5, 100, 1025, 10**6, 2**48, 2**48 - 1, 2**62])
def test_vectorised_equals_scalar(n: int) -> None:
    order = Permutation(n, derive_key(3, n))
    places = np.unique(np.linspace(0, n - 1, 300).astype(np.int64).clip(0, n - 1))
    values = order.take(places)
    assert values.dtype == np.int64
    assert values.tolist() == [order[int(i)] for i in places]
    assert values.min() >= 0 and values.max() < n
    assert len(set(values.tolist())) == len(places)


def test_take_keeps_the_shape() -> None:
    order = Permutation(10, 1)
    assert order.take([[1, 2], [3, 4]]).tolist() == [[order[1], order[2]], [order[3], order[4]]]
    assert order.take([]).tolist() == []


def test_iterates_as_a_sequence() -> None:
    order = Permutation(50, 7)
    assert list(order) == [order[i] for i in range(50)]


def test_golden_values() -> None:
    """Checkpoints rely on these numbers: a change of them reorders the data of every run that resumes."""
    assert derive_key(0) == 12246907308585442206
    assert derive_key(42, "documents", 3) == 17780599537712180922
    assert [Permutation(10, 42)[i] for i in range(10)] == [5, 3, 4, 9, 2, 8, 0, 1, 7, 6]
    assert [Permutation(2**48, 42)[i] for i in range(3)] == [179997583193660, 220810224178674, 236096474558740]


def test_keys_tell_seeds_parts_types_and_order_apart() -> None:
    keys = [
        derive_key(0),
        derive_key(1),
        derive_key(0, 1),
        derive_key(0, "1"),
        derive_key(0, 1, 2),
        derive_key(0, 2, 1),
        derive_key(0, 12),
        derive_key(0, "a", "bc"),
        derive_key(0, "ab", "c"),
        derive_key(-1),
    ]
    assert len(set(keys)) == len(keys)
    assert all(0 <= key < 2**64 for key in keys)
    assert derive_key(5, np.int64(7)) == derive_key(5, 7)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        derive_key(0, 1.5)  # type: ignore[arg-type]


def test_other_key_other_order() -> None:
    orders = {tuple(Permutation(20, key)) for key in range(500)}
    assert len(orders) == 500


def test_all_orders_of_three_occur() -> None:
    orders = [tuple(Permutation(3, derive_key(key))) for key in range(3000)]
    counts = [orders.count(order) for order in set(orders)]
    assert len(counts) == 6
    assert all(350 < count < 650 for count in counts), counts  # 500 expected, standard deviation 20


@pytest.mark.parametrize("n", [8, 13, 64, 100])
def test_uniform_over_keys(n: int) -> None:
    """Element 0 and the step from element 0 to 1 are spread evenly over many keys (chi-square per cell about 1)."""
    rounds = 100 * n
    orders = (Permutation(n, derive_key(key)) for key in range(rounds))
    pairs = np.array([(order[0], order[1]) for order in orders])
    first = np.bincount(pairs[:, 0], minlength=n)
    step = np.bincount((pairs[:, 1] - pairs[:, 0]) % n, minlength=n)[1:]
    for counts in (first, step):
        expected = rounds / len(counts)
        chi_square = ((counts - expected) ** 2 / expected).sum()
        assert chi_square < len(counts) + 5 * np.sqrt(2 * len(counts)), counts


def test_uniform_within_an_order() -> None:
    """Of a large order, neighbours are far apart and the start is spread over the whole range."""
    n = 10**9
    values = Permutation(n, derive_key(1)).take(np.arange(100_000))
    counts = np.histogram(values, bins=100, range=(0, n))[0]
    assert ((counts - 1000) ** 2 / 1000).sum() < 100 + 5 * np.sqrt(200)
    correlation = np.corrcoef(values[:-1], values[1:])[0, 1]
    assert abs(correlation) < 0.02


@pytest.mark.parametrize("i", [-1, 5, 2**70])
def test_index_out_of_range(i: int) -> None:
    with pytest.raises(IndexError, match="permutation of 5"):
        Permutation(5, 0)[i]


def test_take_out_of_range() -> None:
    for indices in ([0, 5], [-1, 0]):
        with pytest.raises(IndexError, match="permutation of 5"):
            Permutation(5, 0).take(indices)


@pytest.mark.parametrize(("n", "key"), [(0, 0), (-3, 0), (2**62 + 1, 0), (5, -1), (5, 2**64)])
def test_arguments_out_of_range(n: int, key: int) -> None:
    with pytest.raises(ValueError, match="permutation"):
        Permutation(n, key)


def test_windows_of_a_hundred_billion_come_once() -> None:
    """Of 1e11 numbers: parts from all over the order, of which no two places have the same."""
    n, size = 10**11, 100_000
    order = Permutation(n, derive_key(0, "windows", 0))
    starts = [0, 12_345_678_901, n // 2, 2**36 - size // 2, n - size]
    values = np.concatenate([order.take(np.arange(start, start + size)) for start in starts])
    assert values.min() >= 0 and values.max() < n
    assert len(np.unique(values)) == len(starts) * size
