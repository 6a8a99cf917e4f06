"""PTX instructions to Python: control flow, liveness, and the source of one function per straight-line segment.

A kernel becomes a list of nodes. A node is either a segment (instructions that never block, executed for a group
of warps by one generated function) or one instruction on which warps may block. In a segment every register is a
local variable holding a NumPy array that broadcasts to (warps, 32); registers are read from the register file on
first use and written back at the end, if some later instruction can read them. Everything with an effect outside
registers is a method of the engine (`E`), called with the group (`G`) and the index of the instruction.

Generated functions come in two variants: for groups in which all lanes are active, and with a lane mask `m`.
"""

from __future__ import annotations

from cute_matmul.emulator.translate.program import Node, Program, program
from cute_matmul.emulator.translate.types import (
    CONST_WINDOW,
    LOCAL_WINDOW,
    PARAM_WINDOW,
    SHARED_START,
    SHARED_WINDOW,
    WINDOW_MASK,
    numpy_dtype,
)

__all__ = [
    "CONST_WINDOW",
    "LOCAL_WINDOW",
    "PARAM_WINDOW",
    "SHARED_START",
    "SHARED_WINDOW",
    "WINDOW_MASK",
    "Node",
    "Program",
    "numpy_dtype",
    "program",
]
