"""TMA descriptors and box copies, against the DSL's encoder and an element-by-element statement of their rules."""

from __future__ import annotations

import dataclasses
import itertools
import math
import struct

import cutlass
import cutlass.cute as cute
import numpy as np
import pytest
import torch
from cutlass.cute.nvgpu import cpasync
from hypothesis import given, settings
from hypothesis import strategies as st

from cute_matmul.emulator import host, tensormap
from cute_matmul.emulator.tensormap import TensorMap, TensorMapError


class Memory:
    """Bytes at an address, as `host.Memory` offers them."""

    def __init__(self, base: int, data: np.ndarray):
        self.base, self.data = base, data

    def view(self, address: int, nbytes: int) -> np.ndarray:
        start = address - self.base
        if start < 0 or start + nbytes > len(self.data):
            raise IndexError(f"{nbytes} bytes at {address}")
        return self.data[start : start + nbytes]


def make_map(**changes) -> TensorMap:
    fields = {
        "dtype": "float16",
        "itemsize": 2,
        "rank": 2,
        "address": 4096,
        "extents": (45, 20),
        "strides": (2, 128),
        "box": (64, 16),
        "element_strides": (1, 1),
        "interleave": 0,
        "swizzle": 128,
        "l2_promotion": 128,
        "fill": "zero",
    }
    return TensorMap(**{**fields, **changes})


# Decoding


@cute.kernel
def descriptor_kernel(atom: cute.CopyAtom, coordinates: cute.Tensor):
    cpasync.prefetch_descriptor(atom)


@cute.jit
def describe(
    tensor: cute.Tensor,
    box: cutlass.Constexpr,
    order: cutlass.Constexpr,
    swizzle: cutlass.Constexpr,
    internal: cutlass.Constexpr,
):
    layout = cute.make_ordered_layout(box, order=order)
    layout = cute.make_composed_layout(cute.make_swizzle(swizzle, 4, 3), 0, layout)
    op = cpasync.CopyBulkTensorTileG2SOp()
    atom, coordinates = cpasync.make_tiled_tma_atom(op, tensor, layout, box, internal_type=internal)
    descriptor_kernel(atom, coordinates).launch(grid=[1, 1, 1], block=[32, 1, 1])


def dsl_descriptor(tensor, box, order, swizzle=0, internal=None) -> TensorMap:
    arguments = (tensor, box, order, swizzle, internal)
    launch = host.Program.compile(describe, *arguments).run(*arguments)[0]
    return TensorMap.decode(launch.params[0])


def encoded_sizes(tensor: torch.Tensor, dims: list[int]) -> dict:
    """What a descriptor must say of a tensor whose dimensions from the contiguous one outwards are `dims`."""
    return {
        "address": tensor.data_ptr(),
        "extents": tuple(tensor.shape[d] for d in dims),
        "strides": tuple(tensor.stride(d) * tensor.itemsize for d in dims),
    }


DTYPES = {
    "uint8": torch.uint8,
    "uint16": torch.uint16,
    "uint32": torch.uint32,
    "uint64": torch.uint64,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "float64": torch.float64,
}


@pytest.mark.parametrize("name", DTYPES)
def test_dtypes_as_the_dsl_encodes_them(name):
    tensor = torch.zeros(33, 160 * 8, dtype=torch.uint8).view(DTYPES[name])
    decoded = dsl_descriptor(tensor, (8, 16), (1, 0))
    assert (decoded.dtype, decoded.itemsize, decoded.rank) == (name, tensor.itemsize, 2)
    expected = encoded_sizes(tensor, [1, 0])
    assert {name: getattr(decoded, name) for name in expected} == expected
    assert (decoded.box, decoded.element_strides) == ((16, 8), (1, 1))
    assert (decoded.interleave, decoded.fill) == (0, "zero")


@pytest.mark.parametrize(("dtype", "name"), [(torch.int32, "uint32"), (torch.int8, "uint8"), (torch.int64, "uint64")])
def test_signed_integers_are_unsigned_to_the_dsl(dtype, name):
    """Copies do not care; a reduction would (min and max of signed integers)."""
    assert dsl_descriptor(torch.zeros(8, 32, dtype=dtype), (8, 16), (1, 0)).dtype == name


def test_tf32_is_a_flag_beside_float32():
    tensor = torch.zeros(8, 32)
    assert dsl_descriptor(tensor, (8, 16), (1, 0), internal=cutlass.TFloat32).dtype == "tfloat32"


@pytest.mark.parametrize(("swizzle", "span"), [(0, 0), (1, 32), (2, 64), (3, 128)])
def test_swizzles_as_the_dsl_encodes_them(swizzle, span):
    box = (8, (span or 128) // 2)
    decoded = dsl_descriptor(torch.zeros(64, 128, dtype=torch.float16), box, (1, 0), swizzle)
    assert (decoded.swizzle, decoded.box) == (span, box[::-1])


@pytest.mark.parametrize("rank", range(1, 6))
def test_ranks_as_the_dsl_encodes_them(rank):
    shape = (3, 5, 7, 9, 24)[5 - rank :]
    box = (2, 3, 4, 5, 8)[5 - rank :]
    decoded = dsl_descriptor(torch.zeros(shape, dtype=torch.float16), box, tuple(range(rank))[::-1])
    assert decoded.rank == rank
    expected = encoded_sizes(torch.empty(shape, dtype=torch.float16), list(range(rank))[::-1])
    assert (decoded.extents, decoded.strides, decoded.box) == (expected["extents"], expected["strides"], box[::-1])


def test_a_column_major_and_a_padded_tensor():
    tensor = torch.zeros(64, 2056, dtype=torch.float16)[:, :2001].t()
    decoded = dsl_descriptor(tensor, (64, 16), (0, 1))
    assert (decoded.extents, decoded.strides) == ((2001, 64), (2, 2056 * 2))
    assert decoded.box == (64, 16)


def test_the_last_64_bytes_do_not_count():
    data = make_map().encode()
    assert TensorMap.decode(data[:64] + bytes(range(64))) == make_map()


maps = st.builds(
    lambda kind, rank, address, extents, strides, box, steps, swizzle, l2, fill: make_map(
        dtype=kind[0],
        itemsize=kind[1],
        rank=rank,
        address=address * 16,
        extents=tuple(extents[:rank]),
        strides=(kind[1], *(s * 16 for s in strides[: rank - 1])),
        box=tuple(box[:rank]),
        element_strides=tuple(steps[:rank]),
        swizzle=swizzle,
        l2_promotion=l2,
        fill=fill,
    ),
    st.sampled_from([("uint8", 1), ("bfloat16", 2), ("tfloat32", 4), ("float32_ftz", 4), ("int64", 8)]),
    st.integers(1, 5),
    st.integers(0, (1 << 53) - 1),
    st.lists(st.integers(1, 1 << 32), min_size=5, max_size=5),
    st.lists(st.integers(0, (1 << 36) - 1), min_size=4, max_size=4),
    st.lists(st.integers(1, 256), min_size=5, max_size=5),
    st.lists(st.integers(1, 8), min_size=5, max_size=5),
    st.sampled_from([0, 32, 64, 128]),
    st.sampled_from([0, 64, 128, 256]),
    st.sampled_from(["zero", "nan"]),
)


@given(maps)
@settings(max_examples=200, deadline=None)
def test_decode_inverts_encode(tensor_map):
    assert TensorMap.decode(tensor_map.encode()) == tensor_map


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (make_map().encode()[:8] + b"\x01" + bytes(119), "kind 1"),
        (b"\xff" * 128, "no tile-mode TMA descriptor"),
        (make_map().encode()[:8] + struct.pack("<I", 2 | 1 << 4 | 13 << 7) + bytes(116), "element type 13"),
        (make_map().encode()[:8] + struct.pack("<I", 2 | 6 << 4) + bytes(116), "rank 7"),
        (struct.pack("<Q", 8) + make_map().encode()[8:], "address 0x8"),
        (bytes(12), "12 bytes"),
    ],
)
def test_bytes_that_are_no_descriptor(data, message):
    with pytest.raises(TensorMapError, match=message) as info:
        TensorMap.decode(data)
    assert info.value.rule == "format"


# Copies


def element_by_element(tensor_map, memory, coordinates, address, shared, move):
    """The rules of a tiled copy for every element of the box in turn: `move(global bytes or None, shared bytes)`."""
    steps = (1, *tensor_map.element_strides[1:])
    counts = [-(-n // step) for n, step in zip(tensor_map.box, steps, strict=True)]
    size = tensor_map.itemsize
    for i, index in enumerate(itertools.product(*map(range, counts[::-1]))):
        at = [c + j * step for c, j, step in zip(coordinates, index[::-1], steps, strict=True)]
        inside = all(0 <= c < extent for c, extent in zip(at, tensor_map.extents, strict=True))
        where = tensor_map.address + sum(c * stride for c, stride in zip(at, tensor_map.strides, strict=True))
        linear = address + i * size
        row, chunk = linear // 128, linear // 16 % 8
        chunk ^= {0: 0, 32: row % 2, 64: row % 4, 128: row % 8}[tensor_map.swizzle]
        offset = row * 128 + chunk * 16 + linear % 16 - address
        move(memory.view(where, size) if inside else None, shared[offset : offset + size])


def load_element(source, target):
    target[...] = 0 if source is None else source


def store_element(target, source):
    if target is not None:
        target[...] = source


def as_stored(tensor_map: TensorMap) -> TensorMap:
    """A tensor whose rows are whole 16-byte pieces: where stores clip."""
    per_piece = 16 // tensor_map.itemsize
    inner = -(-tensor_map.extents[0] // per_piece) * per_piece
    return dataclasses.replace(tensor_map, extents=(inner, *tensor_map.extents[1:]))


def random_case(seed: int):
    rng = np.random.default_rng(seed)
    rank, itemsize = int(rng.integers(1, 6)), int(rng.choice([1, 2, 4, 8]))
    swizzle = int(rng.choice([0, 32, 64, 128]))
    inner = int(rng.choice([16, 32, 64, 128, 256]))
    inner = min(inner, swizzle) if swizzle else min(inner, 256 * itemsize)
    extents = [int(rng.integers(1, 160 // itemsize))] + [int(rng.integers(1, 9)) for _ in range(rank - 1)]
    strides, step = [itemsize], -(-extents[0] * itemsize // 16) * 16
    for extent in extents[1:]:
        strides.append(step + 16 * int(rng.integers(0, 3)))
        step = strides[-1] * extent
    tensor_map = make_map(
        dtype={1: "uint8", 2: "float16", 4: "float32", 8: "uint64"}[itemsize],
        itemsize=itemsize,
        rank=rank,
        extents=tuple(extents),
        strides=tuple(strides),
        box=(inner // itemsize, *(int(rng.integers(1, 6)) for _ in range(rank - 1))),
        element_strides=(int(rng.integers(1, 4)), *(int(rng.integers(1, 4)) for _ in range(rank - 1))),
        swizzle=swizzle,
    )
    end = 1 + sum((n - 1) * s for n, s in zip(extents, strides, strict=True)) + 16
    memory = Memory(4096, rng.integers(0, 256, end, dtype=np.uint8))
    coordinates = [int(rng.integers(-n // 2 - 3, n + 3)) for n in extents]
    coordinates[0] -= coordinates[0] % (16 // itemsize)
    address = 1024 + 128 * int(rng.integers(0, 9))
    shared = rng.integers(0, 256, tensor_map.box_bytes + 128, dtype=np.uint8)
    return tensor_map, memory, coordinates, address, shared


@pytest.mark.parametrize("seed", range(60))
def test_load_and_store_follow_the_rules_element_by_element(seed):
    tensor_map, memory, coordinates, address, shared = random_case(seed)
    expected = shared.copy()
    element_by_element(tensor_map, memory, coordinates, address, expected, load_element)
    loaded = shared.copy()
    before = memory.data.copy()
    tensormap.load(memory, tensor_map, coordinates, address, loaded)
    np.testing.assert_array_equal(loaded, expected)
    np.testing.assert_array_equal(memory.data, before)

    coordinates = [max(at, 0) for at in coordinates]
    reference = Memory(4096, before.copy())
    element_by_element(as_stored(tensor_map), reference, coordinates, address, shared, store_element)
    untouched = shared.copy()
    plan = tensormap.store(memory, tensor_map, coordinates, address, shared)
    np.testing.assert_array_equal(memory.data, reference.data)
    np.testing.assert_array_equal(shared, untouched)
    assert sorted(plan.chunk_offsets // 16) == sorted(set(plan.chunk_offsets // 16))


@pytest.mark.parametrize("seed", range(20))
def test_footprints_are_exactly_what_a_store_writes(seed):
    tensor_map, memory, coordinates, address, shared = random_case(1000 + seed)
    memory.data[...] = 0
    coordinates = [max(at, 0) for at in coordinates]
    plan = tensormap.store(memory, tensor_map, coordinates, address, np.full_like(shared, 255))
    footprint = np.zeros(len(memory.data), bool)
    for row in plan.row_addresses:
        footprint[row - 4096 : row - 4096 + plan.row_bytes] = True
    np.testing.assert_array_equal(memory.data == 255, footprint)

    shared[...] = np.arange(len(shared)) % 251
    tensormap.store(memory, tensor_map, coordinates, address, shared)
    rebuilt = np.zeros(len(memory.data), np.uint8)
    offsets, addresses, sizes = plan.runs
    for offset, where, size in zip(offsets, addresses, sizes, strict=True):
        rebuilt[where - 4096 : where - 4096 + size] = shared[offset : offset + size]
    np.testing.assert_array_equal(rebuilt, np.where(footprint, memory.data, 0))
    assert sizes.sum() == footprint.sum()
    assert plan.clipped == (footprint.sum() != tensor_map.box_bytes)


def test_a_box_wholly_outside_is_zeros_and_writes_nothing():
    memory = Memory(4096, np.full(20 * 128, 7, np.uint8))
    for coordinates in ((0, 20), (48, 0), (0, -16), (-64, 0), (2**31 - 8, -(2**31))):
        shared = np.full(make_map().box_bytes, 9, np.uint8)
        plan = tensormap.load(memory, make_map(), coordinates, 1024, shared)
        assert not shared.any() and plan.clipped and len(plan.row_addresses) == 0
    for coordinates in ((0, 20), (48, 0), (2**31 - 8, 2**31 - 1)):
        tensormap.store(memory, make_map(), coordinates, 1024, shared)
    assert (memory.data == 7).all()


@pytest.mark.parametrize("coordinates", [(0, -1), (-8, 0), (-64, -16)])
def test_stores_take_no_negative_coordinates(coordinates):
    """CUDA C programming guide: of a tile written to global memory the top left corner has no negative indices."""
    memory = Memory(4096, np.zeros(20 * 128, np.uint8))
    for move in (tensormap.store, lambda *arguments: tensormap.reduce(*arguments, "add")):
        with pytest.raises(TensorMapError, match="of a store, they must not be negative") as info:
            move(memory, make_map(), coordinates, 1024, np.zeros(2048, np.uint8))
        assert info.value.rule == "coordinates"
    tensormap.load(memory, make_map(), coordinates, 1024, np.zeros(2048, np.uint8))


@pytest.mark.parametrize("swizzle", [32, 64, 128])
def test_the_swizzle_repeats_every_eight_spans_of_the_address(swizzle):
    addresses = np.arange(0, 4096, 16)
    moved = tensormap.swizzled(addresses, swizzle)
    assert sorted(moved) == sorted(addresses)
    period = 8 * swizzle
    np.testing.assert_array_equal(moved[period // 16 :] - moved[: -period // 16], period)
    assert (moved != addresses).any()
    # Rows of the span's width: chunk c of row r lies at c ^ (r modulo the chunks of a span), in groups of 128 bytes.
    chunks = swizzle // 16
    for row, chunk in itertools.product(range(8), range(chunks)):
        line, lane = divmod(row * chunks + chunk, 8)
        assert moved[row * chunks + chunk] == line * 128 + 16 * (lane ^ line % chunks)


def test_a_store_fills_the_last_16_bytes_of_a_row_and_a_load_does_not():
    memory = Memory(4096, np.full(20 * 128, 7, np.uint8))
    plan = tensormap.store(memory, make_map(), (0, 0), 1024, np.full(2048, 9, np.uint8))  # rows of 90 bytes
    rows = memory.data.reshape(20, 128)[:16]
    assert (rows[:, :96] == 9).all() and (rows[:, 96:] == 7).all() and plan.row_bytes == 96
    shared = np.full(2048, 5, np.uint8)
    plan = tensormap.load(memory, make_map(), (0, 0), 1024, shared)
    assert plan.row_bytes == 90 and np.count_nonzero(shared) == 16 * 90


def test_a_row_without_memory_behind_it_is_named():
    memory = Memory(4096, np.zeros(10 * 128, np.uint8))  # half of the 20 rows
    with pytest.raises(IndexError, match=f"90 bytes at {4096 + 10 * 128}"):
        tensormap.load(memory, make_map(), (0, 4), 1024, np.zeros(2048, np.uint8))
    tensormap.load(memory, make_map(), (0, -6), 1024, np.zeros(2048, np.uint8))


@pytest.mark.parametrize(
    ("changes", "coordinates", "address", "rule", "message"),
    [
        ({}, (0, 0), 1024 + 64, "alignment", "0x440 of a tensor copy, it must be a multiple of 128"),
        ({}, (0, 0, 0), 1024, "coordinates", "3 coordinates for a tensor map of 2 dimensions"),
        (
            {},
            (13, 0),
            1024,
            "coordinates",
            "13 of float16 elements is at byte 26 of a row, it must be a multiple of 16",
        ),
        ({}, (-5, 0), 1024, "coordinates", "-5 of float16 elements is at byte -10 of a row"),
        ({"box": (12, 4)}, (0, 0), 1024, "box", "24 bytes, accepted are multiples of 16, at most the swizzle's 128"),
        ({"box": (72, 4)}, (0, 0), 1024, "box", "144 bytes"),
        ({"interleave": 16}, (0, 0), 1024, "interleave", "16-byte interleaved layouts are not modelled"),
    ],
)
def test_uses_that_are_refused(changes, coordinates, address, rule, message):
    memory = Memory(4096, np.zeros(20 * 128, np.uint8))
    with pytest.raises(TensorMapError, match=message) as info:
        tensormap.load(memory, make_map(**changes), coordinates, address, np.zeros(8192, np.uint8))
    assert info.value.rule == rule


# Reductions


def bits(values: np.ndarray, dtype: str) -> np.ndarray:
    if dtype == "bfloat16":
        return torch.from_numpy(values.astype(np.float32)).bfloat16().view(torch.uint8).numpy()
    return values.astype(dtype).view(np.uint8)


def number(data: np.ndarray, dtype: str):
    """One element as a Python number."""
    kinds = {"float16": "<e", "float32": "<f", "float64": "<d", "uint32": "<I", "int32": "<i", "uint64": "<Q"}
    if dtype == "bfloat16":
        return struct.unpack("<f", b"\0\0" + data.tobytes())[0]
    return struct.unpack({**kinds, "int64": "<q"}[dtype], data.tobytes())[0]


def scalar_reduction(operation: str, old, new, width: int):
    """PTX ISA, red and cp.reduce.async.bulk: the operation on two numbers, before rounding to the type."""
    return {
        "add": lambda: old + new,
        "min": lambda: min(old, new),
        "max": lambda: max(old, new),
        "inc": lambda: 0 if old >= new else old + 1,
        "dec": lambda: new if old == 0 or old > new else old - 1,
        "and": lambda: old & new,
        "or": lambda: old | new,
        "xor": lambda: old ^ new,
    }[operation]()


REDUCTIONS = [
    *itertools.product(("add", "min", "max"), ("float16", "bfloat16", "uint32", "int32", "uint64", "int64")),
    ("add", "float32"),
    ("add", "float64"),
    ("inc", "uint32"),
    ("dec", "uint32"),
    *itertools.product(("and", "or", "xor"), ("uint32", "int32", "uint64", "int64")),
]


@pytest.mark.parametrize(("operation", "dtype"), REDUCTIONS)
def test_reductions_follow_the_scalar_operation(operation, dtype):
    rng = np.random.default_rng(5)
    itemsize = {"float16": 2, "bfloat16": 2, "float32": 4, "uint32": 4, "int32": 4}.get(dtype, 8)
    columns = 32 // itemsize + 1  # so that a box in the second column of chunks is cut
    tensor_map = make_map(
        dtype=dtype,
        itemsize=itemsize,
        extents=(columns, 5),
        strides=(itemsize, 64),
        box=(32 // itemsize, 8),
        swizzle=32,
    )
    if dtype.startswith(("u", "i")):
        low, high = (0, 2**32 - 1) if dtype == "uint32" else (-(2**31), 2**31 - 1) if dtype == "int32" else (0, 2**62)
        sample = lambda n: rng.integers(low, high, n, endpoint=True)  # noqa: E731
    else:
        sample = lambda n: rng.standard_normal(n) * np.exp2(rng.integers(-8, 8, n))  # noqa: E731
    if operation in ("inc", "dec"):
        sample = lambda n: rng.integers(0, 4, n)  # noqa: E731
    memory = Memory(4096, bits(sample(5 * 64 // itemsize), dtype).copy())
    shared = bits(sample(8 * 32 // itemsize), dtype).copy()
    reference = Memory(4096, memory.data.copy())

    def combine(target, source):
        if target is None:
            return
        result = scalar_reduction(operation, number(target, dtype), number(source, dtype), 8 * itemsize)
        if isinstance(result, int):
            result &= (1 << 8 * itemsize) - 1
            target[...] = np.frombuffer(result.to_bytes(itemsize, "little"), np.uint8)
        else:
            target[...] = bits(np.array([result]), dtype)

    at = (16 // itemsize, 2)
    element_by_element(as_stored(tensor_map), reference, at, 1024, shared, combine)
    tensormap.reduce(memory, tensor_map, at, 1024, shared, operation)
    np.testing.assert_array_equal(memory.data, reference.data)
    assert (memory.data != 0).any()


@pytest.mark.parametrize(
    ("operation", "dtype"),
    [
        ("min", "float32"),
        ("inc", "int32"),
        ("and", "float16"),
        ("add", "uint8"),
        ("mul", "float32"),
        ("max", "float64"),
    ],
)
def test_reductions_that_tma_does_not_have(operation, dtype):
    tensor_map = make_map(dtype=dtype)
    memory = Memory(4096, np.zeros(20 * 128, np.uint8))
    with pytest.raises(TensorMapError, match=f"{operation} of {dtype} elements") as info:
        tensormap.reduce(memory, tensor_map, (0, 0), 1024, np.zeros(2048, np.uint8), operation)
    assert info.value.rule == "reduction"


def test_a_swizzle_can_move_the_last_line_beyond_the_box():
    tensor_map = make_map(box=(32, 3))  # rows of 64 bytes: the third is half a line, and moves to its other half
    assert (tensor_map.box_bytes, tensor_map.span_bytes) == (192, 256)
    memory = Memory(4096, np.arange(20 * 128).astype(np.uint8) | 1)
    plan = tensor_map.plan((0, 0), 1024 + 3 * 128)
    assert plan.chunk_offsets.max() + 16 == 256
    shared = np.zeros(256, np.uint8)
    tensormap.load(memory, tensor_map, (0, 0), 1024 + 3 * 128, shared)
    assert np.count_nonzero(shared) == 192
    with pytest.raises(ValueError, match="shared has 192 bytes, the box lies among 256"):
        tensormap.load(memory, tensor_map, (0, 0), 1024 + 3 * 128, shared[:192])
    assert make_map(box=(8, 3), swizzle=0).span_bytes == 48


def test_bytes_of_a_box_count_the_elements_taken():
    tensor_map = make_map(box=(64, 16), element_strides=(4, 3))
    assert tensor_map.taken == (64, 6)
    assert tensor_map.box_bytes == 64 * 6 * 2
    assert dataclasses.replace(tensor_map, element_strides=(1, 1)).box_bytes == math.prod((64, 16)) * 2
