"""Ask the driver to encode TMA descriptors over a sweep of parameters, and write them to a JSON file.

    python tests/gpu_probes/tensormap_table.py tests/data/tensormap_driver.json

Needs libcuda and a GPU; no memory is touched, so addresses are made up. Each entry holds the arguments of
`cuTensorMapEncodeTiled` (CUDA driver API, tensor memory access), the CUresult, and on success the descriptor's
128 bytes as hex without trailing zeros. `tests/test_emulator_tensormap.py` holds the decoder to this table.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import random
import sys

ITEMSIZE = (1, 2, 4, 4, 8, 8, 2, 4, 8, 2, 4, 4, 4)  # CU_TENSOR_MAP_DATA_TYPE_*, in the order of the enumeration
BASE = {
    "dtype": 6,
    "address": 0x7F0000000000,
    "extents": [144, 100],
    "strides": [288],
    "box": [16, 16],
    "element_strides": [1, 1],
    "interleave": 0,
    "swizzle": 0,
    "l2_promotion": 0,
    "fill": 0,
}


def sweep() -> list[dict]:
    """Parameter sets: each field alone, then limits, then random valid and invalid combinations."""
    cases = [BASE]

    def vary(**changes) -> None:
        cases.append({**BASE, **changes})

    for dtype, itemsize in enumerate(ITEMSIZE):
        for fill in (0, 1):
            vary(dtype=dtype, strides=[144 * itemsize], fill=fill)
    for dtype in (13, 14, 15):
        vary(dtype=dtype, extents=[256, 100], strides=[128], box=[128, 16])
    for swizzle, l2, inner in itertools.product(range(7), range(4), (8, 16, 32, 64)):
        vary(swizzle=swizzle, l2_promotion=l2, box=[inner, 16])
    for rank in range(1, 6):
        extents = [24, 9, 7, 5, 3][:rank]
        strides = [48, 48 * 9, 48 * 63, 48 * 315][: rank - 1]
        for box in ([8, 2, 3, 4, 5][:rank], [16, 1, 1, 1, 1][:rank]):
            vary(extents=extents, strides=strides, box=box, element_strides=[1] * rank)
    for step in range(10):
        vary(element_strides=[1, step])
        vary(element_strides=[step, 1])
        vary(
            extents=[64, 32, 32, 32, 32],
            strides=[128 << (5 * i) for i in range(4)],
            box=[16, 8, 8, 2, 2],
            element_strides=[1, 1, step, 1, 1],
        )
        vary(
            extents=[64, 32, 32, 32, 32],
            strides=[128 << (5 * i) for i in range(4)],
            box=[16, 8, 8, 2, 2],
            element_strides=[1, 1, 1, step, max(step - 1, 0)],
        )
    for interleave, swizzle, inner, rank in itertools.product((0, 1, 2), (0, 1, 2, 3), (8, 16), (3, 4, 5)):
        vary(
            interleave=interleave,
            swizzle=swizzle,
            extents=[64, 9, 8, 4, 3][:rank],
            strides=[128 * 3, 128 * 30, 128 * 300, 128 * 3000][: rank - 1],
            box=[inner, 4, 4, 2, 1][:rank],
            element_strides=[1] * rank,
        )
    for address in (0, 8, 16, 32, 0x7FFFFFFFFFF0, 1 << 48, (1 << 57) - 16, 1 << 57):
        vary(address=address)
    for extent in (0, 1, 1 << 31, (1 << 32) - 1, 1 << 32, (1 << 32) + 1):
        vary(extents=[64, extent])
        vary(dtype=0, extents=[extent, 1], strides=[1 << 33])
    for stride in (0, 8, 16, 24, 1 << 35, 1 << 36, (1 << 40) - 16, 1 << 40):
        vary(strides=[stride])
        vary(
            extents=[64, 2, 2, 2, 2],
            strides=[128, 256, 512, stride],
            box=[16, 1, 2, 1, 2],
            element_strides=[1] * 5,
        )
        vary(
            extents=[64, 2, 2, 2, 2],
            strides=[128, stride, 512, 1024],
            box=[16, 1, 2, 1, 2],
            element_strides=[1] * 5,
        )
    vary(
        extents=[64, 2, 2, 2, 2],
        strides=[(i + 1) << 36 | 128 for i in range(4)],
        box=[16, 1, 2, 1, 2],
        element_strides=[1] * 5,
    )
    for box in ([0, 16], [1, 16], [8, 0], [8, 1], [8, 256], [8, 257], [256, 8], [257, 8], [12, 3], [24, 255]):
        vary(box=box)
        vary(box=box, swizzle=3)
    for rows in (1022, 1023, 1024, 1025, 4096):
        vary(extents=[64, rows], strides=[128], box=[64, 8], swizzle=3)
        vary(extents=[60, rows], strides=[128], box=[64, 8], swizzle=3)
    vary(extents=[5, 1001], strides=[16], box=[8, 8])

    rng = random.Random(2024)
    for _ in range(250):
        rank = rng.randint(1, 5)
        dtype = rng.randrange(13)
        itemsize = ITEMSIZE[dtype]
        extents = [rng.choice((1, 3, 7, 16, 100, 129, 4096, 1 << 20)) for _ in range(rank)]
        strides, step = [], -(-extents[0] * itemsize // 16) * 16
        for extent in extents[1:]:
            strides.append(step + 16 * rng.choice((0, 0, 1, 5)))
            step = strides[-1] * extent
        swizzle = rng.randrange(4)
        inner = rng.choice([n for n in (16, 32, 64, 128, 256) if swizzle == 0 or n <= 16 << swizzle]) // itemsize
        cases.append(
            {
                "dtype": dtype,
                "address": 0x7E0000000000 + 16 * rng.randrange(1 << 30),
                "extents": extents,
                "strides": strides,
                "box": [min(inner, 256)] + [rng.randint(1, 256) for _ in range(rank - 1)],
                "element_strides": [1] + [rng.choice((1, 1, 2, 8)) for _ in range(rank - 1)],
                "interleave": 0,
                "swizzle": swizzle,
                "l2_promotion": rng.randrange(4),
                "fill": rng.randrange(2),
            }
        )
    return cases


def encode(driver: ctypes.CDLL, case: dict) -> tuple[int, str]:
    """CUresult and hex descriptor (trailing zeros stripped) of one parameter set."""
    buffer = ctypes.create_string_buffer(128 + 64)
    aligned = (ctypes.addressof(buffer) + 63) & ~63
    ctypes.memset(aligned, 0, 128)
    rank = len(case["extents"])
    status = driver.cuTensorMapEncodeTiled(
        ctypes.c_void_p(aligned),
        ctypes.c_int(case["dtype"]),
        ctypes.c_uint32(rank),
        ctypes.c_void_p(case["address"]),
        (ctypes.c_uint64 * rank)(*case["extents"]),
        (ctypes.c_uint64 * max(rank - 1, 1))(*case["strides"]),
        (ctypes.c_uint32 * rank)(*case["box"]),
        (ctypes.c_uint32 * rank)(*case["element_strides"]),
        ctypes.c_int(case["interleave"]),
        ctypes.c_int(case["swizzle"]),
        ctypes.c_int(case["l2_promotion"]),
        ctypes.c_int(case["fill"]),
    )
    return status, ctypes.string_at(aligned, 128).rstrip(b"\0").hex() if status == 0 else ""


def main(path: str) -> None:
    driver = ctypes.CDLL("libcuda.so.1")
    context, device, version = ctypes.c_void_p(), ctypes.c_int(), ctypes.c_int()
    for status in (
        driver.cuInit(0),
        driver.cuDriverGetVersion(ctypes.byref(version)),
        driver.cuDeviceGet(ctypes.byref(device), 0),
        driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device),
        driver.cuCtxSetCurrent(context),
    ):
        if status:
            raise SystemExit(f"the CUDA driver returned error {status} while starting")
    name = ctypes.create_string_buffer(256)
    driver.cuDeviceGetName(name, 256, device)
    columns = list(BASE)
    rows = []
    for case in sweep():
        status, descriptor = encode(driver, case)
        rows.append([case[column] for column in columns] + [status, descriptor])
    table = {
        "device": name.value.decode(),
        "driver": version.value,
        "columns": [*columns, "status", "descriptor"],
        "rows": rows,
    }
    with open(path, "w") as file:
        head = json.dumps({k: v for k, v in table.items() if k != "rows"})[:-1]
        file.write(head + ', "rows": [\n' + ",\n".join(json.dumps(row) for row in rows) + "\n]}\n")
    encoded = sum(row[-2] == 0 for row in rows)
    print(f"{len(rows)} parameter sets, {encoded} encoded, to {path}")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    main(sys.argv[1])
