"""Loads, stores, atomics, fences, and what is like them."""

from __future__ import annotations

import re

from cute_matmul.emulator.ptx import Instruction, Mem, Sym, Vec
from cute_matmul.emulator.translate.types import BITS, IKET_MODULE, UNSIGNED, numpy_type
from cute_matmul.emulator.translate.writer import Writer


class MemoryInstructions(Writer):
    """Memory: loads, stores, atomics, fences, and calls and traps, which have effects too."""

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
        size = BITS[kind] // 8
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
                value = f"E.parameter({offset + i * size}, {UNSIGNED[8 * size]})"
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
            self.put(item, value, f"b{BITS[kind]}")

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
        unsigned = f"b{BITS[kind]}"
        values = ", ".join(self.value(item, unsigned) for item in items)
        order, scope = self._order()
        self.emit(
            f"E.store(G, {self.src()}, {space!r}, {self.address(target)}, ({values},), {BITS[kind] // 8},"
            f" {self.mask()}, {order!r}, {scope!r})"
        )

    def _st_async(self, ins: Instruction) -> None:
        kind, count = self.kind(), self._vector()
        target, origin, barrier = ins.operands
        items = origin.items if isinstance(origin, Vec) else (origin,)
        if len(items) != count or not any(p.startswith("mbarrier::complete_tx") for p in ins.parts):
            self.unknown("form")
        values = ", ".join(self.value(item, f"b{BITS[kind]}") for item in items)
        self.emit(
            f"E.store_async(G, {self.src()}, {self.place(target, 'cluster')}, ({values},), {BITS[kind] // 8},"
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
            address = self.address(Mem(where.base, where.offset + i * BITS[kind] // 8))
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
