"""Redrawing docs/pseudo_to_real.md: its pictures, and the tables between its markers.

    <!-- table: seeds -->
    ...                      replaced
    <!-- end -->

What stands between tables is written by people who looked at the pictures.
"""

import re
from pathlib import Path

from pseudo_to_real_study import plots, tables
from pseudo_to_real_study.results import read

PAGE = "pseudo_to_real.md"
_TABLE = re.compile(r"(<!-- table: (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)


def draw(results: Path, docs: Path) -> list[Path]:
    """Writes all pictures under `docs/images` and all tables into the page.

    Args:
      results: directory of the results.
      docs: directory of the page.

    Returns:
      What was written.
    """
    found = read(results)
    paths = plots.save(plots.pictures(found), docs / "images")
    page = docs / PAGE
    text = page.read_text(encoding="utf-8")
    page.write_text(with_tables(text, tables.all_tables(found)), encoding="utf-8")
    return [*paths, page]


def with_tables(text: str, by_name: dict[str, str]) -> str:
    """Returns a page with its tables replaced.

    Raises:
      KeyError: a table that there is none of.
    """
    return _TABLE.sub(lambda m: f"{m[1]}{by_name[m[2]]}\n{m[3]}", text)
