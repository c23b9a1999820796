"""Saving and restoring the state of a run.

`save` is asynchronous: it returns when the arrays are copied, and a thread writes them while
training goes on. A save that failed is reported at the next `save`, `wait` or `close`:

>>> checkpoints.save(100, state, data_state, description)    # the disk is full
>>> checkpoints.save(200, state, data_state, description)
Traceback (most recent call last):
CheckpointError: saving checkpoint .../100 failed: OSError: No space left on device

`save`, `wait`, `close` and the methods that read arrays must be called by all processes.
"""

import functools
import json
import logging
import re
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from flax.traverse_util import unflatten_dict
from jax.experimental import multihost_utils

from m6jax.checkpointing import arrays, checksums, damage, stack_joining
from m6jax.checkpointing.pieces import Index, PieceReader, assemble
from m6jax.checkpointing.steps import DOCUMENTS, CheckpointError, Retention, StepDirectories
from m6jax.foundation import pytrees
from m6jax.foundation.validated import ConfigError

Tree = Any


logger = logging.getLogger(__name__)


class Checkpoints:
    """The checkpoints of one run, in one directory.

    Saving at a step replaces what is there under that step, once it is written. Then what `keep`
    and `keep_best` do not keep is removed, and so are steps after it, which belong to a future that
    the run has left.
    """

    def __init__(
        self,
        directory: epath.PathLike,
        *,
        keep: int = 3,
        keep_best: int = 0,
        best_metric: str = "loss",
        highest: bool = False,
        keep_before: int | None = None,
        timeout_seconds: int = 1200,
    ):
        """Opens `directory`, which need not exist; nothing is written before the first save.

        Args:
          directory: A local path or a network path (`gs://`).
          keep: How many of the newest steps are kept, at least 1.
          keep_best: How many steps with the lowest `best_metric` are kept, the newest or not.
          best_metric: The metric that `keep_best` compares.
          highest: Whether the highest are the best.
          keep_before: The newest step that is not after this one is kept as well.
          timeout_seconds: How long a process waits for the others, and for a save to be written.

        Raises:
          ConfigError: If a number is too small.
        """
        if timeout_seconds < 1:
            raise ConfigError(
                f"Checkpoints.timeout_seconds: expected at least 1, got {timeout_seconds}"
            )
        self._retention = Retention(keep, keep_best, best_metric, highest, keep_before)
        self._since: int | None = None
        self._directories = StepDirectories(directory, ocp.utils.is_checkpoint_finalized)
        self._timeout_seconds = timeout_seconds
        documents = {name: ocp.JsonCheckpointHandler() for name in DOCUMENTS}
        self._writer = ocp.AsyncCheckpointer(
            checksums.ListingHandler(state=arrays.handler(), **documents),
            # Made in the background, directories that cannot be made leave threads behind that
            # wait for them and keep the process from ending for five minutes.
            async_options=ocp.AsyncOptions(
                timeout_secs=timeout_seconds, create_directories_asynchronously=False
            ),
        )
        self._writing: int | None = None
        self._saves = 0

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def steps(self) -> list[int]:
        """Returns the complete steps in ascending order."""
        return self._directories.steps()

    def latest(self) -> int | None:
        """Returns the newest complete step, None if there is none.

        Directories that are empty, unfinished or lack a file are passed over, with one warning.
        """
        return self._directories.latest()

    def description(self, step: int) -> dict[str, Any]:
        """Returns the description that was saved with `step`; raises CheckpointError."""
        return self._directories.document(step, "description")

    def restore_data_state(self, step: int) -> dict[str, Any]:
        """Returns the state of the data iterator saved with `step`; raises CheckpointError."""
        return self._directories.document(step, "data_state")

    def metadata(self, step: int) -> Tree:
        """Returns the shapes and types of what `step` holds, without reading arrays.

        Returns:
          Nested dictionaries of ShapeDtypeStruct without shardings; the parts of a leaf's name are
          the keys. Restored as they are, the leaves are numpy arrays.

        Raises:
          CheckpointError: If the step is not there or damaged.
        """
        path = self._arrays_of(step)
        problem = damage.find(path) or checksums.find(path.parent)
        if problem is not None:
            raise CheckpointError(f"checkpoint {step}: {problem}")
        saved = arrays.saved_arrays(path)
        leaves = {n: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for n, leaf in saved.items()}
        return unflatten_dict(leaves, sep="/")

    def pieces(self, step: int) -> PieceReader:
        """Returns what reads parts of the arrays of `step`; raises CheckpointError for damage."""
        return PieceReader(self._arrays_of(step), self._undamaged(step))

    def go_back(self, step: int) -> None:
        """Says that the run goes on from `step`: later ones are removed after the next save."""
        self._since = step

    def remove_unfinished(self) -> None:
        """Removes what saves that failed have left; the next save would do so too."""
        self._directories.remove_unfinished()

    def save(
        self,
        step: int,
        state: Tree,
        data_state: dict[str, Any],
        description: dict[str, Any],
        metrics: dict[str, float] | None = None,
        wait: bool = False,
    ) -> None:
        """Writes one checkpoint, in the background where that is safe.

        Leaves in device memory are copied to the host before this returns and written behind the
        run's back. A leaf that rests on the host is written in place, without a copy; since the
        next step may change it, this returns only when all is written if there is such a leaf.

        Args:
          step: The number of finished steps.
          state: A tree of jax arrays; random keys as their raw data (`jax.random.key_data`).
            Leaves may be `Streamed`: then give `wait`, so that who makes their values is there.
          data_state: The data iterator's state, JSON.
          description: What the run is, JSON.
          metrics: Numbers by name, for `keep_best`, JSON.
          wait: Whether to return only when all is written.

        Raises:
          CheckpointError: If this save cannot start, or the one before it failed.
        """
        self.wait()
        leaves = arrays.by_name(state)
        documents = dict(zip(DOCUMENTS, (data_state, description, metrics or {}), strict=True))
        for name, document in documents.items():
            _check_json(name, document)
        try:
            if self._saves == 0 and jax.process_index() == 0:
                self._directories.remove_unfinished()
            self._saves += 1
            _wait_for_all(f"save {self._saves} of step {step}", self._timeout_seconds)
            items = {name: ocp.args.JsonSave(value) for name, value in documents.items()}
            self._writer.save(
                self._directories.path_to_write(step),
                args=checksums.Items(state=arrays.save_args(leaves), **items),
                force=True,
            )
        except Exception as error:
            raise self._failed_save(step, error) from error
        self._writing = step
        if wait or any(map(arrays.saved_in_place, leaves.values())):
            self.wait()

    def wait(self) -> None:
        """Returns when the last save is written; raises CheckpointError if it failed."""
        if self._writing is None:
            return
        step, self._writing = self._writing, None
        try:
            self._writer.wait_until_finished()
            if jax.process_index() == 0:
                self._directories.remove_old(step, self._retention, self._since)
            self._since = None
        except Exception as error:
            raise self._failed_save(step, error) from error

    def close(self) -> None:
        """Waits for the last save and lets go of what writing needs; raises as `wait` does."""
        try:
            self.wait()
        finally:
            self._writer.close()

    def restore(
        self, step: int, abstract: Tree, widen: Callable[[str], bool] = lambda name: False
    ) -> Tree:
        """Reads the state of `step`.

        Args:
          step: A step of `steps()`.
          abstract: The tree to return, of ShapeDtypeStructs (or arrays) with the shardings and
            memory kinds that the arrays shall have. A leaf without a sharding becomes a numpy
            array. A stack may be cut in other runs than it was saved in (see `layouts`).
          widen: Whether a leaf of a name may be saved with fewer bits than are asked for.

        Returns:
          A tree like `abstract` with the saved values.

        Raises:
          CheckpointError: If leaves are missing, left over, or differ in shape or type (before
            any array is read), or if a file is damaged.
        """
        wanted = dict(pytrees.flatten_named(abstract))
        saved = stack_joining.as_wanted(self._undamaged(step), wanted)
        wider = arrays.wider(saved, wanted, widen)
        if wider:
            logger.warning("checkpoint %d: %s", step, "; ".join(wider.values()))
        as_asked = {name: wanted[name] if name in wider else leaf for name, leaf in saved.items()}
        lines = pytrees.differences(as_asked, wanted)
        if lines:
            raise CheckpointError(
                f"checkpoint {self._directories.path(step)} does not hold what is asked for; "
                "saved against asked for:\n  "
                + "\n  ".join(lines)
                + "\nGive the configuration that it was saved with, or begin another run in "
                "it (Experiment.initial)."
            )
        values = self._read(step, wanted, saved)
        return pytrees.map_named(lambda name, _: values[name], abstract)

    def build(
        self, step: int, leaves: dict[str, Any], values: Callable[[str, Index], np.ndarray]
    ) -> dict[str, Any]:
        """Makes arrays of what `pieces(step)` reads; if one process cannot, no process returns.

        Args:
          step: For messages.
          leaves: By name, ShapeDtypeStructs with shardings; each becomes an array.
          values: Returns the values of a leaf at an index, once for each shard of this process.
        """
        built, problem = {}, None
        try:
            for name, leaf in leaves.items():
                built[name] = assemble(leaf, functools.partial(values, name))
        except CheckpointError as error:
            problem = str(error)
        _agree(step, problem)
        return built

    def _arrays_of(self, step: int) -> epath.Path:
        return self._directories.require(step) / "state"

    def _undamaged(self, step: int) -> dict[str, Any]:
        """Returns what arrays `step` holds, once the processes have looked at its files."""
        path, index = self._arrays_of(step), jax.process_index()
        problem = damage.find(path) if index == 0 else None
        _agree(step, problem or checksums.find(path.parent, index, jax.process_count()))
        return arrays.saved_arrays(path)

    def _read(self, step: int, wanted: dict[str, Any], saved: dict[str, Any]) -> dict[str, Any]:
        """Returns the arrays by name; if one process cannot read its part, no process returns."""
        path, problem, values = self._arrays_of(step), None, {}
        cut = {n: leaf for n, leaf in wanted.items() if isinstance(saved[n], jax.ShapeDtypeStruct)}
        kept = {name: leaf for name, leaf in wanted.items() if name not in cut}
        try:
            values = arrays.read_arrays(path, kept, saved)
        except jax.errors.JaxRuntimeError:
            raise  # a device without memory left is no damage
        except Exception as error:
            reason = error.__cause__ or error
            problem = f"{path} cannot be read: {str(reason).split(' [')[0]}"
        _agree(step, problem)
        if not cut:
            return values
        reader = stack_joining.WholeReader(self.pieces(step))
        return values | self.build(step, cut, functools.partial(stack_joining.values, reader))

    def _failed_save(self, step: int, error: Exception) -> CheckpointError:
        path = self._directories.path(step)
        return CheckpointError(f"saving checkpoint {path} failed: {type(error).__name__}: {error}")


def _wait_for_all(what: str, timeout_seconds: int) -> None:
    """Raises TimeoutError with the processes that do not come; orbax would wait for ever."""
    meet = ocp.multihost.get_barrier_sync_fn()
    try:
        meet(key=f"m6jax {what}", timeout_ms=1000 * timeout_seconds)
    except jax.errors.JaxRuntimeError as error:
        late = re.search(r"timed out task names:\s*([\d\s,]*\d)", str(error))
        who = f"process {late[1]} did not" if late else f"not all processes did ({error})"
        raise TimeoutError(f"{who} arrive at {what} within {timeout_seconds} s") from error


def _agree(step: int, problem: str | None) -> None:
    """Raises CheckpointError on all processes if one of them has a problem."""
    if jax.process_count() > 1:
        having = np.flatnonzero(multihost_utils.process_allgather(np.array(problem is not None)))
        if having.size and problem is None:
            problem = f"process {having[0]} cannot read it"
    if problem is not None:
        raise CheckpointError(f"checkpoint {step}: {problem}")


def _check_json(name: str, document: dict[str, Any]) -> None:
    try:
        json.dumps(document)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{name} cannot be saved as JSON: {error}") from error
