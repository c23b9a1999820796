"""What docs/architecture.md promises of the source, read from the source with `ast`."""

import ast
import functools
import itertools
import json
import pathlib
import subprocess
import sys
from collections.abc import Iterator

from PIL import Image

sys.path.append(str(pathlib.Path(__file__).parents[1] / "docs"))
import draw_map
import write_settings

ROOT = pathlib.Path(__file__).parents[1]
PACKAGE = ROOT / "m6jax"
MAX_LINES = 400

# A package imports from those before it; inside of one, a module from those before it.
ORDER = {
    "foundation": (
        *("failures", "streams", "validated", "pytrees", "meshes", "partitioning", "platforms"),
        "cache_root",
        "whole_files",
    ),
    "layouts": ("leaf_name", "layout", "changes", "offload", "layer_slices", "state_building"),
    "processes": ("standing", "store", "aborting", "watch", "group", "launchers"),
    "modeling": (
        *("routers", "config", "layers", "attention", "dispatch", "balancing", "routing"),
        *("grouped", "moe", "block", "stack", "image", "transformer", "m6"),
    ),
    "optimizers": (
        *("schedules", "rounding", "adam", "adafactor", "optimizer", "optax_wrapper"),
        *("moments", "weight_update"),
    ),
    "training": (*("losses", "finite", "inspection", "train_state", "train_step", "streaming"),),
    "pseudo_to_real": (
        *("delinking", "second_moments", "gradient_agreement", "triggers", "upcycling"),
    ),
    "decoding": ("prompts", "cached", "methods", "generating"),
    "data": (),
    "trackers": ("services", "tracking"),
    "formats": (
        *("weights", "tensor_files", "plain", "hugging_face", "program", "settings"),
        "exporting",
    ),
    "configuration": (),
    "checkpointing": (),
    "experiment": (
        *("rules", "experiment", "summary", "identity", "lock", "model_dir", "programs"),
        *("stage_switch", "sampling", "answering", "gradient_comparison"),
    ),
    "reporting": ("writers", "progress", "tables", "report"),
    "planning": (),
    "converting": (),
    "run": (
        *("preemption", "same_everywhere", "evaluation", "ridge", "answers", "position"),
        *("held_out", "extending", "between_steps", "finite_guard", "choosing", "train"),
        *("inferring", "trained", "harness", "replay", "modes"),
    ),
    "main": (),
}
CORE = ("foundation", "layouts", "modeling", "optimizers", "training", "pseudo_to_real", "decoding")
# What is heavy or belongs to the edge stays in one room.
OWNERS = {
    "gin": ("configuration",),
    "tensorflow": ("data",),
    "tensorflow_text": ("data",),
    "seqio": ("data",),
    "orbax": ("checkpointing",),
    "tensorstore": ("checkpointing",),
}
COLLECTIVES = {
    *("psum", "pmean", "pmax", "pmin", "all_gather", "all_to_all", "psum_scatter", "ppermute"),
    *("axis_index", "axis_size", "shard_map", "with_sharding_constraint"),
}
MEMORY_KINDS = {"pinned_host", "unpinned_host"}
MESH_AXES = {"data", "expert", "model"}
PLACES = {"P", "PartitionSpec", "Mesh", "make_mesh"}
HARDWARE = {"devices", "local_devices", "device_count", "process_index", "default_backend"}


def sources() -> list[pathlib.Path]:
    return sorted(PACKAGE.rglob("*.py"))


def name_of(path: pathlib.Path) -> str:
    """`modeling.moe` for m6jax/modeling/moe.py, `modeling` for m6jax/modeling/__init__.py."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@functools.cache
def parse(path: pathlib.Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


MODULES = {name_of(path): path for path in sources()}


def imports(module: str) -> Iterator[str]:
    """Every module that a module imports, also inside functions: `jax.numpy`, `m6jax.layouts`."""
    for node in ast.walk(parse(MODULES[module])):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                yield whole if whole.removeprefix("m6jax.") in MODULES else str(node.module)


def own_imports(module: str) -> list[str]:
    """The modules of this package that a module imports, without `m6jax.`."""
    names = {name for name in imports(module) if name.split(".")[0] == "m6jax"}
    return sorted({name.removeprefix("m6jax").removeprefix(".") for name in names} - {""})


def attributes(module: str) -> Iterator[tuple[str, str]]:
    """(`jax.lax`, `scan`) for `jax.lax.scan`."""
    for node in ast.walk(parse(MODULES[module])):
        if isinstance(node, ast.Attribute):
            yield ast.unparse(node.value), node.attr


def strings(module: str) -> Iterator[str]:
    """String constants, without docstrings."""
    tree = parse(MODULES[module])
    alone = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in alone:
            yield node.value


def test_every_module_has_its_place():
    parts = [module.split(".") for module in MODULES if module]
    assert {top for top, *_ in parts} - set(ORDER) == set(), "give them a place above"
    inside = {(top, rest[0]) for top, *rest in parts if rest and ORDER[top]}
    known = {(top, module) for top, modules in ORDER.items() for module in modules}
    assert inside == known, "give them a place above"


def test_imports_go_to_what_comes_before():
    """A package's `__init__` exports what is in it; nothing in it imports it."""
    packages = list(ORDER)

    def astray(module: str, other: str) -> bool:
        (top, *rest), (other_top, *other_rest) = module.split("."), other.split(".")
        if top != other_top:
            return packages.index(other_top) > packages.index(top)
        if not rest or not ORDER[top]:
            return False
        if not other_rest:
            return True
        return ORDER[top].index(other_rest[0]) > ORDER[top].index(rest[0])

    pairs = [(module, other) for module in MODULES if module for other in own_imports(module)]
    assert len(pairs) > 100
    assert [f"{m} imports {other}" for m, other in pairs if astray(m, other)] == []
    assert own_imports("") == ["foundation.platforms", "run.trained"]


def test_no_module_imports_itself_through_others():
    done: set[str] = set()

    def visit(module: str, way: tuple[str, ...]) -> None:
        assert module not in way, " -> ".join((*way[way.index(module) :], module))
        if module not in done:
            for imported in own_imports(module):
                visit(imported, (*way, module))
            done.add(module)

    for module in MODULES:
        visit(module, ())


def test_the_picture_of_the_map_is_up_to_date():
    with Image.open(draw_map.PICTURE) as picture:
        drawn = json.loads(picture.text["Description"])
    assert drawn == draw_map.arrows(), "run python docs/draw_map.py"
    assert draw_map.PACKAGES.keys() == ORDER.keys()


def test_the_page_of_settings_is_as_written():
    written = write_settings.PAGE.read_text(encoding="utf-8")
    assert written == write_settings.page(), "run python docs/write_settings.py"


def test_heavy_libraries_stay_in_their_rooms():
    astray = [
        f"{module} imports {imported}"
        for module in MODULES
        for imported in imports(module)
        if (rooms := OWNERS.get(imported.split(".")[0])) and module.split(".")[0] not in rooms
    ]
    assert astray == []


def test_layers_are_scanned_and_rematerialised_in_two_files_alone():
    """`stack` and `m6`. A checkpoint of an elementwise function saves memory, no layer."""
    elementwise = ("modeling.stack", "modeling.layers", "modeling.attention")
    astray = []
    for module in MODULES:
        for owner, attr in attributes(module):
            lifted = owner in ("nn", "linen") and attr in ("scan", "remat", "checkpoint")
            recomputed = owner in ("jax", "ad_checkpoint") and attr in ("remat", "checkpoint")
            scanned = owner in ("jax.lax", "lax") and attr == "scan"
            if (
                (lifted and module != "modeling.m6")
                or (recomputed and module not in elementwise)
                or (scanned and module.startswith("modeling.") and module != "modeling.stack")
            ):
                astray.append(f"{module} uses {owner}.{attr}")
    assert astray == []


def test_memory_kinds_are_named_in_offload_alone():
    assert [m for m in MODULES if m != "layouts.offload" and MEMORY_KINDS & set(strings(m))] == []


def test_mesh_axes_are_named_in_partitioning_alone():
    """Elsewhere 'expert' is a logical axis, and no code speaks to the devices of a mesh axis."""
    astray = []
    for module in MODULES.keys() - {"foundation.partitioning"}:
        for node in ast.walk(parse(MODULES[module])):
            named = {leaf.value for leaf in ast.walk(node) if isinstance(leaf, ast.Constant)}
            called = ast.unparse(node.func).split(".")[-1] if isinstance(node, ast.Call) else ""
            placed = called in PLACES or (
                isinstance(node, ast.Subscript) and ast.unparse(node.value).endswith("mesh.shape")
            )
            if called in COLLECTIVES or (placed and named & MESH_AXES):
                astray.append(f"{module}:{node.lineno} {ast.unparse(node)}")
    assert astray == []


def test_modeling_never_asks_about_devices():
    asked = [
        f"{module} asks for {owner}.{attr}"
        for module in MODULES
        if module.startswith("modeling")
        for owner, attr in attributes(module)
        if owner == "jax" and attr in HARDWARE
    ]
    assert asked == []


def test_files_are_short():
    files = sources() + sorted((ROOT / "tests").rglob("*.py"))
    lengths = {f: len(f.read_text(encoding="utf-8").splitlines()) for f in files}
    long = [f"{f.relative_to(ROOT)}: {n} lines" for f, n in lengths.items() if n >= MAX_LINES]
    assert long == [], "split them by concern"


def test_files_of_tests_have_names_of_their_own():
    """Two files of one name cannot be collected together, and the second's tests do not run."""
    names = sorted(file.name for file in (ROOT / "tests").rglob("test_*.py"))
    assert [name for name, next_name in itertools.pairwise(names) if name == next_name] == []


def test_public_code_has_docstrings():
    missing = []

    def check(node: ast.AST, name: str) -> None:
        if not ast.get_docstring(node):  # type: ignore[arg-type]
            missing.append(name)
        for inner in node.body if isinstance(node, ast.Module | ast.ClassDef) else ():
            if isinstance(inner, ast.FunctionDef | ast.ClassDef) and inner.name[0] != "_":
                check(inner, f"{name}.{inner.name}")

    for module, path in MODULES.items():
        if parse(path).body:
            check(parse(path), module)
    assert missing == []


def run_python(code: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.strip()


def test_importing_takes_less_than_two_seconds():
    # Time of the processor, not of the clock: other work on the machine does not count.
    code = "import time; import m6jax, m6jax.main; print(time.process_time())"
    assert min(float(run_python(code)) for _ in range(2)) < 2.0


def test_the_core_imports_neither_data_nor_configuration_nor_checkpoints():
    core = [m for m in MODULES if m and m.split(".")[0] in CORE]
    code = (
        f"import importlib, sys\nfor m in {core}: importlib.import_module('m6jax.' + m)\n"
        f"print([name for name in {list(OWNERS)} if name in sys.modules])"
    )
    assert run_python(code) == "[]"
