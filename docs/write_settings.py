"""Writes docs/settings.md: every setting, read from the classes and their docstrings.

    python docs/write_settings.py

A test compares the page with what this writes.
"""

import itertools
import pathlib

from m6jax.configuration.listing import Setting, headline, settings_of
from m6jax.configuration.names import classes_within, full_name, home
from m6jax.converting import Conversion
from m6jax.experiment import Experiment
from m6jax.formats import Export
from m6jax.planning import PlanSettings

PAGE = pathlib.Path(__file__).parent / "settings.md"
ROOTS = (Experiment, PlanSettings, Conversion, Export)
BEGIN = """\
# Settings

Every setting that a gin file or the command line can give. Do not edit this page:
`python docs/write_settings.py` writes it. The same on a terminal:

```
m6jax --mode=settings                  # all classes
m6jax --mode=settings AdamW            # one class
m6jax --mode=settings --find held-out  # settings whose text has a word
```

A file imports a class's package, then names it: `from m6jax import optimizers`, then
`optimizers.AdamW.b1 = 0.95`. The command line needs no import: `--gin.AdamW.b1=0.95`. A setting
marked with * may change when a run is resumed; all others are what the run is.
"""


def page() -> str:
    """Returns the text of the page."""
    classes = sorted(classes_within(ROOTS), key=full_name)
    parts = [BEGIN]
    for package, members in itertools.groupby(classes, key=home_package):
        parts.append(f"## {package}\n")
        for cls in members:
            parts.append(f"### {cls.__name__}\n\n{headline(cls).partition(': ')[2]}\n")
            rows = [_row(setting) for setting in settings_of(cls)]
            if rows:
                head = ["| setting | type | default | meaning |", "|---|---|---|---|"]
                parts.append("\n".join([*head, *rows, ""]))
    return "\n".join(parts)


def home_package(cls: type) -> str:
    """Returns the package whose import gives a class its name, such as `optimizers`."""
    return home(cls).removeprefix("m6jax.")


def _row(setting: Setting) -> str:
    name = setting.name.partition(".")[2] + (" *" if setting.adjustable else "")
    default = "must be given" if setting.default is None else f"`{setting.default}`"
    cells = (name, f"`{setting.kind}`", default, setting.meaning)
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(PAGE)
