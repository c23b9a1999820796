import gc
import itertools
import json
import threading

import numpy as np
import pytest

from m6jax.data.config import PrefixLM, TextData, TextFiles, TokenIds
from m6jax.foundation.validated import ConfigError

LENGTHS = [1 + (i * 7) % 11 for i in range(200)]  # documents of 2 to 12 tokens with their ends


def mixture(tmp_path, **options):
    paths = []
    for name, first in (("a", 10), ("b", 300)):
        path = tmp_path / f"{name}.txt"
        path.write_text("\n".join(f"{first + i} " * n for i, n in enumerate(LENGTHS)))
        paths.append(str(path))
    a, b = (TextFiles(train=p, hold_out_every=0, name=n) for p, n in zip(paths, "ab", strict=True))
    settings = {
        "sources": (a, b),
        "rates": (3, 1),
        "vocabulary": TokenIds(size=600),
        "objective": PrefixLM(),
        "length": 16,
        "prefetch": 4,
    }
    return TextData(**(settings | options))


def equal(one, other):
    return one.keys() == other.keys() and all(np.array_equal(one[k], other[k]) for k in one)


PACKINGS = ({"packing": False}, {"packing": True}, {"look_ahead": 256})


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("prefetch", [0, 4])
@pytest.mark.parametrize("stop", [0, 6, 40])
def test_restored_rows_are_bit_equal(tmp_path, packing, prefetch, stop):
    """In the middle of an epoch and after several; what was prefetched does not count as taken."""
    data = mixture(tmp_path, prefetch=prefetch, **packing)
    straight = data.train_rows()
    for _ in range(stop):
        straight.take(16)
    state = json.loads(json.dumps(straight.state()))
    assert state["rows_taken"] == 16 * stop
    expected = [straight.take(16) for _ in range(4)]
    resumed = data.train_rows()
    resumed.take(8)  # a place of its own, with batches made ahead that must be thrown away
    resumed.restore(state)
    assert resumed.state() == state
    assert all(equal(resumed.take(16), batch) for batch in expected)
    assert resumed.state() == straight.state()
    assert resumed.counts() == straight.counts()
    for rows in (straight, resumed):
        rows.close()


@pytest.mark.parametrize("process_count", [1, 2, 4])
def test_shares_of_processes_are_the_whole(tmp_path, process_count):
    data = mixture(tmp_path)
    whole = data.train_rows().take(16)
    shares = [data.train_rows(i, process_count).take(16) for i in range(process_count)]
    assert shares[0]["tokens"].shape == (16 // process_count, 16)
    for name, values in whole.items():
        assert np.array_equal(np.concatenate([share[name] for share in shares]), values)


@pytest.mark.parametrize("packing", PACKINGS)
def test_state_fits_any_number_of_processes(tmp_path, packing):
    data = mixture(tmp_path, **packing)
    four = [data.train_rows(i, 4) for i in range(4)]
    for _, rows in itertools.product(range(3), four):
        rows.take(8)
    states = [rows.state() for rows in four]
    assert all(state == states[0] for state in states)
    two = [data.train_rows(i, 2) for i in range(2)]
    for rows in two:
        rows.restore(states[0])
    after = np.concatenate([rows.take(8)["tokens"] for rows in two])
    expected = np.concatenate([rows.take(8)["tokens"] for rows in four])
    assert np.array_equal(after, expected)


def test_rows_do_not_depend_on_the_batch_size(tmp_path):
    data = mixture(tmp_path)
    whole = data.train_rows().take(48)
    changing = data.train_rows()
    batches = [changing.take(n) for n in (4, 4, 32, 8)]
    for name, values in whole.items():
        assert np.array_equal(np.concatenate([batch[name] for batch in batches]), values)


def test_800_numbered_examples(numbered):
    """Behaviour B10: ids of steps 7 to 10 after a restart at 6 are those of the straight run."""
    data = numbered([1] * 800, packing=False, length=2, prefetch=4)
    straight = data.train_rows()
    ids = [straight.take(16)["targets"][:, 0].tolist() for _ in range(50)]
    assert sorted(itertools.chain.from_iterable(ids)) == list(range(10, 810))  # one epoch
    first = data.train_rows()
    for _ in range(6):
        first.take(16)
    second = data.train_rows()
    second.restore(first.state())
    assert [second.take(16)["targets"][:, 0].tolist() for _ in range(4)] == ids[6:10]


def test_tokens_in_are_tokens_out(tmp_path):
    rows = mixture(tmp_path).train_rows()
    out = sum(int((rows.take(32)["segment_ids"] > 0).sum()) for _ in range(20))
    counts = rows.counts()
    assert counts["tokens_out"] == out
    assert counts["tokens_dropped"] == 0
    assert counts["tokens_in"] == out + counts["tokens_waiting"]


def test_documents_are_whole_in_their_rows(tmp_path):
    """Every segment is one document: one id over and over, then the end."""
    batch = mixture(tmp_path).train_rows().take(64)
    for targets, segments in zip(batch["targets"], batch["segment_ids"], strict=True):
        for segment in range(1, segments.max() + 1):
            *body, end = targets[segments == segment].tolist()
            assert end == 1
            assert len(set(body)) == 1
            assert len(body) == LENGTHS[(body[0] - 10) % 290]


def test_state_of_other_data(tmp_path):
    state = mixture(tmp_path).train_rows().state()
    for options in ({"seed": 1}, {"length": 32}, {"rates": (1, 1)}, *PACKINGS[::2]):
        with pytest.raises(ConfigError, match="the saved place is in other training data"):
            mixture(tmp_path, **options).train_rows().restore(state)
    same = mixture(tmp_path, prefetch=0).train_rows()
    same.restore(state)  # how far ahead is read may change
    with pytest.raises(ConfigError, match="not a place in the training data"):
        same.restore({"fingerprint": state["fingerprint"]})


def test_rows_that_cannot_be_dealt(tmp_path):
    rows = mixture(tmp_path).train_rows(0, 3)
    for wrong in (0, 16):
        with pytest.raises(
            ConfigError, match=f"rows, {wrong}, must be a positive multiple of .* processes, 3"
        ):
            rows.take(wrong)
    with pytest.raises(ConfigError, match=r"process_index 3 is not in 0 \.\.\. 2"):
        mixture(tmp_path).train_rows(3, 3)


def test_errors_of_the_thread_are_raised_by_take(tmp_path, monkeypatch):
    rows = mixture(tmp_path).train_rows()
    rows.take(4)
    rows.close()

    def fail(self, number, key):
        raise OSError("the disk is gone")

    monkeypatch.setattr("m6jax.data.examples.Examples.example", fail)
    with pytest.raises(OSError, match="the disk is gone"):
        rows.take(4)


def test_threads_end_with_their_rows(tmp_path):
    def alive():
        return [t for t in threading.enumerate() if t.name == "m6jax-data"]

    gc.collect()
    before = len(alive())
    rows = mixture(tmp_path).train_rows()
    for count in (4, 8, 4):
        rows.take(count)
    assert len(alive()) == before + 1
    del rows
    gc.collect()
    assert len(alive()) == before
