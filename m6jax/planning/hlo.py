"""What a compiled program does, read from its text: products, collectives, copies to the host.

The compiler's own counts take the body of a loop once. Here every computation is summed up, and
what a loop calls counts as often as it goes round:

    body    { dot ... }                                  2 * 8 * 16 * 16 FLOPs
    ENTRY   { while(...), body=body, known_trip_count 24 }         24 times that

>>> measure(text).flops
98304.0

Where the text does not say how often a loop goes round, its condition does, if it counts up to a
constant (all scans do). Loops of which neither is known, such as those that wait for data, count
once and are named in `Program.unknown_loops`.
"""

import dataclasses
import functools
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping

from m6jax.planning.estimate import COLLECTIVES, Collective
from m6jax.planning.products import GEMM_TARGETS, convolution_flops, dot_flops
from m6jax.planning.replica_groups import axes_of, groups_of

HOST_SPACE = "S(5)"  # how a layout says that an array is in host memory
_BITS = {"pred": 8, "token": 0, "opaque": 0}
_TYPE = re.compile(r"\b([a-z]\w*)\[([\d,]*)\](\{[^}]*\})?")
_NAME = re.compile(r"%([\w.\-]+)")
_HEAD = re.compile(r"\s+(ROOT )?%([\w.\-]+) = ")
_COMPUTATION = re.compile(r"(ENTRY )?%([\w.\-]+) \(")
_OPCODE = re.compile(r"\s*([a-z][\w\-]*)\(")
_CALLS = re.compile(
    r"(?:calls|to_apply|body|condition|true_computation|false_computation)=%([\w.\-]+)"
    r"|(?:branch_computations|called_computations)=\{([^}]*)\}"
)
_TRIPS = re.compile(r'"known_trip_count":\s*\{"n":\s*"(\d+)"')
# What runs the computations that it names; others (reduce, sort, ...) name a scalar function.
_CALLERS = {"fusion", "call", "while", "conditional", "async-start", "custom-call"}
# What holds or passes arrays on without touching them.
_PASSIVE = {
    *("parameter", "tuple", "get-tuple-element", "bitcast", "while", "conditional", "call"),
    *("fusion", "async-start", "async-update", "async-done", "copy-done", "optimization-barrier"),
    *("custom-call", "after-all", "constant"),
}


@dataclasses.dataclass(frozen=True)
class Array:
    """Type of an array: element type, sizes, and whether it is in host memory."""

    dtype: str
    shape: tuple[int, ...]
    on_host: bool

    @property
    def bytes(self) -> int:
        """Bytes without padding."""
        digits = re.search(r"\d+", self.dtype)
        bits = _BITS.get(self.dtype, int(digits[0]) if digits else 0)
        return math.prod(self.shape) * bits // 8


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a computation.

    Attributes:
      name: its own.
      arrays: of its result; several for a tuple.
      opcode: what it does.
      arguments: text between its parentheses.
      attributes: text behind them.
      is_root: whether it is the computation's result.
    """

    name: str
    arrays: tuple[Array, ...]
    opcode: str
    arguments: str
    attributes: str
    is_root: bool

    @property
    def operands(self) -> list[str]:
        """Names of the instructions whose results it takes."""
        return _NAME.findall(self.arguments)


Computation = dict[str, Instruction]


@dataclasses.dataclass
class Program:
    """What one device does in a run of the program.

    Attributes:
      flops: of products of floating-point arrays.
      sent: bytes of collectives, of the larger of operands and results, by kind and by the text of
        their groups of devices.
      to_device: bytes copied from host to device memory.
      to_host: bytes copied the other way.
      instructions: in the text, every computation once.
      unknown_loops: names of loops that are counted once, since nobody says how often they run.
    """

    flops: float = 0.0
    sent: Counter[tuple[str, str]] = dataclasses.field(default_factory=Counter)
    to_device: int = 0
    to_host: int = 0
    instructions: int = 0
    unknown_loops: tuple[str, ...] = ()

    def add(self, other: "Program", times: int = 1) -> None:
        """Adds what another does, so many times."""
        self.flops += times * other.flops
        for key, size in other.sent.items():
            self.sent[key] += times * size
        self.to_device += times * other.to_device
        self.to_host += times * other.to_host

    def collectives(self, mesh: Mapping[str, int]) -> tuple[Collective, ...]:
        """Returns the collectives by kind and mesh axes; those of one device alone are left out.

        Args:
          mesh: sizes of the mesh axes that the program was compiled for.
        """
        total: Counter[tuple[str, tuple[str, ...]]] = Counter()
        for (kind, groups), size in self.sent.items():
            total[kind, axes_of(groups, mesh)] += size
        return tuple(Collective(*key, size) for key, size in sorted(total.items()) if key[1])


def measure(text: str) -> Program:
    """Returns what the program of a text does.

    Args:
      text: an HLO module after optimizations, as `compiled.as_text()` or a dump has it.

    Raises:
      ValueError: it has no entry computation.
    """
    entry, computations = parse(text)
    loops: set[str] = set()

    @functools.cache
    def sum_up(name: str) -> Program:
        program = Program()
        computation = computations[name]
        for instruction in computation.values():
            _add_own(program, instruction, computation)
            times = 1
            if instruction.opcode == "while":
                trips = trip_count(instruction, computation, computations)
                if trips is None:
                    loops.add(instruction.name)
                times = 1 if trips is None else trips
            for callees in _called(instruction):
                # Of a conditional's branches the one that does most.
                program.add(max(map(sum_up, callees), key=lambda p: p.flops), times)
        return program

    program = Program(instructions=sum(map(len, computations.values())))
    program.add(sum_up(entry))
    program.unknown_loops = tuple(sorted(loops))
    return program


def parse(text: str) -> tuple[str, dict[str, Computation]]:
    """Returns the name of the entry computation, and all computations by name."""
    entry = ""
    computations: dict[str, Computation] = {}
    current: Computation = {}
    for line in text.splitlines():
        if head := _HEAD.match(line):
            instruction = _instruction(head, line)
            current[instruction.name] = instruction
        elif (begin := _COMPUTATION.match(line)) and line.endswith("{"):
            current = computations.setdefault(begin[2], {})
            entry = begin[2] if begin[1] else entry
    if not entry:
        raise ValueError("the text has no ENTRY computation: it is no HLO module")
    return entry, computations


def _instruction(head: re.Match[str], line: str) -> Instruction:
    start = head.end()
    end = _closing(line, start) if line[start] == "(" else line.index(" ", start)
    arrays = tuple(
        Array(dtype, tuple(map(int, filter(None, sizes.split(",")))), HOST_SPACE in layout)
        for dtype, sizes, layout in _TYPE.findall(line[start:end])
    )
    opcode = _OPCODE.match(line, end)
    if opcode is None:
        raise ValueError(f"no opcode in {line[:200]!r}")
    close = _closing(line, opcode.end() - 1)
    arguments, attributes = line[opcode.end() : close - 1], line[close:]
    return Instruction(head[2], arrays, opcode[1], arguments, attributes, bool(head[1]))


def _closing(line: str, start: int) -> int:
    """Returns the position behind the parenthesis that closes the one at `start`."""
    depth = 0
    for match in re.compile(r"[()]").finditer(line, start):
        depth += 1 if match[0] == "(" else -1
        if depth == 0:
            return match.end()
    raise ValueError(f"unbalanced parentheses in {line[:200]!r}")


def _called(instruction: Instruction) -> Iterator[list[str]]:
    """Gives the computations that an instruction runs; of those in one list it runs one."""
    if instruction.opcode not in _CALLERS:
        return
    found = _CALLS.findall(instruction.attributes)
    names = [one for one, many in found for one in ([one] if one else _NAME.findall(many))]
    if instruction.opcode == "conditional":
        yield names
    else:
        yield from ([name] for name in names)


def trip_count(
    loop: Instruction, computation: Computation, computations: dict[str, Computation]
) -> int | None:
    """Returns how often a loop goes round; None if the text does not tell.

    Args:
      loop: a while instruction.
      computation: where it is.
      computations: all.
    """
    if known := _TRIPS.search(loop.attributes):
        return int(known[1])
    callees = dict(re.findall(r"(condition|body)=%([\w.\-]+)", loop.attributes))
    condition, body = (computations[callees[key]] for key in ("condition", "body"))
    compare = next(i for i in condition.values() if i.is_root)
    if compare.opcode != "compare" or "direction=LT" not in compare.attributes:
        return None
    counter, limit = (condition[name] for name in compare.operands)
    index = re.search(r"index=(\d+)", counter.attributes)
    if counter.opcode != "get-tuple-element" or limit.opcode != "constant" or not index:
        return None
    start = _constant(_element(computation[loop.operands[0]], int(index[1]), computation))
    root = next(i for i in body.values() if i.is_root)
    added = _element(root, int(index[1]), body)
    steps = [] if added is None else [body[name] for name in added.operands]
    step = next((value for i in steps if (value := _constant(i)) is not None), None)
    if start is None or step is None or step < 1 or (added and added.opcode != "add"):
        return None
    return max(0, math.ceil((int(limit.arguments) - start) / step))


def _element(tuple_: Instruction, index: int, computation: Computation) -> Instruction | None:
    """Returns what is at a place of a tuple, behind copies of it."""
    if tuple_.opcode != "tuple":
        return None
    found = computation[tuple_.operands[index]]
    while found.opcode in ("copy", "bitcast"):
        found = computation[found.operands[0]]
    return found


def _constant(instruction: Instruction | None) -> int | None:
    if instruction is None or instruction.opcode != "constant":
        return None
    return int(instruction.arguments) if re.fullmatch(r"-?\d+", instruction.arguments) else None


def _add_own(program: Program, instruction: Instruction, computation: Computation) -> None:
    """Adds what one instruction does itself."""
    opcode = instruction.opcode
    program.flops += _product_flops(instruction, computation)
    kind = opcode.removesuffix("-done")
    if kind in COLLECTIVES:
        begun = computation[instruction.operands[0]] if kind != opcode else instruction
        size = sum(array.bytes for array in instruction.arrays)
        root = next(i for i in computation.values() if i.is_root)
        if root.opcode == "dynamic-slice" and root.operands[0] == instruction.name:
            kind = "reduce-scatter"  # how TPU programs write it
        elif opcode == "reduce-scatter":  # whose operands are larger
            operands = (computation[name] for name in instruction.operands)
            size = sum(array.bytes for operand in operands for array in operand.arrays)
        program.sent[kind, groups_of(begun.attributes)] += size
    if opcode not in _PASSIVE:
        _add_copies(program, instruction, computation)


def _product_flops(instruction: Instruction, computation: Computation) -> float:
    """Returns the FLOPs of a product of floating-point arrays; 0 of other instructions."""
    opcode, attributes = instruction.opcode, instruction.attributes
    is_gemm = opcode == "custom-call" and any(name in attributes for name in GEMM_TARGETS)
    if opcode not in ("dot", "convolution") and not is_gemm:
        return 0.0
    result = instruction.arrays[0]
    if "f" not in result.dtype:  # cumulative sums of integers, on TPUs
        return 0.0
    left, right = (computation[name].arrays[0].shape for name in instruction.operands[:2])
    if opcode == "convolution":
        return convolution_flops(result.shape, left, right, attributes)
    return dot_flops(result.shape, left, attributes)


def _add_copies(program: Program, instruction: Instruction, computation: Computation) -> None:
    result = instruction.arrays[0] if instruction.arrays else None
    sources = [
        a for name in instruction.operands if name in computation for a in computation[name].arrays
    ]
    if result is None or not sources:
        return
    moved = result
    if instruction.opcode == "dynamic-update-slice":
        moved = computation[instruction.operands[1]].arrays[0]
        sources = [moved]
    from_host = any(source.on_host for source in sources)
    if from_host and not result.on_host:
        program.to_device += moved.bytes
    elif result.on_host and not from_host:
        program.to_host += moved.bytes
