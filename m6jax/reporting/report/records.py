"""The records of a run, as series to be drawn.

>>> records = Records([{"step": 1, "stage": "pseudo", "split": "train", "loss": 5.0}, ...])
>>> records.series("train", "loss")
(array([1, 2, 3]), array([5.0, 4.8, 4.7]))
>>> records.stages
[StageSpan(name='pseudo', first=1, last=2), StageSpan(name='real', first=3, last=3)]
"""

import dataclasses
from collections.abc import Iterable
from typing import Any

import numpy as np

Record = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class StageSpan:
    """A stage of training and the first and last step that was recorded in it."""

    name: str
    first: int
    last: int


class Records:
    """The records of a run by split.

    Attributes:
      splits: The records of each split in order of steps; of two with one step the later counts.
      stages: The stages of training, in order.
    """

    def __init__(self, records: Iterable[Record]):
        by_step: dict[str, dict[int, Record]] = {}
        for record in records:
            by_step.setdefault(record["split"], {})[record["step"]] = record
        self.splits = {
            split: [found[step] for step in sorted(found)] for split, found in by_step.items()
        }
        self.stages: list[StageSpan] = []
        for record in self.splits.get("train", []):
            name, first, last = record["stage"], record["step"], record["step"]
            if self.stages and self.stages[-1].name == name:
                first = self.stages.pop().first
            self.stages.append(StageSpan(name, first, last))

    def series(self, split: str, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Returns the steps at which `name` is a number, finite or not, and these numbers."""
        found = [
            (record["step"], record[name])
            for record in self.splits.get(split, [])
            if isinstance(record.get(name), (int, float))
        ]
        values = np.array(found, dtype=np.float64).reshape(-1, 2)
        return values[:, 0].astype(np.int64), values[:, 1]

    def arrays(self, split: str, name: str) -> list[tuple[int, np.ndarray]]:
        """Returns (step, array) where `name` is an array."""
        return [
            (record["step"], np.array(record[name], dtype=np.float64))
            for record in self.splits.get(split, [])
            if isinstance(record.get(name), list)
        ]

    def tasks(self) -> list[str]:
        """Returns the names of the evaluated tasks, in alphabetical order."""
        prefix = "eval/"
        return sorted(s.removeprefix(prefix) for s in self.splits if s.startswith(prefix))
