from m6jax.data.best_fit import best_fit
from m6jax.data.feature_converters import Room


def packed(sizes, length, look_ahead, waiting=()):
    waiting = list(waiting)
    items = zip("abcdefgh", map(Room, sizes), strict=False)
    rows = ["".join(row) for row in best_fit(items, Room(length), waiting, look_ahead)]
    return rows, "".join(item for item, _ in waiting)


def test_the_oldest_begins_and_the_largest_that_fits_follows():
    """With four to choose from 5 takes 2; then 4 waits with 3 until two more have come."""
    assert packed([5, 4, 3, 2], 7, 4) == (["ad"], "bc")
    assert packed([5, 4, 3, 2, 1, 1], 7, 4) == (["ad", "bc"], "ef")


def test_of_equal_ones_the_older_comes_first():
    assert packed([4, 2, 3, 3], 7, 4) == (["ac"], "bd")


def test_looking_at_one_example_packs_nothing():
    assert packed([4, 2, 1], 7, 1) == (["a", "b", "c"], "")


def test_what_waited_goes_on():
    waiting = [("x", Room(3)), ("y", Room(6))]
    assert packed([4, 1], 7, 3, waiting) == (["xa"], "yb")


def test_pictures_take_room_of_their_own():
    """The second picture fits by its tokens and waits; a smaller text comes in its place."""
    items = [("a", Room(2, 1)), ("b", Room(5, 1)), ("t", Room(1))]
    waiting = []
    assert list(best_fit(items, Room(8, 1), waiting, 3)) == [["a", "t"]]
    assert waiting == [("b", Room(5, 1))]


def test_every_row_is_the_best_of_a_plain_search():
    """The same rows by looking at all that waits, again and again."""
    sizes = [1 + (7 * i * i + i) % 50 for i in range(400)]
    expected, pool = [], []
    for i, size in enumerate(sizes):
        pool.append((i, size))
        if len(pool) < 64:
            continue
        row, free = [], 60
        chosen = pool[0]
        while chosen is not None:
            pool.remove(chosen)
            row.append(chosen[0])
            free -= chosen[1]
            fitting = [item for item in pool if item[1] <= free]
            chosen = max(fitting, key=lambda item: (item[1], -item[0]), default=None)
        expected.append(row)
    waiting = []
    items = list(enumerate(map(Room, sizes)))
    assert list(best_fit(items, Room(60), waiting, 64)) == expected
    assert waiting == [(i, Room(size)) for i, size in pool]
    # Cut in two, the rows are the same.
    waiting = []
    first = list(best_fit(items[:150], Room(60), waiting, 64))
    assert first + list(best_fit(items[150:], Room(60), waiting, 64)) == expected
