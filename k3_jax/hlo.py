"""What the text of a compiled XLA program says of its cost: operations, loops multiplied out."""

import itertools
import math
import re
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np


class Op(NamedTuple):
    """An operation of a compiled program: all its runs together, in a loop too.

    cycles of one run is None where the compiler gives none (an unprofiled Pallas call; or a loop
    of unknown length, whose body then counts once). `bytes` of one run are of HBM.
    """

    name: str
    opcode: str
    runs: int
    cycles: int | None
    bytes: int


ITEM_BYTES = {
    **dict.fromkeys(("pred", "s8", "u8", "f8e4m3fn", "f8e5m2"), 1),
    **dict.fromkeys(("bf16", "f16", "s16", "u16"), 2),
    **dict.fromkeys(("f32", "s32", "u32"), 4),
    **dict.fromkeys(("f64", "s64", "u64"), 8),
}
# Operations that cost nothing by themselves. XLA's own prefetches into VMEM overlap compute.
FREE = {
    *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "iota", "after-all"),
    *("slice-start", "slice-done", "copy-done", "while", "conditional", "call", "partition-id"),
    # Handed to the sparse cores: what they move counts at its custom-call-done.
    *("custom-call-start", "custom-call-update"),
}
CALLS = ("call", "conditional", "async-start")
CALLED = r"(?:calls|to_apply|_computation|called_computations)=\{?%([\w.\-]+)"
WORTH_A_ROW = 65536  # bytes moved by an operation without cycles


class Line(NamedTuple):
    """`name = type opcode(operands)` and the whole line of text."""

    name: str
    type: str
    opcode: str
    operands: list
    is_root: bool
    text: str


class Collective(NamedTuple):
    """An exchange between devices: all its runs together. `sent` bytes leave a device in one run.

    group: the devices, by their numbers in the mesh, that the first device exchanges with, itself
    too; of a permutation, a device and the one that it sends to. scopes: JAX's names of where in
    the program it is. slices: how many of them exchange over the data-centre network; then `group`
    is empty.
    """

    opcode: str
    runs: int
    sent: float
    group: tuple[int, ...]
    scopes: str = ""
    slices: int = 1


COLLECTIVES = (
    *("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "ragged-all-to-all"),
    "collective-permute",
)


def collectives(text: str) -> list[Collective]:
    """Every exchange of a compiled program. A ragged one counts as if it filled the smaller of its
    two buffers: that of the rows here, or that of the rows to come."""
    bodies = computations(text)
    return list(_exchanges(bodies))


def _exchanges(bodies) -> Iterator[Collective]:
    opened = (*CALLS, "fusion", "custom-call-start")
    going_on = set().union(*itertools.starmap(_going_on, bodies.items()))
    for line, by_name, runs in _walk(bodies, bodies["ENTRY"], 1, opened):
        opcode, group, slices = line.opcode.removesuffix("-start"), (), 1
        if line.name in going_on:
            continue
        if opcode == "send" and "_xla_megascale_transfer_type" in line.text:
            opcode, slices = _between_slices(line.text)
        elif opcode in COLLECTIVES:
            group = _group(line.text)
        else:
            continue
        n = max(len(group), slices)
        given = [_bytes(by_name[x].type) for x in line.operands if x in by_name]
        # On average a device sends what it gets: no more than either of the two buffers holds.
        sent = min(given[:2]) if opcode == "ragged-all-to-all" else sum(given)
        share = {"all-gather": n - 1, "all-reduce": 2 * (n - 1) / n, "collective-permute": 1}
        scopes = re.search(r'op_name="([^"]*)"', line.text)
        scopes = scopes.group(1) if scopes else ""
        sent *= share.get(opcode, (n - 1) / n)
        yield Collective(opcode, runs, sent, group, scopes, slices)


def _going_on(name: str, body: list[Line]) -> set[str]:
    """Of a fusion that computes while an exchange is under way, or that waits for it: the exchange,
    which the fusion that began it has too, and what is handed on for it."""
    root = body[-1] if body else None
    if root is None or not (
        name.startswith("async_collective_fusion") or "AsyncCollectiveDone" in root.text
    ):
        return set()
    handed_on = {line.name for line in body if line.opcode == "parameter"}.intersection(
        root.operands
    )
    exchanges = [line for line in body if line.opcode in COLLECTIVES]
    return handed_on.union(*({line.name, *line.operands} for line in exchanges))


def _between_slices(text: str) -> tuple[str, int]:
    """The exchange that hosts make of what a device sends them, and of how many slices: such as
    ALL_REDUCE, with {1,2} of "{1,2}x{0:3}"."""
    opcode = re.search(r'_xla_megascale_transfer_type="(\w+)"', text).group(1)
    listed = re.search(r'_xla_megascale_target="\{([\d,:]+)\}x', text).group(1)
    ends = [[int(n) for n in part.split(":")] for part in listed.split(",")]
    return opcode.lower().replace("_", "-"), sum(end[-1] - end[0] + 1 for end in ends)


def _group(text: str) -> tuple[int, ...]:
    """The first of an exchange's groups of devices."""
    if pair := re.search(r"source_target_pairs=\{\{(\d+),(\d+)\}", text):
        return int(pair.group(1)), int(pair.group(2))
    if listed := re.search(r"replica_groups=\{\{([\d,]+)\}", text):
        return tuple(int(n) for n in listed.group(1).split(","))
    if named := re.search(r"replica_groups=mesh\[([^]]*)\] ?\{([^}]*)\}", text):
        sizes = {a: int(n) for a, n in re.findall(r"'(\w+)'=(\d+)", named.group(1))}
        axes = re.findall(r"'(\w+)'", named.group(2))
        ids = np.arange(math.prod(sizes.values())).reshape(*sizes.values())
        return tuple(ids[tuple(slice(None) if a in axes else 0 for a in sizes)].flat)
    counted = re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", text)
    if counted is None:
        raise ValueError(f"an exchange whose groups are not understood: {text.strip()[:2000]}")
    shape, dims, order = ([int(n) for n in (x or "").split(",") if n] for x in counted.groups())
    ids = np.arange(math.prod(dims)).reshape(dims).transpose(order or None)
    return tuple(ids.reshape(shape)[0].tolist())


def _bytes(types: str) -> int:
    """Of a type, in whatever memory it lies."""
    return type_bytes(re.sub(r"S\(\d+\)", "", types))


def operations(text: str) -> list[Op]:
    """Every operation of a compiled program that computes or moves much, loops multiplied out."""
    bodies = computations(text)
    return list(_operations(bodies))


def _operations(bodies) -> Iterator[Op]:
    for line, by_name, runs in _walk(bodies, bodies["ENTRY"], 1, CALLS):
        if line.opcode == "while" and _trips(bodies, by_name, line) is None:
            yield Op(line.name, "while", runs, None, 0)
        if line.opcode in FREE:
            continue
        cycles, moved = _cycles(line.text), _moved(bodies, by_name, line)
        if cycles or moved > WORTH_A_ROW:
            yield Op(line.name, line.opcode, runs, cycles, moved)


def computations(text: str) -> dict:
    """{name: its Lines}; the entry computation is also under ENTRY."""
    found, lines = {}, None
    for line in text.splitlines():
        head = re.match(r"^(ENTRY )?%?([\w.\-]+) .*\{\s*$", line)
        if head and not line.startswith(" "):
            lines = found[head.group(2)] = []
            if head.group(1):
                found["ENTRY"] = lines
        elif line.rstrip() == "}":
            lines = None
        elif lines is not None and (parsed := _line(line)):
            lines.append(parsed)
        elif lines:
            # Metadata of a kernel may run over lines of their own, which may begin with a brace.
            lines[-1] = lines[-1]._replace(text=f"{lines[-1].text}\n{line}")
    return found


def _line(text):
    parts = re.match(r"\s*(ROOT )?%([\w.\-]+) = (\(.*?\)|\S+) ([a-z][\w\-]*)\((.*?)\)(?:,|$)", text)
    if parts is None:
        return None
    root, name, kind, opcode, operands = parts.groups()
    names = re.findall(r"%([\w.\-]+)", operands) or [operands]
    return Line(name, kind, opcode, names, bool(root), text)


def _walk(bodies, lines, runs, opened) -> Iterator[tuple[Line, dict, int]]:
    """(line, the lines beside it by name, how often it runs), also of what loops and the operations
    `opened` call. A loop of unknown length counts once."""
    by_name = {line.name: line for line in lines}
    for line in lines:
        yield line, by_name, runs
        if line.opcode == "while":
            times = runs * (_trips(bodies, by_name, line) or 1)
            yield from _walk(bodies, bodies[_named(line.text, "body")], times, opened)
        elif line.opcode in opened:
            for called in re.findall(CALLED, line.text):
                yield from _walk(bodies, bodies.get(called, []), runs, opened)


def _named(text, what):
    found = re.search(what + r"=%([\w.\-]+)", text)
    return found.group(1) if found else None


def _cycles(text):
    """The profiler's cycles of a kernel, or else XLA's estimate of a fusion, or None."""
    for where in (r'"bundle_analysis_data":\{', r'"window_config":\{[^}]*?'):
        if found := re.search(where + r'"estimated_cycles":"(\d+)"', text):
            return int(found.group(1))
    return None


def _trips(bodies, by_name, loop):
    """How often a loop runs: what XLA knows, or the constant its condition compares with.

    The constant stands in the condition, or comes in through the loop's tuple; JAX counts from 0 in
    steps of 1.
    """
    if known := re.search(r'known_trip_count":\{"n":"(\d+)"', loop.text):
        return int(known.group(1))
    condition = bodies[_named(loop.text, "condition")]
    called = [_named(line.text, "calls") for line in condition]
    condition = condition + [line for name in called if name for line in bodies.get(name, [])]
    start = by_name.get(loop.operands[0])
    elements = start.operands if start is not None and start.opcode == "tuple" else []
    constants = []
    for line in condition:
        if not line.type.startswith("s32[]"):
            continue
        if line.opcode == "get-tuple-element":
            index = int(re.search(r"index=(\d+)", line.text).group(1))
            line = by_name.get(elements[index]) if index < len(elements) else None
        if line is not None and line.opcode == "constant":
            constants.append(int(re.search(r"constant\((-?\d+)\)", line.text).group(1)))
    # The counter's own start is among them: 0.
    return max(constants, default=0) or None


def type_bytes(types: str) -> int:
    """HBM bytes of a type; what the compiler keeps in another memory space costs none."""
    total = 0
    for dtype, shape, layout in re.findall(r"\b([a-z]+[0-9a-z]*)\[([\d,]*)\](\{[^}]*\})?", types):
        if dtype in ITEM_BYTES and "S(" not in layout:
            total += ITEM_BYTES[dtype] * math.prod(int(n) for n in shape.split(",") if n)
    return total


def _moved(bodies, by_name, line):
    operands = [by_name[name].type if name in by_name else "" for name in line.operands]
    if line.opcode == "fusion":
        return _moved_by_fusion(bodies, line, operands)
    if line.opcode == "dynamic-slice":
        return 2 * type_bytes(line.type)
    if line.opcode == "dynamic-update-slice":
        return 2 * type_bytes(operands[1])
    if line.opcode == "copy-start":
        return type_bytes(line.type)
    if line.opcode == "custom-call":
        if 'custom_call_target="AllocateBuffer"' in line.text:
            return 0
        # What the kernel says of itself: of a stack it may read a part.
        if told := re.search(r'"bytes_accessed":"(\d+)"', line.text):
            return int(told.group(1))
    return type_bytes(line.type) + sum(map(type_bytes, operands))


def _moved_by_fusion(bodies, fusion, operands):
    """A sliced operand counts by its slice, and one that is updated in place by the update."""
    called = _named(fusion.text, "calls")
    body = bodies.get(called, [])
    types = {line.name: line.type for line in body}
    going_on = _going_on(called, body)
    updates = [line for line in body if line.opcode in IN_PLACE]
    update = next((line for line in updates if line.is_root), updates[0] if updates else None)
    total = 0
    for parameter in (line for line in body if line.opcode == "parameter"):
        number = int(parameter.operands[0])
        if parameter.name in going_on:
            continue
        if number < len(operands) and type_bytes(operands[number]):
            total += _read(bodies, body, parameter)
    if update is not None and type_bytes(fusion.type):
        return total + type_bytes(types.get(update.operands[IN_PLACE[update.opcode]], ""))
    if going_on:
        made = body[-1].operands if body[-1].opcode == "tuple" else ()
        return total + sum(type_bytes(types[name]) for name in made if name not in going_on)
    return total + type_bytes(fusion.type)


# Operations that change their first operand where it lies, and which operand is the change.
IN_PLACE = {"dynamic-update-slice": 1, "scatter": 2}


def _read(bodies, body, source):
    """Bytes that a fusion's body reads of one of its lines: slices of it, or all."""
    whole, total = type_bytes(source.type), 0
    for line in body:
        if source.name not in line.operands or line.opcode == "parameter":
            continue
        is_first = line.operands[0] == source.name
        if line.opcode == "dynamic-slice" and is_first:
            # The slice may go to VMEM; what it is cut from is in HBM.
            total += _bytes(line.type)
        elif line.opcode in ("bitcast", "copy") or "output_to_operand_aliasing" in line.text:
            # The same bytes under another type: TPU7x changes the tiles of a stack so.
            total += _read(bodies, body, line)
        elif line.opcode == "fusion":
            inner = bodies.get(_named(line.text, "calls"), [])
            of = [str(i) for i, name in enumerate(line.operands) if name == source.name]
            given = [x for x in inner if x.opcode == "parameter" and x.operands[0] in of]
            total += sum(_read(bodies, inner, x) for x in given)
        elif not (line.opcode in IN_PLACE and is_first):
            return whole
    return min(total, whole)
