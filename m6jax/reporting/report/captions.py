"""Pictures with what a model wrote beside what is right; wrong answers are marked.

matplotlib's own fonts have no Chinese. Where the machine has a font with it, that is used; else the
characters are shown as boxes, and `captions.tsv` has the texts.
"""

import functools
import io
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from etils import epath
from matplotlib import font_manager, ft2font
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from m6jax.reporting.report.style import DELINK, INK

ACROSS = 6  # pictures in a line
_RIGHT = "#2a7d3f"
_BOX = "\u25a1"


class Caption(NamedTuple):
    """A picture with an answer.

    Attributes:
      pixels: uint8 [height, width, 3].
      group: where it belongs, such as the name of a source.
      prompt: what was asked.
      answer: what the model wrote.
      right: right answers.
    """

    pixels: np.ndarray
    group: str
    prompt: str
    answer: str
    right: tuple[str, ...]

    @property
    def is_right(self) -> bool:
        """Whether the answer is a right one."""
        return self.answer in self.right


def write_captions(
    report: epath.Path, captions: Sequence[Caption], shown: Sequence[Sequence[Caption]]
) -> None:
    """Writes `captions.tsv`, all of them, and `captions.png`, those of `shown`, line by line."""
    report.mkdir(parents=True, exist_ok=True)
    lines = ["\t".join(("group", "prompt", "answer", "right", "is_right"))]
    for c in captions:
        cells = c.group, c.prompt, c.answer, " | ".join(c.right), str(c.is_right)
        lines.append("\t".join(" ".join(cell.split()) for cell in cells))
    (report / "captions.tsv").write_text("\n".join(lines) + "\n")
    content = io.BytesIO()
    FigureCanvasAgg(captions_picture(shown)).print_png(content)
    (report / "captions.png").write_bytes(content.getvalue())


def captions_picture(lines: Sequence[Sequence[Caption]]) -> Figure:
    """Draws pictures with answers, wrong ones in red with the right one below.

    Args:
      lines: at most `ACROSS` captions each.
    """
    font = _font("".join(c.prompt + c.answer + "".join(c.right) for line in lines for c in line))
    down = len(lines)
    figure = Figure(figsize=(1.9 * ACROSS, 2.35 * down + 0.5), dpi=110, layout="constrained")
    figure.suptitle(
        "What the model writes; wrong answers in red, with the right one",
        x=0.01,
        ha="left",
        fontsize=13,
        fontweight="bold",
        color=INK,
    )
    for axes in figure.subplots(down, ACROSS, squeeze=False).flat:
        axes.set_axis_off()
    for number, line in enumerate(lines):
        for axes, caption in zip(figure.axes[number * ACROSS :], line, strict=False):
            axes.imshow(caption.pixels)
            axes.set_title(
                _shown(_title(caption), font),
                color=_RIGHT if caption.is_right else DELINK,
                fontproperties=font,
                parse_math=False,
            )
    return figure


def _title(c: Caption) -> str:
    lines = [c.group, f"{c.prompt}{c.answer or '(nothing)'}"]
    lines += [] if c.is_right else [f"right: {c.right[0]}"]
    return "\n".join(" ".join(line.split()) for line in lines)


def _font(text: str) -> font_manager.FontProperties:
    """Returns the font of this machine that has most of the characters; matplotlib's if alike."""
    wanted = {ord(c) for c in text if not c.isspace()}
    paths = [font_manager.findfont("DejaVu Sans"), *(f.fname for f in _fonts())]
    best = max(paths, key=lambda path: len(wanted & _characters(path)))
    return font_manager.FontProperties(fname=best, size=8)


def _fonts() -> list[font_manager.FontEntry]:
    """Returns the fonts that show characters; matplotlib's last resort has only frames for them."""
    fonts = (f for f in font_manager.fontManager.ttflist if not f.name.startswith("Last Resort"))
    return sorted(fonts, key=lambda font: font.fname)


@functools.cache
def _characters(path: str) -> frozenset[int]:
    try:
        return frozenset(ft2font.FT2Font(path).get_charmap())
    except RuntimeError:  # a font of pictures, which matplotlib cannot use
        return frozenset()


def _shown(text: str, font: font_manager.FontProperties) -> str:
    """Returns the text with boxes in the place of characters that the font lacks."""
    there = _characters(str(font.get_file()))
    return "".join(c if c in " \n" or ord(c) in there else _BOX for c in text)
