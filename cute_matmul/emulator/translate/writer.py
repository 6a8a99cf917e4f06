"""The writing of one node's function: registers as local variables, operands, guards; instructions come on top."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from cute_matmul.emulator import formats, ptx
from cute_matmul.emulator.errors import UnknownInstruction
from cute_matmul.emulator.ptx import Imm, Instruction, Mem, Not, Reg, Special, Sym, Vec
from cute_matmul.emulator.translate.types import BITS, FILE, PREFIX, UNSIGNED, numpy_type
from cute_matmul.emulator.translate.usage import consumes, destinations, is_rename, registers_of, sources

if TYPE_CHECKING:
    from cute_matmul.emulator.translate.program import Node, Program


class Writer:
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
        self.packed: dict[Reg, tuple] = {}  # registers and the pieces that they were put together from

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
            name = f"{PREFIX[register.width]}{register.index}"
            # What the segment overwrites must not stay a view of the register file.
            copy = ".copy()" if register in self.written else ""
            self.emit(f"{name} = {FILE[register.width]}[{register.index}, ix]{copy}")
            self.local[register] = name
        return name

    def set(self, register: Reg, expression: str) -> None:
        """Bind the register to an array of its own unsigned type."""
        name = f"{PREFIX[register.width]}{register.index}"
        if self.ins.guard is not None:
            old = self.get(register)
            self.emit(f"{name} = where({self.guard_expression(self.ins)}, {expression}, {old})")
        else:
            self.emit(f"{name} = {expression}")
        self.local[register] = name
        self.dirty[register] = None

    def store(self, register: Reg) -> None:
        file, name = FILE[register.width], self.local[register]
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
            bits = self.program.constant(value, "u8" if BITS[kind] == 64 else "u4")
            return f"{bits}.view({name})" if name[0] != "u" else bits
        bits = BITS[kind]
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
        bits = BITS[kind]
        if isinstance(operand, Imm):
            return self.literal(operand, kind)
        if isinstance(operand, Reg):
            variable = self.get(operand)
            if operand.width == 1 or bits == 1:
                if operand.width != 1 or bits != 1:
                    self.unknown("a predicate where a value is expected")
                return variable
            if operand.width != bits:
                variable = f"{variable}.astype({UNSIGNED[bits]})"
            return variable if name == UNSIGNED[bits] else f"{variable}.view({name})"
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
        return self.program.constant(offset + operand.offset, UNSIGNED[bits])

    def special(self, name: str, bits: int) -> str:
        # `ix` selects the warps; clocks are read when executed.
        if name in ("clock", "clock64", "clock_hi", "globaltimer", "globaltimer_lo", "globaltimer_hi"):
            array = f"E.clock(G, {name!r})"
        else:
            array = f"E.special({name!r})[ix]"
        return f"{array}.astype({UNSIGNED[bits]})"

    def pack(self, operand: Vec, bits: int) -> str:
        part = bits // len(operand.items)
        pieces = []
        for i, item in enumerate(operand.items):
            piece = f"{self.value(item, f'b{part}')}.astype({UNSIGNED[bits]})"
            pieces.append(f"({piece} << {UNSIGNED[bits]}({part * i}))" if i else piece)
        return " | ".join(pieces)

    def put(self, operand, expression: str, kind: str) -> None:
        """Assign an expression of a PTX type's NumPy type to a destination operand."""
        if operand == ptx.SINK:
            return
        if not isinstance(operand, Reg):
            self.unknown(f"destination {operand!r}")
        name, bits = numpy_type(kind), BITS[kind]
        if operand.width == 1 or bits == 1:
            self.set(operand, expression)
        elif operand.width == bits:
            self.set(operand, expression if name == UNSIGNED[bits] else f"({expression}).view({UNSIGNED[bits]})")
        elif name[0] == "i":
            wide = operand.width
            self.set(operand, f"({expression}).astype(i{wide // 8}).view({UNSIGNED[wide]})")
        else:
            bits_expression = expression if name[0] == "u" else f"({expression}).view({UNSIGNED[bits]})"
            self.set(operand, f"({bits_expression}).astype({UNSIGNED[operand.width]})")

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
        kind = UNSIGNED[operand.base.width]
        value = operand.offset & ((1 << operand.base.width) - 1)
        return f"{base} + {self.program.constant(value, kind)}"

    def place(self, operand: Mem, space: str) -> str:
        """Expression for places (slot and offset) in shared memory."""
        return f"E.shared_address(G, {space!r}, {self.address(operand)}, {self.mask()})"

    def kind(self, at: int = -1) -> str:
        """The type suffix of the current instruction."""
        name = self.ins.parts[at]
        if name not in BITS:
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
        if is_rename(ins):
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
        self._emit_undefined(ins, undefined)
        written = set(destinations(ins))
        self.packed = {r: v for r, v in self.packed.items() if r not in written and not written & set(v)}
        if ins.parts[0] == "mov" and ins.guard is None and isinstance(ins.operands[1], Vec):
            self.packed[ins.operands[0]] = ins.operands[1].items

    def _emit_undefined(self, ins: Instruction, undefined: frozenset[Reg]) -> None:
        if ins.parts[0] == "mov" and isinstance(ins.operands[0], Vec) and ins.operands[1] in self.packed:
            # Taken apart as it was put together: each piece is as undefined as its own origin, not as the whole.
            pieces = self.packed[ins.operands[1]]
            if len(pieces) == len(ins.operands[0].items):
                for target, origin in zip(ins.operands[0].items, pieces, strict=True):
                    if target in undefined:
                        spread = self._keys([origin]) if origin in undefined else "()"
                        self.emit(f"E.spread_undefined(G, {self._keys([target])}, {spread}, {self.mask()})")
                return
        written = [r for r in destinations(ins) if r in undefined]
        wgmma = ins.opcode.startswith("wgmma.mma_async")
        read = [r for operand in ins.operands[1 if destinations(ins) else 0 :] for r in registers_of(operand)]
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
        if self.settled or not is_rename(ins) or ins.operands[1].index not in self.program.accumulators:
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
