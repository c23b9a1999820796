"""Vocabularies of Hugging Face's tokenizers library: a `tokenizer.json` of any kind.

The library is an extra (`pip install 'm6jax[tokenizers]'`), imported when a vocabulary is read.
Many of these tokenizers change text (lower case, Unicode forms, spaces), so a corpus counts the
documents that decoding gives back as they were.
"""

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

from m6jax.data.cache import digest
from m6jax.data.errors import DataError
from m6jax.data.files import Scan, read_file
from m6jax.data.source import Source
from m6jax.data.vocab import Vocabulary
from m6jax.foundation.validated import ConfigError, PathName, nearest, validated

_ENDS = ("</s>", "<|endoftext|>", "<|end_of_text|>", "<eos>", "[SEP]")
_STARTS = ("<s>", "<bos>", "<|begin_of_text|>", "[CLS]")
_PADS = ("<pad>", "[PAD]", "<|pad|>")


@validated
class TokenizerFile:
    """A user's own `tokenizer.json`.

    Attributes:
      path: of the file.
      extra_ids: sentinels for span denoising, above its ids.
      end: the token that ends a document; None: the first of `</s>`, `<|endoftext|>`,
        `<|end_of_text|>`, `<eos>` and `[SEP]` that it has.
    """

    path: PathName
    extra_ids: int = 0
    end: str | None = None

    def check(self) -> None:
        """Checks the range."""
        if self.extra_ids < 0:
            raise ConfigError(f"TokenizerFile.extra_ids: {self.extra_ids} is negative")

    def model_if_there(self) -> bytes | None:
        """Returns the file; None where it is there no longer."""
        try:
            return read_file(self.path)
        except DataError:
            return None

    def pinned(self, path: str) -> "TokenizerFile":
        """Returns the setting of the same vocabulary whose file lies elsewhere."""
        return dataclasses.replace(self, path=path)

    def load(self, sources: Sequence[Source], scans: Sequence[Scan] | None = None) -> Vocabulary:
        """Returns the vocabulary; the sources are not read.

        Text never encodes to a special token, even where it holds the name of one. A document's
        first input is the tokenizer's token for beginnings, or else its end.

        Raises:
          DataError: there is no such file, it is no tokenizer, or has no end; or the library is not
            installed.
        """
        model = read_file(self.path)
        tokenizer = _parsed(model, self.path)
        tokenizer.encode_special_tokens = True
        tokenizer.no_truncation()
        tokenizer.no_padding()
        ids = tokenizer.get_vocab(with_added_tokens=True)
        end = self._end(ids)
        return Vocabulary(
            base_size=max(ids.values()) + 1,
            extra_ids=self.extra_ids,
            eos_id=end,
            pad_id=_first(ids, _PADS, end),
            fingerprint=digest("tokenizers", model.hex(), self.extra_ids, end),
            encode=lambda text: list(tokenizer.encode(text, add_special_tokens=False).ids),
            decode_pieces=lambda pieces: str(tokenizer.decode(pieces, skip_special_tokens=False)),
            model=model,
            start_id=_first(ids, _STARTS, end),
            restores_all=False,
        )

    def _end(self, ids: dict[str, int]) -> int:
        if self.end is not None:
            if self.end not in ids:
                raise DataError(
                    f"TokenizerFile.end: {self.path} has no token {self.end!r}"
                    f"{nearest(self.end, ids)}"
                )
            return ids[self.end]
        found = next((name for name in _ENDS if name in ids), None)
        if found is None:
            raise DataError(
                f"TokenizerFile.end: {self.path} has none of the tokens {', '.join(_ENDS)}; name"
                " the one that ends a document"
            )
        return ids[found]


def _parsed(model: bytes, path: str) -> Any:
    try:
        import tokenizers
    except ImportError as error:
        raise DataError(
            f"TokenizerFile: to read {path} the library tokenizers is needed (pip install"
            " 'm6jax[tokenizers]')"
        ) from error
    try:
        json.loads(model)
        return tokenizers.Tokenizer.from_str(model.decode())
    except Exception as error:  # the library raises Exception itself
        raise DataError(f"TokenizerFile.path: {path} is not a tokenizer.json ({error})") from error


def _first(ids: dict[str, int], names: Sequence[str], otherwise: int) -> int:
    return next((ids[name] for name in names if name in ids), otherwise)
