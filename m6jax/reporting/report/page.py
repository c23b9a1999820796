"""One HTML page of a run, or of several side by side, that needs no other file.

Pictures are inside of it, nothing is fetched, and it reads on a telephone.
"""

import base64
import html
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from m6jax.reporting.report.comparison import progress
from m6jax.reporting.report.records import Records

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #2b2b2b; max-width: 60rem; margin: 0 auto;
  padding: 1rem; }
h1, h2 { line-height: 1.2; }
img { max-width: 100%; height: auto; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; }
th, td { padding: 0.2rem 0.8rem 0.2rem 0; text-align: left; border-bottom: 1px solid #e6e6e6;
  white-space: nowrap; }
pre { font-size: 13px; background: #f7f7f5; padding: 0.8rem; overflow-x: auto; }
"""
# What a table of held-out sets shows, and how.
_HELD_OUT = {
    "loss": "{:.4f}",
    "perplexity": "{:.2f}",
    "bits_per_byte": "{:.4f}",
    "accuracy": "{:.4f}",
}


def page(
    title: str,
    runs: Mapping[str, Records],
    pictures: Mapping[str, bytes],
    configs: Mapping[str, str],
) -> str:
    """Returns the page.

    Args:
      title: its heading.
      runs: by name.
      pictures: PNG files by what they show.
      configs: `config.gin` by the name of the run.
    """
    parts = [f"<h1>{html.escape(title)}</h1>", "<h2>Training</h2>", _table(_training(runs))]
    held_out = _held_out(runs)
    if len(held_out) > 1:
        parts += ["<h2>Held-out text, at its last evaluation</h2>", _table(held_out)]
    for name, content in pictures.items():
        data = base64.b64encode(content).decode()
        alt = html.escape(name)
        parts += [f"<h2>{alt}</h2>", f'<img alt="{alt}" src="data:image/png;base64,{data}">']
    if len(configs) > 1:
        parts += ["<h2>Settings that differ</h2>", _table(_differences(configs))]
    for name, text in configs.items():
        heading = f"<summary>config.gin of {html.escape(name)}</summary>"
        parts.append(f"<details>{heading}<pre>{html.escape(text)}</pre></details>")
    head = (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{html.escape(title)}</title><style>{_STYLE}</style></head><body>"
    )
    return "\n".join([head, *parts, "</body></html>", ""])


def _training(runs: Mapping[str, Records]) -> list[list[str]]:
    rows = [["run", "stage", "steps", "loss at its end", "tokens", "hours"]]
    for name, run in runs.items():
        places = progress(run)
        records = run.splits.get("train", [])
        for stage in run.stages:
            last = max(i for i, r in enumerate(records) if r["step"] <= stage.last)
            loss = records[last].get("loss")
            rows.append(
                [
                    name,
                    stage.name,
                    f"{stage.first:,} to {stage.last:,}",
                    "" if loss is None else f"{loss:.4f}",
                    f"{places['tokens'][last]:,.0f}",
                    f"{places['hours'][last]:.3g}",
                ]
            )
    return rows


def _held_out(runs: Mapping[str, Records]) -> list[list[str]]:
    rows = [["run", "set", "step", *_HELD_OUT]]
    for name, run in runs.items():
        for task in run.tasks():
            record = run.splits[f"eval/{task}"][-1]
            cells = [_cell(record.get(column), how) for column, how in _HELD_OUT.items()]
            rows.append([name, task, f"{record['step']:,}", *cells])
    return rows


def _cell(value: Any, how: str) -> str:
    return how.format(value) if isinstance(value, int | float) else ""


def _differences(configs: Mapping[str, str]) -> list[list[str]]:
    """Returns a row for each line of a configuration that not all have, with their values."""
    values: dict[str, dict[str, str]] = {}
    for name, text in configs.items():
        for line in text.splitlines():
            setting, equals, value = line.partition(" = ")
            if equals and not line.startswith((" ", "#")):
                values.setdefault(setting, {})[name] = value
    rows = [["setting", *configs]]
    for setting, found in values.items():
        cells = [found.get(name, "") for name in configs]
        if len(set(cells)) > 1:
            rows.append([setting, *cells])
    return rows


def _table(rows: Sequence[Sequence[str]]) -> str:
    def cells(row: Iterable[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in row) + "</tr>"

    head, *body = rows
    inside = cells(head, "th") + "".join(cells(row, "td") for row in body)
    return f'<div class="wide"><table>{inside}</table></div>'
