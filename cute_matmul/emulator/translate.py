"""PTX instructions to Python: control flow, liveness, and the source of one function per straight-line segment.

A kernel becomes a list of nodes. A node is either a segment (instructions that never block, executed for a group
of warps by one generated function) or one instruction on which warps may block. In a segment every register is a
local variable holding a NumPy array that broadcasts to (warps, 32); registers are read from the register file on
first use and written back at the end, if some later instruction can read them. Everything with an effect outside
registers is a method of the engine (`E`), called with the group (`G`) and the index of the instruction.

Generated functions come in two variants: for groups in which all lanes are active, and with a lane mask `m`.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from cute_matmul.emulator import formats, matrix, ops, ptx
from cute_matmul.emulator.errors import UnknownInstruction
from cute_matmul.emulator.ptx import Imm, Instruction, Kernel, Mem, Module, Not, Pair, Reg, Special, Sym, Vec

SHARED_START = 1024  # bytes at the start of the shared window that sm_90 keeps for itself
IKET_MODULE = "__iket_meta_info"  # the variable by which a module says that it was compiled with event tracing
SHARED_WINDOW = 1 << 56
LOCAL_WINDOW = 2 << 56
PARAM_WINDOW = 3 << 56
CONST_WINDOW = 4 << 56
WINDOW_MASK = (1 << 56) - 1

_BITS = {"pred": 1, "f16x2": 32, "bf16x2": 32, "bf16": 16, "tf32": 32, "b128": 128}
_BITS |= {f"{k}{b}": b for k in "busf" for b in (8, 16, 32, 64)}
_PREFIX = {1: "p", 16: "h", 32: "r", 64: "d"}
_FILE = {1: "A1", 16: "A16", 32: "A32", 64: "A64"}
_UNSIGNED = {1: "b1", 8: "u1", 16: "u2", 32: "u4", 64: "u8"}

_NAMESPACE = {
    "np": np,
    "ops": ops,
    "where": np.where,
    "b1": np.bool_,
    "u1": np.uint8,
    "u2": np.uint16,
    "u4": np.uint32,
    "u8": np.uint64,
    "i1": np.int8,
    "i2": np.int16,
    "i4": np.int32,
    "i8": np.int64,
    "f4": np.float32,
    "f8": np.float64,
}


def numpy_type(kind: str) -> str:
    """The short name of the NumPy type in which values of a PTX type are computed; half types stay bits."""
    if kind == "pred":
        return "b1"
    if kind in ("f16x2", "bf16x2", "tf32"):
        return "u4"
    if kind in ("f16", "bf16"):
        return "u2"
    letter = {"b": "u", "u": "u", "s": "i", "f": "f"}[kind[0]]
    return f"{letter}{int(kind[1:]) // 8}"


# --- Which registers an instruction reads and writes -----------------------------------------------------

_NO_DESTINATION = re.compile(
    r"st\b|st\.|red\.|bar\.|barrier\.|bra|ret|exit|trap|brkpt|membar|fence|prefetch|cp\.|nanosleep|stmatrix|setmaxnreg"
    r"|mbarrier\.(init|inval|expect_tx|complete_tx)|wgmma\.(fence|commit|wait)|griddepcontrol|discard|applypriority"
    r"|pmevent|tensormap|call|bulk"
)


def _registers(operand) -> list[Reg]:
    if isinstance(operand, Reg):
        return [operand]
    if isinstance(operand, Vec):
        return [r for item in operand.items for r in _registers(item)]
    if isinstance(operand, Pair):
        return _registers(operand.first) + _registers(operand.second)
    if isinstance(operand, Not):
        return _registers(operand.operand)
    if isinstance(operand, Mem):
        return _registers(operand.base) + [r for item in operand.extra for r in _registers(item)]
    return []


def destinations(ins: Instruction) -> list[Reg]:
    """Registers that the instruction writes."""
    base = ins.parts[0]
    if (base in ("bar", "barrier") and ins.parts[1] == "red") or ins.opcode.startswith(
        ("bar.cta.red", "barrier.cta.red")
    ):
        return _registers(ins.operands[0])
    if _NO_DESTINATION.match(ins.opcode) or not ins.operands or isinstance(ins.operands[0], Mem):
        return []
    return _registers(ins.operands[0])


def sources(ins: Instruction) -> list[Reg]:
    """Registers that the instruction reads, its guard and (when guarded) what it may leave unchanged included."""
    written = destinations(ins)
    first = 1 if written or (ins.operands and ins.operands[0] == ptx.SINK) else 0
    out = [r for operand in ins.operands[first:] for r in _registers(operand)]
    if ins.opcode.startswith("wgmma.mma_async"):
        out += written
    if ins.guard is not None:
        out.append(ins.guard[0])
        out += written
    if ins.parts[0] in ("bar", "barrier") and written:
        out += [r for operand in ins.operands[1:] for r in _registers(operand)]
    return out


def _is_rename(ins: Instruction) -> bool:
    """A plain move from one 32-bit register to another."""
    return (
        ins.parts[0] == "mov"
        and ins.guard is None
        and all(isinstance(operand, Reg) and operand.width == 32 for operand in ins.operands)
    )


_CONSUMERS = frozenset(
    {"ld", "ldu", "st", "atom", "red", "mma", "wgmma", "ldmatrix", "stmatrix", "mbarrier", "cp", "bar", "barrier"}
    | {"bra", "ret", "exit", "setmaxnreg", "trap", "call"}
)


def consumes(ins: Instruction) -> bool:
    """Whether the instruction uses its operands for more than computing a register."""
    return ins.parts[0] in _CONSUMERS or not destinations(ins)


def kind_of(ins: Instruction) -> str:
    """The kind under which a report counts an instruction."""
    op, parts = ins.opcode, ins.parts
    if op.startswith("wgmma.mma"):
        return "wgmma"
    if op.startswith("wgmma"):
        return "wgmma sync"
    if parts[0] in (
        "mma",
        "ldmatrix",
        "stmatrix",
        "movmatrix",
        "shfl",
        "vote",
        "elect",
        "redux",
        "match",
        "setmaxnreg",
    ):
        return parts[0]
    if op.startswith(("cp.async.bulk.tensor", "cp.reduce.async.bulk.tensor")):
        return "tma store" if ".global.shared" in op else "tma load"
    if op.startswith(("cp.async.bulk.commit", "cp.async.bulk.wait")):
        return "bulk group"
    if "async.bulk" in op:
        return "bulk copy"
    if op.startswith("cp.async"):
        return "cp.async"
    if op.startswith("mbarrier"):
        return "mbarrier wait" if "_wait" in op else "mbarrier"
    if parts[0] in ("bar", "barrier"):
        return "cluster barrier" if "cluster" in parts else "barrier"
    if parts[0] in ("ld", "st", "atom", "red"):
        space = next(
            (s for s in ("shared", "global", "local", "param", "const") if any(p.startswith(s) for p in parts)),
            "generic",
        )
        return f"{parts[0]}.{space}"
    if parts[0] in ("bra", "ret", "exit"):
        return "branch"
    if parts[0] in ("fence", "membar"):
        return "fence"
    if parts[0] in ("fma", "mul", "add", "sub", "mad", "div", "rcp", "ex2") and parts[-1].startswith(("f", "bf")):
        return "float"
    return "integer"


# --- Nodes -------------------------------------------------------------------------------------------------

_WAITS = re.compile(r"mbarrier\.(try_wait|test_wait)")
_BARRIER_SYNC = re.compile(r"(bar|barrier)(\.cta)?\.(sync|red)\b")
_CLUSTER_WAIT = re.compile(r"barrier\.cluster\.wait")
_MMA_WAIT = re.compile(r"wgmma\.wait_group")
_BLOCKING = (_WAITS, _BARRIER_SYNC, _CLUSTER_WAIT, _MMA_WAIT)


@dataclass
class Node:
    """Instructions [start, end). `kind`: 'segment', 'try' (mbarrier wait), 'bar', 'cluster', 'mma' (wgmma wait).

    `target` and `fall` are node numbers: where a taken branch and where everything else goes on; the number of
    nodes stands for the exit. `join` is the node where both sides of the branch meet again. `gather` says that
    whole warp groups enter together.
    """

    index: int
    start: int
    end: int
    kind: str = "segment"
    target: int = -1
    fall: int = -1
    join: int = -1
    gather: bool = False
    live_out: int = 0
    functions: dict[bool, Callable] = field(default_factory=dict)
    counts: Counter = field(default_factory=Counter)


class Program:
    """A kernel ready to run: nodes, register numbering, address layout of parameters, shared and local variables."""

    def __init__(self, module: Module, kernel: Kernel) -> None:
        self.module, self.kernel = module, kernel
        self.instructions = kernel.instructions
        self._layout()
        self._nodes()
        self._liveness()
        self._joins()
        self.wgmma: dict[int, tuple] = {}
        self.accumulators, self.tracked = self._accumulators()
        self.unset, self.undefined = self._undefined()
        self.constants: dict[tuple, str] = {}
        self.namespace = dict(_NAMESPACE)

    # Addresses

    def _layout(self) -> None:
        self.param_offsets: list[int] = []
        self.addresses: dict[str, tuple[str, int]] = {}
        at = 0
        for variable in self.kernel.params:
            at = -(-at // variable.align) * variable.align
            self.param_offsets.append(at)
            self.addresses[variable.name] = ("param", at)
            at += variable.nbytes
        self.param_bytes = at
        tops = {"shared": SHARED_START, "local": 0, "const": 0}
        dynamic = []
        variables = list(self.module.variables.values()) + list(self.kernel.variables.values())
        for variable in variables:
            if variable.space == "global":
                self.addresses[variable.name] = ("global", 0)
            elif variable.space in tops and not variable.extern:
                top = -(-tops[variable.space] // variable.align) * variable.align
                self.addresses[variable.name] = (variable.space, top)
                tops[variable.space] = top + variable.nbytes
            elif variable.space == "shared":
                dynamic.append(variable)
            elif variable.space != "param":
                raise UnknownInstruction(self.kernel.name, None, f"variable {variable.name} in .{variable.space}")
        align = max([v.align for v in dynamic], default=16)
        self.dynamic_start = -(-tops["shared"] // align) * align
        for variable in dynamic:
            self.addresses[variable.name] = ("shared", self.dynamic_start)
        self.static_shared_end = tops["shared"]
        self.local_bytes = -(-tops["local"] // 16) * 16
        self.constant_bytes = tops["const"]

    # Control flow

    def _nodes(self) -> None:
        instructions = self.instructions
        count = len(instructions)
        leaders = {0, count}
        for ins in instructions:
            base = ins.parts[0]
            if base == "bra":
                leaders |= {ins.target, ins.index + 1}
            elif base in ("ret", "exit"):
                leaders.add(ins.index + 1)
            elif any(pattern.match(ins.opcode) for pattern in _BLOCKING):
                leaders |= {ins.index, ins.index + 1}
        # A segment with a wgmma starts at its first one, so that warp groups gather there.
        ordered = sorted(leaders)
        for start, end in itertools.pairwise(ordered):
            first = next((i for i in range(start, end) if instructions[i].opcode.startswith("wgmma.mma_async")), None)
            if first is not None:
                leaders.add(first)
        ordered = sorted(leaders)
        self.nodes: list[Node] = []
        self.node_at: dict[int, int] = {}
        for start, end in itertools.pairwise(ordered):
            self.node_at[start] = len(self.nodes)
            self.nodes.append(Node(len(self.nodes), start, end))
        exit_node = self.node_at[count] = len(self.nodes)
        for node in self.nodes:
            last = instructions[node.end - 1]
            node.fall = self.node_at[node.end]
            base = last.parts[0]
            if base == "bra":
                node.target = self.node_at[last.target]
                if last.guard is None:
                    node.fall, node.target = node.target, -1
            elif base in ("ret", "exit"):
                if last.guard is None:
                    node.fall = exit_node
                else:
                    node.target = exit_node
            elif _WAITS.match(last.opcode):
                node.kind = "try"
            elif _BARRIER_SYNC.match(last.opcode):
                node.kind = "bar"
            elif _CLUSTER_WAIT.match(last.opcode):
                node.kind = "cluster"
            elif _MMA_WAIT.match(last.opcode):
                node.kind = "mma"
                if last.guard is not None:
                    raise UnknownInstruction(self.kernel.name, last, "a guard on wgmma")
            first = instructions[node.start]
            node.gather = first.opcode.startswith("wgmma.mma_async")
            for ins in instructions[node.start : node.end]:
                node.counts[kind_of(ins)] += 1

    def successors(self, node: Node) -> tuple[int, ...]:
        return (node.fall,) if node.target < 0 else (node.fall, node.target)

    def _bit(self, register: Reg) -> int:
        return 1 << (self._bit_base[register.width] + register.index)

    def _liveness(self) -> None:
        base, at = {}, 0
        for width in (1, 16, 32, 64):
            base[width] = at
            at += self.kernel.registers[width]
        self._bit_base = base
        uses, defines = [], []
        for node in self.nodes:
            use = define = 0
            for ins in self.instructions[node.start : node.end]:
                for register in sources(ins):
                    bit = self._bit(register)
                    if not define & bit:
                        use |= bit
                for register in destinations(ins):
                    define |= self._bit(register)
            uses.append(use)
            defines.append(define)
        live_in = [0] * (len(self.nodes) + 1)
        changed = True
        while changed:
            changed = False
            for node in reversed(self.nodes):
                out = 0
                for successor in self.successors(node):
                    out |= live_in[successor]
                into = uses[node.index] | (out & ~defines[node.index])
                node.live_out = out
                if into != live_in[node.index]:
                    live_in[node.index] = into
                    changed = True
        self._entry_live = live_in[0]

    def _undefined(self) -> tuple[frozenset[Reg], frozenset[Reg]]:
        """Registers that some path reads before anything sets them, and those that may receive such a value.

        An accumulator of a wgmma counts as set there: whether it is read depends on scale-d, known when it runs.
        """
        count = len(self.nodes)
        uses, defines, by_bit = [0] * count, [0] * count, {}
        for node in self.nodes:
            use = define = 0
            for ins in self.instructions[node.start : node.end]:
                written = destinations(ins)
                read = sources(ins)
                if ins.opcode.startswith("wgmma.mma_async"):
                    read = read[: len(read) - len(written)]
                for register in read:
                    bit = self._bit(register)
                    by_bit[bit] = register
                    use |= bit & ~define
                for register in written:
                    define |= self._bit(register)
            uses[node.index], defines[node.index] = use, define
        live_in = [0] * (count + 1)
        changed = True
        while changed:
            changed = False
            for node in reversed(self.nodes):
                out = 0
                for successor in self.successors(node):
                    out |= live_in[successor]
                into = uses[node.index] | (out & ~defines[node.index])
                if into != live_in[node.index]:
                    live_in[node.index] = into
                    changed = True
        accumulators = {
            r for ins in self.instructions if ins.opcode.startswith("wgmma.mma_async") for r in destinations(ins)
        }
        unset = {register for bit, register in by_bit.items() if live_in[0] & bit}
        unset |= {r for r in accumulators if self._entry_live & self._bit(r)}
        reached = set(unset)
        changed = bool(reached)
        while changed:
            changed = False
            for ins in self.instructions:
                if consumes(ins) or not any(r in reached for r in sources(ins)):
                    continue
                for register in destinations(ins):
                    if register not in reached:
                        reached.add(register)
                        changed = True
        return frozenset(unset), frozenset(reached)

    def _joins(self) -> None:
        """Immediate post-dominators, as the place where the sides of a divergent branch meet."""
        count = len(self.nodes)
        everything = (1 << (count + 1)) - 1
        post = [everything] * count + [1 << count]
        changed = True
        while changed:
            changed = False
            for node in reversed(self.nodes):
                common = everything
                for successor in self.successors(node):
                    common &= post[successor]
                new = common | (1 << node.index)
                if new != post[node.index]:
                    post[node.index] = new
                    changed = True
        for node in self.nodes:
            if node.target < 0:
                continue
            strict = post[node.index] & ~(1 << node.index)
            # The nearest strict post-dominator is post-dominated by all the others.
            node.join = count
            candidate = strict
            while candidate:
                low = (candidate & -candidate).bit_length() - 1
                if post[low] & strict == strict:
                    node.join = low
                    break
                candidate &= candidate - 1

    def _accumulators(self) -> tuple[frozenset[int], frozenset[int]]:
        """32-bit registers that some wgmma names (accumulators, A fragments), and those that plain moves connect to
        them."""
        named = set()
        moves: dict[int, set[int]] = {}
        for ins in self.instructions:
            if ins.opcode.startswith("wgmma.mma_async"):
                named |= {r.index for r in _registers(ins.operands[0])}
                if isinstance(ins.operands[1], Vec):
                    named |= {r.index for r in _registers(ins.operands[1])}
            elif _is_rename(ins):
                to, origin = (o.index for o in ins.operands)
                moves.setdefault(to, set()).add(origin)
                moves.setdefault(origin, set()).add(to)
        tracked, edge = set(named), list(named)
        while edge:
            for other in moves.get(edge.pop(), ()):
                if other not in tracked:
                    tracked.add(other)
                    edge.append(other)
        return frozenset(named), frozenset(tracked)

    # Code

    def function(self, node: Node, masked: bool) -> Callable:
        """The generated function of a node, made on first use."""
        function = node.functions.get(masked)
        if function is None:
            writer = _Writer(self, node, masked)
            source = writer.source()
            code = compile(source, f"<ptx {self.kernel.name[:40]} node {node.index}>", "exec")
            exec(code, self.namespace)
            function = node.functions[masked] = self.namespace[writer.name]
            function.__ptx_source__ = source
        return function

    def constant(self, value: int | float, kind: str) -> str:
        """Name of a (1, 1) array holding a literal."""
        key = (value, kind) if isinstance(value, int) else (repr(value), kind)
        name = self.constants.get(key)
        if name is None:
            name = self.constants[key] = f"K{len(self.constants)}"
            array = np.array([[value]], dtype=_NAMESPACE[kind])
            array.flags.writeable = False
            self.namespace[name] = array
        return name

    def object(self, key: str, value) -> str:
        """Name of a Python object in generated code."""
        name = f"O_{key}"
        self.namespace[name] = value
        return name


@lru_cache(maxsize=32)
def program(text: str, kernel: str) -> Program:
    """Parse and prepare one kernel of a PTX text. Raises KeyError if it has no such kernel."""
    module = ptx.parse(text)
    return Program(module, module.kernels[kernel])


class _Writer:
    """Writes the function of one node."""

    def __init__(self, program: Program, node: Node, masked: bool) -> None:
        self.program, self.node, self.masked = program, node, masked
        self.name = f"node{node.index}{'m' if masked else ''}"
        self.lines: list[str] = []
        self.local: dict[Reg, str] = {}
        self.dirty: dict[Reg, None] = {}
        self.ins: Instruction | None = None
        self.temporaries = 0
        body = program.instructions[node.start : node.end]
        self.body = body
        self.written = {r for ins in body for r in destinations(ins)}
        self.report: list[tuple[str, int, list, list]] = []  # uses of wgmma's registers, not yet written out
        self.settled = False

    # Plumbing

    def source(self) -> str:
        result = "None"
        at = 0
        while at < len(self.body):
            ins = self.ins = self.body[at]
            base = ins.parts[0]
            self._track_undefined(ins)
            fused = self._mma_run(at) if base == "mma" else 0
            if fused:
                at += fused
                continue
            self._report_accumulators(ins)
            self._settle(ins)
            if base in ("bra", "ret", "exit"):
                if ins.guard is not None:
                    result = self.guard_expression(ins)
            elif self.node.kind != "segment":
                result = self.blocking(ins)
            else:
                emit = getattr(self, f"op_{base}", None)
                if emit is None:
                    self.unknown("opcode")
                emit(ins)
            at += 1
        self._flush_reports()
        self.flush(final=True)
        head = [f"def {self.name}(E, G, ix, m):", " A1 = E.A1; A16 = E.A16; A32 = E.A32; A64 = E.A64; O = E.observers"]
        return "\n".join(head + [" " + line for line in self.lines] + [f" return {result}"])

    def unknown(self, what: str):
        raise UnknownInstruction(self.program.kernel.name, self.ins, what)

    def emit(self, line: str) -> None:
        self.lines.append(line)

    def temporary(self) -> str:
        self.temporaries += 1
        return f"t{self.temporaries}"

    def get(self, register: Reg) -> str:
        name = self.local.get(register)
        if name is None:
            name = f"{_PREFIX[register.width]}{register.index}"
            # What the segment overwrites must not stay a view of the register file.
            copy = ".copy()" if register in self.written else ""
            self.emit(f"{name} = {_FILE[register.width]}[{register.index}, ix]{copy}")
            self.local[register] = name
        return name

    def set(self, register: Reg, expression: str) -> None:
        """Bind the register to an array of its own unsigned type."""
        name = f"{_PREFIX[register.width]}{register.index}"
        if self.ins.guard is not None:
            old = self.get(register)
            self.emit(f"{name} = where({self.guard_expression(self.ins)}, {expression}, {old})")
        else:
            self.emit(f"{name} = {expression}")
        self.local[register] = name
        self.dirty[register] = None

    def store(self, register: Reg) -> None:
        file, name = _FILE[register.width], self.local[register]
        if self.masked:
            self.emit(f"{file}[{register.index}, ix] = where(m, {name}, {file}[{register.index}, ix])")
        else:
            self.emit(f"{file}[{register.index}, ix] = {name}")

    def flush(self, registers=None, final: bool = False) -> None:
        """Write back dirty registers: the given ones, or those that are live after the node."""
        for register in list(self.dirty):
            if registers is not None and register not in registers:
                continue
            if not final or self.node.live_out & self.program._bit(register):
                self.store(register)
            del self.dirty[register]

    def forget(self, registers) -> None:
        for register in registers:
            self.local.pop(register, None)

    def guard_expression(self, ins: Instruction) -> str:
        register, negated = ins.guard
        return f"~{self.get(register)}" if negated else self.get(register)

    def mask(self) -> str:
        """Lanes that execute the current instruction: 'None' for all."""
        if self.ins.guard is None:
            return "m" if self.masked else "None"
        guard = self.guard_expression(self.ins)
        return f"({guard}) & m" if self.masked else guard

    def src(self) -> int:
        return self.ins.index

    # Operands

    def literal(self, imm: Imm, kind: str) -> str:
        name = numpy_type(kind)
        if imm.is_float:
            if kind in ("f16", "bf16"):
                value = (
                    np.array(imm.value, np.uint32).view(np.float32)
                    if imm.width == 32
                    else np.array(imm.value, np.uint64).view(np.float64)
                )
                encode = formats.f32_to_f16 if kind == "f16" else formats.f32_to_bf16
                return self.program.constant(int(encode(np.asarray(value, np.float32)[None])[0]), "u2")
            value = imm.value
            if kind in ("f32", "b32", "u32", "s32") and imm.width == 64:
                as_double = np.array(value, np.uint64).view(np.float64)
                value = int(as_double.astype(np.float32).view(np.uint32))
            elif kind == "f64" and imm.width == 32:
                single = np.array(value, np.uint32).view(np.float32)
                value = int(single.astype(np.float64).view(np.uint64))
            bits = self.program.constant(value, "u8" if _BITS[kind] == 64 else "u4")
            return f"{bits}.view({name})" if name[0] != "u" else bits
        bits = _BITS[kind]
        if bits == 1:
            return self.program.constant(bool(imm.value), "b1")
        if name[0] == "f":
            return self.program.constant(float(imm.value), name)
        value = imm.value & ((1 << bits) - 1)
        if name[0] == "i" and value >> (bits - 1):
            value -= 1 << bits
        return self.program.constant(value, name)

    def value(self, operand, kind: str) -> str:
        """An expression for an operand as the NumPy type of a PTX type."""
        name = numpy_type(kind)
        bits = _BITS[kind]
        if isinstance(operand, Imm):
            return self.literal(operand, kind)
        if isinstance(operand, Reg):
            variable = self.get(operand)
            if operand.width == 1 or bits == 1:
                if operand.width != 1 or bits != 1:
                    self.unknown("a predicate where a value is expected")
                return variable
            if operand.width != bits:
                variable = f"{variable}.astype({_UNSIGNED[bits]})"
            return variable if name == _UNSIGNED[bits] else f"{variable}.view({name})"
        if isinstance(operand, Sym):
            return self.symbol(operand, bits)
        if isinstance(operand, Special):
            return self.special(operand.name, bits)
        if isinstance(operand, Not):
            return f"~{self.value(operand.operand, kind)}"
        if isinstance(operand, Vec):
            return self.pack(operand, bits)
        return self.unknown(f"operand {operand!r}")

    def symbol(self, operand: Sym, bits: int) -> str:
        where = self.program.addresses.get(operand.name)
        if where is None:
            self.unknown(f"symbol {operand.name}")
        space, offset = where
        if space == "global":
            return f"E.global_symbol({operand.name!r}, {operand.offset})"
        return self.program.constant(offset + operand.offset, _UNSIGNED[bits])

    def special(self, name: str, bits: int) -> str:
        # `ix` selects the warps; clocks are read when executed.
        if name in ("clock", "clock64", "clock_hi", "globaltimer", "globaltimer_lo", "globaltimer_hi"):
            array = f"E.clock(G, {name!r})"
        else:
            array = f"E.special({name!r})[ix]"
        return f"{array}.astype({_UNSIGNED[bits]})"

    def pack(self, operand: Vec, bits: int) -> str:
        part = bits // len(operand.items)
        pieces = []
        for i, item in enumerate(operand.items):
            piece = f"{self.value(item, f'b{part}')}.astype({_UNSIGNED[bits]})"
            pieces.append(f"({piece} << {_UNSIGNED[bits]}({part * i}))" if i else piece)
        return " | ".join(pieces)

    def put(self, operand, expression: str, kind: str) -> None:
        """Assign an expression of a PTX type's NumPy type to a destination operand."""
        if operand == ptx.SINK:
            return
        if not isinstance(operand, Reg):
            self.unknown(f"destination {operand!r}")
        name, bits = numpy_type(kind), _BITS[kind]
        if operand.width == 1 or bits == 1:
            self.set(operand, expression)
        elif operand.width == bits:
            self.set(operand, expression if name == _UNSIGNED[bits] else f"({expression}).view({_UNSIGNED[bits]})")
        elif name[0] == "i":
            wide = operand.width
            self.set(operand, f"({expression}).astype(i{wide // 8}).view({_UNSIGNED[wide]})")
        else:
            bits_expression = expression if name[0] == "u" else f"({expression}).view({_UNSIGNED[bits]})"
            self.set(operand, f"({bits_expression}).astype({_UNSIGNED[operand.width]})")

    def address(self, operand: Mem) -> str:
        """Address expression: uint32 or uint64 lanes."""
        if not isinstance(operand, Mem):
            self.unknown("an address is expected")
        if isinstance(operand.base, Sym):
            space = self.program.addresses.get(operand.base.name, ("?", 0))[0]
            return self.symbol(Sym(operand.base.name, operand.offset), 64 if space in ("global", "param") else 32)
        if isinstance(operand.base, Imm):
            return self.program.constant(operand.base.value + operand.offset, "u8")
        if not isinstance(operand.base, Reg):
            self.unknown("address")
        base = self.get(operand.base)
        if not operand.offset:
            return base
        kind = _UNSIGNED[operand.base.width]
        value = operand.offset & ((1 << operand.base.width) - 1)
        return f"{base} + {self.program.constant(value, kind)}"

    def place(self, operand: Mem, space: str) -> str:
        """Expression for places (slot and offset) in shared memory."""
        return f"E.shared_address(G, {space!r}, {self.address(operand)}, {self.mask()})"

    def kind(self, at: int = -1) -> str:
        """The type suffix of the current instruction."""
        name = self.ins.parts[at]
        if name not in _BITS:
            self.unknown(f"type .{name}")
        return name

    def modifiers(self, allowed: set[str], skip: int = 1) -> set[str]:
        """Parts between the name and the type; anything not expected stops."""
        found = set(self.ins.parts[skip:-1])
        extra = found - allowed
        if extra:
            self.unknown(f"modifier .{sorted(extra)[0]}")
        return found

    # Registers of wgmma in other instructions, for the hazard checker

    def _report_accumulators(self, ins: Instruction) -> None:
        tracked = self.program.tracked
        if not tracked:
            return
        if ins.opcode.startswith("wgmma"):
            self._flush_reports()
            return
        read = {r.index for r in sources(ins) if r.width == 32} & tracked
        written = {r.index for r in destinations(ins) if r.width == 32} & tracked
        if not read and not written:
            return
        if _is_rename(ins):
            to, origin = (o.index for o in ins.operands)
            entry = self._report_entry("move", ins)
            if origin in entry[2]:
                self._flush_reports()
                entry = self._report_entry("move", ins)
            entry[2].append(to)
            entry[3].append(origin)
        elif ins.parts[0] == "mov" and isinstance(ins.operands[1], Imm):
            self._report_entry("fresh", ins)[2].extend(written)
        else:
            entry = self._report_entry("touch", ins)
            entry[2].extend(sorted(written))
            entry[3].extend(sorted(read))

    def _report_entry(self, kind: str, ins: Instruction) -> tuple[str, int, list, list]:
        """The last entry of the report if this instruction can join it, else a new one: kind, index, written, read."""
        if self.report:
            last = self.report[-1]
            same_line = kind != "touch" or self.program.instructions[last[1]].source == ins.source
            if last[0] == kind and same_line:
                return last
        self.report.append((kind, ins.index, [], []))
        return self.report[-1]

    def _flush_reports(self) -> None:
        for kind, index, written, read in self.report:
            if kind == "touch":
                reads, writes = tuple(dict.fromkeys(read)), tuple(dict.fromkeys(written))
                self.emit(f"for o in O: o.registers(G.agents, {index}, {reads!r}, {writes!r})")
            elif kind == "fresh":
                self.emit(f"for o in O: o.fresh_registers(G.agents, {index}, {tuple(written)!r})")
            else:
                self.emit(f"for o in O: o.move_registers(G.agents, {tuple(written)!r}, {tuple(read)!r})")
        self.report = []

    # Registers that nothing has set

    def _track_undefined(self, ins: Instruction) -> None:
        undefined = self.program.undefined
        if not undefined:
            return
        written = [r for r in destinations(ins) if r in undefined]
        wgmma = ins.opcode.startswith("wgmma.mma_async")
        read = [r for operand in ins.operands[1 if destinations(ins) else 0 :] for r in _registers(operand)]
        read = [r for r in dict.fromkeys(read) if r in undefined]
        guard = [ins.guard[0]] if ins.guard is not None and ins.guard[0] in undefined else []
        checked = guard + (read if consumes(ins) else [])
        if checked:
            # A guard decides who executes: it is looked at for all lanes that could.
            mask = ("m" if self.masked else "None") if guard else self.mask()
            self.emit(f"E.check_undefined(G, {ins.index}, {self._keys(checked)}, {mask})")
        if not written or wgmma:
            return
        if ins.parts[0] == "selp" and ins.operands[3] not in undefined:
            sides = [self._keys([o]) if isinstance(o, Reg) and o in undefined else "()" for o in ins.operands[1:3]]
            choice = self.value(ins.operands[3], "pred")
            self.emit(f"E.spread_undefined(G, {self._keys(written)}, {sides[0]}, {self.mask()}, {choice}, {sides[1]})")
            return
        spread = "()" if consumes(ins) else self._keys(read)
        self.emit(f"E.spread_undefined(G, {self._keys(written)}, {spread}, {self.mask()})")

    @staticmethod
    def _keys(registers: list[Reg]) -> str:
        return "(" + "".join(f"({r.width}, {r.index}), " for r in registers) + ")"

    def _settle(self, ins: Instruction) -> None:
        """Before a rename of an accumulator: what is in flight must write the old name, not the copy's."""
        if self.settled or not _is_rename(ins) or ins.operands[1].index not in self.program.accumulators:
            return
        self.settled = True
        self.emit("E.settle(G)")
        self.forget(
            [r for r in self.local if r.width == 32 and r.index in self.program.accumulators and r not in self.dirty]
        )

    # Instructions on which warps may block: the function returns what the engine needs to decide

    def blocking(self, ins: Instruction) -> str:
        if self.node.kind == "try":
            space = self.space(ins)
            address = self.place(ins.operands[1], space)
            by_parity = "parity" in ins.parts
            value = self.value(ins.operands[2], "b32" if by_parity else "b64")
            return f"({address}, {value}, {self.mask()})"
        if self.node.kind == "bar":
            operands = list(ins.operands)
            predicate = "None"
            if "red" in ins.parts:
                operands = operands[1:]
                tail = operands.pop()
                predicate = self.value(tail, "pred")
            number = self.value(operands[0], "u32") if operands else self.program.constant(0, "u4")
            count = self.value(operands[1], "u32") if len(operands) > 1 else "None"
            if ins.guard is not None:
                self.unknown("a guard on a barrier")
            return f"({number}, {count}, {predicate})"
        return "None"

    @staticmethod
    def space(ins: Instruction) -> str:
        """State space named by the opcode: shared, cluster, global, local, param, const or generic."""
        for part in ins.parts[1:]:
            if part in ("shared", "shared::cta"):
                return "shared"
            if part == "shared::cluster":
                return "cluster"
            if part in ("global", "local", "param", "const") or part.startswith("param::"):
                return part.split("::")[0]
        return "generic"

    # Moves and conversions

    def op_mov(self, ins: Instruction) -> None:
        kind = self.kind()
        target, origin = ins.operands
        if isinstance(target, Vec):
            part = _BITS[kind] // len(target.items)
            name = self.temporary()
            self.emit(f"{name} = {self.value(origin, kind)}")
            for i, item in enumerate(target.items):
                shifted = f"({name} >> {_UNSIGNED[_BITS[kind]]}({part * i}))" if i else name
                self.put(item, f"{shifted}.astype({_UNSIGNED[part]})", f"b{part}")
            return
        kind = f"b{_BITS[kind]}" if kind != "pred" else kind
        self.put(target, self.value(origin, kind), kind)

    def op_cvt(self, ins: Instruction) -> None:
        target = ins.operands[0]
        modifiers = ins.parts[1:-2]
        to, source = ins.parts[-2], ins.parts[-1]
        integers = re.compile(r"[us](8|16|32|64)$")
        if not modifiers and integers.match(to) and integers.match(source):
            value = self.value(ins.operands[1], source)
            self.put(target, f"{value}.astype({numpy_type(to)})", to)
            return
        try:
            function = formats.cvt(ins.opcode, target.width)
        except formats.FormatError as error:
            self.unknown(str(error))
        name = self.program.object(re.sub(r"\W", "_", ins.opcode) + f"_{target.width}", function)
        args = []
        for operand in ins.operands[1:]:
            kind = {"f16x2": "b32", "bf16x2": "b32", "e4m3x2": "b16", "e5m2x2": "b16", "tf32": "b32"}.get(source)
            kind = kind or f"b{_BITS[source]}"
            args.append(f"np.ascontiguousarray({self.value(operand, kind)})")
        self.set(target, f"{name}({', '.join(args)}).astype({_UNSIGNED[target.width]}, copy=False)")

    def op_cvta(self, ins: Instruction) -> None:
        to = "to" in ins.parts
        space = next(p for p in ins.parts[1:] if p not in ("to", "u64", "u32"))
        space = space.split("::")[0] if space != "shared::cluster" else "shared"
        windows = {
            "shared": SHARED_WINDOW,
            "local": LOCAL_WINDOW,
            "param": PARAM_WINDOW,
            "const": CONST_WINDOW,
            "global": 0,
        }
        if space not in windows:
            self.unknown(f"space .{space}")
        operand = ins.operands[1]
        value = (
            self.value(operand, "u64")
            if not isinstance(operand, Reg) or operand.width == 64
            else f"{self.get(operand)}.astype(u8)"
        )
        if space != "global":
            if to:
                value = f"{value} & {self.program.constant(WINDOW_MASK, 'u8')}"
            else:
                value = f"{value} | {self.program.constant(windows[space], 'u8')}"
        self.put(ins.operands[0], value, "u64")

    def op_isspacep(self, ins: Instruction) -> None:
        value = self.value(ins.operands[1], "u64")
        windows = {
            "shared": 1,
            "shared::cta": 1,
            "shared::cluster": 1,
            "local": 2,
            "param": 3,
            "param::entry": 3,
            "const": 4,
            "global": 0,
        }
        if ins.parts[1] not in windows:
            self.unknown("space")
        self.put(ins.operands[0], f"({value} >> u8(56)) == u8({windows[ins.parts[1]]})", "pred")

    def op_mapa(self, ins: Instruction) -> None:
        operand = ins.operands[1]
        bits = _BITS[self.kind()]
        generic = not any(p.startswith("shared::cluster") for p in ins.parts)
        address = self.value(operand, f"u{bits}")
        rank = self.value(ins.operands[2], "u32")
        self.put(ins.operands[0], f"E.mapa({address}, {rank}, {generic})", f"u{bits}")

    def op_getctarank(self, ins: Instruction) -> None:
        bits = _BITS[self.kind()]
        self.put(ins.operands[0], f"E.cta_rank_of(G, {self.value(ins.operands[1], f'u{bits}')})", "u32")

    # Integer and logic

    def _binary(self, ins: Instruction, expression: str, kind: str) -> None:
        a, b = (self.value(operand, kind) for operand in ins.operands[1:3])
        self.put(ins.operands[0], expression.format(a=a, b=b), kind)

    def _is_float(self, kind: str) -> bool:
        return kind in ("f16", "bf16", "f16x2", "bf16x2", "f32", "f64")

    def op_add(self, ins: Instruction) -> None:
        self._additive(ins, "add", "+")

    def op_sub(self, ins: Instruction) -> None:
        self._additive(ins, "sub", "-")

    def _additive(self, ins: Instruction, name: str, sign: str) -> None:
        kind = self.kind()
        if self._is_float(kind):
            self._float(ins, name)
        elif "cc" in ins.parts:
            self._carry(ins, name, False)
        elif "sat" in ins.parts:
            a, b = (self.value(operand, "s32") for operand in ins.operands[1:3])
            self.put(
                ins.operands[0], f"np.clip({a}.astype(i8) {sign} {b}.astype(i8), -2**31, 2**31 - 1).astype(i4)", "s32"
            )
        else:
            self.modifiers(set())
            self._binary(ins, f"{{a}} {sign} {{b}}", f"u{_BITS[kind]}")

    def op_addc(self, ins: Instruction) -> None:
        self._carry(ins, "add", True)

    def op_subc(self, ins: Instruction) -> None:
        self._carry(ins, "sub", True)

    def op_madc(self, ins: Instruction) -> None:
        self._carry_product(ins, True)

    def _carry_product(self, ins: Instruction, with_carry: bool) -> None:
        """mad.cc and madc: a half of the product, then an addition with the carry."""
        product, kind = self._product(ins, self.kind())
        name = self.temporary()
        self.emit(f"{name} = {product}.view({_UNSIGNED[_BITS[kind]]})")
        self._carry(ins, "add", with_carry, (name, self.value(ins.operands[3], f"u{_BITS[kind]}")))

    def _carry(self, ins: Instruction, name: str, with_carry: bool, terms: tuple[str, str] | None = None) -> None:
        """add.cc and its relatives. The carry lives in a local: PTX has it within a block only in compiler output."""
        bits = _BITS[self.kind()]
        if ins.guard is not None:
            self.unknown("a guard on a carry instruction")
        kind = _UNSIGNED[bits]
        a, b, out = self.temporary(), self.temporary(), self.temporary()
        left, right = terms or tuple(self.value(o, f"u{bits}") for o in ins.operands[1:3])
        self.emit(f"{a} = {left}; {b} = {right}")
        carry = f"cc.astype({kind})" if with_carry else f"{kind}(0)"
        if name == "add":
            self.emit(f"{out} = {a} + {b} + {carry}")
            overflow = f"({out} < {a})" + (f" | (cc & ({out} == {a}))" if with_carry else "")
        else:
            self.emit(f"{out} = {a} - {b} - {carry}")
            overflow = f"({a} < {b})" + (f" | (cc & ({a} == {b}))" if with_carry else "")
        if "cc" in ins.parts:
            self.emit(f"cc = {overflow}")
        self.put(ins.operands[0], out, f"u{bits}")

    def op_mul(self, ins: Instruction) -> None:
        kind = self.kind()
        if self._is_float(kind):
            self._float(ins, "mul")
            return
        self.put(ins.operands[0], *self._product(ins, kind))

    def op_mul24(self, ins: Instruction) -> None:
        self._binary(ins, f"ops.mul24({{a}}, {{b}}, {ins.parts[1] == 'hi'})", self.kind())

    def op_mad24(self, ins: Instruction) -> None:
        kind = self.kind()
        if "sat" in ins.parts:
            self.unknown("modifier .sat")
        a, b = (self.value(o, kind) for o in ins.operands[1:3])
        product = f"ops.mul24({a}, {b}, {ins.parts[1] == 'hi'}).view(u4)"
        self.put(ins.operands[0], f"{product} + {self.value(ins.operands[3], 'u32')}", "u32")

    def _product(self, ins: Instruction, kind: str) -> tuple[str, str]:
        mode = self.ins.parts[1]
        if mode == "wide":
            wide = f"{kind[0]}{2 * _BITS[kind]}"
            a, b = (f"{self.value(o, kind)}.astype({numpy_type(wide)})" for o in ins.operands[1:3])
            return f"({a} * {b})", wide
        if mode == "hi":
            a, b = (self.value(o, kind) for o in ins.operands[1:3])
            return f"ops.mul_hi({a}, {b})", kind
        if mode != "lo":
            self.unknown(f"modifier .{mode}")
        unsigned = f"u{_BITS[kind]}"
        a, b = (self.value(o, unsigned) for o in ins.operands[1:3])
        return f"({a} * {b})", unsigned

    def op_mad(self, ins: Instruction) -> None:
        kind = self.kind()
        if self._is_float(kind):
            self._float(ins, "fma")
            return
        if "sat" in ins.parts:
            self.unknown("modifier .sat")
        if "cc" in ins.parts:
            self._carry_product(ins, False)
            return
        product, result = self._product(ins, kind)
        unsigned = f"u{_BITS[result]}"
        as_unsigned = f"{product}.view({numpy_type(unsigned)})"
        self.put(ins.operands[0], f"{as_unsigned} + {self.value(ins.operands[3], unsigned)}", unsigned)

    def op_div(self, ins: Instruction) -> None:
        kind = self.kind()
        if self._is_float(kind):
            self._float(ins, "div")
        else:
            self._binary(ins, "ops.div({a}, {b})", kind)

    def op_rem(self, ins: Instruction) -> None:
        self._binary(ins, "ops.rem({a}, {b})", self.kind())

    def op_neg(self, ins: Instruction) -> None:
        kind = self.kind()
        if kind in ("f32", "f64"):
            sign = 1 << (_BITS[kind] - 1)
            bits = f"b{_BITS[kind]}"
            value = f"{self.value(ins.operands[1], bits)} ^ {self.program.constant(sign, numpy_type(bits))}"
            if "ftz" in ins.parts:
                value = f"ops.flush(({value}).view(f4)).view(u4)"
            self.put(ins.operands[0], value, bits)
        elif self._is_float(kind):
            self._half(ins, "neg", 1)
        else:
            unsigned = f"u{_BITS[kind]}"
            self.put(ins.operands[0], f"-{self.value(ins.operands[1], unsigned)}", unsigned)

    def op_abs(self, ins: Instruction) -> None:
        kind = self.kind()
        if kind in ("f32", "f64"):
            value = f"np.abs({self.value(ins.operands[1], kind)})"
            self.put(ins.operands[0], f"ops.flush({value})" if "ftz" in ins.parts else value, kind)
        elif self._is_float(kind):
            self._half(ins, "abs", 1)
        else:
            self.put(ins.operands[0], f"np.abs({self.value(ins.operands[1], kind)})", kind)

    def _extremum(self, ins: Instruction, name: str) -> None:
        kind = self.kind()
        nan = "NaN" in ins.parts
        if set(ins.parts[1:-1]) - {"NaN", "ftz", "relu", "xorsign", "abs"}:
            self.unknown("modifier")
        if "xorsign" in ins.parts:
            if kind != "f32" or "ftz" in ins.parts:
                self.unknown("modifier .xorsign")
            self._binary(ins, f"ops.xorsign({{a}}, {{b}}, {name == 'min'}, {nan})", kind)
            return
        if kind in ("f32", "f64"):
            values = [self.value(operand, kind) for operand in ins.operands[1:]]
            if "ftz" in ins.parts:
                values = [f"ops.flush({v})" for v in values]
            expression = values[0]
            for value in values[1:]:
                expression = f"ops.f{name}({expression}, {value}, {nan})"
            self.put(ins.operands[0], expression, kind)
        elif self._is_float(kind):
            self._half(ins, f"{name}.nan" if nan else name, 2)
        else:
            relu = "relu" in ins.parts
            function = "np.minimum" if name == "min" else "np.maximum"
            self._binary(ins, f"np.maximum({function}({{a}}, {{b}}), 0)" if relu else f"{function}({{a}}, {{b}})", kind)

    def op_min(self, ins: Instruction) -> None:
        self._extremum(ins, "min")

    def op_max(self, ins: Instruction) -> None:
        self._extremum(ins, "max")

    def op_and(self, ins: Instruction) -> None:
        self._binary(ins, "{a} & {b}", self.kind())

    def op_or(self, ins: Instruction) -> None:
        self._binary(ins, "{a} | {b}", self.kind())

    def op_xor(self, ins: Instruction) -> None:
        self._binary(ins, "{a} ^ {b}", self.kind())

    def op_not(self, ins: Instruction) -> None:
        kind = self.kind()
        self.put(ins.operands[0], f"~{self.value(ins.operands[1], kind)}", kind)

    def op_cnot(self, ins: Instruction) -> None:
        kind = self.kind()
        self.put(ins.operands[0], f"({self.value(ins.operands[1], kind)} == 0).astype({numpy_type(kind)})", kind)

    def op_shl(self, ins: Instruction) -> None:
        self._shift(ins, "shl", "<<")

    def op_shr(self, ins: Instruction) -> None:
        self._shift(ins, "shr", ">>")

    def _shift(self, ins: Instruction, name: str, sign: str) -> None:
        kind = self.kind()
        a, amount = self.value(ins.operands[1], kind), ins.operands[2]
        if isinstance(amount, Imm) and 0 <= amount.value < _BITS[kind]:
            expression = f"{a} {sign} {self.program.constant(amount.value, numpy_type(kind))}"
        else:
            expression = f"ops.{name}({a}, {self.value(amount, 'u32')})"
        self.put(ins.operands[0], expression, kind)

    def op_shf(self, ins: Instruction) -> None:
        if ins.parts[1] not in ("l", "r") or ins.parts[2] not in ("wrap", "clamp") or ins.parts[3] != "b32":
            self.unknown("modifier")
        low, high, amount = (self.value(o, "u32") for o in ins.operands[1:4])
        left, wrap = ins.parts[1] == "l", ins.parts[2] == "wrap"
        self.put(ins.operands[0], f"ops.funnel({low}, {high}, {amount}, {left}, {wrap})", "u32")

    def op_lop3(self, ins: Instruction) -> None:
        if len(ins.parts) != 2 or not isinstance(ins.operands[4], Imm):
            self.unknown("form")
        a, b, c = (self.value(o, "u32") for o in ins.operands[1:4])
        self.put(ins.operands[0], f"ops.lop3({a}, {b}, {c}, {ins.operands[4].value})", "u32")

    def op_prmt(self, ins: Instruction) -> None:
        if len(ins.parts) != 2:
            self.unknown("mode")
        a, b, c = (self.value(o, "u32") for o in ins.operands[1:4])
        self.put(ins.operands[0], f"ops.prmt({a}, {b}, {c})", "u32")

    def op_bfe(self, ins: Instruction) -> None:
        kind = self.kind()
        a = self.value(ins.operands[1], kind)
        start, length = (self.value(o, "u32") for o in ins.operands[2:4])
        self.put(ins.operands[0], f"ops.bfe({a}, {start}, {length})", kind)

    def op_bfi(self, ins: Instruction) -> None:
        kind = self.kind()
        a, b = (self.value(o, kind) for o in ins.operands[1:3])
        start, length = (self.value(o, "u32") for o in ins.operands[3:5])
        self.put(ins.operands[0], f"ops.bfi({a}, {b}, {start}, {length})", kind)

    def op_bfind(self, ins: Instruction) -> None:
        self.put(
            ins.operands[0], f"ops.bfind({self.value(ins.operands[1], self.kind())}, {'shiftamt' in ins.parts})", "u32"
        )

    def op_clz(self, ins: Instruction) -> None:
        self.put(ins.operands[0], f"ops.clz({self.value(ins.operands[1], self.kind())})", "u32")

    def op_popc(self, ins: Instruction) -> None:
        self.put(ins.operands[0], f"ops.popc({self.value(ins.operands[1], self.kind())})", "u32")

    def op_brev(self, ins: Instruction) -> None:
        kind = self.kind()
        self.put(ins.operands[0], f"ops.brev({self.value(ins.operands[1], kind)})", kind)

    def op_sad(self, ins: Instruction) -> None:
        kind = self.kind()
        a, b, c = (self.value(o, kind) for o in ins.operands[1:4])
        self.put(ins.operands[0], f"({c} + (np.maximum({a}, {b}) - np.minimum({a}, {b})))", kind)

    def op_dp4a(self, ins: Instruction) -> None:
        a, b, c = (self.value(o, "u32") for o in ins.operands[1:4])
        signed = [p == "s32" for p in ins.parts[1:3]]
        self.put(ins.operands[0], f"ops.dp4a({a}, {b}, {c}, {signed[0]}, {signed[1]})", "u32")

    # Comparison and selection

    def op_setp(self, ins: Instruction) -> None:
        parts = [p for p in ins.parts[1:-1] if p != "ftz"]
        kind = self.kind()
        comparison = self._compare(parts[0], ins.operands[1], ins.operands[2], kind, "ftz" in ins.parts)
        target = ins.operands[0]
        if len(parts) > 1:
            sign = {"and": "&", "or": "|", "xor": "^"}.get(parts[1])
            if sign is None:
                self.unknown(f"modifier .{parts[1]}")
            other = self.value(ins.operands[3], "pred")
            name = self.temporary()
            self.emit(f"{name} = {comparison}")
            if isinstance(target, Pair):
                self.put(target.second, f"(~{name}) {sign} {other}", "pred")
                target = target.first
            self.put(target, f"{name} {sign} {other}", "pred")
            return
        if isinstance(target, Pair):
            name = self.temporary()
            self.emit(f"{name} = {comparison}")
            self.put(target.first, name, "pred")
            self.put(target.second, f"~{name}", "pred")
        else:
            self.put(target, comparison, "pred")

    def _compare(self, name: str, left, right, kind: str, ftz: bool) -> str:
        if kind in ("f16", "bf16"):
            decode = "ops.formats.f16_to_f32" if kind == "f16" else "ops.formats.bf16_to_f32"
            a, b = (f"{decode}(np.ascontiguousarray({self.value(o, kind)}))" for o in (left, right))
            return f"ops.compare({name!r}, {a}, {b})"
        if kind in ("f16x2", "bf16x2"):
            return self.unknown("packed comparison")
        a, b = self.value(left, kind), self.value(right, kind)
        if kind in ("f32", "f64"):
            if ftz:
                a, b = f"ops.flush({a})", f"ops.flush({b})"
            return f"ops.compare({name!r}, {a}, {b})"
        signs = {
            "eq": "==",
            "ne": "!=",
            "lt": "<",
            "le": "<=",
            "gt": ">",
            "ge": ">=",
            "lo": "<",
            "ls": "<=",
            "hi": ">",
            "hs": ">=",
        }
        if name not in signs:
            self.unknown(f"comparison .{name}")
        return f"({a} {signs[name]} {b})"

    def op_set(self, ins: Instruction) -> None:
        name, to, source = ins.parts[1], ins.parts[-2], ins.parts[-1]
        if len(ins.parts) != 4 or to not in ("u32", "s32", "f32"):
            self.unknown("form")
        comparison = self._compare(name, ins.operands[1], ins.operands[2], source, False)
        if to == "f32":
            self.put(ins.operands[0], f"{comparison}.astype(f4)", "f32")
        else:
            self.put(ins.operands[0], f"where({comparison}, u4(0xFFFFFFFF), u4(0))", "u32")

    def op_selp(self, ins: Instruction) -> None:
        kind = self.kind()
        kind = f"b{_BITS[kind]}"
        a, b = (self.value(o, kind) for o in ins.operands[1:3])
        self.put(ins.operands[0], f"where({self.value(ins.operands[3], 'pred')}, {a}, {b})", kind)

    def op_slct(self, ins: Instruction) -> None:
        kind = f"b{_BITS[ins.parts[-2]]}"
        a, b = (self.value(o, kind) for o in ins.operands[1:3])
        self.put(ins.operands[0], f"where({self.value(ins.operands[3], ins.parts[-1])} >= 0, {a}, {b})", kind)

    # Floating point

    def _float(self, ins: Instruction, name: str) -> None:
        kind = self.kind()
        count = {"fma": 3}.get(name, 2)
        if kind not in ("f32", "f64"):
            self._half(ins, name, count)
            return
        flags = set(ins.parts[1:-1])
        mode = next((f for f in ("rz", "rm", "rp") if f in flags), "rn")
        extra = flags - {"rn", "rz", "rm", "rp", "ftz", "sat", "approx", "full"}
        if extra:
            self.unknown(f"modifier .{sorted(extra)[0]}")
        args = [self.value(o, kind) for o in ins.operands[1 : 1 + count]]
        if "ftz" in flags:
            args = [f"ops.flush({a})" for a in args]
        if kind == "f64" and (mode != "rn" or name == "fma"):
            if name == "fma" and mode == "rn":
                expression = f"ops.fma64({', '.join(args)})"
            else:
                self.unknown("rounding mode in f64")
        elif name == "fma":
            expression = f"ops.fma32({', '.join(args)}, {mode!r})"
        elif mode == "rn" or name == "div":
            if mode != "rn":
                self.unknown("rounding mode of div")
            sign = {"add": "+", "sub": "-", "mul": "*", "div": "/"}[name]
            expression = f"({args[0]} {sign} {args[1]})"
        elif name == "sub":
            expression = f"ops.add32({args[0]}, -({args[1]}), {mode!r})"
        else:
            expression = f"ops.{name}32({args[0]}, {args[1]}, {mode!r})"
        if "ftz" in flags:
            expression = f"ops.flush({expression})"
        if "sat" in flags:
            expression = f"ops.saturate({expression})"
        self.put(ins.operands[0], expression, kind)

    def _half(self, ins: Instruction, name: str, count: int) -> None:
        kind = self.kind()
        flags = set(ins.parts[1:-1]) - {"NaN", "rn", "approx"}
        if flags - {"relu", "sat"}:
            self.unknown(f"modifier .{sorted(flags - {'relu', 'sat'})[0]}")
        element = kind.removesuffix("x2")
        options = f"relu={'relu' in flags}, sat={'sat' in flags}"
        if kind.endswith("x2"):
            args = ", ".join(f"ops.halves({self.value(o, kind)})" for o in ins.operands[1 : 1 + count])
            self.put(
                ins.operands[0], f"ops.join_halves(ops.half_op({name!r}, {element!r}, ({args},), {options}))", kind
            )
        else:
            args = ", ".join(self.value(o, kind) for o in ins.operands[1 : 1 + count])
            self.put(ins.operands[0], f"ops.half_op({name!r}, {element!r}, ({args},), {options})", kind)

    def op_fma(self, ins: Instruction) -> None:
        self._float(ins, "fma")

    def _function(self, ins: Instruction) -> None:
        kind = self.kind()
        name = ins.parts[0]
        if kind not in ("f32", "f64"):
            self._half(ins, name, 1)
            return
        flags = set(ins.parts[1:-1])
        if flags - {"approx", "rn", "ftz"}:
            self.unknown("modifier")
        value = self.value(ins.operands[1], kind)
        if "ftz" in flags:
            value = f"ops.flush({value})"
        expression = f"ops.approx({name!r}, {value})"
        if kind == "f32":
            expression += ".astype(f4)"
        if "ftz" in flags:
            expression = f"ops.flush({expression})"
        self.put(ins.operands[0], expression, kind)

    op_rcp = op_sqrt = op_rsqrt = op_sin = op_cos = op_lg2 = op_ex2 = op_tanh = _function

    def op_copysign(self, ins: Instruction) -> None:
        kind = self.kind()
        a, b = (self.value(o, kind) for o in ins.operands[1:3])
        self.put(ins.operands[0], f"np.copysign({b}, {a})", kind)

    def op_testp(self, ins: Instruction) -> None:
        kind = self.kind()
        value = self.value(ins.operands[1], kind)
        tests = {
            "finite": "np.isfinite({v})",
            "infinite": "np.isinf({v})",
            "number": "~np.isnan({v})",
            "notanumber": "np.isnan({v})",
        }
        if ins.parts[1] not in tests:
            self.unknown(f"test .{ins.parts[1]}")
        self.put(ins.operands[0], tests[ins.parts[1]].format(v=value), "pred")

    # Memory

    def _vector(self) -> int:
        for part in self.ins.parts:
            if re.fullmatch(r"v[248]", part):
                return int(part[1])
        return 1

    def _order(self) -> tuple[str, str]:
        parts = self.ins.parts
        order = next(
            (p for p in ("relaxed", "acquire", "release", "acq_rel", "volatile", "mmio") if p in parts), "weak"
        )
        scope = next(
            (p for p in ("cta", "cluster", "gpu", "sys") if p in parts), "gpu" if order != "volatile" else "sys"
        )
        return order, scope

    def op_ld(self, ins: Instruction) -> None:
        kind, count, space = self.kind(), self._vector(), self.space(ins)
        size = _BITS[kind] // 8
        if kind == "b128":
            self.unknown("type .b128")
        target, origin = ins.operands[0], ins.operands[1]
        items = target.items if isinstance(target, Vec) else (target,)
        if len(items) != count:
            self.unknown("vector width")
        if space == "param":
            if not isinstance(origin.base, Sym):
                self.unknown("a parameter address in a register")
            if origin.base.name in self.program.kernel.variables:
                self.put(target, f"call_{origin.base.name}", kind)
                return
            offset = self.program.addresses[origin.base.name][1] + origin.offset
            for i, item in enumerate(items):
                value = f"E.parameter({offset + i * size}, {_UNSIGNED[8 * size]})"
                self._put_loaded(item, value, kind)
            return
        order, scope = self._order()
        name = self.temporary()
        self.emit(
            f"{name} = E.load(G, {self.src()}, {space!r}, {self.address(origin)}, {size}, {count}, {self.mask()},"
            f" {order!r}, {scope!r})"
        )
        for i, item in enumerate(items):
            self._put_loaded(item, f"{name}[{i}]", kind)

    def _put_loaded(self, item, value: str, kind: str) -> None:
        if kind[0] == "s":
            self.put(item, f"{value}.view({numpy_type(kind)})", kind)
        else:
            self.put(item, value, f"b{_BITS[kind]}")

    op_ldu = op_ld

    def _is_trace_mark(self) -> bool:
        """Whether this store belongs to the DSL's in-kernel event tracing: a timestamp, then a pmevent with its number.

        Its address lies in the part of shared memory that the system keeps; on a GPU run-iket patches the place.
        """
        following = self.program.instructions[self.src() + 1 : self.src() + 2]
        return IKET_MODULE in self.program.module.variables and any(i.parts[0] == "pmevent" for i in following)

    def op_st(self, ins: Instruction) -> None:
        if self._is_trace_mark():
            return
        kind, count, space = self.kind(), self._vector(), self.space(ins)
        target, origin = ins.operands[0], ins.operands[1]
        if "async" in ins.parts:
            self._st_async(ins)
            return
        if space == "param":
            # An argument of a call: a local of the generated function until the call, which follows in the segment.
            self.emit(f"call_{target.base.name} = {self.value(origin, kind)}")
            return
        if kind == "b128":
            self.unknown("type .b128")
        items = origin.items if isinstance(origin, Vec) else (origin,)
        if len(items) != count:
            self.unknown("vector width")
        unsigned = f"b{_BITS[kind]}"
        values = ", ".join(self.value(item, unsigned) for item in items)
        order, scope = self._order()
        self.emit(
            f"E.store(G, {self.src()}, {space!r}, {self.address(target)}, ({values},), {_BITS[kind] // 8},"
            f" {self.mask()}, {order!r}, {scope!r})"
        )

    def _st_async(self, ins: Instruction) -> None:
        kind, count = self.kind(), self._vector()
        target, origin, barrier = ins.operands
        items = origin.items if isinstance(origin, Vec) else (origin,)
        if len(items) != count or not any(p.startswith("mbarrier::complete_tx") for p in ins.parts):
            self.unknown("form")
        values = ", ".join(self.value(item, f"b{_BITS[kind]}") for item in items)
        self.emit(
            f"E.store_async(G, {self.src()}, {self.place(target, 'cluster')}, ({values},), {_BITS[kind] // 8},"
            f" {self.place(barrier, 'cluster')}, {self.mask()})"
        )

    def op_atom(self, ins: Instruction) -> None:
        self._atomic(ins, True)

    def op_red(self, ins: Instruction) -> None:
        if "async" in ins.parts:
            self.unknown("form")
        self._atomic(ins, False)

    def _atomic(self, ins: Instruction, returns: bool) -> None:
        kind = self.kind()
        names = ("add", "min", "max", "and", "or", "xor", "exch", "cas", "inc", "dec")
        name = next((p for p in ins.parts if p in names), None)
        if name is None:
            self.unknown("atomic operation")
        operands = ins.operands[1:] if returns else ins.operands
        order, scope = self._order()
        if order == "weak":
            order = "relaxed"
        # The elements of a vector form are atomic one by one (PTX ISA, red and atom with .vec).
        where = operands[0]
        columns = [self._items(o) for o in operands[1 : 3 if name == "cas" else 2]]
        if any(len(column) != self._vector() for column in columns):
            self.unknown("vector width")
        for i, terms in enumerate(zip(*columns, strict=True)):
            values = ", ".join(self.value(o, kind) for o in terms)
            result = self.temporary()
            address = self.address(Mem(where.base, where.offset + i * _BITS[kind] // 8))
            self.emit(
                f"{result} = E.atomic(G, {self.src()}, {self.space(ins)!r}, {address}, {name!r}, {kind!r},"
                f" ({values},), {self.mask()}, {order!r}, {scope!r})"
            )
            if returns:
                self.put(self._items(ins.operands[0])[i], result, kind)

    def _nothing(self, ins: Instruction) -> None:
        """Hints: no effect on results."""

    op_prefetch = op_prefetchu = op_nanosleep = op_griddepcontrol = op_discard = op_applypriority = op_pmevent = (
        _nothing
    )
    op_brkpt = _nothing

    def op_createpolicy(self, ins: Instruction) -> None:
        self.put(ins.operands[0], self.program.constant(0, "u8"), "b64")

    def op_call(self, ins: Instruction) -> None:
        """Of functions only `vprintf`: compilers inline everything else that kernels call."""
        match = re.match(r"call(?:\.uni)?\s*\((\w+)\)\s*,\s*vprintf\s*,\s*\((\w+)\s*,\s*(\w+)\)", ins.text)
        if match is None or ins.guard is not None:
            self.unknown("function call")
        result, text, arguments = match.groups()
        self.emit(f"E.printf(G, call_{text}, call_{arguments}, {self.mask()})")
        self.emit(f"call_{result} = {self.program.constant(0, 'u4')}")

    def op_trap(self, ins: Instruction) -> None:
        self.emit(f"E.trap(G, {self.src()}, {self.mask()})")

    def op_membar(self, ins: Instruction) -> None:
        scope = {"cta": "cta", "gl": "gpu", "sys": "sys", "proxy": "proxy"}[ins.parts[1]]
        if scope == "proxy":
            self.unknown("form")
        self.emit(f"E.fence(G, {self.src()}, 'sc', {scope!r}, {self.mask()})")

    def op_fence(self, ins: Instruction) -> None:
        parts = ins.parts
        scope = next((p for p in ("cta", "cluster", "gpu", "sys") if p in parts), "cta")
        if parts[1] == "proxy":
            if parts[2] == "async":
                space = self.space(ins)
                kind = (
                    "proxy.async" if space == "generic" else f"proxy.async.{'shared' if space == 'cluster' else space}"
                )
            elif parts[2] == "tensormap::generic" or parts[2] == "alias":
                kind = f"proxy.{parts[2]}"
            else:
                self.unknown("proxy")
        elif parts[1] == "mbarrier_init":
            kind, scope = "mbarrier_init", "cluster"
        elif parts[1] in ("acq_rel", "sc", "acquire", "release"):
            kind = parts[1] if parts[1] in ("acq_rel", "sc") else "acq_rel"
        else:
            self.unknown("fence")
        self.emit(f"E.fence(G, {self.src()}, {kind!r}, {scope!r}, {self.mask()})")

    # Across lanes

    def _active(self) -> str:
        return "G.active" if not self.masked else "m"

    def op_shfl(self, ins: Instruction) -> None:
        if ins.parts[1] != "sync" or self.kind() != "b32":
            self.unknown("form")
        target = ins.operands[0]
        a, b, c = (self.value(o, "u32") for o in ins.operands[1:4])
        value, inside = self.temporary(), self.temporary()
        self._check_members(ins.operands[4])
        self.emit(f"{value}, {inside} = ops.shuffle({ins.parts[2]!r}, {a}, {b}, {c})")
        if isinstance(target, Pair):
            self.put(target.second, inside, "pred")
            target = target.first
        self.put(target, value, "b32")

    def _check_members(self, operand) -> None:
        if isinstance(operand, Imm) and operand.value & 0xFFFFFFFF == 0xFFFFFFFF and not self.masked:
            return
        self.emit(f"E.check_members(G, {self.src()}, {self.value(operand, 'u32')}, {self.mask()})")

    def _voters(self, operand) -> str:
        """Lanes named by a member mask, among the active ones."""
        named = f"ops.members({self.value(operand, 'u32')})"
        return f"({named} & {self._active()})"

    def op_vote(self, ins: Instruction) -> None:
        if ins.parts[1] != "sync":
            self.unknown("form")
        mode = ins.parts[2]
        self._check_members(ins.operands[2])
        voters = self._voters(ins.operands[2])
        value = self.value(ins.operands[1], "pred")
        if mode == "ballot":
            self.put(ins.operands[0], f"ops.ballot({value} & {voters})", "b32")
        elif mode == "all":
            self.put(ins.operands[0], f"({value} | ~{voters}).all(axis=-1, keepdims=True)", "pred")
        elif mode == "any":
            self.put(ins.operands[0], f"({value} & {voters}).any(axis=-1, keepdims=True)", "pred")
        elif mode == "uni":
            name = self.temporary()
            self.emit(
                f"{name} = {voters}; {name} = ({value} | ~{name}).all(axis=-1, keepdims=True)"
                f" | ~({value} & {name}).any(axis=-1, keepdims=True)"
            )
            self.put(ins.operands[0], name, "pred")
        else:
            self.unknown(f"mode .{mode}")

    def op_activemask(self, ins: Instruction) -> None:
        self.put(ins.operands[0], f"ops.ballot({self._active()})", "b32")

    def op_match(self, ins: Instruction) -> None:
        kind = self.kind()
        self._check_members(ins.operands[2])
        value = f"np.broadcast_to({self.value(ins.operands[1], kind)}, (G.count, 32))"
        voters = f"np.broadcast_to({self._voters(ins.operands[2])}, (G.count, 32))"
        if ins.parts[1] == "any":
            self.put(ins.operands[0], f"ops.match_any({value}, {voters})", "b32")
            return
        mask, agree, target = self.temporary(), self.temporary(), ins.operands[0]
        self.emit(f"{mask} = {voters}; {agree} = ops.match_any({value}, {mask})")
        self.emit(f"{agree} = ({agree} == ops.ballot({mask})) | ~{mask}; {agree} = {agree}.all(axis=-1, keepdims=True)")
        first = target.first if isinstance(target, Pair) else target
        if isinstance(target, Pair):
            self.put(target.second, agree, "pred")
        self.put(first, f"where({agree}, ops.ballot({mask}), u4(0))", "b32")

    def op_redux(self, ins: Instruction) -> None:
        kind = self.kind()
        if kind == "f32":
            self.unknown("type")
        self._check_members(ins.operands[2])
        value = f"np.broadcast_to({self.value(ins.operands[1], kind)}, (G.count, 32))"
        self.put(ins.operands[0], f"ops.redux({ins.parts[2]!r}, {value}, {self._voters(ins.operands[2])})", kind)

    def op_elect(self, ins: Instruction) -> None:
        target = ins.operands[0]
        leader = self.temporary()
        self._check_members(ins.operands[1])
        self.emit(f"{leader} = ops.elect({self._voters(ins.operands[1])})")
        self.put(target.second, f"ops.LANES == {leader}", "pred")
        self.put(target.first, f"{leader}.astype(u4)", "b32")

    def op_setmaxnreg(self, ins: Instruction) -> None:
        self.emit(f"E.setmaxnreg(G, {self.src()}, {ins.parts[1]!r}, {ins.operands[0].value})")

    # Barriers that do not block

    def op_bar(self, ins: Instruction) -> None:
        if "arrive" in ins.parts:
            number, count = (self.value(o, "u32") for o in ins.operands[:2])
            self.emit(f"E.bar_arrive(G, {self.src()}, {number}, {count}, {self.mask()})")
        elif ins.opcode.startswith("bar.warp.sync"):
            self._check_members(ins.operands[0])
        else:
            self.unknown("form")

    def op_barrier(self, ins: Instruction) -> None:
        if "cluster" in ins.parts:
            if "arrive" not in ins.parts:
                self.unknown("form")
            self.emit(f"E.cluster_arrive(G, {self.src()}, {'relaxed' not in ins.parts}, {self.mask()})")
        else:
            self.op_bar(ins)

    def op_mbarrier(self, ins: Instruction) -> None:
        action = ins.parts[1]
        space, mask = self.space(ins), self.mask()
        order = "relaxed" if "relaxed" in ins.parts else "release"
        operands = list(ins.operands)
        target = None
        if not isinstance(operands[0], Mem):
            target = operands.pop(0)
        address = self.place(operands[0], space)
        if action == "init":
            self.emit(f"E.mbar_init(G, {self.src()}, {address}, {self.value(operands[1], 'u32')}, {mask})")
        elif action == "inval":
            self.emit(f"E.mbar_inval(G, {self.src()}, {address}, {mask})")
        elif action == "expect_tx":
            self.emit(
                f"E.mbar_arrive(G, {self.src()}, {address}, None, {self.value(operands[1], 'u32')}, {mask}, {order!r})"
            )
        elif action == "complete_tx":
            self.emit(f"E.mbar_complete_tx(G, {self.src()}, {address}, {self.value(operands[1], 'u32')}, {mask})")
        elif action in ("arrive", "arrive_drop"):
            tx, count = "None", self.program.constant(1, "u4")
            if "expect_tx" in ins.parts:
                tx = self.value(operands[1], "u32")
            elif len(operands) > 1:
                count = self.value(operands[1], "u32")
            drop = action == "arrive_drop"
            result = self.temporary()
            self.emit(f"{result} = E.mbar_arrive(G, {self.src()}, {address}, {count}, {tx}, {mask}, {order!r}, {drop})")
            if target is not None and target != ptx.SINK:
                self.put(target, result, "b64")
        else:
            self.unknown("form")

    # Asynchronous copies

    def op_cp(self, ins: Instruction) -> None:
        parts = ins.parts
        op = ins.opcode
        mask, src = self.mask(), self.src()
        if op.startswith("cp.async.bulk.prefetch"):
            return
        if op.startswith("cp.async.bulk.commit_group"):
            self.emit(f"E.bulk_commit(G, {src}, {mask})")
        elif op.startswith("cp.async.bulk.wait_group"):
            self.emit(f"E.bulk_wait(G, {src}, {ins.operands[0].value}, {'read' in parts}, {mask})")
        elif op.startswith(("cp.async.bulk.tensor", "cp.reduce.async.bulk.tensor")):
            self._bulk_tensor(ins)
        elif op.startswith(("cp.async.bulk", "cp.reduce.async.bulk")):
            self._bulk(ins)
        elif op.startswith("cp.async.commit_group"):
            self.emit(f"E.cp_async_commit(G, {src}, {mask})")
        elif op.startswith("cp.async.wait_group"):
            self.emit(f"E.cp_async_wait(G, {src}, {ins.operands[0].value}, {mask})")
        elif op.startswith("cp.async.wait_all"):
            self.emit(f"E.cp_async_commit(G, {src}, {mask}); E.cp_async_wait(G, {src}, 0, {mask})")
        elif op.startswith("cp.async.mbarrier.arrive"):
            address = self.place(ins.operands[0], self.space(ins))
            self.emit(f"E.cp_async_mbar_arrive(G, {src}, {address}, {'noinc' in parts}, {mask})")
        elif op.startswith(("cp.async.ca", "cp.async.cg")):
            target, origin, size = ins.operands[:3]
            nbytes, ignored = "None", "None"
            for extra in ins.operands[3:]:
                if isinstance(extra, (Reg, Not)) and _registers(extra)[0].width == 1:
                    ignored = self.value(extra, "pred")
                elif isinstance(extra, Reg) and extra.width == 64:
                    continue
                else:
                    nbytes = self.value(extra, "u32")
            self.emit(
                f"E.cp_async(G, {src}, {self.place(target, 'shared')},"
                f" {self.address(origin)}, {size.value}, {nbytes}, {ignored}, {mask})"
            )
        else:
            self.unknown("form")

    def _coordinates(self, vector: Vec) -> str:
        return "(" + "".join(f"{self.value(item, 's32')}, " for item in vector.items) + ")"

    def _bulk_tensor(self, ins: Instruction) -> None:
        parts, op = ins.parts, ins.opcode
        if any(p.startswith(("im2col", "tile::", "cta_group")) for p in parts):
            self.unknown("mode")
        operands = list(ins.operands)
        if ".global.shared::cta" in op:
            reduction = next((p for p in parts if p in ("add", "min", "max", "inc", "dec", "and", "or", "xor")), None)
            tensor, origin = operands[:2]
            self.emit(
                f"E.tensor_store(G, {self.src()}, {self.address(Mem(tensor.base, tensor.offset))},"
                f" {self._coordinates(tensor.extra[0])},"
                f" {self.place(origin, 'shared')}, {reduction!r}, {self.mask()})"
            )
            return
        target, tensor, barrier = operands[:3]
        rest = operands[3:]
        multicast = "None"
        if "multicast::cluster" in parts:
            multicast = self.value(rest.pop(0), "u16")
        space = "cluster" if "shared::cluster" in parts else "shared"
        self.emit(
            f"E.tensor_load(G, {self.src()}, {self.place(target, space)},"
            f" {self.address(Mem(tensor.base, tensor.offset))}, {self._coordinates(tensor.extra[0])},"
            f" {self.place(barrier, space)}, {multicast}, {self.mask()})"
        )

    def _bulk(self, ins: Instruction) -> None:
        parts = ins.parts
        reduction, kind = None, None
        if ins.opcode.startswith("cp.reduce"):
            reduction = next((p for p in parts if p in ("add", "min", "max", "inc", "dec", "and", "or", "xor")), None)
            kind = parts[-1]
        spaces = [p for p in parts if p in ("shared::cta", "shared::cluster", "global")]
        target, origin, size = ins.operands[:3]
        nbytes = self.value(size, "u32")
        if spaces == ["global", "shared::cta"]:
            if "cp_mask" in parts:
                self.unknown("modifier .cp_mask")
            place = self.place(origin, "shared")
            self.emit(
                f"E.bulk_store(G, {self.src()}, {self.address(target)}, {place}, {nbytes},"
                f" {reduction!r}, {kind!r}, {self.mask()})"
            )
            return
        barrier = self.place(ins.operands[3], "cluster")
        where = self.place(target, "cluster")
        multicast = "None"
        if "multicast::cluster" in parts:
            multicast = self.value(ins.operands[4], "u16")
        if len(spaces) == 2 and spaces[1] == "global":
            self.emit(
                f"E.bulk_load(G, {self.src()}, {where}, {self.address(origin)}, {nbytes}, {barrier},"
                f" {multicast}, {self.mask()})"
            )
        elif spaces == ["shared::cluster", "shared::cta"]:
            place = self.place(origin, "shared")
            self.emit(
                f"E.bulk_peer(G, {self.src()}, {where}, {place}, {nbytes}, {barrier},"
                f" {reduction!r}, {kind!r}, {self.mask()})"
            )
        else:
            self.unknown("spaces")

    def op_tensormap(self, ins: Instruction) -> None:
        self.unknown("opcode")

    # Matrix instructions

    def op_wgmma(self, ins: Instruction) -> None:
        action = ins.parts[1]
        if ins.guard is not None:
            self.unknown("a guard on wgmma")
        if action == "mma_async":
            self._wgmma(ins)
        elif action == "fence":
            self.emit(f"E.wgmma_fence(G, {self.src()})")
        elif action == "commit_group":
            self.emit(f"E.wgmma_commit(G, {self.src()})")
        else:
            self.unknown("form")

    def _wgmma(self, ins: Instruction) -> None:
        operands = list(ins.operands)
        accumulators = _registers(operands.pop(0))
        a = operands.pop(0)
        b = operands.pop(0)
        fragments = _registers(a) if isinstance(a, Vec) else []
        scale = "None"
        if operands and not isinstance(operands[0], Imm):
            scale = self.value(operands.pop(0), "pred")
        elif operands:
            scale = f"{self.program.constant(bool(operands.pop(0).value), 'b1')}"
        tail = tuple(int(o.value) for o in operands)
        if self.masked:
            self.emit(f"E.partial_wgmma(G, {self.src()})")
        try:
            spec = matrix.Wgmma.parse(ins.opcode, tail, bool(fragments))
        except matrix.MatrixError as error:
            self.unknown(str(error))
        self.program.wgmma[ins.index] = (
            spec,
            np.array([r.index for r in accumulators]),
            np.array([r.index for r in fragments]) if fragments else None,
            tuple(r.index for r in accumulators),
            tuple(r.index for r in fragments),
        )
        descriptor_a = "None" if fragments else self.value(a, "b64")
        self.flush(set(accumulators) | set(fragments))
        self.emit(f"E.wgmma_issue(G, {self.src()}, {descriptor_a}, {self.value(b, 'b64')}, {scale})")
        self.forget(accumulators)
        self.settled = False

    def _mma_run(self, at: int) -> int:
        """Independent mma.sync of one shape that follow each other become one call. Returns how many, 0 for none."""
        first = self.body[at]
        run, written = [], set()
        for ins in self.body[at:]:
            if ins.opcode != first.opcode or ins.guard is not None:
                break
            if any(r in written for r in sources(ins)):
                break
            written |= set(destinations(ins))
            run.append(ins)
        if not run or self.program.accumulators or self.program.undefined:
            return 0
        op = self._mma_op(first)
        name = self.program.object(re.sub(r"\W", "_", first.opcode), op)
        stacks = []
        for position in (1, 2, 3):
            rows = [
                "(" + "".join(f"{self.value(r, 'b32')}, " for r in self._items(ins.operands[position])) + ")"
                for ins in run
            ]
            stacks.append("(" + "".join(f"{row}, " for row in rows) + ")")
        result = self.temporary()
        self.emit(f"{result} = E.mma(G, {first.index}, {name}, {', '.join(stacks)})")
        for i, ins in enumerate(run):
            self.ins = ins
            for j, item in enumerate(self._items(ins.operands[0])):
                self.put(item, f"{result}[{i}][{j}]", "b32")
        return len(run)

    @staticmethod
    def _items(operand) -> tuple:
        return operand.items if isinstance(operand, Vec) else (operand,)

    def _mma_op(self, ins: Instruction) -> matrix.Mma:
        try:
            return matrix.Mma.parse(ins.opcode)
        except matrix.MatrixError as error:
            return self.unknown(str(error))

    def op_mma(self, ins: Instruction) -> None:
        if ins.guard is not None:
            self.unknown("a guard on mma")
        name = self.program.object(re.sub(r"\W", "_", ins.opcode), self._mma_op(ins))
        stacks = [
            "((" + "".join(f"{self.value(r, 'b32')}, " for r in self._items(o)) + "),)" for o in ins.operands[1:4]
        ]
        result = self.temporary()
        self.emit(f"{result} = E.mma(G, {ins.index}, {name}, {', '.join(stacks)})")
        for j, item in enumerate(self._items(ins.operands[0])):
            self.put(item, f"{result}[0][{j}]", "b32")

    def op_ldmatrix(self, ins: Instruction) -> None:
        try:
            op = matrix.LdMatrix.parse(ins.opcode)
        except matrix.MatrixError as error:
            self.unknown(str(error))
        name = self.program.object(re.sub(r"\W", "_", ins.opcode), op)
        result = self.temporary()
        address = self.place(ins.operands[1], self.space(ins))
        self.emit(f"{result} = E.ldmatrix(G, {self.src()}, {name}, {address}, {self.mask()})")
        for i, item in enumerate(self._items(ins.operands[0])):
            self.put(item, f"{result}[{i}]", "b32")

    def op_stmatrix(self, ins: Instruction) -> None:
        try:
            op = matrix.StMatrix.parse(ins.opcode)
        except matrix.MatrixError as error:
            self.unknown(str(error))
        name = self.program.object(re.sub(r"\W", "_", ins.opcode), op)
        values = "".join(f"{self.value(item, 'b32')}, " for item in self._items(ins.operands[1]))
        address = self.place(ins.operands[0], self.space(ins))
        self.emit(f"E.stmatrix(G, {self.src()}, {name}, {address}, ({values}), {self.mask()})")

    def op_movmatrix(self, ins: Instruction) -> None:
        value = f"np.broadcast_to({self.value(ins.operands[1], 'b32')}, (G.count, 32))"
        self.put(ins.operands[0], f"E.movmatrix({value})", "b32")
