"""Metrics out: one JSON object a line for programs, TensorBoard for people.

>>> with MetricWriter(model_dir, resume_step=None) as writer:
...   writer.write({"step": 10, "stage": "pseudo", "split": "train", "loss": math.nan})
>>> print((model_dir / "metrics.jsonl").read_text())
{"step": 10, "stage": "pseudo", "split": "train", "loss": null, "nonfinite": {"loss": "nan"}}

JSON has no NaN and no infinity. Such a number is written as null, and `nonfinite` says under its
name what it was; for an array, what is among its nulls. `read_records` gives both back.

A run that goes on from step s writes the steps after s again, so their lines are dropped first;
the lines before are left as they are, byte for byte. Of the records of step s itself some were
written after its checkpoint, such as an evaluation at the end of a stage, and come again: a record
whose step, stage and split are there already is not written a second time.
"""

import json
import logging
import math
import os
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorboardX
from etils import epath

from m6jax.foundation.whole_files import write_whole
from m6jax.trackers import Tracked

logger = logging.getLogger(__name__)

FILE = "metrics.jsonl"
_REQUIRED = ("step", "stage", "split")
_ARRAY_DIGITS = 6
_MOST_CURVES = 64  # entries of a one-dimensional array that TensorBoard shows as curves

# It would say at every step that a loss is NaN.
logging.getLogger("tensorboardX.x2num").setLevel(logging.ERROR)


class MetricWriter:
    """Writes records to MODEL_DIR/metrics.jsonl and MODEL_DIR/tensorboard.

    A local file gets each line at once. A network path (`gs://`) cannot be appended to: there the
    files are written anew every `flush_seconds`, at `flush` and at `close`; call `flush` before a
    checkpoint is saved, so that no line before it can be lost.
    """

    def __init__(
        self,
        model_dir: epath.PathLike,
        resume_step: int | None = None,
        *,
        enabled: bool = True,
        keep_later: bool = False,
        flush_seconds: float = 30.0,
        trackers: Sequence[Tracked] = (),
    ):
        """Opens the files and drops the lines that will be written again.

        Args:
          model_dir: A local or a network path.
          resume_step: The step of the checkpoint that the run goes on from; lines of later steps
            are dropped. None for a run that starts anew: all lines are dropped.
          enabled: False on all processes but the first: nothing is read or written.
          keep_later: True for an evaluation beside a run: no line is dropped.
          flush_seconds: How often files on a network path are written.
          trackers: Services that get the numbers too; closed with the files.
        """
        self._trackers = tuple(trackers)
        self._enabled = enabled
        if not enabled:
            return
        directory = epath.Path(model_dir)
        directory.mkdir(parents=True, exist_ok=True)
        last_step = -1 if resume_step is None else resume_step
        self._lines = _Lines(directory / FILE, math.inf if keep_later else last_step)
        self._board = _Board(directory / "tensorboard", None if keep_later else last_step + 1)
        self._flush_seconds = flush_seconds
        self._flushed = time.monotonic()

    def __enter__(self) -> "MetricWriter":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def write(self, record: dict[str, Any]) -> None:
        """Writes one record, unless there is one of its step, stage and split.

        Args:
          record: Has `step`, `stage` and `split`; all else are numbers, strings, None, or arrays
            of any kind and rank (written as nested lists, floating-point ones with six digits).

        Raises:
          ValueError: If one of the three is missing, or a value is none of these.
        """
        if not self._enabled:
            return
        missing = [name for name in _REQUIRED if name not in record]
        if missing:
            raise ValueError(f"record of {sorted(record)} has no {missing[0]!r}")
        if not self._lines.is_new(record):
            return
        values = {name: _as_plain(name, value) for name, value in record.items()}
        self._lines.append(_as_json(values))
        self._board.add(values)
        for tracker in self._trackers:
            tracker.log(values)
        if time.monotonic() - self._flushed >= self._flush_seconds:
            self.flush()

    def text(self, name: str, text: str, step: int) -> None:
        """Shows a text in TensorBoard, such as the configuration."""
        if self._enabled:
            self._board.writer.add_text(name, text, step)

    def flush(self) -> None:
        """Returns when all lines are where they belong."""
        if self._enabled:
            self._flushed = time.monotonic()
            self._lines.flush()
            self._board.flush()

    def close(self) -> None:
        """Flushes, and closes the files."""
        if self._enabled:
            self._lines.flush()
            self._lines.close()
            self._board.close()
            for tracker in self._trackers:
                tracker.close()


def write_record(path: epath.Path, record: dict[str, Any]) -> None:
    """Writes one record as a file of its own, in the place of an older one.

    Where it cannot be written, such as in the directory of someone else, a warning says so.
    """
    values = {name: _as_plain(name, value) for name, value in record.items()}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, _as_json(values).encode() + b"\n")
    except OSError as error:
        logger.warning("%s cannot be written: %s", path, error)


def write_lines(path: epath.PathLike, records: Iterable[dict[str, Any]]) -> None:
    """Writes records to a file, one JSON object a line, in the place of what was there."""
    plain = ({name: _as_plain(name, v) for name, v in record.items()} for record in records)
    epath.Path(path).write_text("".join(f"{_as_json(values)}\n" for values in plain))


def read_records(model_dir: epath.PathLike) -> list[dict[str, Any]]:
    """Returns the records of MODEL_DIR/metrics.jsonl in order, empty if there is no such file.

    Numbers that are not finite are as they were when written; in arrays they are all NaN.
    A line that is no JSON is left out, with a warning.
    """
    path = epath.Path(model_dir) / FILE
    content = path.read_bytes() if path.exists() else b""
    return [record for _, record in _parsed(path, content) if record is not None]


def _parsed(path: epath.Path, content: bytes) -> Iterator[tuple[bytes, dict[str, Any] | None]]:
    """Yields (line with its end, record); None for a line that is no JSON, with a warning."""
    for number, line in enumerate(content.splitlines(keepends=True), 1):
        try:
            record = json.loads(line)
            record["step"]
        except (ValueError, KeyError, TypeError):
            if line.endswith(b"\n"):
                logger.warning("%s:%d: not a record, passed over", path, number)
                yield line, None
            continue  # a last line without an end: its writer was killed
        for name, kind in record.get("nonfinite", {}).items():
            record[name] = (
                float(kind)
                if record[name] is None
                else np.array(record[name], dtype=np.float64).tolist()
            )
        yield line if line.endswith(b"\n") else line + b"\n", record


class _Lines:
    """The lines of a file, of which those after `last_step` are dropped at the start."""

    def __init__(self, path: epath.Path, last_step: float):
        self._path = path
        before = path.read_bytes() if path.exists() else b""
        self._step: int | None = None
        self._known: list[Any] = []  # of this step
        kept = [
            line
            for line, record in _parsed(path, before)
            if record is None or (record["step"] <= last_step and self.is_new(record))
        ]
        self._local = "://" not in str(path)
        self._content, self._written = [] if self._local else kept, b"".join(kept) == before
        if self._local:
            if not self._written:
                write_whole(path, b"".join(kept))
            self._file = open(path, "ab")  # noqa: SIM115

    def is_new(self, record: dict[str, Any]) -> bool:
        """Whether no record of this step, stage and split was asked for before it.

        Records come in the order of their steps, so that those of the newest step are remembered.
        """
        step, *key = (record.get(name) for name in _REQUIRED)
        if step != self._step:
            self._step, self._known = step, []
        new = key not in self._known
        if new:
            self._known.append(key)
        return new

    def append(self, line: str) -> None:
        encoded = line.encode() + b"\n"
        if self._local:
            self._file.write(encoded)
            self._file.flush()
        else:
            self._content.append(encoded)
            self._written = False

    def flush(self) -> None:
        if not self._local and not self._written:
            self._path.write_bytes(b"".join(self._content))
            self._written = True

    def close(self) -> None:
        if self._local:
            self._file.close()


class _Board:
    """TensorBoard's files; for a network path they are made here and copied there.

    A number is a curve; so is each entry of a short array, such as a value for every layer. What is
    longer or has more dimensions is a histogram for each row.
    """

    def __init__(self, path: epath.Path, purge_step: int | None):
        self._target = path if "://" in str(path) else None
        self._directory = tempfile.mkdtemp(prefix="m6jax-") if self._target else str(path)
        self.writer = tensorboardX.SummaryWriter(
            self._directory,
            purge_step=purge_step,
            flush_secs=10,
            filename_suffix=f".{os.getpid()}.{time.time_ns()}",
        )

    def add(self, values: dict[str, Any]) -> None:
        step, split = values["step"], values["split"]
        for name, value in values.items():
            if name in _REQUIRED or value is None:
                continue
            tag = f"{split}/{name}"
            if isinstance(value, str):
                self.writer.add_text(tag, value, step)
            elif np.ndim(value) == 0:
                self.writer.add_scalar(tag, np.float64(value), step)
            elif value.ndim == 1 and value.size <= _MOST_CURVES:
                for index, entry in enumerate(value):
                    self.writer.add_scalar(f"{tag}/{index:02d}", np.float64(entry), step)
            else:
                rows = value.reshape(-1, value.shape[-1])
                for index, row in enumerate(rows):
                    finite = row[np.isfinite(row)]
                    if finite.size:
                        of_row = tag if value.ndim == 1 else f"{tag}/{index:02d}"
                        self.writer.add_histogram(of_row, finite, step)

    def flush(self) -> None:
        self.writer.flush()
        self._copy()

    def close(self) -> None:
        self.writer.close()
        self._copy()
        if self._target is not None:
            shutil.rmtree(self._directory)

    def _copy(self) -> None:
        if self._target is not None:
            self._target.mkdir(parents=True, exist_ok=True)
            for file in epath.Path(self._directory).iterdir():
                (self._target / file.name).write_bytes(file.read_bytes())


def _as_plain(name: str, value: Any) -> Any:
    """Returns a Python number, string or None, or an array of float64 or int64."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    array = np.asarray(value)
    if array.dtype.kind in "iub":
        return array.item() if array.ndim == 0 else array.astype(np.int64)
    try:
        array = array.astype(np.float64)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name}: a {type(value).__name__} is no number and no array") from error
    return array.item() if array.ndim == 0 else array


def _as_json(values: dict[str, Any]) -> str:
    plain, nonfinite = {}, {}
    for name, value in values.items():
        if isinstance(value, np.ndarray):
            finite = np.isfinite(value)
            if not finite.all():
                nonfinite[name] = " ".join(sorted({str(x) for x in value[~finite].tolist()}))
            boxed = _rounded(value).astype(object)
            boxed[~finite] = None
            value = boxed.tolist()
        elif isinstance(value, float) and not math.isfinite(value):
            nonfinite[name], value = str(value), None
        plain[name] = value
    if nonfinite:
        plain["nonfinite"] = nonfinite
    return json.dumps(plain, allow_nan=False, ensure_ascii=False)


def _rounded(array: np.ndarray) -> np.ndarray:
    """Returns a floating-point array with six digits: a load of 48 by 10,000 is 4 MB as it is."""
    if array.dtype.kind != "f":
        return array
    with np.errstate(divide="ignore", invalid="ignore"):
        digits = _ARRAY_DIGITS - 1 - np.floor(np.log10(np.abs(array)))
        scale = 10.0 ** np.clip(digits, -300, 300)
        return np.where(array == 0, 0.0, np.round(array * scale) / scale)
