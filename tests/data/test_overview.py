import dataclasses

import numpy as np
import pytest

from m6jax.data.config import HeldOutFiles, TextData, TextFiles, TokenIds
from m6jax.data.inspection import inspect
from m6jax.data.overview import describe, overviews


@pytest.fixture
def data(tmp_path):
    """Two sources of 20 and 10 documents of 3 tokens, one held-out set; rows of 8."""
    for name, first, number in (("a", 10, 20), ("b", 40, 10)):
        lines = [f"{first + i} " * 2 + str(first + i) for i in range(number)]
        (tmp_path / f"{name}.txt").write_text("\n".join(lines) + "\n")
    (tmp_path / "other.txt").write_text("10 10 10\n9 9\n")
    a, b = (TextFiles(train=f"{tmp_path}/{name}.txt", name=name, hold_out_every=5) for name in "ab")
    return TextData(
        sources=(a, dataclasses.replace(b, document="line", hold_out_every=0)),
        held_out=(HeldOutFiles(files=f"{tmp_path}/other.txt", document="line"),),
        rates=(3, 1),
        vocabulary=TokenIds(size=60),
        length=8,
        prefetch=0,
    )


def test_numbers_of_the_sources(data):
    """In 100 rows are 200 examples, 150 of the 16 of `a` and 50 of the 10 of `b`."""
    a, b, other = overviews(data, data.train_rows(), 100)
    assert (a.name, a.documents, a.tokens, a.num_bytes, a.examples) == ("a", 16, 48, 144, 16)
    assert (a.held_out, a.held_out_tokens, a.duplicates) == (4, 12, 0)
    assert (b.documents, b.held_out, b.duplicates) == (10, 0, None)
    assert a.epochs == pytest.approx(150 / 16)
    assert b.epochs == pytest.approx(5.0)
    assert (other.documents, other.epochs) == (0, None)
    assert (other.held_out, other.duplicates) == (2, 1)  # 10 10 10 is trained on


def test_epochs_are_those_of_the_order(data):
    rows = data.train_rows()
    expected = rows.epochs(512)
    rows.take(512)
    drawn = rows.state()["place"]["start"]["drawn"]
    counts = [examples.count for examples in rows.examples]
    seen = np.divide(drawn, counts)
    np.testing.assert_allclose(seen, expected, rtol=0.15)  # drawn by chance, and a round ahead


def test_what_is_said_when_a_run_begins(data):
    rows = data.train_rows()
    a, b, other, guess, last = describe(data, rows, 100)
    assert a == (
        "a: 16 documents, 144 bytes, 48 tokens; 9.38 epochs in this run; held out 4 documents, 36"
        " bytes, 12 tokens"
    )
    assert b == "b: 10 documents, 90 bytes, 30 tokens; 5 epochs in this run"
    assert other.endswith("held out 2 documents, 13 bytes, 5 tokens; 1 of them trained on too")
    assert guess.startswith("a: every line is a document, as it seems (to change it: --gin.Text")
    first, second = rows.take(1)["targets"].reshape(2, 4)[:, 0].tolist()
    shown = " | ".join(f"{number} " * 3 for number in (first, second))
    assert last == f"rows are 100.0% full; the next: {shown}"


def test_rows_in_full(data):
    lines = list(inspect(data, 100))
    (summary,) = [line for line in lines if line.startswith("rows ")]
    assert summary == (
        "rows     of the next 256: 0.0% of the positions are padding, 2.0 examples a row, loss on"
        " 100.0% of the positions"
    )
    at = lines.index("row 0    positions 8, empty 0, examples 2, with loss 8")
    assert lines[at + 1].startswith("  1      0-3, loss on 0-3: ")
    assert lines[at + 2].startswith("  2      4-7, loss on 4-7: ")
    at = lines.index("lengths  b: 10 examples, in positions")
    assert lines[at + 1].split() == ["3", "-", "4", "10", "#" * 40]
