"""Which registers an instruction reads and writes, and the kind under which a report counts it."""

from __future__ import annotations

import re

from cute_matmul.emulator import ptx
from cute_matmul.emulator.ptx import Instruction, Mem, Not, Pair, Reg, Vec

_NO_DESTINATION = re.compile(
    r"st\b|st\.|red\.|bar\.|barrier\.|bra|ret|exit|trap|brkpt|membar|fence|prefetch|cp\.|nanosleep|stmatrix|setmaxnreg"
    r"|mbarrier\.(init|inval|expect_tx|complete_tx)|wgmma\.(fence|commit|wait)|griddepcontrol|discard|applypriority"
    r"|pmevent|tensormap|call|bulk"
)


def registers_of(operand) -> list[Reg]:
    if isinstance(operand, Reg):
        return [operand]
    if isinstance(operand, Vec):
        return [r for item in operand.items for r in registers_of(item)]
    if isinstance(operand, Pair):
        return registers_of(operand.first) + registers_of(operand.second)
    if isinstance(operand, Not):
        return registers_of(operand.operand)
    if isinstance(operand, Mem):
        return registers_of(operand.base) + [r for item in operand.extra for r in registers_of(item)]
    return []


def destinations(ins: Instruction) -> list[Reg]:
    """Registers that the instruction writes."""
    base = ins.parts[0]
    if (base in ("bar", "barrier") and ins.parts[1] == "red") or ins.opcode.startswith(
        ("bar.cta.red", "barrier.cta.red")
    ):
        return registers_of(ins.operands[0])
    if _NO_DESTINATION.match(ins.opcode) or not ins.operands or isinstance(ins.operands[0], Mem):
        return []
    return registers_of(ins.operands[0])


def sources(ins: Instruction) -> list[Reg]:
    """Registers that the instruction reads, its guard and (when guarded) what it may leave unchanged included."""
    written = destinations(ins)
    first = 1 if written or (ins.operands and ins.operands[0] == ptx.SINK) else 0
    out = [r for operand in ins.operands[first:] for r in registers_of(operand)]
    if ins.opcode.startswith("wgmma.mma_async"):
        out += written
    if ins.guard is not None:
        out.append(ins.guard[0])
        out += written
    if ins.parts[0] in ("bar", "barrier") and written:
        out += [r for operand in ins.operands[1:] for r in registers_of(operand)]
    return out


def is_rename(ins: Instruction) -> bool:
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
