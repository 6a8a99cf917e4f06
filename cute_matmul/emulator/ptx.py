"""PTX text to instructions: the subset of the language that compilers emit for sm_90a kernels.

Knows the grammar (PTX ISA 8.x: directives, scopes, operands), not what instructions mean. Registers are
numbered per width, labels and registers of inner `{ }` scopes are made unique, and every instruction knows its
line in the PTX text and, where `.loc` gives one, its line in the Python source.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass, field
from functools import lru_cache

REGISTER_WIDTHS = {"pred": 1, "b8": 16, "u8": 16, "s8": 16}
for _bits in (16, 32, 64):
    for _kind in "busf":
        REGISTER_WIDTHS[f"{_kind}{_bits}"] = _bits
REGISTER_WIDTHS |= {"f16x2": 32, "bf16": 16, "bf16x2": 32, "tf32": 32}


class PtxError(ValueError):
    """Text that this parser cannot read, with its line."""

    def __init__(self, message: str, line: int) -> None:
        super().__init__(f"PTX line {line}: {message}")
        self.line = line


@dataclass(frozen=True)
class Reg:
    """A register: width 1 (predicate), 16, 32 or 64, and its number among those of that width."""

    width: int
    index: int
    name: str = field(compare=False, default="")


@dataclass(frozen=True)
class Imm:
    """A literal. `value` is an int; `is_float` says that it is the bit pattern of a float of `width` bits."""

    value: int
    is_float: bool = False
    width: int = 0


@dataclass(frozen=True)
class Sym:
    """The address of a variable (parameter, shared, local, global) plus an offset in bytes."""

    name: str
    offset: int = 0


@dataclass(frozen=True)
class Special:
    """A special register, without the percent sign: `tid.x`, `cluster_ctarank`."""

    name: str


@dataclass(frozen=True)
class Mem:
    """`[base + offset]`, or `[base, {coordinates}]` with further operands in `extra`."""

    base: object
    offset: int = 0
    extra: tuple = ()


@dataclass(frozen=True)
class Vec:
    """`{a, b, ...}`."""

    items: tuple


@dataclass(frozen=True)
class Not:
    """`!p` as an operand."""

    operand: object


@dataclass(frozen=True)
class Pair:
    """`d|p`: two destinations."""

    first: object
    second: object


@dataclass(frozen=True)
class Label:
    """A branch target: the index of the instruction it stands before."""

    name: str


SINK = Sym("_")


@dataclass
class Instruction:
    """One instruction. `opcode` is the whole dotted name; `parts` the same, split at the dots."""

    index: int
    opcode: str
    operands: tuple
    guard: tuple[Reg, bool] | None  # (predicate, negated)
    line: int
    source: tuple[str, int] | None
    text: str
    parts: tuple[str, ...] = ()
    target: int = -1  # of a branch: index of the instruction it jumps to

    @property
    def place(self) -> str:
        """`file.py:12` where the compiler recorded it, else `PTX line 34`."""
        return f"{self.source[0]}:{self.source[1]}" if self.source else f"PTX line {self.line}"


@dataclass(frozen=True)
class Variable:
    """A variable in some state space. `nbytes` 0 with `extern` is dynamic shared memory."""

    name: str
    space: str
    nbytes: int
    align: int
    data: bytes = b""
    extern: bool = False


@dataclass
class Kernel:
    """One `.entry`. `registers` counts the registers of each width; `params` are in order."""

    name: str
    params: tuple[Variable, ...] = ()
    variables: dict[str, Variable] = field(default_factory=dict)
    registers: dict[int, int] = field(default_factory=lambda: {1: 0, 16: 0, 32: 0, 64: 0})
    instructions: list[Instruction] = field(default_factory=list)
    required_block: tuple[int, int, int] | None = None
    labels: dict[str, int] = field(default_factory=dict)


@dataclass
class Module:
    """A PTX file: its kernels and module-level variables."""

    kernels: dict[str, Kernel]
    variables: dict[str, Variable]
    version: str
    target: str


_LABEL = re.compile(r"([A-Za-z_$%][\w$]*)\s*:(?!:)")
_LINE_DIRECTIVES = (".loc\t", ".loc ", ".file", ".version", ".target", ".address_size")
_GUARD = re.compile(r"@\s*(!?)\s*([\w$%.]+)\s+")
_TOKEN = re.compile(
    r'\s*("(?:[^"\\]|\\.)*"|0[fF][0-9a-fA-F]{8}|0[dD][0-9a-fA-F]{16}|0[xX][0-9a-fA-F]+U?|0[bB][01]+U?'
    r"|\d+\.\d*(?:[eE][-+]?\d+)?|\d+U?"
    r"|[A-Za-z_$%.][\w$.]*(?:::[\w.]+)*|[\[\]{}(),+\-!|<>=;*&~])"
)


def tokens(text: str, line: int) -> list[str]:
    """Split one statement."""
    out, at = [], 0
    text = text.rstrip()
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None:
            raise PtxError(f"cannot read {text[at : at + 40]!r}", line)
        out.append(match.group(1))
        at = match.end()
    return out


def _statements(text: str):
    """Yield (kind, text, line, in_asm): kind is 'stmt', 'label', 'open', 'close' or 'directive'."""
    at, line, size, in_asm = 0, 1, len(text), False
    while at < size:
        char = text[at]
        if char == "\n":
            line += 1
            at += 1
        elif char.isspace():
            at += 1
        elif text.startswith("//", at):
            end = text.find("\n", at)
            end = size if end < 0 else end
            comment = text[at + 2 : end].strip()
            if comment == "begin inline asm":
                in_asm = True
            elif comment == "end inline asm":
                in_asm = False
            at = end
        elif text.startswith("/*", at):
            end = text.index("*/", at) + 2
            line += text.count("\n", at, end)
            at = end
        elif char == "{":
            yield "open", "", line, in_asm
            at += 1
        elif char == "}":
            yield "close", "", line, in_asm
            at += 1
        elif char == ";":
            at += 1
        elif text.startswith(_LINE_DIRECTIVES, at):
            end = text.find("\n", at)
            end = size if end < 0 else end
            yield "directive", text[at:end].split("//")[0].strip(), line, in_asm
            at = end
        elif (match := _LABEL.match(text, at)) is not None:
            yield "label", match.group(1), line, in_asm
            at = match.end()
        else:
            end, depth, header = at, 0, text.startswith((".visible", ".entry", ".weak", ".func", ".extern"), at)
            quoted = False
            while end < size:
                c = text[end]
                if c == '"':
                    quoted = not quoted
                elif quoted:
                    pass
                elif (c == ";" and depth == 0) or (c == "{" and header and depth == 0 and "=" not in text[at:end]):
                    break
                elif c in "([{":
                    depth += 1
                elif c in ")]}":
                    depth -= 1
                elif c == "/" and text.startswith("//", end):
                    stop = text.find("\n", end)
                    text = text[:end] + " " * (stop - end) + text[stop:]
                end += 1
            yield "stmt", text[at:end], line, in_asm
            line += text.count("\n", at, end)
            at = end


class _Scope:
    def __init__(self, parent: _Scope | None, prefix: str) -> None:
        self.parent, self.prefix = parent, prefix
        self.registers: dict[str, Reg] = {}
        self.labels: dict[str, str] = {}

    def register(self, name: str) -> Reg | None:
        scope = self
        while scope is not None:
            if name in scope.registers:
                return scope.registers[name]
            scope = scope.parent
        return None

    def label(self, name: str) -> str | None:
        scope = self
        while scope is not None:
            if name in scope.labels:
                return scope.labels[name]
            scope = scope.parent
        return None


def _number(token: str) -> Imm | None:
    head = token[:2].lower()
    if head == "0f" and len(token) == 10:
        return Imm(int(token[2:], 16), True, 32)
    if head == "0d" and len(token) == 18:
        return Imm(int(token[2:], 16), True, 64)
    digits = token.rstrip("U")
    if head in ("0x", "0b"):
        return Imm(int(digits, 0))
    if token[0].isdigit():
        if "." in token:
            return Imm(struct.unpack("<Q", struct.pack("<d", float(token)))[0], True, 64)
        return Imm(int(digits, 8) if len(digits) > 1 and digits[0] == "0" else int(digits))
    return None


def _initialiser(words: list[str], size: int, line: int) -> bytes:
    """The bytes of `{1, -2, 0f3F800000}`, elements of `size` bytes."""
    out, negative = [], False
    for word in words:
        if word == "-":
            negative = True
        elif word not in "{},":
            number = _number(word)
            if number is None:
                raise PtxError(f"an initialiser with the address of {word!r} is not supported", line)
            value = -number.value if negative else number.value
            out.append((value & ((1 << 8 * size) - 1)).to_bytes(size, "little"))
            negative = False
    return b"".join(out)


class _Operands:
    """Recursive reader over the tokens of one instruction's operands."""

    def __init__(self, items: list[str], scope: _Scope, line: int, is_branch: bool) -> None:
        self.items, self.scope, self.line, self.at, self.is_branch = items, scope, line, 0, is_branch

    def peek(self) -> str:
        return self.items[self.at] if self.at < len(self.items) else ""

    def take(self, expected: str | None = None) -> str:
        token = self.peek()
        if not token or (expected is not None and token != expected):
            raise PtxError(f"expected {expected or 'an operand'}, got {token or 'the end'!r}", self.line)
        self.at += 1
        return token

    def all(self) -> tuple:
        out = []
        while self.at < len(self.items):
            out.append(self.operand())
            if self.peek() == ",":
                self.take()
            elif self.at < len(self.items):
                raise PtxError(f"unexpected {self.peek()!r} in operands", self.line)
        return tuple(out)

    def operand(self):
        token = self.peek()
        if token == "{":
            return Vec(self.list("{", "}"))
        if token == "[":
            return self.memory()
        if token == "(":
            return Vec(self.list("(", ")"))
        first = self.atom()
        if self.peek() == "|":
            self.take()
            return Pair(first, self.atom())
        if self.peek() == "+" and isinstance(first, Sym):
            self.take()
            return Sym(first.name, first.offset + self.integer())
        return first

    def list(self, opening: str, closing: str) -> tuple:
        self.take(opening)
        out = []
        while self.peek() != closing:
            out.append(self.operand())
            if self.peek() == ",":
                self.take()
        self.take(closing)
        return tuple(out)

    def integer(self) -> int:
        negative = False
        while self.peek() in "+-":
            negative ^= self.take() == "-"
        number = _number(self.take())
        if number is None or number.is_float:
            raise PtxError("expected an integer", self.line)
        return -number.value if negative else number.value

    def memory(self) -> Mem:
        self.take("[")
        base = self.atom()
        offset = 0
        if self.peek() in ("+", "-"):
            offset = self.integer()
        extra = []
        while self.peek() == ",":
            self.take()
            extra.append(self.operand())
        self.take("]")
        if isinstance(base, Sym) and base.offset:
            base, offset = Sym(base.name), offset + base.offset
        return Mem(base, offset, tuple(extra))

    def atom(self):
        token = self.take()
        if token == "!":
            return Not(self.atom())
        if token == "-":
            value = self.atom()
            if not isinstance(value, Imm):
                raise PtxError("a minus sign before something that is no literal", self.line)
            if value.is_float:
                return Imm(value.value ^ (1 << (value.width - 1)), True, value.width)
            return Imm(-value.value)
        if token == "_":
            return SINK
        number = _number(token)
        if number is not None:
            return number
        register = self.scope.register(token)
        if register is not None:
            return register
        if self.is_branch:
            return Label(token)
        if token.startswith("%"):
            return Special(token[1:])
        if token == "WARP_SZ":
            return Imm(32)
        return Sym(token)


class _Parser:
    def __init__(self, text: str) -> None:
        self.text = text
        self.variables: dict[str, Variable] = {}
        self.kernels: dict[str, Kernel] = {}
        self.version = self.target = ""
        self.files: dict[int, str] = {}
        self.kernel: Kernel | None = None
        self.scope: _Scope | None = None
        self.scopes = 0
        self.skip_function = False
        self.location: tuple[int, int, int] | None = None
        # (instruction, (file, line, column)); files are named at the end of the text
        self.locations: list[tuple[Instruction, tuple[int, int, int] | None]] = []
        self.branches: list[tuple[Instruction, _Scope]] = []

    def run(self) -> Module:
        depth = 0
        pending_body = False
        for kind, text, line, in_asm in _statements(self.text):
            if kind == "directive":
                self.directive(text, in_asm)
            elif kind == "open":
                depth += 1
                if pending_body:
                    pending_body = False
                    self.scope = _Scope(None, "")
                elif self.scope is not None:
                    self.scopes += 1
                    self.scope = _Scope(self.scope, f"{self.scopes}.")
            elif kind == "close":
                depth -= 1
                if self.scope is not None:
                    self.scope = self.scope.parent
                if depth == 0:
                    self.end_function()
            elif kind == "label":
                if self.kernel is not None and not self.skip_function:
                    unique = self.scope.prefix + text
                    self.scope.labels[text] = unique
                    self.kernel.labels[unique] = len(self.kernel.instructions)
            elif depth == 0:
                pending_body = self.module_statement(text, line)
            elif not self.skip_function:
                self.statement(text, line)
        self.resolve_sources()
        return Module(self.kernels, self.variables, self.version, self.target)

    def directive(self, text: str, in_asm: bool) -> None:
        words = text.split(None, 3)
        if words[0] == ".loc":
            # Inside inline assembly the compiler counts the lines of the assembly text: not lines of the source.
            if not in_asm:
                column = words[3].split(",")[0].split()[0] if len(words) > 3 else "0"
                self.location = (int(words[1]), int(words[2]), int(column))
        elif words[0] == ".file":
            self.files[int(words[1])] = text.split('"')[1]
        elif words[0] == ".version":
            self.version = words[1]
        elif words[0] == ".target":
            self.target = text.split(None, 1)[1]

    def module_statement(self, text: str, line: int) -> bool:
        """A declaration outside functions. True if a function body follows."""
        words = tokens(text, line)
        if ".entry" in words:
            name = words[words.index(".entry") + 1]
            self.kernel = Kernel(name)
            self.location = None
            params = []
            if "(" in words:
                opening = words.index("(")
                closing = len(words) - 1 - words[::-1].index(")")
                params = self.split(words[opening + 1 : closing])
                rest = words[closing + 1 :]
            else:
                rest = words[words.index(".entry") + 2 :]
            self.kernel.params = tuple(self.variable(p, line, "param") for p in params)
            if ".reqntid" in rest:
                numbers = [int(w) for w in rest[rest.index(".reqntid") + 1 :] if w.isdigit()][:3]
                self.kernel.required_block = tuple(numbers + [1] * (3 - len(numbers)))
            return True
        if ".func" in words:
            has_body = not any(w == ".extern" for w in words) and not text.rstrip().endswith(")noreturn")
            self.skip_function = has_body
            return has_body
        variable = self.variable(words, line)
        self.variables[variable.name] = variable
        return False

    @staticmethod
    def split(words: list[str]) -> list[list[str]]:
        out: list[list[str]] = [[]]
        depth = 0
        for word in words:
            depth += (word in "([{") - (word in ")]}")
            if word == "," and depth == 0:
                out.append([])
            else:
                out[-1].append(word)
        return [part for part in out if part]

    @staticmethod
    def variable(words: list[str], line: int, space: str = "") -> Variable:
        sizes = {"b8": 1, "u8": 1, "s8": 1, "pred": 1, "b128": 16}
        align, element, extern, name, count, data = 0, 0, False, "", 1, b""
        at = 0
        while at < len(words):
            word = words[at]
            if word == ".align":
                align = int(words[at + 1])
                at += 1
            elif word == ".extern":
                extern = True
            elif word in (".shared", ".local", ".global", ".const", ".param"):
                space = word[1:]
            elif word.startswith(".") and word[1:] in REGISTER_WIDTHS | sizes:
                element = sizes.get(word[1:]) or REGISTER_WIDTHS[word[1:]] // 8
            elif word == "[":
                size = words[at + 1]
                count *= int(size, 0) if size != "]" else 0
            elif word == "=":
                data = _initialiser(words[at + 1 :], element, line)
                break
            elif not word.startswith(".") and word not in "]" and not word.isdigit() and not name:
                name = word
            at += 1
        if not name or not space:
            raise PtxError(f"cannot read the declaration {' '.join(words)[:80]!r}", line)
        return Variable(name, space, element * count, align or max(element, 1), data, extern)

    def statement(self, text: str, line: int) -> None:
        guard, rest = self.guard(text, line)
        words = tokens(rest, line)
        if words[0] == ".reg":
            self.declare_registers(words, line)
        elif words[0] in (".local", ".shared", ".param", ".const", ".global"):
            variable = self.variable(words, line)
            self.kernel.variables[variable.name] = variable
        elif words[0].startswith("."):
            if words[0] not in (".pragma", ".maxnreg", ".branchtargets", ".callprototype", ".section"):
                raise PtxError(f"unknown directive {words[0]}", line)
        else:
            self.instruction(words, guard, " ".join(text.split()), line)

    def declare_registers(self, words: list[str], line: int) -> None:
        kinds = [w[1:] for w in words[1:] if w.startswith(".")]
        kind = kinds[-1]
        if kind not in REGISTER_WIDTHS or len(kinds) > 1:
            raise PtxError(f"registers of type {' '.join(kinds)} are not supported", line)
        width = REGISTER_WIDTHS[kind]
        names = words[words.index("." + kind) + 1 :]
        for part in self.split(names):
            many = len(part) > 1 and part[1] == "<"
            for name in [f"{part[0]}{i}" for i in range(int(part[2]))] if many else part[:1]:
                self.scope.registers[name] = Reg(width, self.kernel.registers[width], self.scope.prefix + name)
                self.kernel.registers[width] += 1

    def instruction(self, words: list[str], guard: tuple[Reg, bool] | None, text: str, line: int) -> None:
        opcode = words[0]
        base = opcode.split(".")[0]
        reader = _Operands(words[1:], self.scope, line, base == "bra")
        operands = reader.all() if base != "call" else ()
        index = len(self.kernel.instructions)
        instruction = Instruction(index, opcode, operands, guard, line, None, text, tuple(opcode.split(".")))
        self.kernel.instructions.append(instruction)
        self.locations.append((instruction, self.location))
        if base == "bra":
            self.branches.append((instruction, self.scope))

    def guard(self, text: str, line: int) -> tuple[tuple[Reg, bool] | None, str]:
        match = _GUARD.match(text)
        if match is None:
            return None, text
        register = self.scope.register(match.group(2))
        if register is None or register.width != 1:
            raise PtxError(f"guard {match.group(2)!r} is no predicate", line)
        return (register, bool(match.group(1))), text[match.end() :]

    def end_function(self) -> None:
        if self.kernel is not None and not self.skip_function:
            for instruction, scope in self.branches:
                name = scope.label(instruction.operands[-1].name)
                if name is None:
                    raise PtxError(f"no label {instruction.operands[-1].name!r}", instruction.line)
                instruction.target = self.kernel.labels[name]
            self.kernels[self.kernel.name] = self.kernel
        self.branches = []
        self.kernel, self.scope, self.skip_function = None, None, False

    def resolve_sources(self) -> None:
        """Name the files. Column 0 marks the function, not a statement: take the nearest statement after it."""
        upcoming: tuple[int, int, int] | None = None
        precise: list[tuple[int, int, int] | None] = [None] * len(self.locations)
        for i in range(len(self.locations) - 1, -1, -1):
            instruction, location = self.locations[i]
            if instruction.opcode.split(".")[0] in ("bra", "ret", "exit"):
                upcoming = None
            if location is not None and location[2] > 0:
                upcoming = location
            precise[i] = upcoming
        for (instruction, location), near in zip(self.locations, precise, strict=True):
            if location is not None and location[2] == 0 and near is not None and near[0] == location[0]:
                location = near
            if location is not None and location[0] in self.files:
                instruction.source = (self.files[location[0]], location[1])


@lru_cache(maxsize=32)
def parse(text: str) -> Module:
    """Parse a PTX file. Raises PtxError with the line of what it cannot read."""
    return _Parser(text).run()
