"""The cases of data/operands.json, and the checks that the GPU and the emulator share.

Operands lie between nans and outputs between elements of a known pattern, so that a read or write outside a
matrix shows. Which operands are accepted is decided here from TMA's rules alone, not by asking the package.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path

import pytest
import torch

from cute_matmul import matmul, problem, registry
from cute_matmul.config import TileConfig
from cute_matmul.launch import Unsupported

DATA = json.loads((Path(__file__).parent / "data" / "operands.json").read_text())

DTYPES = ("float16", "bfloat16")
MAJORS = tuple(product("km", "kn"))
RAGGED = (200, 296, 424)  # no multiple of a tile in any dimension, all multiples of 16 bytes

MARGIN = 1024  # elements around a matrix; keeps its address aligned to 16 bytes
PATTERN = 0x5A5A  # a finite number in both dtypes, which no test computes
TMA_BYTES = 16  # CUDA Driver API, cuTensorMapEncodeTiled: globalAddress, globalStrides


@dataclass(frozen=True)
class Shape:
    m: int
    n: int
    k: int
    why: str

    def __str__(self) -> str:
        return f"{self.m}x{self.n}x{self.k}"


SHAPES = tuple(Shape(*case["mnk"], case["why"]) for case in DATA["shapes"])


@dataclass(frozen=True)
class View:
    """How one of the three matrices is cut from a larger buffer: a Python expression in `empty`."""

    argument: str
    text: str
    why: str

    def __str__(self) -> str:
        return f"{self.argument}={self.text.replace(' ', '')}"


OVERLAP = "overlaps a"
"""The one view of the data file that is no expression; its cases are in `OVERLAPS`."""

_SIBLINGS = (
    ("empty(64, 72)[:, :64]", "row stride of 72 elements: 16-byte aligned, so it must be accepted"),
    ("empty(129, 72)[1:, 8:]", "storage offset that keeps the address aligned"),
    ("empty(256, 128)[::2, 8:72]", "row step and a column window"),
    ("empty(64, 1).expand(64, 128)", "stride 0 along the other dimension"),
    ("empty(65, 64).t()[:, 1:]", "column-major with an offset of one whole row"),
    ("empty(64, 65)[:, :64].t()", "column-major, stride not 16-byte aligned"),
    ("empty(1, 65)[:, :64]", "one row: its stride is never used"),
    ("empty(64, 9)[:, :1]", "one column, whose rows are 9 elements apart"),
    ("empty(64, 16)[:, 8:9]", "one column, whose rows are 16 elements apart"),
    ("empty(64, 1)", "one column, contiguous"),
    ("empty(1, 1)", "one element"),
)
_OUT_SIBLINGS = (
    ("empty(33, 467)[1:, 1:]", "odd row stride and an address that is only 2-byte aligned"),
    ("empty(130, 129)[:, :128]", "whole tiles at an odd row stride"),
    ("empty(130, 130)[1:129, 1:129]", "whole tiles whose address is not 4-byte aligned"),
    ("empty(130, 132)[:, :128]", "rows that start at 8 bytes"),
    ("empty(130, 142)[1:, 2:128]", "rows that start, and end, at 4 bytes"),
    ("empty(130, 136)[:, :126]", "rows that start at 16 bytes and end at 4"),
    ("empty(130, 136)[:, :125]", "rows that start at 16 bytes and end at 2"),
    ("empty(300, 136)[::2]", "row step"),
    ("empty(466, 40).t()", "column-major output"),
    ("empty(40, 467)[:, 1:].t()", "column-major output with an odd stride"),
    ("empty(128, 256)[:, ::2]", "no unit stride at all"),
    ("empty(1, 128).expand(64, 128)", "rows that are the same memory"),
    ("empty(64, 1).expand(64, 128)", "columns that are the same memory"),
    ("empty(40, 1)", "one column"),
    ("empty(40, 7)[:, 3:4]", "one column, whose elements are 7 apart"),
    ("empty(1, 40)", "one row"),
)


def _views() -> Iterator[View]:
    for case in DATA["views"]:
        for argument in ("a", "b") if "a" in case else ("out",):
            text = case.get("a") or case["out"]
            if text != OVERLAP:
                yield View(argument, text, case["why"])
    for text, why in _SIBLINGS:
        for argument in ("a", "b"):
            yield View(argument, text, why)
    for text, why in _OUT_SIBLINGS:
        yield View("out", text, why)


VIEWS = tuple(_views())


def variants() -> tuple[str, ...]:
    return registry.names()


def configs() -> list[tuple[str, TileConfig]]:
    """(variant, config) for every configuration of every variant."""
    return [(name, config) for name in variants() for config in registry.get(name).load().SPACE]


def accumulates_fp32(variant: str) -> bool:
    return registry.get(variant).accumulator == "float32"


def accepted_dtypes(variant: str) -> tuple[str, ...]:
    return registry.get(variant).dtypes


def variant_dtypes() -> list[tuple[str, str]]:
    """(variant, dtype) for every type that every variant accepts."""
    return [(name, dtype) for name in variants() for dtype in accepted_dtypes(name)]


def torch_dtype(name: str) -> torch.dtype:
    return getattr(torch, name)


def sample(index: int, count: int) -> list[tuple[str, tuple[str, str]]]:
    """`count` of the eight (dtype, majors), other ones for each index; a few indices see all of them."""
    combinations = list(product(DTYPES, MAJORS))
    step = len(combinations) // count
    # Both types each time, and with an odd multiplier all eight in turn.
    return [combinations[(index * 5 + i * step) % len(combinations)] for i in range(count)]


def quick(variant: str) -> list[tuple[str, tuple[str, str]]]:
    """Two (dtype, majors) for a variant, the same wherever few kernels must do: all of them over the ladder."""
    index = variants().index(variant)
    other = "bfloat16" if "bfloat16" in accepted_dtypes(variant) else "float16"
    return [("float16", ("k", "n")), (other, MAJORS[index % len(MAJORS)])]


def draw(shape: tuple[int, ...], dtype: str, device: str, seed: int) -> torch.Tensor:
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(shape, generator=generator, device=device).to(torch_dtype(dtype))


def matrix(rows: int, columns: int, dtype: str, device: str, *, transposed: bool, seed: int) -> torch.Tensor:
    """A random (rows, columns) matrix between nans; transposed: its columns are contiguous."""
    flat = torch.full((2 * MARGIN + rows * columns,), float("nan"), dtype=torch_dtype(dtype), device=device)
    shape = (columns, rows) if transposed else (rows, columns)
    inner = flat[MARGIN : MARGIN + rows * columns].view(shape)
    inner.copy_(draw(shape, dtype, device, seed))
    return inner.t() if transposed else inner


def operands(
    m: int, n: int, k: int, dtype: str, majors: tuple[str, str], device: str
) -> tuple[torch.Tensor, torch.Tensor]:
    a = matrix(m, k, dtype, device, transposed=majors[0] == "m", seed=1)
    b = matrix(k, n, dtype, device, transposed=majors[1] == "k", seed=2)
    return a, b


def cut(text: str, dtype: str, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """(view, buffer) of a View's expression; the buffer is all nan."""
    buffers = []

    def empty(*shape: int) -> torch.Tensor:
        buffers.append(torch.full(shape, float("nan"), dtype=torch_dtype(dtype), device=device))
        return buffers[0]

    return eval(text, {"__builtins__": {}}, {"empty": empty}), buffers[0]


@dataclass
class Output:
    """An output full of nan inside a buffer full of PATTERN."""

    tensor: torch.Tensor
    buffer: torch.Tensor
    outside: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.outside = torch.ones_like(self.buffer, dtype=torch.bool)
        if 0 in self.tensor.stride():  # an expanded view cannot be filled
            self.outside.view(-1)[places(self.tensor).to(self.buffer.device)] = False
        else:
            view = self.tensor.shape, self.tensor.stride(), self.tensor.storage_offset()
            self.outside.as_strided(*view).fill_(False)
        self.buffer.view(torch.int16).fill_(PATTERN)
        self.buffer.masked_fill_(~self.outside, float("nan"))

    @classmethod
    def contiguous(cls, m: int, n: int, dtype: str, device: str) -> Output:
        flat = torch.empty(2 * MARGIN + m * n, dtype=torch_dtype(dtype), device=device)
        return cls(flat[MARGIN : MARGIN + m * n].view(m, n), flat)

    def assert_only_inside_written(self) -> None:
        touched = self.outside & (self.buffer.view(torch.int16) != PATTERN)
        assert not touched.any(), f"written outside the output at {touched.nonzero()[:4].tolist()} of its buffer"

    def assert_not_written(self) -> None:
        self.assert_only_inside_written()
        assert self.buffer.masked_select(~self.outside).isnan().all(), "written although the call was refused"


def describable(operand: torch.Tensor) -> bool:
    """Whether TMA can describe a 16-bit matrix: one unit stride, the other a positive multiple of 16 bytes."""
    if operand.numel() == 0:
        return True
    if operand.data_ptr() % TMA_BYTES:
        return False
    for unit, other in ((0, 1), (1, 0)):
        has_unit = operand.shape[unit] == 1 or operand.stride(unit) == 1
        step = operand.stride(other) * 2
        if has_unit and (operand.shape[other] == 1 or (step > 0 and step % TMA_BYTES == 0)):
            return True
    return False


def places(tensor: torch.Tensor) -> torch.Tensor:
    """Where in its storage each element of a 2-D tensor is, in elements."""
    rows, columns = (torch.arange(extent) * step for extent, step in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.storage_offset() + rows[:, None] + columns


def storable(out: torch.Tensor, align: int) -> bool:
    """Whether `out` has a dimension of unit stride, no two elements in one place, and rows that suit `align`.

    align: bytes, of which a row's address and length must be multiples (what is stored by TMA is clipped in steps
    of 16 bytes: data/tensormap_clipping.json). Rows are along whichever dimension has unit stride.
    """
    if out.numel() == 0:
        return True
    distinct = out.is_contiguous() or places(out).unique().numel() == out.numel()
    if out.data_ptr() % align or not distinct:
        return False
    for unit, other in ((1, 0), (0, 1)):
        has_unit = out.shape[unit] == 1 or out.stride(unit) == 1
        apart = out.shape[other] == 1 or out.stride(other) * 2 % align == 0
        if has_unit and apart and out.shape[unit] * 2 % align == 0:
            return True
    return False


@contextmanager
def refused(arguments: str | tuple[str, ...], kind: type[Exception] = Unsupported, *words: str):
    """The block must raise `kind` with a message that begins with (one of) the arguments and holds every word."""
    starts = (arguments,) if isinstance(arguments, str) else arguments
    with pytest.raises(kind) as caught:
        yield
    message = str(caught.value)
    assert message.startswith(tuple(start + " " for start in starts)), message
    for word in words:
        assert word in message, f"{word!r} is not in: {message}"


def assert_right(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, variant: str, rows: int = 1 << 14) -> None:
    """Within the bound of the variant's accumulation, in blocks of rows so that a large product fits."""
    accumulator = registry.get(variant).accumulator
    for first in range(0, max(1, out.shape[0]), rows):
        block = slice(first, first + rows)
        checked = problem.check(out[block], a[block], b, accumulator=accumulator)
        assert checked.ok, f"rows from {first}: {checked}"


def check_product(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    output: Output | None = None,
    variant: str,
    config: TileConfig | None = None,
    backend: str = "auto",
) -> None:
    """a @ b is right and written where it belongs, or refused in so many words with nothing written."""
    dtype = str(a.dtype).removeprefix("torch.")
    output = output or Output.contiguous(a.shape[0], b.shape[1], dtype, str(a.device))

    def call() -> torch.Tensor:
        return matmul(a, b, out=output.tensor, variant=variant, config=config, backend=backend)

    accepted = accepted_dtypes(variant)
    align = getattr(registry.get(variant).load(), "OUT_ALIGN", 2)
    empty = output.tensor.numel() == 0 or a.shape[1] == 0
    culprits = tuple(
        name
        for name, fine in (
            ("a", empty or describable(a)),
            ("b", empty or describable(b)),
            ("out", storable(output.tensor, 2 if empty else align)),
        )
        if not fine
    )
    if dtype not in accepted:
        with refused("a", TypeError, *accepted):
            call()
    elif culprits:
        with refused(culprits, ValueError):
            call()
    else:
        assert call() is output.tensor
        output.assert_only_inside_written()
        assert_right(output.tensor, a, b, variant)
        return
    output.assert_not_written()


def check_view(view: View, dtype: str, device: str, *, variant: str, backend: str = "auto") -> None:
    """One matrix is the view, the other two are plain."""
    tensor, buffer = cut(view.text, dtype, device)
    rows, columns = tensor.shape
    if view.argument == "out":
        a, b = operands(rows, columns, 72, dtype, ("k", "k"), device)
        check_product(a, b, output=Output(tensor, buffer), variant=variant, backend=backend)
        return
    if 0 in tensor.stride():
        buffer.copy_(draw(tuple(buffer.shape), dtype, device, 3))
    else:
        tensor.copy_(draw((rows, columns), dtype, device, 3))
    if view.argument == "a":
        b = matrix(columns, 72, dtype, device, transposed=False, seed=4)
        check_product(tensor, b, variant=variant, backend=backend)
    else:
        a = matrix(40, rows, dtype, device, transposed=True, seed=4)
        check_product(a, tensor, variant=variant, backend=backend)


def _window(buffer: torch.Tensor, row: int, column: int, rows: int, columns: int) -> torch.Tensor:
    return buffer[row : row + rows, column : column + columns]


OVERLAPS: dict[str, Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor, torch.Tensor]]] = {
    # Each makes (a, b, out) from a (256, 512) buffer; all three are 64 x 64.
    "out is a": lambda buffer: (
        _window(buffer, 0, 0, 64, 64),
        _window(buffer, 64, 0, 64, 64),
        _window(buffer, 0, 0, 64, 64),
    ),
    "out is b": lambda buffer: (
        _window(buffer, 0, 0, 64, 64),
        _window(buffer, 64, 0, 64, 64),
        _window(buffer, 64, 0, 64, 64),
    ),
    "last row of a": lambda buffer: (
        _window(buffer, 0, 0, 64, 64),
        _window(buffer, 128, 0, 64, 64),
        _window(buffer, 63, 0, 64, 64),
    ),
    "last columns of a": lambda buffer: (
        _window(buffer, 0, 0, 64, 64),
        _window(buffer, 128, 0, 64, 64),
        _window(buffer, 0, 56, 64, 64),
    ),
    "first columns of b": lambda buffer: (
        _window(buffer, 0, 0, 64, 64),
        _window(buffer, 128, 64, 64, 64),
        _window(buffer, 130, 8, 64, 64),
    ),
    "a transposed": lambda buffer: (
        _window(buffer, 0, 0, 64, 64).t(),
        _window(buffer, 128, 0, 64, 64),
        _window(buffer, 0, 0, 64, 64),
    ),
    "out transposed": lambda buffer: (
        _window(buffer, 0, 0, 64, 64),
        _window(buffer, 128, 0, 64, 64),
        _window(buffer, 0, 32, 64, 64).t(),
    ),
}

NEIGHBOURS: dict[str, Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor, torch.Tensor]]] = {
    # The same, but nothing is shared: the call must be accepted.
    "columns beside a": lambda buffer: (
        _window(buffer, 0, 0, 64, 64),
        _window(buffer, 128, 0, 64, 64),
        _window(buffer, 0, 64, 64, 64),
    ),
    "columns before a": lambda buffer: (
        _window(buffer, 0, 64, 64, 64),
        _window(buffer, 128, 0, 64, 64),
        _window(buffer, 0, 0, 64, 64),
    ),
    "columns before b, other rows": lambda buffer: (
        _window(buffer, 0, 256, 64, 64),
        _window(buffer, 17, 128, 64, 64),
        _window(buffer, 20, 64, 64, 64),
    ),
    "between a and b": lambda buffer: (
        _window(buffer, 0, 0, 64, 64),
        _window(buffer, 0, 128, 64, 64),
        _window(buffer, 0, 64, 64, 64),
    ),
    "last columns of a row, first of the next": lambda buffer: (
        _window(buffer, 0, 448, 64, 64),
        _window(buffer, 128, 0, 64, 64),
        _window(buffer, 1, 0, 64, 64),
    ),
    "columns beside a, which is transposed": lambda buffer: (
        _window(buffer, 0, 0, 64, 64).t(),
        _window(buffer, 128, 0, 64, 64),
        _window(buffer, 0, 64, 64, 64),
    ),
    "columns beside b, transposed": lambda buffer: (
        _window(buffer, 128, 0, 64, 64),
        _window(buffer, 0, 128, 64, 64),
        _window(buffer, 0, 64, 64, 64).t(),
    ),
    "every other row, a the others": lambda buffer: (
        buffer[1:128:2, :64],
        buffer[128:192, :64],
        buffer[0:128:2, 32:96],
    ),
    "columns beside every other row": lambda buffer: (
        buffer[0:128:2, :64],
        buffer[128:192, :64],
        buffer[0:64, 64:128],
    ),
    "rows below": lambda buffer: (
        _window(buffer, 0, 0, 64, 64),
        _window(buffer, 64, 0, 64, 64),
        _window(buffer, 128, 0, 64, 64),
    ),
}


def check_overlap(name: str, dtype: str, device: str, *, variant: str, backend: str = "auto") -> None:
    buffer = draw((256, 512), dtype, device, 5)
    a, b, out = OVERLAPS[name](buffer)
    before = buffer.clone()
    with refused("out", ValueError, "overlap"):
        matmul(a, b, out=out, variant=variant, backend=backend)
    assert torch.equal(buffer, before)


def check_neighbours(name: str, dtype: str, device: str, *, variant: str, backend: str = "auto") -> None:
    buffer = draw((256, 512), dtype, device, 5)
    a, b, out = NEIGHBOURS[name](buffer)
    before, a_before, b_before = buffer.clone(), a.clone(), b.clone()
    out.fill_(float("nan"))
    assert matmul(a, b, out=out, variant=variant, backend=backend) is out
    assert_right(out, a_before, b_before, variant)
    out.copy_(before.as_strided(out.shape, out.stride(), out.storage_offset()))
    assert torch.equal(buffer, before), "written outside the output"


def check_ones(variant: str, dtype: str, device: str, *, backend: str = "auto") -> None:
    """Ones with K = 2049: exactly 2049 before it is rounded to the output's type."""
    k, padded = 2049, 2056
    a = torch.full((72, padded), float("nan"), dtype=torch_dtype(dtype), device=device)[:, :k].fill_(1)
    b = torch.full((80, padded), float("nan"), dtype=torch_dtype(dtype), device=device)[:, :k].fill_(1).t()
    out = matmul(a, b, variant=variant, backend=backend)
    assert torch.equal(out, torch.full_like(out, 2049.0))


def check_accumulation(variant: str, dtype: str, device: str, *, backend: str = "auto") -> None:
    """2048 and then 24 single ones, each in a K step of its own.

    Sharper than ones throughout, whose sums over 16 elements fp16 still adds exactly: an accumulator with
    fp16's 11 bits stays at 2048, and one with bf16's 8 does too. 2072 is an fp16 number and 2080 its bf16 one.
    """
    a = torch.zeros((64, 25 * 64), dtype=torch_dtype(dtype), device=device)
    a[:, 0] = 2048
    a[:, 64::64] = 1
    b = torch.ones((25 * 64, 64), dtype=torch_dtype(dtype), device=device)
    out = matmul(a, b, variant=variant, backend=backend)
    assert torch.equal(out, torch.full_like(out, 2072.0))


def check_nonfinite(variant: str, dtype: str, device: str, *, backend: str = "auto") -> None:
    """A row with an infinity and a column with a nan: exactly these are infinite and nan in the product."""
    a, b = operands(*RAGGED, dtype, ("k", "n"), device)
    a[131, 419] = float("inf")
    b[7, 289] = float("nan")
    out = matmul(a, b, variant=variant, backend=backend)
    nan = torch.zeros(out.shape, dtype=torch.bool, device=device)
    nan[:, 289] = True
    inf = torch.zeros_like(nan)
    inf[131] = True
    inf &= ~nan
    assert torch.equal(out.isnan(), nan)
    assert torch.equal(out.isinf(), inf)
    assert torch.equal(out[131].signbit()[inf[131]], b[419].signbit()[inf[131]])
    assert_right(out, a, b, variant)


def check_repeats(
    variant: str, mnk: tuple[int, int, int], dtype: str, device: str, *, times: int, backend: str = "auto"
) -> None:
    """The same inputs give the same bits each time."""
    a, b = operands(*mnk, dtype, ("k", "n"), device)
    first = matmul(a, b, variant=variant, backend=backend).view(torch.int16)
    for _ in range(times - 1):
        out = torch.full_like(first, PATTERN).view(torch_dtype(dtype))
        matmul(a, b, out=out, variant=variant, backend=backend)
        assert torch.equal(out.view(torch.int16), first)
