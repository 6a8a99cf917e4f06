"""Instructions of a warp or CTA together: shuffles, votes, elections, barriers that do not block."""

from __future__ import annotations

from cute_matmul.emulator import ptx
from cute_matmul.emulator.ptx import Imm, Instruction, Mem, Pair
from cute_matmul.emulator.translate.writer import Writer


class LaneInstructions(Writer):
    """Shuffles, votes, elections, barriers that do not block."""

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
