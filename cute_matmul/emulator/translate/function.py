"""All instructions together: what writes a node's function."""

from __future__ import annotations

from cute_matmul.emulator.translate.lanes import LaneInstructions
from cute_matmul.emulator.translate.memory import MemoryInstructions
from cute_matmul.emulator.translate.scalar import ScalarInstructions
from cute_matmul.emulator.translate.units import UnitInstructions


class FunctionWriter(ScalarInstructions, MemoryInstructions, LaneInstructions, UnitInstructions):
    """Writes the function of one node."""
