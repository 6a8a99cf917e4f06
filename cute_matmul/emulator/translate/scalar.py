"""Instructions that compute registers from registers: moves, conversions, integers, comparisons, floating point."""

from __future__ import annotations

import re

from cute_matmul.emulator import formats
from cute_matmul.emulator.ptx import Imm, Instruction, Pair, Reg, Vec
from cute_matmul.emulator.translate.types import (
    BITS,
    CONST_WINDOW,
    LOCAL_WINDOW,
    PARAM_WINDOW,
    SHARED_WINDOW,
    UNSIGNED,
    WINDOW_MASK,
    numpy_type,
)
from cute_matmul.emulator.translate.writer import Writer


class ScalarInstructions(Writer):
    """Moves, conversions, integers, comparisons, floating point."""

    # Moves and conversions

    def op_mov(self, ins: Instruction) -> None:
        kind = self.kind()
        target, origin = ins.operands
        if isinstance(target, Vec):
            part = BITS[kind] // len(target.items)
            name = self.temporary()
            self.emit(f"{name} = {self.value(origin, kind)}")
            for i, item in enumerate(target.items):
                shifted = f"({name} >> {UNSIGNED[BITS[kind]]}({part * i}))" if i else name
                self.put(item, f"{shifted}.astype({UNSIGNED[part]})", f"b{part}")
            return
        kind = f"b{BITS[kind]}" if kind != "pred" else kind
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
            kind = kind or f"b{BITS[source]}"
            args.append(f"np.ascontiguousarray({self.value(operand, kind)})")
        self.set(target, f"{name}({', '.join(args)}).astype({UNSIGNED[target.width]}, copy=False)")

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
        if ins.parts[1] in ("shared", "shared::cta"):
            self.put(ins.operands[0], f"E.own_shared(G, {value})", "pred")
            return
        windows = {
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
        bits = BITS[self.kind()]
        generic = not any(p.startswith("shared::cluster") for p in ins.parts)
        address = self.value(operand, f"u{bits}")
        rank = self.value(ins.operands[2], "u32")
        self.put(ins.operands[0], f"E.mapa({address}, {rank}, {generic})", f"u{bits}")

    def op_getctarank(self, ins: Instruction) -> None:
        bits = BITS[self.kind()]
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
            self._binary(ins, f"{{a}} {sign} {{b}}", f"u{BITS[kind]}")

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
        self.emit(f"{name} = {product}.view({UNSIGNED[BITS[kind]]})")
        self._carry(ins, "add", with_carry, (name, self.value(ins.operands[3], f"u{BITS[kind]}")))

    def _carry(self, ins: Instruction, name: str, with_carry: bool, terms: tuple[str, str] | None = None) -> None:
        """add.cc and its relatives. The carry lives in a local: PTX has it within a block only in compiler output."""
        bits = BITS[self.kind()]
        if ins.guard is not None:
            self.unknown("a guard on a carry instruction")
        kind = UNSIGNED[bits]
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
            wide = f"{kind[0]}{2 * BITS[kind]}"
            a, b = (f"{self.value(o, kind)}.astype({numpy_type(wide)})" for o in ins.operands[1:3])
            return f"({a} * {b})", wide
        if mode == "hi":
            a, b = (self.value(o, kind) for o in ins.operands[1:3])
            return f"ops.mul_hi({a}, {b})", kind
        if mode != "lo":
            self.unknown(f"modifier .{mode}")
        unsigned = f"u{BITS[kind]}"
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
        unsigned = f"u{BITS[result]}"
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
            sign = 1 << (BITS[kind] - 1)
            bits = f"b{BITS[kind]}"
            value = f"{self.value(ins.operands[1], bits)} ^ {self.program.constant(sign, numpy_type(bits))}"
            if "ftz" in ins.parts:
                value = f"ops.flush(({value}).view(f4)).view(u4)"
            self.put(ins.operands[0], value, bits)
        elif self._is_float(kind):
            self._half(ins, "neg", 1)
        else:
            unsigned = f"u{BITS[kind]}"
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
        if isinstance(amount, Imm) and 0 <= amount.value < BITS[kind]:
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
        kind = f"b{BITS[kind]}"
        a, b = (self.value(o, kind) for o in ins.operands[1:3])
        self.put(ins.operands[0], f"where({self.value(ins.operands[3], 'pred')}, {a}, {b})", kind)

    def op_slct(self, ins: Instruction) -> None:
        kind = f"b{BITS[ins.parts[-2]]}"
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
