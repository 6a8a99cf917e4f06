"""Device printf: the format string and the argument buffer of `vprintf` to text.

The buffer holds the arguments one after the other, each aligned to its size, floats as double (CUDA C++ programming
guide, "Formatted Output").
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable

from cute_matmul.emulator.errors import EmulatorError

_CONVERSION = re.compile(r"%([-+ #0]*)(\d*)(?:\.(\d+))?(hh|h|ll|l|j|z|t)?([diouxXcfFeEgGaAsp%])")


def render(text: str, read: Callable[[int, int], bytes], string_at: Callable[[int], str]) -> str:
    """Format one call. read(offset, nbytes) reads the argument buffer, string_at(address) a string for %s.

    Raises EmulatorError for a conversion that C does not have.
    """
    out, at, offset = [], 0, 0
    while at < len(text):
        start = text.find("%", at)
        if start < 0:
            out.append(text[at:])
            break
        out.append(text[at:start])
        match = _CONVERSION.match(text, start)
        if match is None:
            raise EmulatorError(f"printf format {text!r}: cannot read {text[start : start + 8]!r}")
        at = match.end()
        flags, width, precision, length, kind = match.groups()
        if kind == "%":
            out.append("%")
            continue
        is_float = kind in "fFeEgGaA"
        size = 8 if is_float or kind in "sp" or length in ("l", "ll", "j", "z", "t") else 4
        offset = -(-offset // size) * size
        data = read(offset, size)
        offset += size
        head = f"%{flags}{width}" + (f".{precision}" if precision else "")
        if is_float:
            (value,) = struct.unpack("<d", data)
            out.append(value.hex() if kind in "aA" else f"{head}{kind}" % value)
            continue
        number = int.from_bytes(data, "little", signed=kind in "di")
        if kind == "c":
            out.append(f"{head}c" % chr(number & 255))
        elif kind == "s":
            out.append(f"{head}s" % string_at(number))
        elif kind == "p":
            out.append(f"0x{number:x}")
        else:
            out.append(f"{head}{'d' if kind in 'diu' else kind}" % number)
    return "".join(out)
