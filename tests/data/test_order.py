import itertools
import json

import numpy as np
import pytest

from m6jax.data.corpus import Corpus
from m6jax.data.examples import Examples
from m6jax.data.feature_converters import Room
from m6jax.data.order import Order, Place
from m6jax.data.preprocessors import LanguageModelling, SpanDenoising
from m6jax.foundation.validated import ConfigError


def examples_of(lengths, vocabulary, length=16, objective=None):
    """Examples of documents of so many tokens, ends not counted."""
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    corpus = Corpus(name="x", tokens=np.full(offsets[-1], 7), offsets=offsets, num_bytes=None)
    return Examples(corpus, objective or LanguageModelling(), length, vocabulary)


def order_of(*examples, rates=None, length=16, **options):
    rates = rates or [1.0] * len(examples)
    settings = {"packing": True, "look_ahead": 0, "seed": 0, "shards": 8}
    return Order(examples, rates, room=Room(length), **(settings | options))


@pytest.fixture
def hundred(ids_vocabulary):
    return examples_of([1 + i % 15 for i in range(100)], ids_vocabulary)


def test_every_epoch_has_every_example_once_in_a_new_order(hundred):
    order = order_of(hundred, packing=False, shards=1)
    rows, _ = order.rows(order.begin(), 300)
    items = [item for row in rows for item in row]
    epochs = [items[i : i + 100] for i in (0, 100, 200)]
    for number, epoch in enumerate(epochs):
        assert {item.epoch for item in epoch} == {number}
        assert sorted(item.example for item in epoch) == list(range(100))
    orders = [[item.example for item in epoch] for epoch in epochs]
    assert orders[0] != orders[1] != orders[2]
    other = order_of(hundred, packing=False, shards=1, seed=1)
    assert other.rows(other.begin(), 300)[0] != rows


@pytest.mark.parametrize(("look_ahead", "filled"), [(0, 0.92), (64, 0.97)])
def test_packed_rows_hold_every_example_once_an_epoch(hundred, look_ahead, filled):
    """With 1,024 examples a round, epochs 0 to 8 are all in the rows of some rounds."""
    order = order_of(hundred, look_ahead=look_ahead)
    rows, place = order.rows(order.begin(), 2000)
    counts = order.counts(place)
    seen = [item for row in rows for item in row]
    assert len(seen) == len(set(seen))
    early = [item for item in seen if item.epoch < 9]
    assert len(early) == 900
    assert counts["tokens_in"] == sum(
        counts[name] for name in ("tokens_out", "tokens_dropped", "tokens_waiting")
    )
    _, units = hundred.sizes(np.array([item.example for item in seen]))
    assert counts["tokens_out"] == units.sum()
    assert counts["tokens_out"] > filled * 2000 * 16
    assert order.filled(order.begin(), 2000) == counts["tokens_out"] / (2000 * 16)


def test_rows_do_not_depend_on_how_they_are_asked_for(hundred):
    order = order_of(hundred)
    together, end = order.rows(order.begin(), 500)
    rows, place = [], order.begin()
    for count in itertools.cycle([1, 7, 32, 100]):
        some, place = order.rows(place, min(count, 500 - len(rows)))
        rows += some
        if len(rows) == 500:
            break
    assert rows == together
    assert place == end


@pytest.mark.parametrize("look_ahead", [0, 256])
def test_a_place_is_all_that_is_needed(hundred, look_ahead):
    order = order_of(hundred, hundred, rates=[3, 1], look_ahead=look_ahead)
    for taken in (0, 1, 37, 200, 700):
        _, place = order.rows(order.begin(), taken)
        saved = json.loads(json.dumps(place.to_json()))
        assert saved == place.to_json()
        fresh = order_of(hundred, hundred, rates=[3, 1], look_ahead=look_ahead)
        assert fresh.rows(Place.from_json(saved), 90) == order.rows(place, 90)
        assert fresh.counts(Place.from_json(saved)) == order.counts(place)


def test_a_mixture_keeps_its_rates(hundred, ids_vocabulary):
    """3:1 of 8,000 draws is 2,000 of the second, give or take 4 standard deviations of 39."""
    order = order_of(hundred, examples_of([5], ids_vocabulary), rates=[3, 1], packing=False)
    rows, _ = order.rows(order.begin(), 8000)
    sources = [row[0].source for row in rows]
    assert abs(sources.count(1) - 2000) < 156
    assert all(abs(sources[i::8].count(1) - 250) < 60 for i in range(8))  # in every shard
    epochs = [row[0].epoch for row in rows if row[0].source == 1]
    assert sorted(epochs) == list(range(len(epochs)))  # one example: every draw is an epoch


def test_rare_sources_come_too(hundred):
    order = order_of(hundred, hundred, rates=[999, 1], packing=False)
    rows, _ = order.rows(order.begin(), 10_000)
    assert 0 < sum(row[0].source for row in rows) < 30


def test_long_rows_take_several_rounds(ids_vocabulary):
    """Rows of 4,096 tokens of documents of 2: some rounds close no row."""
    order = order_of(examples_of([1] * 50, ids_vocabulary, length=4096), length=4096)
    rows, place = order.rows(order.begin(), 3)
    assert [len(row) for row in rows] == [2048] * 3
    assert place.start.number > 3


def test_what_the_objective_cannot_use_is_counted(ids_vocabulary):
    """Documents of 1 and 4 tokens: the first are dropped by denoising."""
    examples = examples_of([1, 4], ids_vocabulary, objective=SpanDenoising())
    order = order_of(examples)
    rows, place = order.rows(order.begin(), 100)
    assert {item.example for row in rows for item in row} == {1}
    counts = order.counts(place)
    drawn = counts["tokens_in"]
    assert counts["tokens_dropped"] == pytest.approx(drawn / 5, rel=0.01)
    assert drawn == counts["tokens_dropped"] + counts["tokens_out"] + counts["tokens_waiting"]


def test_keys_differ_between_epochs(hundred):
    order = order_of(hundred, packing=False)
    rows, _ = order.rows(order.begin(), 300)
    keys = {order.key(row[0]) for row in rows}
    assert len(keys) == 300


@pytest.mark.parametrize("wrong", [None, {}, {"start": {}, "row": 0}, {"start": 3, "row": 0}])
def test_not_a_place(wrong):
    with pytest.raises(ConfigError, match="not a place in the training data"):
        Place.from_json(wrong)
