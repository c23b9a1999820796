"""Objectives for pictures with texts, each by hand; docs/data.md shows the same.

Ids: 0 the start and padding, 1 the end, 104 the first sentinel. A picture has two patches. A line
of `sees` is a position of the row, with a `#` for every position that it sees.
"""

import dataclasses

import jax
import numpy as np
import pytest

from m6jax.data.config import BuiltinPictures, SentencePiece, TextData, TokenIds
from m6jax.data.corpus import Album, Corpus
from m6jax.data.examples import Examples
from m6jax.data.feature_converters import RowShape, to_features
from m6jax.data.matching import Matching, other_picture
from m6jax.data.pictures import Pictures
from m6jax.data.preprocessors import Answering, TextDenoising
from m6jax.foundation.validated import ConfigError
from m6jax.modeling.attention import training_mask

PATCHES = np.ones((2, 3), np.float32)


def row(*examples, length):
    """The features of a row of examples that each have the picture, and who sees whom."""
    shape = RowShape(length, pad_id=0, pictures=2, slots=4, patch_dim=3)
    shown = [dataclasses.replace(example, patches=PATCHES) for example in examples]
    features = {name: values[0] for name, values in to_features([shown], shape).items()}
    segments, prefix = features["segment_ids"][None], features["bidirectional"][None]
    mask = jax.device_get(training_mask(segments, prefix))[0, 0]
    sees = ["".join(".#"[int(seen)] for seen in query) for query in mask]
    return features, sees


def check(features, **expected):
    assert {name: features[name].tolist() for name in expected} == expected


def test_captioning(ids_vocabulary):
    """Patches, then the caption 20 21: every token of it and its end carry loss."""
    caption = Answering().example(np.array([20, 21]), 0, 3, 0, ids_vocabulary)
    features, sees = row(caption, length=6)
    check(
        features,
        tokens=[0, 0, 0, 20, 21, 0],
        targets=[0, 0, 20, 21, 1, 0],
        patch_mask=[1, 1, 0, 0, 0, 0],
        segment_ids=[1, 1, 1, 1, 1, 0],
        positions=[0, 1, 2, 3, 4, 0],
        bidirectional=[1, 1, 1, 0, 0, 0],
        loss_weights=[0, 0, 1, 1, 1, 0],
    )
    assert sees == ["###...", "###...", "###...", "####..", "#####.", "......"]


def test_image_based_denoising(ids_vocabulary):
    """Patches and 20 21 22 23 without one token see each other; the whole text is asked for."""
    objective = TextDenoising(noise_density=0.25, mean_span_length=1.0)
    document = np.array([20, 21, 22, 23])
    assert objective.sequence_length(np.array([1, 4])).tolist() == [0, 9]
    assert objective.units_at_most(9) == 4
    cuts = set()
    for key in range(40):
        features, sees = row(objective.example(document, 0, 4, key, ids_vocabulary), length=12)
        left = features["tokens"][3:7].tolist()
        cut = left.index(104)
        cuts.add(cut)
        assert left == [*document[:cut], 104, *document[cut + 1 :]]
        check(
            features,
            tokens=[0, 0, 0, *left, 20, 21, 22, 23, 0],
            targets=[0, 0, *left, 20, 21, 22, 23, 1, 0],
            segment_ids=[1] * 11 + [0],
            positions=[*range(11), 0],
            bidirectional=[1] * 7 + [0] * 5,
            loss_weights=[0] * 6 + [1] * 5 + [0],
        )
        assert sees[:7] == ["#######....."] * 7
        assert sees[7:] == [
            "########....",
            "#########...",
            "##########..",
            "###########.",
            "." * 12,
        ]
    assert cuts == {0, 1, 2, 3}


def test_visual_question_answering(ids_vocabulary):
    """The question 20 21 with two right answers, 30 and 31 32: two examples, apart in one row."""
    answers = [
        Answering().example(np.array([20, 21, *answer]), 0, 3 + len(answer), 0, ids_vocabulary, 2)
        for answer in ([30], [31, 32])
    ]
    features, sees = row(*answers, length=14)
    check(
        features,
        tokens=[0, 0, 0, 20, 21, 30, 0, 0, 0, 20, 21, 31, 32, 0],
        targets=[0, 0, 20, 21, 30, 1, 0, 0, 20, 21, 31, 32, 1, 0],
        patch_mask=[1, 1, 0, 0, 0, 0, 1, 1, 0, 0, 0, 0, 0, 0],
        segment_ids=[1] * 6 + [2] * 7 + [0],
        positions=[0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 4, 5, 6, 0],
        bidirectional=[1] * 5 + [0] + [1] * 5 + [0] * 3,
        loss_weights=[0, 0, 0, 0, 1, 1, 0, 0, 0, 0, 1, 1, 1, 0],
    )
    assert sees[:6] == ["#####........."] * 5 + ["######........"]
    assert sees[6:11] == ["......#####..."] * 5
    assert sees[11:] == ["......######..", "......#######.", "." * 14]


@pytest.mark.parametrize(("matches", "answer"), [(True, [7]), (False, [8, 9])])
def test_image_text_matching(ids_vocabulary, matches, answer):
    """Patches and the text 20 21 see each other; whether they belong together is asked for."""
    objective = Matching(yes="7", no="8 9")
    example = objective.asked(np.array([20, 21]), matches, ids_vocabulary)
    n = len(answer)
    features, sees = row(example, length=9)
    check(
        features,
        tokens=[0, 0, 0, 20, 21, *answer, *[0] * (4 - n)],
        targets=[0, 0, 20, 21, *answer, 1, *[0] * (4 - n)],
        segment_ids=[1] * (5 + n) + [0] * (4 - n),
        positions=[*range(5 + n), *[0] * (4 - n)],
        bidirectional=[1] * 5 + [0] * 4,
        loss_weights=[0] * 4 + [1] * (n + 1) + [0] * (4 - n),
    )
    assert sees[:6] == ["#####...."] * 5 + ["######..."]
    assert example.length <= objective.sequence_length(np.array(2))


class TestMatching:
    @pytest.fixture
    def corpus(self):
        """Five pictures: two of one class, 20; one with two texts, 20 and 30; 40; 50 51."""
        texts = [[20], [20], [20], [30], [40], [50, 51]]
        offsets = np.cumsum([0, *map(len, texts)])
        patches = np.arange(5, dtype=np.uint8)[:, None, None] * np.ones((5, 2, 3), np.uint8)
        album = Album(patches, np.array([0, 1, 2, 2, 3, 4]), np.zeros(6, np.int64))
        tokens = np.concatenate(texts)
        return Corpus(name="x", tokens=tokens, offsets=offsets, num_bytes=None, album=album)

    def test_another_picture_does_not_go_with_the_text(self, corpus):
        of_class = {other_picture(corpus, 0, key) for key in range(200)}
        assert of_class == {3, 4}
        assert {other_picture(corpus, 3, key) for key in range(200)} == {0, 1, 3, 4}

    def test_the_same_picture_is_no_other_one(self, corpus):
        corpus.album.patches[4] = corpus.album.patches[3]
        assert {other_picture(corpus, 4, key) for key in range(200)} == {0, 1, 2}

    def test_a_rare_other_picture_is_found(self, corpus):
        """After the tries at random all pictures are looked at."""
        many = Album(
            np.arange(400, dtype=np.uint16)[:, None, None], np.arange(400), np.zeros(400, np.int64)
        )
        rare = dataclasses.replace(
            corpus, tokens=np.array([20] * 399 + [30]), offsets=np.arange(401), album=many
        )
        assert {other_picture(rare, 0, key) for key in range(50)} == {399}

    def test_without_another_text_all_match(self, corpus):
        alike = dataclasses.replace(corpus, tokens=np.full(7, 20), offsets=np.arange(7))
        assert other_picture(alike, 0, 3) is None
        examples = self.examples(alike)
        assert all(7 in examples.example(0, key).targets for key in range(20))

    def test_half_match_and_keys_decide(self, corpus):
        examples = self.examples(corpus)
        made = [examples.example(3, key) for key in range(200)]
        for example, again in zip(made, (examples.example(3, k) for k in range(200)), strict=True):
            own = example.patches[0, 0] == np.float32(2 / 127.5 - 1)
            assert example.targets.tolist() == [30, 7, 1] if own else [30, 8, 9, 1]
            np.testing.assert_array_equal(example.patches, again.patches)
        right = sum(7 in example.targets for example in made)
        assert 75 < right < 125

    def test_no_example_is_longer_than_planned(self, corpus):
        examples = self.examples(corpus)
        lengths, _ = examples.sizes(np.arange(examples.count))
        longest = [
            max(examples.example(n, key).length for key in range(20)) for n in range(examples.count)
        ]
        assert (np.array(longest) <= lengths).all()

    def test_the_built_in_pictures(self):
        """With the question in the text; the model is told of half of them that they match."""
        data = TextData(
            sources=(BuiltinPictures(name="fashion", objective=Matching()),),
            vocabulary=SentencePiece(size=300),
            pictures=Pictures(grid=(1, 2), patch_size=2, per_row=2),
            length=64,
            prefetch=0,
        )
        batch, vocabulary = data.train_rows().take(32), data.vocab()
        asked = np.where(batch["loss_weights"] > 0, batch["targets"], -1)
        answers = [vocabulary.decode(row[row >= 0].tolist()) for row in asked]
        assert set(answers) == {"yes", "no"}  # of the first of a row: it ends with it
        assert data.predicted_bytes("fashion") is None

    def test_what_cannot_be(self, ids_vocabulary):
        with pytest.raises(ConfigError, match=r"yes 'a' and no 'a' must be two texts"):
            Matching(yes="a", no="a")
        long = dataclasses.replace(ids_vocabulary, encode=lambda text: [5] * 7)
        with pytest.raises(ConfigError, match=r"'yes' has 7 tokens, at most 6 were expected"):
            Matching().asked(np.array([20]), True, long)

    def examples(self, corpus):
        vocabulary = TokenIds(size=100).load(())
        return Examples(corpus, Matching(yes="7", no="8 9"), 32, vocabulary)
