import pytest

from m6jax.data import documents
from m6jax.data.config import HeldOutFiles, TextData, TextFiles
from m6jax.data.documents import guess_document, is_blank, numbered_documents, read_documents

PROSE = "It was the best of times, it was the worst of times, it was the age\n" * 5


@pytest.fixture
def write(tmp_path):
    def write(content, name="text.txt"):
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
        return str(tmp_path / name)

    return write


@pytest.mark.parametrize("block", [1, 2, 1 << 20])
@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize(
    ("document", "expected"),
    [
        ("line", ["a", "b", "爱"]),
        ("paragraph", ["a", "b\n爱"]),
        ("file", ["a\n\n\u3000\nb\n爱"]),
    ],
)
def test_documents(write, monkeypatch, block, end, document, expected):
    """Whatever ends a line, wherever a block ends, with a byte-order mark in front."""
    monkeypatch.setattr(documents, "_BLOCK", block)
    path = write("\ufeff" + end.join(["a", "", "\u3000", "b", "爱", ""]))
    assert [d.decode() for d in read_documents(path, document)] == expected


@pytest.mark.parametrize("text", ["", " \t", "\u3000", "\xa0", "\u200b\ufeff", " \u200d\xad "])
def test_what_cannot_be_seen_is_blank(write, text):
    assert is_blank(text)
    for document in ("line", "paragraph", "file"):
        assert list(read_documents(write(f"{text}\n\n{text}"), document)) == []


def test_invisible_characters_in_text_stay():
    assert not is_blank("\u200ba")
    assert not is_blank("。")


def test_guess(write):
    """Prose has blank lines or a width at which it was wrapped; other text has its lines."""
    assert guess_document([write("one\ntwo, which is longer\nthree\n")]) == "line"
    assert guess_document([write(PROSE + "\n" + PROSE)]) == "paragraph"
    assert guess_document([write(PROSE + "\r\r" + PROSE)]) == "paragraph"
    assert guess_document([write("\n\n" + PROSE)]) == "line"
    many = [write(PROSE * 2, f"{i}.txt") for i in range(20)]
    assert guess_document(many) == "file"
    assert guess_document(many[:19]) == "line"
    parted = [write(f"a {i}\n\nb", f"{i}.txt") for i in range(20)]
    assert guess_document(parted) == "file"
    uneven = [write("one\ntwo, which is longer\n" * 9, f"{i}.txt") for i in range(20)]
    assert guess_document(uneven) == "line"


def test_a_guess_is_used_and_said(write):
    path = write("\n".join(f"{PROSE} {i}\n" for i in range(20)))
    source = TextFiles(train=path)
    assert len(list(source.documents("train"))) == 18
    assert source.separator == b"\n\n"
    held_out = HeldOutFiles(files=write("a\nb\n", "b.txt"))
    data = TextData(sources=(source,), held_out=(held_out,))
    prose, lines = data.guesses()
    assert prose.startswith("text: every paragraph is a document, as it seems (to change")
    assert "--gin.TextFiles.document=\"'line'\"" in prose
    assert "held_out: every line is a document" in lines
    assert TextData(sources=(TextFiles(train=path, document="line"),)).guesses() == []
    as_said = TextFiles(train=path, document="paragraph")
    assert source.scan() == as_said.scan()


def test_documents_know_their_lines(write):
    """Counted from 1, blank lines included."""
    path = write("\n\na\nb\n\n \nc\n")
    assert list(numbered_documents(path, "paragraph")) == [(3, b"a\nb"), (7, b"c")]
    assert list(numbered_documents(path, "line")) == [(3, b"a"), (4, b"b"), (7, b"c")]
    assert list(numbered_documents(write("a\n\nb"), "paragraph")) == [(1, b"a"), (3, b"b")]
    assert [line for line, _ in numbered_documents(path, "file")] == [1]
