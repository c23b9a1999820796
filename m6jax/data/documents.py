r"""The documents of text files.

A document is a line, the lines between blank lines, or a whole file. The line end that closes a
document is no part of it (the end-of-document token stands for it), so `a\n\nb\nc\n` is, as lines,
`a`, `b`, `c`; as paragraphs `a`, `b\nc`; as one file `a\n\nb\nc`.

What cannot be seen is no text: a byte-order mark is left out, lines may end in CR, LF or both (LF
is what the model sees), and a line of spaces of any kind or of zero-width characters is blank.
"""

import codecs
import io
import itertools
import statistics
from collections.abc import Iterator, Sequence
from typing import Literal

from m6jax.data.files import open_file

DocumentKind = Literal["line", "paragraph", "file"]

_BLOCK = 1 << 20
# Characters without width or ink that str.strip leaves: zero-width, joiners, byte-order mark,
# soft hyphen, marks of direction.
_INVISIBLE = "\u200b\u200c\u200d\u2060\ufeff\u00ad\u200e\u200f"

_LOOK_AT_FILES, _LOOK_AT_LINES = 8, 400
_MANY_FILES = 20  # so that every tenth can be held out
_WRAPPED_AT = (40, 100)  # characters of the longest lines of text that was wrapped


def is_blank(text: str) -> bool:
    """Whether there is nothing to be seen in a text."""
    return not text.strip() or not text.translate(dict.fromkeys(map(ord, _INVISIBLE))).strip()


def read_documents(name: str, document: DocumentKind) -> Iterator[bytes]:
    """Yields the documents of a file as UTF-8; blank ones are left out.

    Args:
      name: of the file.
      document: what a document is.
    """
    return (text for _, text in numbered_documents(name, document))


def numbered_documents(name: str, document: DocumentKind) -> Iterator[tuple[int, bytes]]:
    """Yields documents as `read_documents`, each with the number of its first line, from 1."""
    if document == "file":
        whole = "\n".join(_lines(name)).rstrip("\n")
        if not is_blank(whole):
            yield 1, whole.encode()
        return
    paragraph: list[str] = []
    number = 0
    for number, line in enumerate(_lines(name), start=1):
        blank = is_blank(line)
        if not blank:
            paragraph.append(line)
        if paragraph and (blank or document == "line"):
            first = number - len(paragraph) + (not blank)
            yield first, "\n".join(paragraph).encode()
            paragraph = []
    if paragraph:
        yield number - len(paragraph) + 1, "\n".join(paragraph).encode()


def guess_document(names: Sequence[str]) -> DocumentKind:
    """Returns what a document seems to be in some files, from the first lines of a few of them.

    Text with blank lines, or with lines wrapped at one width, is prose: of many files each is a
    document, of few the paragraphs. Other text has a document in every line.
    """
    step = -(-len(names) // _LOOK_AT_FILES)
    lines = [
        line for name in names[::step] for line in itertools.islice(_lines(name), _LOOK_AT_LINES)
    ]
    full = [line for line in lines if not is_blank(line)]
    parted = any(map(is_blank, "\n".join(lines).strip("\n").split("\n")))
    many = len(names) >= _MANY_FILES
    if parted:
        return "file" if many else "paragraph"
    return "file" if many and _is_wrapped(full) else "line"


def _is_wrapped(lines: list[str]) -> bool:
    """Whether most lines are nearly as long as the longest tenth, as where a program broke them."""
    if len(lines) < 10:
        return False
    lengths = sorted(map(len, lines))
    longest = lengths[len(lengths) * 9 // 10]
    low, high = _WRAPPED_AT
    return low <= longest <= high and statistics.median(lengths) >= 0.85 * longest


def _lines(name: str) -> Iterator[str]:
    """Yields the lines of a file without their ends."""
    decoder = io.IncrementalNewlineDecoder(
        codecs.getincrementaldecoder("utf-8-sig")(), translate=True
    )
    begun: list[str] = []  # of a line that the blocks so far did not end
    with open_file(name) as file:
        while block := file.read(_BLOCK):
            first, *more = decoder.decode(block).split("\n")
            begun.append(first)
            if more:
                yield "".join(begun)
                yield from more[:-1]
                begun = [more[-1]]
    begun.append(decoder.decode(b"", final=True))
    last = "".join(begun).removesuffix("\n")
    if last:
        yield last
