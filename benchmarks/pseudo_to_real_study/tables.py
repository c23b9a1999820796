"""The tables of docs/pseudo_to_real.md, in Markdown, from the results alone.

Where something was not run or not measured yet, a cell says so with a dash.
"""

from collections.abc import Sequence

import numpy as np

from pseudo_to_real_study.results import RESIDENT, STREAMED, Found, Result
from pseudo_to_real_study.variants import Variant, planned

NOTHING = "–"
HEADLINE = (
    ("Real from scratch", Variant(unit=None)),
    ("Real from scratch, peak 0.008", Variant(unit=None, peak=8)),
    ("unit 1, switch at 60 %", Variant(unit=1, switch=60)),
    ("unit 2, switch at 60 %", Variant(unit=2, switch=60)),
)


def all_tables(found: Found) -> dict[str, str]:
    """Returns every table by its name in the page."""
    return {
        "seeds": seeds(found),
        "grid": grid(found),
        "steps": steps(found),
        "depths": depths(found),
    }


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns a table in Markdown; the first column is text, the others are numbers."""
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def cases(found: Found) -> list[str]:
    """Returns the kinds of Real step that times are given for."""
    topologies = list(found.paper["topologies"]) if found.paper else []
    return [RESIDENT, STREAMED, *topologies]


def title(case: str) -> str:
    """Returns what a kind of Real step is called in a header."""
    names = {RESIDENT: "time, resident", STREAMED: "time, streamed"}
    return names.get(case, f"time, 10T on `{case}`")


def reached(found: Found, run: Result, case: str | None) -> float | None:
    """Returns the tokens or the time to the loss at which Real from scratch of the seed ends.

    Args:
      found: all results.
      run: of any variant.
      case: kind of Real step; None: tokens.

    Returns:
      As a share of what Real from scratch took; None if it is never reached, or was not measured.
    """
    scratch = found.scratch(run.variant.seed)
    step = run.step_reaching(scratch.final) if scratch else None
    if scratch is None or step is None:
        return None
    if case is None:
        return step / float(scratch.steps[-1])
    share = found.pseudo_step(run.variant, case)
    return None if share is None else run.real_steps(step, share) / float(scratch.steps[-1])


def seeds(found: Found) -> str:
    """Returns the table of what was run with three seeds."""
    header = ["", "seeds", "final loss", "against scratch", "tokens to its loss"]
    header += [f"{title(case)}" for case in cases(found)]
    rows = []
    for label, variant in HEADLINE:
        runs = found.seeds(variant)
        pairs = [(r, s) for r in runs if (s := found.scratch(r.variant.seed))]
        row = [label, str(len(runs)), _spread([r.final for r in runs], "{:.3f}")]
        row.append(_spread([100 * (r.final / s.final - 1) for r, s in pairs], "{:+.1f} %"))
        row += [_shares([reached(found, r, case) for r in runs]) for case in (None, *cases(found))]
        rows.append(row)
    return table(header, rows)


def grid(found: Found) -> str:
    """Returns the table of all runs with seed 0."""
    header = ["run", "switched at", "final loss", "bits a byte", "against scratch"]
    header += ["tokens to its loss", *(title(case) for case in cases(found))]
    scratch = found.scratch(0)
    rows = []
    for variant in planned():
        run = found.runs.get(variant.name)
        if run is None or variant.seed:
            continue
        against = f"{100 * (run.final / scratch.final - 1):+.1f} %" if scratch else NOTHING
        row = [f"`{variant.name}`", f"{run.switched}", f"{run.final:.3f}"]
        row += [f"{run.bits_per_byte:.3f}", against]
        row += [_shares([reached(found, run, case)]) for case in (None, *cases(found))]
        rows.append(row)
    return table(header, rows)


def steps(found: Found) -> str:
    """Returns the table of measured and planned step times."""
    rows = []
    if found.step_times:
        median = found.step_times["median"]
        for name, seconds in median.items():
            ratios = [f"{seconds / median[real]:.2f}" for real in (RESIDENT, STREAMED)]
            rows.append([f"`{name}`", f"{1e3 * seconds:.0f} ms", *ratios])
    measured = table(["stage", "a step", "of a resident Real step", "of a streamed one"], rows)
    if not found.paper:
        return measured
    rows = []
    for topology, plans in found.paper["topologies"].items():
        for stage, plan in plans.items():
            parts = [f"{plan[part]:.1f}" for part in ("compute", "interconnect", "host_link")]
            moved = f"{plan['host_traffic_bytes'] / 1e9:.0f} GB"
            ratio = plan["step_seconds"] / plans["real"]["step_seconds"]
            rows.append([f"`{topology}` {stage}", *parts, moved, f"{ratio:.2f}"])
    header = ["10T, as planned", "compute, s", "interconnect, s", "host link, s"]
    header += ["moved a step and chip", "step, Real = 1"]
    return measured + "\n\n" + table(header, rows)


def depths(found: Found) -> str:
    """Returns the table of bytes and seconds by depth."""
    header = ["layers", "stage", "parameters", "gradients", "optimizer", "the step's own"]
    header += ["a step", "delink"]
    rows = []
    for row in found.depths["depths"] if found.depths else ():
        for stage in ("pseudo", "real"):
            of = row[stage]
            names = ("parameters", "gradients", "optimizer", "temporary")
            sizes = [f"{of[name] / 1e6:,.1f} MB" for name in names]
            delink = f"{1e3 * row['delink_seconds']:.0f} ms" if stage == "real" else ""
            seconds = f"{1e3 * of['step_seconds']:.0f} ms"
            rows.append([str(row["depth"]), stage, *sizes, seconds, delink])
    return table(header, rows)


def _spread(values: Sequence[float], form: str) -> str:
    """Returns mean and range."""
    if not values:
        return NOTHING
    mean = form.format(np.mean(values))
    if len(values) == 1:
        return mean
    return f"{mean} ({form.format(min(values))} to {form.format(max(values))})"


def _shares(values: Sequence[float | None]) -> str:
    """Returns the mean of shares in percent, or how often there was none."""
    known = [value for value in values if value is not None]
    if not known:
        return NOTHING
    missing = len(values) - len(known)
    return _spread([100 * v for v in known], "{:.0f} %") + (f", {missing} never" if missing else "")
