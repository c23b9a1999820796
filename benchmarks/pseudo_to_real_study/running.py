"""Making a run and keeping what it found; resumable, since the runs themselves are.

A run writes to `studies/` in m6jax's cache and goes on from there when it was interrupted. When it
has ended, its held-out losses are added to the results and what it wrote is removed.
"""

import dataclasses
import json
import shutil
from pathlib import Path

import fetch
import jax

from m6jax.data.cache import built, digest
from m6jax.foundation.cache_root import cache_root
from m6jax.run import train
from pseudo_to_real_study.variants import Study, Variant

HELD_OUT_EVERY = 10
EXCERPT_BYTES = 1500  # of a held-out speech: what is scored twenty times in a run


def text_of_study() -> Path:
    """Returns a directory with speeches to train on, and excerpts of others to score.

    Raises:
      NotFetched: the speeches are not in the cache.
    """
    speeches = sorted(fetch.fetched("sotu").glob("*.txt"))

    def build(directory: Path) -> None:
        for part in ("train", "held_out"):
            (directory / part).mkdir()
        for i, speech in enumerate(speeches):
            content = speech.read_bytes()
            if i % HELD_OUT_EVERY == HELD_OUT_EVERY - 1:
                excerpt = content[:EXCERPT_BYTES].decode("utf-8", errors="ignore")
                (directory / "held_out" / speech.name).write_text(excerpt, encoding="utf-8")
            else:
                (directory / "train" / speech.name).write_bytes(content)

    key = digest([speech.name for speech in speeches], HELD_OUT_EVERY, EXCERPT_BYTES)
    return built("texts", key, build)


def run(variant: Variant, study: Study, text: Path, results: Path) -> Path | None:
    """Makes a run, or goes on with it, and returns the file of its result.

    Args:
      variant: what to run.
      study: sizes.
      text: see `Variant.experiment`.
      results: directory of the results; one that is there already is left as it is.

    Returns:
      None if the run was asked to stop; the same call goes on with it.
    """
    path = results / f"{variant.name}.json"
    if path.exists():
        return path
    model_dir = cache_root() / "studies" / "pseudo_to_real" / variant.name
    if not train.run(variant.experiment(study, text, model_dir)).finished:
        return None
    with (model_dir / "metrics.jsonl").open(encoding="utf-8") as lines:
        records = [json.loads(line) for line in lines]
    results.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(summary(variant, study, records)) + "\n", encoding="utf-8")
    shutil.rmtree(model_dir)
    return path


def summary(variant: Variant, study: Study, records: list[dict]) -> dict:
    """Returns what is kept of a run: its settings and its held-out losses.

    Args:
      variant: what was run.
      study: sizes.
      records: the lines of its metrics.
    """
    # At a delink the same step is scored before and after; both have the same loss.
    scored = {r["step"]: r for r in records if r["split"].startswith("eval/")}
    last = scored[max(scored)]
    delinks = [r for r in records if r["split"] == "delink"]
    return {
        "kind": "run",
        "name": variant.name,
        "variant": dataclasses.asdict(variant),
        "study": dataclasses.asdict(study),
        "steps": sorted(scored),
        "loss": [round(float(scored[step]["loss"]), 5) for step in sorted(scored)],
        "bits_per_byte": round(float(last["bits_per_byte"]), 4),
        "fraction_dropped": round(float(last["fraction_dropped"]), 4),
        "delinks": [{k: r[k] for k in ("step", "loss_before", "loss_after")} for r in delinks],
        "jax": jax.__version__,
    }
