import numpy as np

from m6jax.data.feature_converters import FEATURES, OpenRow, first_fit, to_features
from m6jax.data.preprocessors import Example, LanguageModelling


def test_documents_of_3_and_2_tokens_in_length_6(ids_vocabulary):
    """Behaviour B13: the end of each document is its last token."""
    make = LanguageModelling().example
    row = [
        make(np.array([20, 21]), 0, 3, 0, ids_vocabulary),
        make(np.array([30]), 0, 2, 0, ids_vocabulary),
    ]
    features = to_features([row], 6, pad_id=0)
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
    features = to_features([[Example(tokens, tokens + 1, prefix=3)]], 5, pad_id=2)
    assert features["bidirectional"].tolist() == [[1, 1, 1, 0, 0]]
    assert features["loss_weights"].tolist() == [[0, 0, 1, 1, 0]]
    assert features["tokens"].tolist() == [[5, 6, 7, 8, 2]]


def test_rows_without_examples_are_padding():
    features = to_features([[], []], 3, pad_id=2)
    assert (features["tokens"] == 2).all()
    assert (features["targets"] == 2).all()
    for name in ("loss_weights", "segment_ids", "positions", "bidirectional"):
        assert features[name].shape == (2, 3)
        assert not features[name].any()


def packed(sizes, length, most_open):
    open_rows = []
    closed = list(first_fit(zip("abcdefgh", sizes, strict=False), length, open_rows, most_open))
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
    open_rows = [OpenRow(["x"], 2)]
    assert list(first_fit([("y", 4), ("z", 1)], 6, open_rows, 4)) == [["x", "y"]]
    assert open_rows == [OpenRow(["z"], 1)]


def test_no_item_is_lost_and_no_row_is_too_long():
    sizes = [1 + (7 * i * i) % 10 for i in range(500)]
    open_rows = []
    closed = list(first_fit(enumerate(sizes), 16, open_rows, 8))
    rows = closed + [row.items for row in open_rows]
    assert sorted(i for row in rows for i in row) == list(range(500))
    assert all(sum(sizes[i] for i in row) <= 16 for row in rows)
    assert len(open_rows) <= 8
    assert len(rows) < 1.05 * sum(sizes) / 16
