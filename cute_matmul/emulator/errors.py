"""What the emulator raises. Hazards and deadlocks of a kernel are not errors: they are in the report."""

from __future__ import annotations


class EmulatorError(RuntimeError):
    """The emulator cannot go on, for a reason that is no hazard of the kernel."""


class UnknownInstruction(EmulatorError):
    """An instruction, or a form of one, whose meaning is not implemented. Names its text, line and kernel."""

    def __init__(self, kernel: str, instruction, what: str) -> None:
        self.kernel, self.instruction = kernel, instruction
        if instruction is None:
            super().__init__(f"kernel {kernel}: not implemented: {what}")
        else:
            super().__init__(
                f"kernel {kernel}: not implemented ({what}): {instruction.text!r} at PTX line {instruction.line}"
                f" ({instruction.place})"
            )
