"""TMA descriptors (CUtensorMap): decode the 128 bytes, and copy, fill, clip, swizzle and reduce boxes as TMA does.

The layout of a descriptor is not documented. This one was read off the DSL's inline encoder and the driver's
`cuTensorMapEncodeTiled` over a sweep of parameters; the driver's table is a test of this module. As little-endian
64-bit words:

    0   base address, a multiple of 16
    1   low half: flags (below); high half: stride 1 in units of 16 bytes, bits 0-31
    2   strides 2 and 3, likewise
    3   low half: stride 4; bits 32-47: bits 32-35 of strides 1 to 4, four bits each
    4   extents 0 and 1, less 1 each
    5   extents 2 and 3
    6   low half: extent 4; bits 32-46: element strides less 1, three bits each; top byte: box 0 less 1
    7   boxes 1 to 4 less 1, a byte each
    8+  not read by copies: the driver notes sizes of the box and the swizzle here, the DSL leaves what was there

    flags: bits 0-3 are 2 from the DSL, 0 from the driver; 4-6 rank less 1; 7-10 element type; 11-12 interleave;
           13-14 swizzle; 15 NaN fill; 16 the element type is TF32; 17-18 L2 promotion; 21 is set by the DSL where
           the tensor spans 128 KiB or more, never by the driver, and is ignored here

Dimension 0 is the contiguous one. Coordinates, extents and boxes count elements; strides and addresses count bytes.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import struct
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

DESCRIPTOR_BYTES = 128
DESCRIPTOR_ALIGN = 64  # CUDA driver API, CUtensorMap
SHARED_ALIGN = 128  # PTX ISA, cp.async.bulk.tensor: alignment of the shared-memory address
CHUNK = 16  # bytes that a swizzle keeps together, and the unit of a box's inner extent

# element type code of flags bits 7-10 (with bit 16 for TF32) -> name, bytes
_TYPES = {
    (0, 0): ("uint8", 1),
    (1, 0): ("uint16", 2),
    (2, 0): ("uint32", 4),
    (3, 0): ("int32", 4),
    (4, 0): ("uint64", 8),
    (5, 0): ("int64", 8),
    (6, 0): ("float16", 2),
    (7, 0): ("float32", 4),
    (8, 0): ("float32_ftz", 4),
    (9, 0): ("float64", 8),
    (10, 0): ("bfloat16", 2),
    (7, 1): ("tfloat32", 4),
    (8, 1): ("tfloat32_ftz", 4),
}
_SWIZZLE = (0, 32, 64, 128)
_INTERLEAVE = (0, 16, 32)
_L2_PROMOTION = (0, 64, 128, 256)


RULES = ("format", "coordinates", "alignment", "box", "interleave", "fill", "reduction")


class TensorMapError(ValueError):
    """A descriptor or a use of one that the hardware would refuse or that is not modelled; `rule` is one of RULES."""

    def __init__(self, rule: str, message: str):
        self.rule = rule
        super().__init__(message)


class GlobalMemory(Protocol):
    """Where boxes come from and go to: writable bytes by address, an IndexError where there is no memory."""

    def view(self, address: int, nbytes: int) -> np.ndarray:
        """uint8 (nbytes,) over the memory itself."""


@dataclasses.dataclass(frozen=True)
class BoxPlan:
    """Where one box lies in global and shared memory.

    `rows` are the stretches that are contiguous in global memory, the part inside the tensor only; `chunks` are the
    box's 16-byte pieces in the box's order (dimension 0 fastest), inside or not, since shared memory always holds
    the whole box.

    row_addresses: int64 (n,), first byte of each row; row_bytes: bytes in each.
    chunk_offsets: int64 (box_bytes / 16,), where each chunk lies, counted from the shared address, swizzled.
    clipped: whether some of the box is outside the tensor.
    """

    row_addresses: np.ndarray
    row_bytes: int
    chunk_offsets: np.ndarray
    clipped: bool
    _first: tuple[int, ...]  # per dimension, the first element inside the tensor,
    _count: tuple[int, ...]  # how many are inside,
    _taken: tuple[int, ...]  # and how many the box has
    _itemsize: int
    _address: int

    @functools.cached_property
    def runs(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The part inside the tensor as stretches that are contiguous in shared and in global memory.

        int64 (n,) each: offset from the shared address, global address, bytes. A stretch lies in one swizzled
        16-byte chunk, or in several that stay neighbours.
        """
        if not len(self.row_addresses):
            return (np.zeros(0, np.int64),) * 3
        low = self._first[0] * self._itemsize
        chunks = np.arange(low // CHUNK, -(-(low + self.row_bytes) // CHUNK), dtype=np.int64)
        start = np.maximum(chunks * CHUNK, low)
        nbytes = np.minimum(chunks * CHUNK + CHUNK, low + self.row_bytes) - start
        rows = np.zeros(1, dtype=np.int64)  # of the box, in the order of row_addresses
        pitch = 1
        for first, count, taken in zip(self._first[1:], self._count[1:], self._taken[1:], strict=True):
            rows = ((np.arange(first, first + count) * pitch)[:, None] + rows[None, :]).reshape(-1)
            pitch *= taken
        per_row = self._taken[0] * self._itemsize // CHUNK
        shared = (self.chunk_offsets[rows[:, None] * per_row + chunks] + (start - chunks * CHUNK)).reshape(-1)
        address = (self.row_addresses[:, None] + (start - low)).reshape(-1)
        nbytes = np.broadcast_to(nbytes, (len(rows), len(chunks))).reshape(-1)
        joins = (shared[1:] == shared[:-1] + nbytes[:-1]) & (address[1:] == address[:-1] + nbytes[:-1])
        begins = np.flatnonzero(np.concatenate(([True], ~joins)))
        return shared[begins], address[begins], np.add.reduceat(nbytes, begins)


@dataclasses.dataclass(frozen=True)
class TensorMap:
    """A decoded descriptor. Tuples have one entry per dimension, the contiguous one first.

    strides are in bytes, strides[0] is the element size. `box` counts the elements a copy spans, `element_strides`
    the step between those it takes. `swizzle`, `interleave` and `l2_promotion` are in bytes, 0 for none.
    """

    dtype: str
    itemsize: int
    rank: int
    address: int
    extents: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    element_strides: tuple[int, ...]
    interleave: int
    swizzle: int
    l2_promotion: int
    fill: str

    @staticmethod
    def decode(data: bytes) -> TensorMap:
        """Decode a descriptor's first 64 bytes (the rest carries nothing).

        Raises TensorMapError("format") where the bytes are no tile-mode descriptor of this format.
        """
        return _decode(bytes(data[:64]))

    @functools.cached_property
    def taken(self) -> tuple[int, ...]:
        """Elements a copy moves along each dimension: the box over the element strides, rounded up.

        Element stride 0 is ignored without interleaving (CUDA driver API, cuTensorMapEncodeTiled).
        """
        steps = (1, *self.element_strides[1:])
        return tuple(-(-n // step) for n, step in zip(self.box, steps, strict=True))

    @functools.cached_property
    def box_bytes(self) -> int:
        """Bytes of the box in shared memory, which a load counts in full however much of it is outside."""
        return math.prod(self.taken) * self.itemsize

    @functools.cached_property
    def span_bytes(self) -> int:
        """Bytes from the shared address on among which the box lies: a swizzle moves pieces within lines of 128."""
        return -(-self.box_bytes // SHARED_ALIGN) * SHARED_ALIGN if self.swizzle else self.box_bytes

    def plan(self, coordinates: Sequence[int], shared_address: int, *, store: bool = False) -> BoxPlan:
        """Where the box at `coordinates` (elements, may be negative or beyond the extents) lies.

        store: of a copy to global memory. Loads clip the innermost dimension at its extent; stores at the next 16
        bytes, so that they write up to 15 bytes beyond a row that is no multiple of 16 bytes (measured on an H200,
        tests/data/tensormap_clipping.json).

        Raises TensorMapError for the wrong number of coordinates, an innermost coordinate that is not a multiple of
        16 bytes, a negative one of a store (both end in an illegal instruction on an H200), a shared address that
        is not a multiple of 128 bytes, an inner box extent that is not a multiple of 16 bytes or exceeds the
        swizzle, or interleaving.
        """
        at = tuple(int(c) for c in coordinates)
        _check(self, at, shared_address, store)
        return _plan(self, at, shared_address % _pattern_bytes(self), store)

    def replace(self, **changes: Any) -> TensorMap:
        """A copy with other fields, as `tensormap.replace` makes."""
        return dataclasses.replace(self, **changes)

    def encode(self) -> bytes:
        """The 128 bytes of this descriptor, the first 64 as the driver encodes them, the others 0."""
        code, tf32 = next(code for code, (name, _) in _TYPES.items() if name == self.dtype)
        rank = self.rank
        flags = (rank - 1) << 4 | code << 7 | _INTERLEAVE.index(self.interleave) << 11
        flags |= _SWIZZLE.index(self.swizzle) << 13 | (self.fill == "nan") << 15 | tf32 << 16
        flags |= _L2_PROMOTION.index(self.l2_promotion) << 17
        strides = [s >> 4 for s in self.strides[1:]] + [0] * (5 - rank)
        extents = [n - 1 for n in self.extents] + [0] * (5 - rank)
        box = [n - 1 for n in self.box] + [0] * (5 - rank)
        steps = [n - 1 for n in self.element_strides] + [0] * (5 - rank)
        low = (1 << 32) - 1
        words = [
            self.address,
            flags | (strides[0] & low) << 32,
            strides[1] & low | (strides[2] & low) << 32,
            strides[3] & low | sum((s >> 32) << (32 + 4 * i) for i, s in enumerate(strides)),
            extents[0] | extents[1] << 32,
            extents[2] | extents[3] << 32,
            extents[4] | sum(step << (32 + 3 * i) for i, step in enumerate(steps)) | box[0] << 56,
            sum(n << (8 * i) for i, n in enumerate(box[1:])),
        ]
        return struct.pack("<8Q", *words).ljust(DESCRIPTOR_BYTES, b"\0")


@functools.lru_cache(maxsize=256)
def _decode(data: bytes) -> TensorMap:
    if len(data) != 64:
        raise TensorMapError("format", f"a descriptor of {len(data)} bytes, it has {DESCRIPTOR_BYTES}")
    words = struct.unpack("<8Q", data)
    flags = words[1] & 0xFFFFFFFF
    kind, rank = flags & 0xF, (flags >> 4 & 7) + 1
    code = (flags >> 7 & 0xF, flags >> 16 & 1)
    if kind not in (0, 2) or rank > 5 or code not in _TYPES or words[0] % 16:
        raise TensorMapError(
            "format",
            f"bytes that are no tile-mode TMA descriptor (kind {kind}, rank {rank}, element type {code[0]}, "
            f"address {words[0]:#x}): im2col descriptors are not modelled, other bytes mean a wrong pointer",
        )
    interleave = flags >> 11 & 3
    if interleave == 3:
        raise TensorMapError("format", "interleave code 3, known are 0 to 2")
    dtype, itemsize = _TYPES[code]
    halves = [half for word in words for half in (word & 0xFFFFFFFF, word >> 32)]
    strides = [(halves[3 + i] | (words[3] >> (32 + 4 * i) & 0xF) << 32) << 4 for i in range(4)]
    extents = [halves[8 + i] + 1 for i in range(5)]
    steps = [(words[6] >> (32 + 3 * i) & 7) + 1 for i in range(5)]
    box = [(words[6] >> 56) + 1] + [(words[7] >> (8 * i) & 0xFF) + 1 for i in range(4)]
    return TensorMap(
        dtype=dtype,
        itemsize=itemsize,
        rank=rank,
        address=words[0],
        extents=tuple(extents[:rank]),
        strides=(itemsize, *strides[: rank - 1]),
        box=tuple(box[:rank]),
        element_strides=tuple(steps[:rank]),
        interleave=_INTERLEAVE[interleave],
        swizzle=_SWIZZLE[flags >> 13 & 3],
        l2_promotion=_L2_PROMOTION[flags >> 17 & 3],
        fill="nan" if flags >> 15 & 1 else "zero",
    )


def swizzled(address: np.ndarray, swizzle: int) -> np.ndarray:
    """Where bytes at shared-memory addresses go under a 0, 32, 64 or 128 byte swizzle.

    The pattern is a function of the address: bits 4-6 are xored with bits 7-9, of which 32 bytes use one and 64
    two (CUDA C programming guide, the shared-memory bank swizzle of TMA).
    """
    mask = {0: 0, 32: 1, 64: 3, 128: 7}[swizzle]
    return address ^ ((address >> 7 & mask) << 4)


def _pattern_bytes(tensor_map: TensorMap) -> int:
    """Period of the swizzle in shared memory, so that plans can be shared by addresses that differ by it."""
    return max(8 * tensor_map.swizzle, SHARED_ALIGN)


def _check(tensor_map: TensorMap, coordinates: tuple[int, ...], shared_address: int, store: bool) -> None:
    if len(coordinates) != tensor_map.rank:
        raise TensorMapError(
            "coordinates", f"{len(coordinates)} coordinates for a tensor map of {tensor_map.rank} dimensions"
        )
    if coordinates[0] * tensor_map.itemsize % CHUNK:
        raise TensorMapError(
            "coordinates",
            f"innermost coordinate {coordinates[0]} of {tensor_map.dtype} elements is at byte "
            f"{coordinates[0] * tensor_map.itemsize} of a row, it must be a multiple of {CHUNK} bytes",
        )
    if store and min(coordinates) < 0:
        raise TensorMapError("coordinates", f"coordinates {coordinates} of a store, they must not be negative")
    if tensor_map.interleave:
        raise TensorMapError("interleave", f"{tensor_map.interleave}-byte interleaved layouts are not modelled")
    if shared_address % SHARED_ALIGN:
        raise TensorMapError(
            "alignment",
            f"shared address {shared_address:#x} of a tensor copy, it must be a multiple of {SHARED_ALIGN}",
        )
    inner = tensor_map.box[0] * tensor_map.itemsize
    if inner % CHUNK or (tensor_map.swizzle and inner > tensor_map.swizzle):
        limit = f", at most the swizzle's {tensor_map.swizzle}" if tensor_map.swizzle else ""
        raise TensorMapError("box", f"an inner box extent of {inner} bytes, accepted are multiples of 16{limit}")


@functools.lru_cache(maxsize=128)
def _chunk_offsets(box_bytes: int, swizzle: int, phase: int) -> np.ndarray:
    """Offsets of a box's chunks from a shared address that is `phase` modulo the swizzle's period."""
    linear = phase + CHUNK * np.arange(box_bytes // CHUNK, dtype=np.int64)
    offsets = swizzled(linear, swizzle) - phase
    offsets.flags.writeable = False
    return offsets


@functools.lru_cache(maxsize=8192)
def _plan(tensor_map: TensorMap, coordinates: tuple[int, ...], phase: int, store: bool) -> BoxPlan:
    extents = tensor_map.extents
    if store:
        per_chunk = CHUNK // tensor_map.itemsize
        extents = (-(-extents[0] // per_chunk) * per_chunk, *extents[1:])
    steps = (1, *tensor_map.element_strides[1:])
    first, count, address = [], [], tensor_map.address
    for at, extent, step, taken, stride in zip(
        coordinates, extents, steps, tensor_map.taken, tensor_map.strides, strict=True
    ):
        low = min(max(0, -(at // step)), taken)  # first taken element at or beyond coordinate 0
        high = min(max(-((at - extent) // step), low), taken)  # first one at or beyond the extent
        first.append(low)
        count.append(high - low)
        address += (at + low * step) * stride
    inside = all(count)
    rows = np.zeros(1 if inside else 0, dtype=np.int64) + address
    if inside:
        for dim in range(1, tensor_map.rank):
            moves = np.arange(count[dim], dtype=np.int64) * (tensor_map.strides[dim] * steps[dim])
            rows = (moves[:, None] + rows[None, :]).reshape(-1)
    rows.flags.writeable = False
    return BoxPlan(
        row_addresses=rows,
        row_bytes=count[0] * tensor_map.itemsize,
        chunk_offsets=_chunk_offsets(tensor_map.box_bytes, tensor_map.swizzle, phase),
        clipped=tuple(count) != tensor_map.taken,
        _first=tuple(first),
        _count=tuple(count),
        _taken=tensor_map.taken,
        _itemsize=tensor_map.itemsize,
        _address=address,
    )


def _global_box(memory: GlobalMemory, tensor_map: TensorMap, plan: BoxPlan) -> np.ndarray | None:
    """The part of the box inside the tensor, as uint8 (outermost count, ..., count 1, row bytes); None if empty."""
    if not all(plan._count):
        return None
    steps = (1, *tensor_map.element_strides[1:])
    moves = [
        stride * step for stride, step in zip(tensor_map.strides[1:], steps[1:], strict=True)
    ]  # bytes from row to row
    start = int(plan.row_addresses.min())
    stop = int(plan.row_addresses.max()) + plan.row_bytes
    try:
        span = memory.view(start, stop - start)
    except IndexError:
        for address in plan.row_addresses:  # name the first row outside, not the whole span
            memory.view(int(address), plan.row_bytes)
        raise
    shape = (*plan._count[:0:-1], plan.row_bytes)
    return np.lib.stride_tricks.as_strided(
        span[plan._address - start :], shape=shape, strides=(*moves[::-1], 1), writeable=True
    )


def _box_slices(tensor_map: TensorMap, plan: BoxPlan) -> tuple[slice, ...]:
    """Where the inside part lies in the box as uint8 (outermost, ..., dimension 1, inner bytes)."""
    outer = [slice(f, f + n) for f, n in zip(plan._first[:0:-1], plan._count[:0:-1], strict=True)]
    low = plan._first[0] * tensor_map.itemsize
    return (*outer, slice(low, low + plan.row_bytes))


def _box_shape(tensor_map: TensorMap) -> tuple[int, ...]:
    return (*tensor_map.taken[:0:-1], tensor_map.taken[0] * tensor_map.itemsize)


# Sixteen bytes as one NumPy element: copying complex numbers moves bytes, whatever they mean.
_CHUNK_DTYPE = np.complex128


def load(
    memory: GlobalMemory,
    tensor_map: TensorMap,
    coordinates: Sequence[int],
    shared_address: int,
    shared: np.ndarray,
) -> BoxPlan:
    """Copy a box from global to shared memory, filling what is outside the tensor.

    shared: uint8, the shared memory from `shared_address` on, `tensor_map.span_bytes` or more; it is written.

    Raises TensorMapError as `TensorMap.plan` does, and IndexError from `memory` where a row has no memory behind it.
    """
    plan = tensor_map.plan(coordinates, shared_address)
    inside = _global_box(memory, tensor_map, plan)
    if plan.clipped or inside is None:
        box = np.empty(_box_shape(tensor_map), dtype=np.uint8)
        _fill(tensor_map, box)
        if inside is not None:
            box[_box_slices(tensor_map, plan)] = inside
    else:
        box = np.ascontiguousarray(inside)
    _chunks(shared, tensor_map)[plan.chunk_offsets // CHUNK] = box.reshape(-1).view(_CHUNK_DTYPE)
    return plan


def store(
    memory: GlobalMemory,
    tensor_map: TensorMap,
    coordinates: Sequence[int],
    shared_address: int,
    shared: np.ndarray,
) -> BoxPlan:
    """Copy a box from shared to global memory; what is outside the tensor is not written.

    Inside counts whole 16-byte pieces of a row, see `TensorMap.plan`. Arguments as `load`.
    """
    plan = tensor_map.plan(coordinates, shared_address, store=True)
    inside = _global_box(memory, tensor_map, plan)
    if inside is not None:
        inside[...] = _shared_box(tensor_map, plan, shared)[_box_slices(tensor_map, plan)]
    return plan


def reduce(
    memory: GlobalMemory,
    tensor_map: TensorMap,
    coordinates: Sequence[int],
    shared_address: int,
    shared: np.ndarray,
    operation: str,
) -> BoxPlan:
    """Combine a box of shared memory into global memory: add, min, max, inc, dec, and, or, xor.

    Element by element, atomically, as the descriptor's type says (PTX ISA, cp.reduce.async.bulk.tensor). 16-bit
    floating-point results are rounded once, to nearest even. Rows are taken to be clipped as `store` clips them;
    unlike those of `load` and `store`, that has not been measured. Arguments otherwise as `load`.

    Raises TensorMapError("reduction") where the operation has no meaning for the type.
    """
    combine = _reduction(tensor_map.dtype, operation)
    plan = tensor_map.plan(coordinates, shared_address, store=True)
    inside = _global_box(memory, tensor_map, plan)
    if inside is not None:
        source = np.ascontiguousarray(_shared_box(tensor_map, plan, shared)[_box_slices(tensor_map, plan)])
        inside[...] = combine(np.ascontiguousarray(inside), source)
    return plan


def _chunks(shared: np.ndarray, tensor_map: TensorMap) -> np.ndarray:
    """Shared memory as 16-byte chunks."""
    if len(shared) < tensor_map.span_bytes:
        raise ValueError(f"shared has {len(shared)} bytes, the box lies among {tensor_map.span_bytes}")
    return shared[: len(shared) // CHUNK * CHUNK].view(_CHUNK_DTYPE)


def _shared_box(tensor_map: TensorMap, plan: BoxPlan, shared: np.ndarray) -> np.ndarray:
    chunks = _chunks(shared, tensor_map)[plan.chunk_offsets // CHUNK]
    return chunks.view(np.uint8).reshape(_box_shape(tensor_map))


def _fill(tensor_map: TensorMap, box: np.ndarray) -> None:
    if tensor_map.fill == "zero":
        box[...] = 0
    else:
        raise TensorMapError("fill", "NaN fill outside the tensor is not modelled")


def _reduction(dtype: str, operation: str):
    """A function of two uint8 arrays (inner dimension contiguous) that returns the combined uint8 array."""
    integer = {"uint32": np.uint32, "int32": np.int32, "uint64": np.uint64, "int64": np.int64}.get(dtype)
    small = dtype in ("float16", "bfloat16")
    if operation in ("and", "or", "xor") and integer is not None:
        function = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}[operation]
    elif operation in ("add", "min", "max") and (integer is not None or small):
        function = {"add": np.add, "min": np.fmin, "max": np.fmax}[operation]
    elif operation == "add" and dtype in ("float32", "float32_ftz", "float64"):
        function = np.add
    elif operation in ("inc", "dec") and dtype == "uint32":
        function = _increment if operation == "inc" else _decrement
    else:
        raise TensorMapError("reduction", f"{operation} of {dtype} elements, which TMA does not reduce")

    def combine(target: np.ndarray, source: np.ndarray) -> np.ndarray:
        if dtype == "bfloat16":
            with np.errstate(all="ignore"):
                result = function(_from_bfloat16(target), _from_bfloat16(source))
            return _to_bfloat16(result).view(np.uint8)
        kind = integer or {"float16": np.float16, "float64": np.float64}.get(dtype, np.float32)
        with np.errstate(all="ignore"):
            return function(target.view(kind), source.view(kind)).view(np.uint8)

    return combine


def _increment(old: np.ndarray, limit: np.ndarray) -> np.ndarray:
    return np.where(old >= limit, np.uint32(0), old + np.uint32(1))


def _decrement(old: np.ndarray, limit: np.ndarray) -> np.ndarray:
    return np.where((old == 0) | (old > limit), limit, old - np.uint32(1))


def _from_bfloat16(data: np.ndarray) -> np.ndarray:
    return (data.view(np.uint16).astype(np.uint32) << 16).view(np.float32)


def _to_bfloat16(values: np.ndarray) -> np.ndarray:
    bits = values.view(np.uint32)
    rounded = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FFF), rounded)
