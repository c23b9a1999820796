"""Every template starts what it says: scripts run with the cluster's commands played by others."""

import importlib
import os
import pathlib
import shlex
import subprocess
import sys
import types

import pytest
import yaml

from m6jax import configuration, main
from m6jax.experiment import Experiment
from m6jax.experiment.model_dir import MACROS
from m6jax.foundation.failures import NotFiniteError

ROOT = pathlib.Path(__file__).parents[2]
LAUNCH = ROOT / "launch"
# Arguments, one a line, where they can be read; then what a real one would do.
PLAYED = """#!/usr/bin/env bash
printf '%s\\n' "$@" > "$0.arguments"
exit ${EXIT_CODE:-0}
"""
FLAGS = ["--gin_file=configs/quickstart.gin", "--gin.MODEL_DIR='/tmp/an odd name'"]


def experiment_of(command):
    """The experiment that a command trains, by the real parser; fails if it is no such command."""
    *start, module = command[: command.index("m6jax.main") + 1]
    assert [*start, module] == ["python", "-u", "-m", "m6jax.main"]
    flags = command[4:]
    bindings = [flag.removeprefix(main.GIN) for flag in flags if flag.startswith(main.GIN)]
    options = main._parser().parse_args([f for f in flags if not f.startswith(main.GIN)])
    files = [ROOT / file for file in options.gin_file]
    return configuration.load(files, bindings, [ROOT], root=Experiment, macros=MACROS).value


def play(directory, *names):
    """A PATH on which these commands are played."""
    for name in names:
        (directory / name).write_text(PLAYED, encoding="utf-8")
        (directory / name).chmod(0o755)
    return f"{directory}:{os.environ['PATH']}"


def arguments_of(directory, name):
    return (directory / f"{name}.arguments").read_text(encoding="utf-8").splitlines()


@pytest.mark.parametrize("script", sorted(LAUNCH.glob("*.sh")), ids=lambda path: path.name)
def test_scripts_are_well_formed(script):
    subprocess.run(["bash", "-n", script], check=True)
    assert os.access(script, os.X_OK)


@pytest.mark.parametrize(("code", "again"), [(75, True), (0, False), (2, False), (1, False)])
def test_slurm_starts_all_and_puts_a_preempted_job_into_the_queue_again(tmp_path, code, again):
    environment = {"PATH": play(tmp_path, "srun", "scontrol"), "SLURM_JOB_ID": "7"}
    environment["EXIT_CODE"] = str(code)
    (tmp_path / "scontrol").write_text(PLAYED.replace("${EXIT_CODE:-0}", "0"), encoding="utf-8")
    ended = subprocess.run([LAUNCH / "slurm.sh", *FLAGS], env=os.environ | environment)
    assert ended.returncode == code
    *options, command = arguments_of(tmp_path, "srun")[:2], arguments_of(tmp_path, "srun")[2:]
    assert options == [["--kill-on-bad-exit=1", "--label"]]
    assert experiment_of(command).model_dir == "/tmp/an odd name"
    requeued = (tmp_path / "scontrol.arguments").exists()
    assert requeued == again
    if again:
        assert arguments_of(tmp_path, "scontrol") == ["requeue", "7"]


def test_slurm_asks_for_a_process_for_each_gpu_and_a_signal_in_time():
    lines = (LAUNCH / "slurm.sh").read_text(encoding="utf-8").splitlines()
    asked = dict(
        x.removeprefix("#SBATCH --").split("=") for x in lines if "#SBATCH" in x and "=" in x
    )
    assert asked["ntasks-per-node"] == asked["gpus-per-node"]
    assert asked["signal"] == "TERM@120"  # to the processes, not to the script


def test_xpk_gets_the_command_as_one_argument(tmp_path):
    given = {"CLUSTER": "c", "WORKLOAD": "w", "IMAGE": "i", "TPU_TYPE": "v5litepod-16"}
    environment = os.environ | given | {"PATH": play(tmp_path, "xpk")}
    subprocess.run([LAUNCH / "xpk.sh", *FLAGS], env=environment, check=True)
    *options, command = arguments_of(tmp_path, "xpk")
    assert options[:2] == ["workload", "create"]
    assert {"--cluster=c", "--tpu-type=v5litepod-16", "--num-slices=1"} <= set(options)
    command = shlex.split(command.removeprefix("--command="))
    assert experiment_of(command).model_dir == "/tmp/an odd name"


def test_xpk_says_what_it_needs():
    ended = subprocess.run([LAUNCH / "xpk.sh"], capture_output=True, text=True)
    assert ended.returncode == 1
    assert "CLUSTER: name of the cluster" in ended.stderr


def test_a_jobset_is_whole():
    jobset = yaml.safe_load((LAUNCH / "jobset.yaml").read_text(encoding="utf-8"))
    assert (jobset["apiVersion"], jobset["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    (job,) = jobset["spec"]["replicatedJobs"]
    spec = job["template"]["spec"]
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    assert experiment_of(container["command"]).partitioning.expert == 4
    # As many processes as the slice has hosts.
    x, y = map(int, pod["nodeSelector"]["cloud.google.com/gke-tpu-topology"].split("x"))
    chips = container["resources"]["limits"]["google.com/tpu"]
    assert spec["parallelism"] == spec["completions"] == x * y / chips
    # What another start does not help ends all; a save takes its time.
    (rule,) = spec["podFailurePolicy"]["rules"]
    assert rule["action"] == "FailJob"
    assert rule["onExitCodes"]["containerName"] == container["name"]
    assert rule["onExitCodes"]["values"] == [main.EXIT_BAD_CONFIGURATION, NotFiniteError.exit_code]
    assert pod["restartPolicy"] == "Never"  # which a podFailurePolicy needs
    assert pod["terminationGracePeriodSeconds"] >= 120


class FakeRay(types.ModuleType):
    """Ray on one machine, where what is asked for is done at once."""

    def __init__(self):
        super().__init__("ray")
        self.exceptions = types.SimpleNamespace(RayActorError=ConnectionError)
        self.placed = []

    def init(self):
        pass

    def get(self, result):
        return result()

    def remote(self, cls):
        def method(actor, name):
            call = getattr(actor, name)
            return types.SimpleNamespace(remote=lambda *given: lambda: call(*given))

        def make(**options):
            self.placed.append(options)
            actor = cls()
            names = [name for name in dir(cls) if name[0] != "_"]
            handle = types.SimpleNamespace(**{name: method(actor, name) for name in names})
            return types.SimpleNamespace(remote=lambda: handle)

        return types.SimpleNamespace(options=make)


@pytest.fixture
def on_ray(monkeypatch):
    """`launch/on_ray.py` on a fake Ray."""
    ray = FakeRay()
    groups = types.ModuleType("ray.util.placement_group")
    groups.placement_group = lambda bundles, strategy: types.SimpleNamespace(
        ready=lambda: lambda: None, bundles=bundles, strategy=strategy
    )
    groups.remove_placement_group = lambda group: None
    strategies = types.ModuleType("ray.util.scheduling_strategies")
    strategies.PlacementGroupSchedulingStrategy = lambda group, **options: (group, options)
    modules = {
        "ray": ray,
        "ray.util": types.ModuleType("ray.util"),
        "ray.util.placement_group": groups,
        "ray.util.scheduling_strategies": strategies,
    }
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.syspath_prepend(LAUNCH)
    yield importlib.import_module("on_ray")
    del sys.modules["on_ray"]


@pytest.mark.parametrize(
    ("codes", "expected"),
    [([0, 0], 0), ([75, 75], 75), ([1, -9, 0, 0], 0), ([1, None, 2, 2], 2), ([1, 1, -9, -9], 1)],
)
def test_ray_starts_one_process_a_machine_and_all_again(on_ray, monkeypatch, codes, expected):
    """Codes of two processes, and of the two after a loss; None: the machine is gone."""
    commands, left = [], iter(codes)

    def ended(self, flags):
        commands.append(flags)
        code = next(left)
        if code is None:
            raise ConnectionError
        return code

    monkeypatch.setattr(on_ray.Host, "run", ended)
    job = yaml.safe_load((LAUNCH / "kuberay.yaml").read_text(encoding="utf-8"))
    python, script, *arguments = shlex.split(job["spec"]["entrypoint"])
    assert (python, ROOT / script) == ("python", LAUNCH / "on_ray.py")
    arguments = [a.replace("--restarts=10", "--restarts=1") for a in arguments]
    assert on_ray.main(arguments) == expected
    assert len(commands) == len(codes)
    first, second = commands[:2]
    assert first[-2:] == ["--num_processes=2", "--process_id=0"]
    assert second[-2:] == ["--num_processes=2", "--process_id=1"]
    assert first[-3] == second[-3]
    for command in commands:
        read = experiment_of(["python", "-u", "-m", "m6jax.main", *command])
        assert read.partitioning.expert == 8


def test_kuberay_has_the_machines_that_the_run_asks_for():
    job = yaml.safe_load((LAUNCH / "kuberay.yaml").read_text(encoding="utf-8"))
    (workers,) = job["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    asked = dict(x.split("=") for x in shlex.split(job["spec"]["entrypoint"]) if x.count("=") == 1)
    assert workers["replicas"] == int(asked["--hosts"])
    (container,) = workers["template"]["spec"]["containers"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == asked["--gpus"]


def test_the_launcher_of_one_machine_spreads_devices_evenly(monkeypatch):
    monkeypatch.syspath_prepend(LAUNCH)
    local = importlib.import_module("local")
    assert [local.fewer(n, 8) for n in (8, 4, 3, 2, 1)] == [4, 2, 2, 1, 1]
    assert local.fewer(4, None) == 3
    with pytest.raises(SystemExit, match="8 devices do not spread evenly over 3 processes"):
        local.main(["--processes=3", "--devices=8", "--", "--gin_file=x"])
