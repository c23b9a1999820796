"""Answers about pictures: how they are scored, shown, and held against a linear classifier."""

import numpy as np
import pytest
from PIL import Image

from m6jax.data.config import BuiltinPictures, SentencePiece, TextData
from m6jax.data.pictures import Pictures
from m6jax.data.questions import Question, questions, sources_with_questions
from m6jax.data.source import TRAIN, VALIDATION
from m6jax.reporting.report import captions as captions_report
from m6jax.run import ridge
from m6jax.run.answers import Answered, token_f1, write_captions

PATCHES = np.zeros((4, 12), np.uint8)


def asked(label, *answers):
    return Question(PATCHES, [5], f"{label}: ", answers, label)


@pytest.mark.parametrize(
    ("answer", "right", "f1"),
    [
        ("red car", "red car", 1.0),
        ("red car", "blue car", 0.5),
        ("car car", "car", 2 / 3),  # one of two words is right, all that is wanted is there
        ("红色汽车", "汽车", 2 / 3),
        ("car", "bus", 0.0),
        ("", "bus", 0.0),
    ],
)
def test_token_f1(answer, right, f1):
    assert token_f1(answer, right) == pytest.approx(f1)


def test_metrics_of_labels_and_several_answers():
    found = Answered(
        "x",
        VALIDATION,
        [asked("en", "cat", "a kitten"), asked("en", "dog"), asked("zh", "猫")],
        ["a kitten", "a dog", "狗"],
        ridge=0.5,
    )
    assert found.metrics() == {
        "en_exact": 0.5,
        "en_f1": pytest.approx((1 + 2 / 3) / 2),
        "zh_exact": 0.0,
        "zh_f1": 0.0,
        "ridge_exact": 0.5,
    }
    assert str(found) == (
        "answers  x, held out (3 questions): en 50.0% exact, token F1 0.833; zh 0.0% exact, token"
        " F1 0.000; a ridge classifier on the same pixels 50.0%"
    )


def test_questions_of_the_built_in_pictures():
    emoji = BuiltinPictures(name="emoji")
    data = TextData(
        sources=(emoji,),
        vocabulary=SentencePiece(size=1200),
        pictures=Pictures(grid=(2, 2), patch_size=4),
    )
    (source,) = sources_with_questions(data)
    first, second, *rest = questions(data, source, VALIDATION)
    record = next(emoji.records(VALIDATION))
    assert (first.prompt, first.answers, first.label) == ("English: ", (record.fields["en"],), "en")
    assert (second.prompt, second.answers) == ("中文：", (record.fields["zh"],))
    np.testing.assert_array_equal(first.patches, data.pictures.patches(record.picture))
    assert len(rest) == 2 * 51 - 2
    assert len(questions(data, source, TRAIN)) == 2 * 461


class TestRidge:
    @pytest.fixture
    def made(self):
        """Three classes of 40 noisy pictures each, of which half are to be classified."""
        rng = np.random.default_rng(0)
        classes = np.arange(120) % 3
        pixels = rng.normal(size=(3, 30))[classes] + rng.normal(scale=1.5, size=(120, 30))
        return pixels, [f"class {c}" for c in classes]

    def test_is_the_least_squares_of_its_penalty(self, made, monkeypatch):
        """Against the normal equations, with an intercept that carries no penalty."""
        pixels, classes = made
        x, y = pixels[:60], np.eye(3)[np.arange(60) % 3]
        values = np.linalg.eigvalsh((x - x.mean(0)) @ (x - x.mean(0)).T)
        monkeypatch.setattr(ridge, "_PENALTIES", np.array([0.3]))
        ones = np.column_stack([x, np.ones(60)])
        penalty = 0.3 * values.clip(0).mean() * np.diag([*[1.0] * 30, 0.0])
        weights = np.linalg.solve(ones.T @ ones + penalty, ones.T @ y)
        expected = np.column_stack([pixels[60:], np.ones(60)]) @ weights
        found = ridge.classify(x, classes[:60], pixels[60:])
        assert found == [f"class {c}" for c in expected.argmax(1)]

    def test_leaves_out_one_picture_at_a_time(self, made, monkeypatch):
        """The penalty it chooses is the one that is best when each is really left out."""
        pixels, classes = made
        x, known = pixels[:60], classes[:60]
        values = np.linalg.eigvalsh((x - x.mean(0)) @ (x - x.mean(0)).T).clip(0)
        penalties = np.array([1e-4, 1.0, 1e3])
        right = []
        y = np.eye(3)[np.arange(60) % 3]
        for penalty in penalties * values.mean():
            matrix = penalty * np.diag([*[1.0] * 30, 0.0])
            hits = 0
            for i in range(60):
                keep = np.arange(60) != i
                ones = np.column_stack([x, np.ones(60)])
                weights = np.linalg.solve(
                    ones[keep].T @ ones[keep] + matrix, ones[keep].T @ y[keep]
                )
                hits += int((ones[i] @ weights).argmax() == i % 3)
            right.append(hits)
        assert len(set(right)) > 1
        monkeypatch.setattr(ridge, "_PENALTIES", penalties)
        chosen = ridge.classify(x, known, pixels[60:])
        monkeypatch.setattr(ridge, "_PENALTIES", penalties[[int(np.argmax(right))]])
        assert chosen == ridge.classify(x, known, pixels[60:])

    def test_finds_classes(self, made):
        pixels, classes = made
        found = ridge.classify(pixels[:60], classes[:60], pixels[60:])
        assert np.mean([a == b for a, b in zip(found, classes[60:], strict=True)]) > 0.8


class TestCaptions:
    def test_are_written(self, tmp_path):
        """A line of pictures for each label; the table has every answer."""
        wanted = [asked("en", "cat"), asked("en", "dog $a"), asked("zh", "狗")]
        sets = [Answered("x", TRAIN, wanted, ["cat", "$b\tc", "狗"])]
        write_captions(tmp_path, sets, Pictures(grid=(2, 2), patch_size=2))
        assert (tmp_path / "captions.tsv").read_text().splitlines() == [
            "group\tprompt\tanswer\tright\tis_right",
            "x, trained on\ten:\tcat\tcat\tTrue",
            "x, trained on\ten:\t$b c\tdog $a\tFalse",
            "x, trained on\tzh:\t狗\t狗\tTrue",
        ]
        with Image.open(tmp_path / "captions.png") as picture:
            assert picture.size[1] < picture.size[0]

    def test_wrong_ones_are_marked(self):
        shown = [
            captions_report.Caption(np.zeros((4, 4, 3), np.uint8), "x", "en: ", answer, ("cat",))
            for answer in ("cat", "dog", "")
        ]
        figure = captions_report.captions_picture([shown])
        titles = [axes.title for axes in figure.axes[:3]]
        assert [t.get_text() for t in titles] == [
            "x\nen: cat",
            "x\nen: dog\nright: cat",
            "x\nen: (nothing)\nright: cat",
        ]
        assert [t.get_color() == captions_report.DELINK for t in titles] == [False, True, True]

    def test_characters_without_a_glyph_are_boxes(self, monkeypatch):
        monkeypatch.setattr(captions_report, "_fonts", list)
        font = captions_report._font("a猫")
        assert captions_report._shown("a猫\n", font) == "a\u25a1\n"

    def test_frames_in_the_place_of_characters_are_no_font(self):
        """Matplotlib has a font that claims every character and shows none."""
        assert not [f.name for f in captions_report._fonts() if "Last Resort" in f.name]
        assert "Last" not in captions_report._font("a猫").get_name()

    def test_a_font_that_has_them_is_taken(self, monkeypatch, tmp_path):
        """Here one that claims more characters than matplotlib's own."""
        own = captions_report._font("a").get_file()
        monkeypatch.setattr(
            captions_report, "_characters", lambda path: frozenset(map(ord, "a猫" * (path != own)))
        )
        other = type("Font", (), {"fname": "/other.ttf"})()
        monkeypatch.setattr(captions_report, "_fonts", lambda: [other])
        assert captions_report._font("a猫").get_file() == "/other.ttf"


def test_nothing_is_written_without_questions(tmp_path):
    write_captions(tmp_path / "report", [], Pictures())
    assert not (tmp_path / "report").exists()
