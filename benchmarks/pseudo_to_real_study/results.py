"""What the runs found: losses against tokens, and against time once steps have been measured.

A run of n steps, of which the Pseudo stage took p, took p * (seconds of a step of that stage) +
(n - p) * (seconds of a Real step). Time is given in steps of the Real stage, so that the machine's
speed drops out: with a Pseudo step of a quarter of a Real one, 60 of 100 steps there and 40 in the
Real stage take the time of 55 Real steps.
"""

import dataclasses
import json
from pathlib import Path

import numpy as np

from pseudo_to_real_study.variants import Study, Variant

# What a Real step is, by the name of the measurement.
RESIDENT, STREAMED = "real", "real-streamed"


@dataclasses.dataclass(frozen=True)
class Result:
    """A finished run.

    Attributes:
      variant: what was run.
      study: sizes.
      steps: int[n], updates after which held-out text was scored.
      loss: float[n], nats a token.
      switched: updates before the Real stage; 0 from scratch.
      bits_per_byte: at the end.
      fraction_dropped: of the experts' choices, at the end.
    """

    variant: Variant
    study: Study
    steps: np.ndarray
    loss: np.ndarray
    switched: int
    bits_per_byte: float
    fraction_dropped: float

    @property
    def final(self) -> float:
        """Held-out loss at the end."""
        return float(self.loss[-1])

    def step_reaching(self, loss: float) -> float | None:
        """Returns after how many steps the loss is reached, between two scores in proportion.

        Returns:
          None if it never is.
        """
        below = np.flatnonzero(self.loss <= loss)
        if not below.size:
            return None
        i = int(below[0])
        if i == 0:
            return float(self.steps[0])
        (s0, s1), (l0, l1) = self.steps[i - 1 : i + 1], self.loss[i - 1 : i + 1]
        return float(s0 + (s1 - s0) * (l0 - loss) / (l0 - l1))

    def real_steps(self, steps: np.ndarray | float, pseudo_step: float) -> np.ndarray | float:
        """Returns the time of so many steps of the run in steps of the Real stage.

        Args:
          steps: of the run.
          pseudo_step: time of a step of the Pseudo stage relative to one of the Real stage.
        """
        shared = np.minimum(steps, self.switched)
        return shared * pseudo_step + (steps - shared)


@dataclasses.dataclass(frozen=True)
class Found:
    """All results that there are.

    Attributes:
      runs: by name.
      step_times: what `step_times.measure` wrote; None before.
      depths: what `depths.measure` wrote; None before.
      paper: what `paper.measure` wrote; None before.
    """

    runs: dict[str, Result]
    step_times: dict | None
    depths: dict | None
    paper: dict | None

    def pseudo_step(self, variant: Variant, real: str) -> float | None:
        """Returns a Pseudo step relative to a Real one; None if that was not measured.

        Args:
          variant: whose Pseudo stage; Real from scratch has none, and any number would do.
          real: RESIDENT, STREAMED, or the topology of a plan of the paper's model.
        """
        if variant.unit is None:
            return 1.0
        if self.paper and real in self.paper["topologies"]:
            plan = self.paper["topologies"][real]
            return plan["pseudo"]["step_seconds"] / plan["real"]["step_seconds"]
        if self.step_times is None:
            return None
        seconds = self.step_times["median"]
        own = "" if variant.own == "nothing" else f"-own-{variant.own}"
        return seconds[f"unit{variant.unit}{own}"] / seconds[real]

    def seeds(self, variant: Variant) -> list[Result]:
        """Returns the results of a variant with all seeds that were run."""
        alike = [dataclasses.replace(variant, seed=seed) for seed in range(3)]
        return [self.runs[v.name] for v in alike if v.name in self.runs]

    def scratch(self, seed: int) -> Result | None:
        """Returns the result of Real from scratch with a seed."""
        return self.runs.get(Variant(unit=None, seed=seed).name)


def read(directory: Path) -> Found:
    """Reads all results in a directory."""
    documents = [
        json.loads(p.read_text(encoding="utf-8")) for p in sorted(directory.glob("*.json"))
    ]
    by_kind = {document["kind"]: document for document in documents}
    runs = [read_run(document) for document in documents if document["kind"] == "run"]
    return Found(
        runs={run.variant.name: run for run in runs},
        step_times=by_kind.get("step_times"),
        depths=by_kind.get("depths"),
        paper=by_kind.get("ten_trillion"),
    )


def read_run(document: dict) -> Result:
    """Returns a run's result from its JSON."""
    return Result(
        variant=Variant(**document["variant"]),
        study=Study(**document["study"]),
        steps=np.array(document["steps"]),
        loss=np.array(document["loss"]),
        switched=document["delinks"][-1]["step"] if document["delinks"] else 0,
        bits_per_byte=document["bits_per_byte"],
        fraction_dropped=document["fraction_dropped"],
    )
