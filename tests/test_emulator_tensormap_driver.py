"""TMA descriptors against those that the driver encoded on a GPU machine (tests/gpu_probes/tensormap_table.py)."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

from cute_matmul.emulator.tensormap import TensorMap, TensorMapError

DRIVER = json.loads((Path(__file__).parent / "data" / "tensormap_driver.json").read_text())

# CUtensorMapDataType, in the order of the enumeration (CUDA driver API).
TYPES = (
    *("uint8", "uint16", "uint32", "int32", "uint64", "int64", "float16", "float32", "float64", "bfloat16"),
    *("float32_ftz", "tfloat32", "tfloat32_ftz"),
)
ITEMSIZE = (1, 2, 4, 4, 8, 8, 2, 4, 8, 2, 4, 4, 4)
ROWS = [dict(zip(DRIVER["columns"], row, strict=True)) for row in DRIVER["rows"]]
ENCODED = [row for row in ROWS if row["status"] == 0]


def expected_map(row: dict) -> TensorMap:
    """The descriptor that a row's parameters ask for."""
    return TensorMap(
        dtype=TYPES[row["dtype"]],
        itemsize=ITEMSIZE[row["dtype"]],
        rank=len(row["extents"]),
        address=row["address"],
        extents=tuple(row["extents"]),
        strides=(ITEMSIZE[row["dtype"]], *row["strides"]),
        box=tuple(row["box"]),
        element_strides=tuple(row["element_strides"]),
        interleave=(0, 16, 32)[row["interleave"]],
        swizzle=(0, 32, 64, 128)[row["swizzle"]],
        l2_promotion=(0, 64, 128, 256)[row["l2_promotion"]],
        fill=("zero", "nan")[row["fill"]],
    )


def test_the_table_covers_every_field():
    assert len(ENCODED) > 250
    for column, values in (("dtype", 13), ("swizzle", 4), ("l2_promotion", 4), ("fill", 2), ("interleave", 3)):
        assert len({row[column] for row in ENCODED}) >= values, column
    assert {len(row["extents"]) for row in ENCODED} == {1, 2, 3, 4, 5}
    assert {step for row in ENCODED for step in row["element_strides"]} == set(range(1, 9))


def test_descriptors_of_the_driver_decode_to_their_parameters():
    for row in ENCODED:
        data = bytes.fromhex(row["descriptor"]).ljust(128, b"\0")
        assert TensorMap.decode(data) == expected_map(row), row


def test_encoding_gives_the_drivers_bytes():
    for row in ENCODED:
        data = bytes.fromhex(row["descriptor"]).ljust(128, b"\0")
        assert expected_map(row).encode()[:64] == data[:64], row


def test_a_table_row_with_a_wrong_field_would_be_noticed():
    """Every bit that a parameter set turns on in the first 64 bytes changes what is decoded."""
    for row in ENCODED[:: len(ENCODED) // 20]:
        data = bytearray(bytes.fromhex(row["descriptor"]).ljust(128, b"\0"))
        for at in range(512):
            if not data[at // 8] >> (at % 8) & 1:
                continue
            data[at // 8] ^= 1 << (at % 8)
            with contextlib.suppress(TensorMapError):
                assert TensorMap.decode(bytes(data)) != expected_map(row), (row, at)
            data[at // 8] ^= 1 << (at % 8)
