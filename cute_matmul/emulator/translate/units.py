"""Instructions for the asynchronous units and the tensor cores: copies, bulk groups, WGMMA, mma.sync, ldmatrix."""

from __future__ import annotations

import re

import numpy as np

from cute_matmul.emulator import matrix
from cute_matmul.emulator.ptx import Imm, Instruction, Mem, Not, Reg, Vec
from cute_matmul.emulator.translate.usage import destinations, registers_of, sources
from cute_matmul.emulator.translate.writer import Writer


class UnitInstructions(Writer):
    """Copies, bulk groups, WGMMA, mma.sync, ldmatrix, stmatrix."""

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
                if isinstance(extra, (Reg, Not)) and registers_of(extra)[0].width == 1:
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
        accumulators = registers_of(operands.pop(0))
        a = operands.pop(0)
        b = operands.pop(0)
        fragments = registers_of(a) if isinstance(a, Vec) else []
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
