"""What the compiler made of a kernel: registers, shared memory, CTAs per SM, instructions by kind.

Registers and local memory are read from the cubin's `.nv.info` section, instruction counts from the PTX text
and, where the disassembler is there, from SASS. Nothing is run and no GPU is needed.
"""

from __future__ import annotations

import os
import re
import shutil
import struct
import subprocess
import tempfile
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from .config import ctas_per_sm

if TYPE_CHECKING:
    from cute_matmul.compile import CompiledKernel

KINDS = (
    "wgmma",
    "mma.sync",
    "ldmatrix",
    "stmatrix",
    "TMA load",
    "TMA store",
    "mbarrier init",
    "mbarrier arrive",
    "mbarrier try_wait",
    "bar.sync",
    "local load",
    "local store",
)

# First match counts. PTX ISA, "Instruction Set"; `mbarrier arrive` includes arrive.expect_tx and the arrivals
# that drop a participant, `bar.sync` the other spellings and the one-sided named-barrier arrive.
_PTX = (
    ("wgmma", r"wgmma\.mma_async\b"),
    ("mma.sync", r"mma\.sync\b"),
    ("ldmatrix", r"ldmatrix\b"),
    ("stmatrix", r"stmatrix\b"),
    ("TMA load", r"cp\.async\.bulk\.(tensor\.\S*)?shared::(cta|cluster)\.global\b"),
    ("TMA store", r"cp\.(reduce\.)?async\.bulk\.(tensor\.\S*)?global\.shared::cta\b"),
    ("mbarrier init", r"mbarrier\.init\b"),
    ("mbarrier arrive", r"mbarrier\.arrive(_drop)?\b"),
    ("mbarrier try_wait", r"mbarrier\.(try|test)_wait\b"),
    ("bar.sync", r"(bar|barrier)(\.cta)?\.(sync|arrive|red)\b"),
    ("local load", r"ld(\.volatile)?\.local\b"),
    ("local store", r"st(\.volatile)?\.local\b"),
)

# CUDA Binary Utilities, "Instruction Set Reference", Hopper.
_SASS = (
    ("wgmma", r"[HIQB]GMMA\b"),
    ("mma.sync", r"[HIDQB]MMA\b"),
    ("ldmatrix", r"LDSM\b"),
    ("stmatrix", r"STSM\b"),
    ("TMA load", r"UTMALDG\b|UBLKCP\.S\.G\b"),
    ("TMA store", r"UTMASTG\b|UTMAREDG\b|UBLKRED\.G\b|UBLKCP\.G\.S\b"),
    ("mbarrier init", r"SYNCS\.EXCH\b"),
    ("mbarrier arrive", r"SYNCS\.ARRIVE\b"),
    ("mbarrier try_wait", r"SYNCS\.PHASECHK\b"),
    ("bar.sync", r"BAR\.(SYNC|ARV|RED)\b"),
    ("local load", r"LDL\b"),
    ("local store", r"STL\b"),
)

DISASSEMBLER_PACKAGE = "nvidia-cuda-nvdisasm"
NO_DISASSEMBLER = f"needs nvdisasm: pip install {DISASSEMBLER_PACKAGE} (or this package's extra sass)"

# Attribute codes of `.nv.info`, with the names that nvdisasm prints for them.
_EIATTR_FRAME_SIZE = 0x11
_EIATTR_REGCOUNT = 0x2F
_FORMAT_SIZED = 0x04

_OPCODE = re.compile(r"(?:@!?%?\w+\s+)?([a-z][\w.:]*)")
_SASS_LINE = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?\w+\s+)?([A-Z][\w.]*)", re.MULTILINE)


class NoDisassembler(RuntimeError):
    """nvdisasm is neither installed from its package nor on PATH."""


@dataclass(frozen=True)
class Inspection:
    """One compiled kernel in numbers. Bytes are per CTA, except `local_bytes`: per thread.

    `sass` and `spills` are None without the disassembler, and `sass_note` says how to get it.
    """

    variant: str
    config: str
    dtype: str
    a_major: str
    b_major: str
    symbol: str
    threads: int
    registers: int
    local_bytes: int
    smem_static_bytes: int
    smem_dynamic_bytes: int
    ctas_per_sm: int
    limited_by: str
    ptx: dict[str, int]
    sass: dict[str, int] | None
    spills: int | None
    sass_note: str | None

    def as_dict(self) -> dict:
        """Plain values, for JSON."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}

    def rows(self) -> list[tuple[str, str]]:
        """(what, value) for a table."""
        smem = f"{self.smem_static_bytes + self.smem_dynamic_bytes:,} bytes"
        if self.smem_static_bytes:
            smem += f" ({self.smem_static_bytes:,} static)"
        rows = [
            ("config", self.config),
            ("operands", f"{self.dtype}, A {self.a_major}-major, B {self.b_major}-major"),
            ("threads", f"{self.threads}"),
            ("registers per thread", f"{self.registers}"),
            ("local memory per thread", f"{self.local_bytes} bytes"),
            ("spills", "-" if self.spills is None else f"{self.spills} instructions"),
            ("shared memory", smem),
            ("CTAs per SM", f"{self.ctas_per_sm} (limited by {self.limited_by})"),
        ]
        for kind in KINDS:
            sass = "-" if self.sass is None else str(self.sass[kind])
            rows.append((kind, f"{self.ptx[kind]} PTX, {sass} SASS"))
        return rows

    def __str__(self) -> str:
        return table([self])


def table(inspections: list[Inspection]) -> str:
    """Inspections beside each other, one column each."""
    from tabulate import tabulate

    columns = [dict(inspection.rows()) for inspection in inspections]
    rows = [[what, *(column[what] for column in columns)] for what in columns[0]]
    headers = ["", *(inspection.variant for inspection in inspections)]
    text = tabulate(rows, headers=headers, tablefmt="simple", disable_numparse=True)
    notes = {inspection.sass_note for inspection in inspections if inspection.sass_note}
    return "\n".join([text, *(f"SASS: {note}" for note in sorted(notes))])


def inspect(kernel: CompiledKernel) -> Inspection:
    """Read a compiled kernel. Raises ValueError where its cubin is not one this reader knows."""
    registers, local_bytes = resources(kernel.cubin, kernel.symbol)
    ptx = count_ptx(kernel.ptx)
    static = static_shared_bytes(kernel.ptx)
    ctas, limited_by = ctas_per_sm(kernel.threads, registers, static + kernel.smem_bytes)
    sass = note = None
    try:
        sass = count_sass(disassemble(kernel.cubin))
    except NoDisassembler as error:
        note = str(error)
    return Inspection(
        variant=kernel.variant,
        config=str(kernel.config),
        dtype=str(kernel.dtype),
        a_major=kernel.a_major,
        b_major=kernel.b_major,
        symbol=kernel.symbol,
        threads=kernel.threads,
        registers=registers,
        local_bytes=local_bytes,
        smem_static_bytes=static,
        smem_dynamic_bytes=kernel.smem_bytes,
        ctas_per_sm=ctas,
        limited_by=limited_by,
        ptx=ptx,
        sass=sass,
        spills=None if sass is None else _spills(ptx, sass),
        sass_note=note,
    )


def spills(kernel: CompiledKernel) -> int:
    """SASS local loads and stores beyond those the PTX itself has: what the register allocator added.

    A register array indexed at run time, as V2's phases, is local memory in PTX already and no spill.
    Raises NoDisassembler without nvdisasm.
    """
    return _spills(count_ptx(kernel.ptx), count_sass(disassemble(kernel.cubin)))


def _spills(ptx: dict[str, int], sass: dict[str, int]) -> int:
    return sum(max(0, sass[kind] - ptx[kind]) for kind in ("local load", "local store"))


def resources(cubin: bytes, symbol: str) -> tuple[int, int]:
    """(registers per thread, bytes of local memory per thread) of a kernel, from the cubin's `.nv.info`.

    Raises ValueError where `cubin` is not a 64-bit little-endian ELF with these attributes for `symbol`.
    """
    sections = _elf_sections(cubin)
    info, symbols, names = (sections.get(name) for name in (".nv.info", ".symtab", ".strtab"))
    if info is None or symbols is None or names is None:
        raise ValueError(f"cubin must have .nv.info, .symtab and .strtab; it has {', '.join(sections)}")
    values: dict[int, int] = {}
    offset = 0
    while offset + 4 <= len(info):
        # Elf_Nv_Info: format byte, attribute byte, then two bytes of value, or of the size of what follows.
        form, attribute, size = struct.unpack_from("<BBH", info, offset)
        offset += 4
        if form != _FORMAT_SIZED:
            continue
        if attribute in (_EIATTR_FRAME_SIZE, _EIATTR_REGCOUNT) and size == 8:
            index, value = struct.unpack_from("<II", info, offset)
            (name_offset,) = struct.unpack_from("<I", symbols, index * 24)
            if _c_string(names, name_offset) == symbol:
                values[attribute] = value
        offset += size
    if values.keys() != {_EIATTR_FRAME_SIZE, _EIATTR_REGCOUNT}:
        raise ValueError(f"cubin must state EIATTR_REGCOUNT and EIATTR_FRAME_SIZE of {symbol}; it has {values}")
    return values[_EIATTR_REGCOUNT], values[_EIATTR_FRAME_SIZE]


def _elf_sections(image: bytes) -> dict[str, bytes]:
    if image[:6] != b"\x7fELF\x02\x01":
        raise ValueError(f"cubin must be a 64-bit little-endian ELF file, it starts with {image[:6]!r}")
    (table_offset,) = struct.unpack_from("<Q", image, 0x28)
    entry_size, count, names_index = struct.unpack_from("<HHH", image, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", image, table_offset + i * entry_size) for i in range(count)]
    names_offset = headers[names_index][4]
    nobits = 8
    return {
        _c_string(image, names_offset + name): b"" if kind == nobits else image[offset : offset + size]
        for name, kind, _, _, offset, size in headers
    }


def _c_string(data: bytes, offset: int) -> str:
    return data[offset : data.index(b"\0", offset)].decode()


def static_shared_bytes(ptx: str) -> int:
    """Bytes of shared memory that the PTX declares with a size (the dynamic part has none)."""
    linkage, align = r"(?:\.visible\s+|\.weak\s+)?", r"(?:\.align\s+\d+\s+)?"
    declaration = rf"^\s*{linkage}\.shared\s+{align}\.[bfsu](\d+)\s+[\w$]+(?:\[(\d+)\])?\s*;"
    sizes = re.findall(declaration, ptx, re.MULTILINE)
    return sum(int(bits) // 8 * int(count or 1) for bits, count in sizes)


def ptx_opcodes(ptx: str) -> list[str]:
    """The opcode of every instruction, with its qualifiers, in order."""
    text = re.sub(r"/\*.*?\*/", " ", ptx, flags=re.DOTALL)
    text = re.sub(r'//[^\n]*|"[^"\n]*"', " ", text)
    text = re.sub(r"^\s*\.(loc|file|section)\b[^\n{]*", " ", text, flags=re.MULTILINE)  # these end with the line
    statements = re.split(r"[;{}]|^\s*[\w$]+:(?!:)", text, flags=re.MULTILINE)
    matches = (_OPCODE.match(statement.strip()) for statement in statements)
    return [match.group(1) for match in matches if match]


def sass_opcodes(sass: str) -> list[str]:
    """The opcode of every instruction of nvdisasm's text, with its modifiers, in order."""
    return _SASS_LINE.findall(sass)


def count_ptx(ptx: str) -> dict[str, int]:
    """Instructions of PTX text by kind, see KINDS. Counts are of the text: a loop body counts once."""
    return _count(ptx_opcodes(ptx), _PTX)


def count_sass(sass: str) -> dict[str, int]:
    """Instructions of nvdisasm's text by kind, see KINDS."""
    return _count(sass_opcodes(sass), _SASS)


def _count(opcodes: list[str], patterns: tuple[tuple[str, str], ...]) -> dict[str, int]:
    compiled = [(kind, re.compile(pattern)) for kind, pattern in patterns]
    counts = dict.fromkeys(KINDS, 0)
    for opcode in opcodes:
        for kind, pattern in compiled:
            if pattern.match(opcode):
                counts[kind] += 1
                break
    return counts


def find_disassembler() -> str | None:
    """Path of nvdisasm: the one of its pip package, else the one on PATH, else None."""
    from importlib.metadata import PackageNotFoundError, files

    try:
        # Versions of the package have moved the file, so ask for it by name.
        for path in files(DISASSEMBLER_PACKAGE) or ():
            located = Path(str(path.locate()))
            if path.name in ("nvdisasm", "nvdisasm.exe") and os.access(located, os.X_OK):
                return str(located)
    except PackageNotFoundError:
        pass
    return shutil.which("nvdisasm")


@lru_cache(maxsize=32)
def disassemble(cubin: bytes) -> str:
    """nvdisasm's text of a cubin. Raises NoDisassembler without it, RuntimeError with its message on failure."""
    tool = find_disassembler()
    if tool is None:
        raise NoDisassembler(NO_DISASSEMBLER)
    with tempfile.TemporaryDirectory(prefix="cute_matmul-") as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(cubin)
        done = subprocess.run([tool, "-c", str(path)], capture_output=True, text=True, check=False)
    if done.returncode != 0 or not sass_opcodes(done.stdout):
        raise RuntimeError(f"{tool} failed with status {done.returncode}: {done.stderr.strip()}")
    return done.stdout
