import dataclasses

import numpy as np

from m6jax.data.feature_converters import FEATURES, OpenRow, Room, RowShape, first_fit, to_features
from m6jax.data.preprocessors import Answering, Example, LanguageModelling


def test_documents_of_3_and_2_tokens_in_length_6(ids_vocabulary):
    """Behaviour B13: the end of each document is its last token."""
    make = LanguageModelling().example
    row = [
        make(np.array([20, 21]), 0, 3, 0, ids_vocabulary),
        make(np.array([30]), 0, 2, 0, ids_vocabulary),
    ]
    features = to_features([row], RowShape(6, pad_id=0))
    assert features["segment_ids"].tolist() == [[1, 1, 1, 2, 2, 0]]
    assert features["positions"].tolist() == [[0, 1, 2, 0, 1, 0]]
    assert features["tokens"].tolist() == [[0, 20, 21, 0, 30, 0]]
    assert features["targets"].tolist() == [[20, 21, 1, 30, 1, 0]]
    assert features["loss_weights"].tolist() == [[1, 1, 1, 1, 1, 0]]
    assert features["bidirectional"].tolist() == [[0] * 6]
    assert {name: a.dtype for name, a in features.items()} == FEATURES


def test_prefix_sees_itself_and_carries_no_loss():
    """Three inputs of the prefix; the last of them predicts the first target that counts."""
    tokens = np.arange(5, 9)
    features = to_features([[Example(tokens, tokens + 1, prefix=3)]], RowShape(5, pad_id=2))
    assert features["bidirectional"].tolist() == [[1, 1, 1, 0, 0]]
    assert features["loss_weights"].tolist() == [[0, 0, 1, 1, 0]]
    assert features["tokens"].tolist() == [[5, 6, 7, 8, 2]]


def test_patches_stand_before_their_own_text(ids_vocabulary):
    """A text of 2 tokens; then a picture of 2 patches with the prompt 30 and the answer 31 32.

    The picture and its prompt see each other in full; loss is on the answer and its end alone.
    """
    text = LanguageModelling().example(np.array([20, 21]), 0, 2, 0, ids_vocabulary)
    made = Answering().example(np.array([30, 31, 32]), 0, 4, 0, ids_vocabulary, prompt=1)
    patches = np.arange(6, dtype=np.float32).reshape(2, 3)
    shape = RowShape(10, pad_id=0, pictures=2, slots=4, patch_dim=3)
    features = to_features([[text, dataclasses.replace(made, patches=patches)], []], shape)
    expected = {
        "tokens": [0, 20, 0, 0, 0, 30, 31, 32, 0, 0],
        "targets": [20, 21, 0, 0, 30, 31, 32, 1, 0, 0],
        "patch_mask": [0, 0, 1, 1, 0, 0, 0, 0, 0, 0],
        "segment_ids": [1, 1, 2, 2, 2, 2, 2, 2, 0, 0],
        "positions": [0, 1, 0, 1, 2, 3, 4, 5, 0, 0],
        "bidirectional": [0, 0, 1, 1, 1, 1, 0, 0, 0, 0],
        "loss_weights": [1, 1, 0, 0, 0, 1, 1, 1, 0, 0],
    }
    assert {n: features[n][0].tolist() for n in expected} == expected
    np.testing.assert_array_equal(features["patches"][0], np.concatenate([patches, 0 * patches]))
    assert not features["patch_mask"][1].any()
    assert features["patches"].shape == (2, 4, 3)


def test_what_is_given_alone_carries_no_loss(ids_vocabulary):
    """The first part of a document whose prompt is longer than the part."""
    part = Answering().example(np.arange(10, 16), 0, 3, 0, ids_vocabulary, prompt=5)
    features = to_features([[part, Example(np.array([7]), np.array([8]))]], RowShape(4, pad_id=0))
    assert features["loss_weights"].tolist() == [[0, 0, 0, 1]]
    assert features["bidirectional"].tolist() == [[1, 1, 1, 0]]


def test_rows_without_examples_are_padding():
    features = to_features([[], []], RowShape(3, pad_id=2))
    assert (features["tokens"] == 2).all()
    assert (features["targets"] == 2).all()
    for name in ("loss_weights", "segment_ids", "positions", "bidirectional"):
        assert features[name].shape == (2, 3)
        assert not features[name].any()


def packed(sizes, length, most_open):
    open_rows = []
    items = zip("abcdefgh", map(Room, sizes), strict=False)
    closed = list(first_fit(items, Room(length), open_rows, most_open))
    return ["".join(row) for row in closed], ["".join(r.items) for r in open_rows]


def test_first_fit_takes_the_oldest_row_with_room():
    """4+2 closes; 3 waits; 5+1 closes before 3 does."""
    assert packed([4, 3, 5, 2, 1], 6, 8) == (["ad"], ["be", "c"])
    assert packed([4, 3, 5, 2, 3, 1], 6, 8) == (["ad", "be", "cf"], [])


def test_the_fullest_row_is_closed_for_a_new_one():
    assert packed([4, 5, 3], 6, 2) == (["b"], ["a", "c"])


def test_one_open_row_keeps_the_order():
    assert packed([4, 3, 2, 6, 1], 6, 1) == (["a", "bc", "d"], ["e"])


def test_open_rows_go_on():
    open_rows = [OpenRow(["x"], Room(2))]
    assert list(first_fit([("y", Room(4)), ("z", Room(1))], Room(6), open_rows, 4)) == [["x", "y"]]
    assert open_rows == [OpenRow(["z"], Room(1))]


def test_a_row_has_room_for_so_many_pictures():
    """Four would fit by their tokens; the third and fourth go on in another row, with a text."""
    items = [(name, Room(2, 1)) for name in "abcd"] + [("t", Room(4, 0))]
    open_rows = []
    assert list(first_fit(items, Room(8, 2), open_rows, 4)) == [["a", "b", "t"]]
    assert open_rows == [OpenRow(["c", "d"], Room(4, 2))]


def test_no_item_is_lost_and_no_row_is_too_long():
    sizes = [1 + (7 * i * i) % 10 for i in range(500)]
    open_rows = []
    closed = list(first_fit(enumerate(map(Room, sizes)), Room(16), open_rows, 8))
    rows = closed + [row.items for row in open_rows]
    assert sorted(i for row in rows for i in row) == list(range(500))
    assert all(sum(sizes[i] for i in row) <= 16 for row in rows)
    assert len(open_rows) <= 8
    assert len(rows) < 1.05 * sum(sizes) / 16
