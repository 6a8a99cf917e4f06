"""A small def-use walk over the PTX text of one kernel: which registers a loop carries, and what depends on them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property

_REGISTER = re.compile(r"%[a-z]+\d+")
# Comments and line information, which ends with its line and not with a semicolon.
_NO_CODE = re.compile(r"//[^\n]*|^\s*\.(loc|file|section)\b[^\n]*", re.MULTILINE)
_LABEL = re.compile(r"([\w$]+):(?!:)")
# Instructions whose first operand is read or is an address (PTX ISA, each instruction's syntax).
_NO_RESULT = re.compile(
    r"(st|red|bra|bar|barrier|fence|membar|ret|exit|trap|prefetch|cp\.async|cp\.reduce|stmatrix|nanosleep"
    r"|mbarrier\.(init|inval|expect_tx|complete_tx)|wgmma\.(fence|commit_group|wait_group)|setmaxnreg)\b"
)


@dataclass(frozen=True)
class Instruction:
    """opcode with its qualifiers; the registers written and read; operands as text, one string each."""

    opcode: str
    writes: frozenset[str]
    reads: frozenset[str]
    operands: tuple[str, ...]


def instructions(ptx: str) -> list[Instruction | str]:
    """Instructions and `$labels` of PTX text, in order. Labels local to inline assembly are left out."""
    body = _NO_CODE.sub("", ptx[ptx.index("{\n") :])
    # Vector operands become one word each, so that commas part operands and braces are scopes.
    body = re.sub(r"\{([^{}\n]*)\}", lambda match: "<" + match.group(1).replace(",", " ") + ">", body)
    found: list[Instruction | str] = []
    for statement in body.split(";"):
        text = statement.strip(" \t\n{}")
        while label := _LABEL.match(text):
            if label.group(1).startswith("$"):
                found.append(label.group(1))
            text = text[label.end() :].strip(" \t\n{}")
        if text and not text.startswith("."):
            found.append(_instruction(text))
    return found


def _instruction(text: str) -> Instruction:
    guard, rest = text.split(None, 1) if text.startswith("@") else ("", text)
    opcode, *tail = rest.split(None, 1)
    operands = tuple(part.strip() for part in tail[0].split(",")) if tail else ()
    registers = [frozenset(_REGISTER.findall(operand)) for operand in operands]
    reads = frozenset(_REGISTER.findall(guard)).union(*registers[1:])
    writes: frozenset[str] = frozenset()
    if registers:
        if _NO_RESULT.match(opcode):
            reads |= registers[0]
        else:
            writes = registers[0]
    if opcode.startswith("wgmma.mma_async"):
        reads |= registers[0]  # the accumulators
    return Instruction(opcode, writes, reads, operands)


@dataclass(frozen=True)
class Loop:
    body: tuple[Instruction, ...]

    def find(self, opcode: str) -> list[Instruction]:
        return [instruction for instruction in self.body if instruction.opcode.startswith(opcode)]

    @cached_property
    def carried(self) -> frozenset[str]:
        """Registers whose value in one turn comes from their value in the turn before."""
        return frozenset(r for r, reads in self._read_for.items() if r in self.sources(frozenset(reads)))

    @cached_property
    def _read_for(self) -> dict[str, set[str]]:
        """What the instructions that write a register read."""
        reads: dict[str, set[str]] = {}
        for instruction in self.body:
            for written in instruction.writes:
                reads.setdefault(written, set()).update(instruction.reads)
        return reads

    def sources(self, registers: frozenset[str]) -> frozenset[str]:
        """`registers` and all that their values are computed from inside the loop."""
        known, todo = set(registers), list(registers)
        while todo:
            new = self._read_for.get(todo.pop(), set()) - known
            known |= new
            todo += new
        return frozenset(known)

    def carried_sources(self, operand: str) -> frozenset[str]:
        """The loop-carried registers that an operand's value depends on."""
        return self.sources(frozenset(_REGISTER.findall(operand))) & self.carried


def loops(ptx: str) -> list[Loop]:
    """The loops of a kernel: from a label to the last branch back to it."""
    code = instructions(ptx)
    starts = {item: i for i, item in enumerate(code) if isinstance(item, str)}
    ends: dict[int, int] = {}
    for i, item in enumerate(code):
        if isinstance(item, Instruction) and item.opcode.startswith("bra"):
            start = starts.get(item.operands[0])  # none: local to inline assembly, as a wait's own loop
            if start is not None and start < i:
                ends[start] = i
    return [
        Loop(tuple(item for item in code[start : end + 1] if isinstance(item, Instruction)))
        for start, end in sorted(ends.items())
    ]


def loop_with(ptx: str, opcode: str) -> Loop:
    """The innermost loop that holds an instruction, which must be in one."""
    holding = [loop for loop in loops(ptx) if loop.find(opcode)]
    assert holding, f"no loop with {opcode}"
    return min(holding, key=lambda loop: len(loop.body))
