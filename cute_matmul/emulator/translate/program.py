"""A kernel as a list of nodes: control flow, liveness, addresses of its variables."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from cute_matmul.emulator import ptx
from cute_matmul.emulator.errors import UnknownInstruction
from cute_matmul.emulator.ptx import Instruction, Kernel, Module, Reg, Vec
from cute_matmul.emulator.translate.function import FunctionWriter
from cute_matmul.emulator.translate.types import NAMESPACE, SHARED_START
from cute_matmul.emulator.translate.usage import consumes, destinations, is_rename, kind_of, registers_of, sources

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
        self.namespace = dict(NAMESPACE)

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
        live_in, live_out = self._flow(sources)
        for node in self.nodes:
            node.live_out = live_out[node.index]
        self._entry_live = live_in[0]

    def _flow(self, reads: Callable[[Instruction], list[Reg]]) -> tuple[list[int], list[int]]:
        """Registers, as bits, whose value some path from each node's begin, and from its end, still reads.

        `reads` says what an instruction reads. The exit counts as a last node, where nothing is read.
        """
        uses, defines = [], []
        for node in self.nodes:
            use = define = 0
            for ins in self.instructions[node.start : node.end]:
                for register in reads(ins):
                    use |= self._bit(register) & ~define
                for register in destinations(ins):
                    define |= self._bit(register)
            uses.append(use)
            defines.append(define)
        live_in, live_out = [0] * (len(self.nodes) + 1), [0] * len(self.nodes)
        changed = True
        while changed:
            changed = False
            for node in reversed(self.nodes):
                out = 0
                for successor in self.successors(node):
                    out |= live_in[successor]
                into = uses[node.index] | (out & ~defines[node.index])
                live_out[node.index] = out
                if into != live_in[node.index]:
                    live_in[node.index] = into
                    changed = True
        return live_in, live_out

    def _undefined(self) -> tuple[frozenset[Reg], frozenset[Reg]]:
        """Registers that some path reads before anything sets them, and those that may receive such a value.

        An accumulator of a wgmma counts as set there: whether it is read depends on scale-d, known when it runs.
        """

        def reads(ins: Instruction) -> list[Reg]:
            read = sources(ins)
            if ins.opcode.startswith("wgmma.mma_async"):
                read = read[: len(read) - len(destinations(ins))]
            return read

        live_in, _ = self._flow(reads)
        by_bit = {self._bit(register): register for ins in self.instructions for register in reads(ins)}
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
                named |= {r.index for r in registers_of(ins.operands[0])}
                if isinstance(ins.operands[1], Vec):
                    named |= {r.index for r in registers_of(ins.operands[1])}
            elif is_rename(ins):
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
            writer = FunctionWriter(self, node, masked)
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
            array = np.array([[value]], dtype=NAMESPACE[kind])
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
