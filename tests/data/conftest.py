"""A cache of the session's own, small vocabularies and small texts."""

import os

import pytest

from m6jax.data.config import LanguageModelling, TextData, TextFiles, TokenIds
from m6jax.data.vocab import Vocabulary


@pytest.fixture(scope="session", autouse=True)
def cache_home(tmp_path_factory):
    before = os.environ.get("XDG_CACHE_HOME")
    home = tmp_path_factory.mktemp("cache")
    os.environ["XDG_CACHE_HOME"] = str(home)
    yield home
    if before is None:
        del os.environ["XDG_CACHE_HOME"]
    else:
        os.environ["XDG_CACHE_HOME"] = before


@pytest.fixture
def ids_vocabulary() -> Vocabulary:
    """100 ids and 5 sentinels (104 down to 100); 1 ends a document."""
    return TokenIds(size=100, extra_ids=5).load((), ())


@pytest.fixture
def numbered(tmp_path):
    """Makes `TextData` whose document i is the tokens `10 + i` repeated; text is numbers."""

    def make(lengths, name="text", **options) -> TextData:
        path = tmp_path / f"{name}.txt"
        lines = [" ".join([str(10 + i)] * n) for i, n in enumerate(lengths)]
        path.write_text("\n".join(lines) + "\n")
        settings = {
            "sources": (TextFiles(train=str(path), hold_out_every=0, name=name),),
            "vocabulary": TokenIds(size=10 + len(lengths)),
            "objective": LanguageModelling(),
            "prefetch": 0,
        }
        return TextData(**(settings | options))

    return make
