"""A run's metrics as a table, for a notebook or a terminal.

>>> table = MetricTable([{"step": 1, "split": "train", "loss": 5.0}, ...])
>>> table.split("train")["loss"]
array([5.0, 4.8])
>>> pandas.DataFrame(table.records)
"""

from collections.abc import Iterable
from typing import Any

import numpy as np

WIDTH = 12


class MetricTable:
    """Records of `metrics.jsonl`, in their order.

    Attributes:
      records: one dict a row: step, stage, split, and what was measured.
    """

    def __init__(self, records: Iterable[dict[str, Any]]):
        self.records = list(records)

    def __len__(self) -> int:
        return len(self.records)

    @property
    def splits(self) -> list[str]:
        """What was measured: `train`, `eval/NAME`, `delink`, in order of appearance."""
        return list(dict.fromkeys(record["split"] for record in self.records))

    @property
    def columns(self) -> list[str]:
        """Names of the values that are one number or text in some row; arrays are in `records`."""
        return list(
            dict.fromkeys(
                name
                for record in self.records
                for name, value in record.items()
                if isinstance(value, int | float | str)
            )
        )

    def split(self, name: str) -> "MetricTable":
        """Returns the rows of one split; raises KeyError for one that is not there."""
        if name not in self.splits:
            raise KeyError(f"no split {name!r} (there are {', '.join(self.splits) or 'none'})")
        return MetricTable(record for record in self.records if record["split"] == name)

    def __getitem__(self, column: str) -> np.ndarray:
        """Returns a column, one entry a row: float64 with NaN where a row has none, or texts."""
        if column not in self.columns:
            raise KeyError(f"no column {column!r} (there are {', '.join(self.columns) or 'none'})")
        values = [record.get(column) for record in self.records]
        if any(isinstance(value, str) for value in values):
            return np.array(["" if value is None else value for value in values])
        return np.array([np.nan if value is None else value for value in values], np.float64)

    def __str__(self) -> str:
        names = self.columns
        rows = [names, *([_text(record.get(name)) for name in names] for record in self.records)]
        return "\n".join(" ".join(text[:WIDTH].rjust(WIDTH) for text in row) for row in rows)

    __repr__ = __str__


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.5g}"
    return "" if value is None or isinstance(value, list | dict) else str(value)
