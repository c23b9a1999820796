"""The model of 10 trillion parameters on paper: what the two stages' steps take on accelerators.

The planner's analytic engine says what a chip computes, sends and copies in a step of each stage;
the longest of the three is the step's time. The Real stage streams all expert weights from the
host, the Pseudo stage has nothing there.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

FILE = "ten_trillion.json"
STAGES = ("pseudo", "real")
TOPOLOGIES = ("v6e:16x16", "v5p:8x8x8")


def measure(results: Path, root: Path) -> dict[str, Any]:
    """Plans both stages for all topologies and writes `ten_trillion.json`.

    Args:
      results: directory of the results.
      root: of the repository, for its configurations.
    """
    plans = {t: {stage: plan(stage, t, root) for stage in STAGES} for t in TOPOLOGIES}
    result = {"kind": "ten_trillion", "topologies": plans}
    results.mkdir(parents=True, exist_ok=True)
    (results / FILE).write_text(json.dumps(result) + "\n", encoding="utf-8")
    print(json.dumps(result))
    return result


def plan(stage: str, topology: str, root: Path) -> dict[str, float]:
    """Returns the seconds that a step's parts take, and those of the step."""
    with tempfile.TemporaryDirectory() as directory:
        command = [
            *(sys.executable, "-m", "m6jax.main", "--mode=plan"),
            f"--gin_file=configs/runs/plan_m6_10t_{stage}.gin",
            f"--gin.TOPOLOGY='{topology}'",
            "--gin.PlanSettings.engines='ANALYTIC'",
            f"--gin.MODEL_DIR='{directory}'",
        ]
        subprocess.run(command, cwd=root, check=True, stdout=subprocess.DEVNULL)
        document = json.loads((Path(directory) / "plan.json").read_text(encoding="utf-8"))
    times = document["roofline"]
    names = ("compute", "interconnect", "host_link", "step_seconds")
    seconds = {name: round(times[name], 3) for name in names}
    return seconds | {"host_traffic_bytes": document["host_traffic_bytes_per_device"]}
