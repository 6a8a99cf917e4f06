"""Box copies against what an H200 did (tests/gpu_probes/tma_store_clipping.py), byte for byte."""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

import numpy as np
import pytest

from cute_matmul import emulator
from cute_matmul.emulator import host, tensormap
from cute_matmul.emulator.tensormap import TensorMap, TensorMapError

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE / "gpu_probes"))
import tma_store_clipping as probe  # noqa: E402

CASES = json.loads((HERE / "data" / "tensormap_clipping.json").read_text())["cases"]


class Memory:
    """The matrix's bytes at the address that a test gives it."""

    def __init__(self, data: np.ndarray):
        self.data = data

    def view(self, address: int, nbytes: int) -> np.ndarray:
        assert address >= 4096 and address + nbytes <= 4096 + len(self.data)
        return self.data[address - 4096 : address - 4096 + nbytes]


def name(case: dict) -> str:
    parts = [case["mode"], case["dtype"], f"sw{case['swizzle']}", f"+{case['offset']}", *case["tile"]]
    return "-".join(map(str, [*parts, "of", *case["extents"], "at", *case["at"]]))


def copied(case: dict) -> tuple[np.ndarray, np.ndarray]:
    """Global and shared memory after the emulator's copy of a case."""
    itemsize = probe.DTYPES[case["dtype"]][1]
    matrix, shared = probe.initial(case)
    tensor_map = TensorMap(
        # The DSL encodes signed 32-bit integers as unsigned ones.
        dtype={"int32": "uint32"}.get(case["dtype"], case["dtype"]),
        itemsize=itemsize,
        rank=2,
        address=4096,
        extents=tuple(case["extents"][::-1]),
        strides=(itemsize, case["pitch"] * itemsize),
        box=tuple(case["tile"][::-1]),
        element_strides=tuple(case.get("element_strides", [1, 1])[::-1]),
        interleave=0,
        swizzle=case["swizzle"],
        l2_promotion=128,
        fill=("zero", "nan")[case.get("fill", 0)],
    )
    memory, at, address = Memory(matrix.copy()), case["at"][::-1], 1024 + case["offset"]
    after = shared.copy()
    mode = case["mode"].removesuffix("_warp")
    if mode.startswith("load"):
        tensormap.load(memory, tensor_map, at, address, after)
    elif mode == "store":
        tensormap.store(memory, tensor_map, at, address, after)
    else:
        tensormap.reduce(memory, tensor_map, at, address, after, mode)
    return memory.data, after


@pytest.mark.parametrize("case", [case for case in CASES if "sha256" in case], ids=name)
def test_copies_leave_the_bytes_that_the_gpu_left(case):
    matrix, shared = copied(case)
    target, was = (
        (shared, probe.initial(case)[1]) if case["mode"].startswith("load") else (matrix, probe.initial(case)[0])
    )
    assert probe.runs(target != was) == case["changed"]
    assert hashlib.sha256(target.tobytes()).hexdigest() == case["sha256"]
    assert case["source_intact"]


@pytest.mark.parametrize("case", [case for case in CASES if "error" in case], ids=name)
def test_what_the_gpu_refuses_is_an_error(case):
    assert "illegal instruction" in case["message"]
    with pytest.raises(TensorMapError) as info:
        copied(case)
    assert info.value.rule == "coordinates"


def test_the_measurements_hold_what_they_are_for():
    """Every row length modulo 16 bytes, every swizzle, negative and far coordinates, and refusals of both kinds."""
    good = [case for case in CASES if "sha256" in case]
    for mode in ("load", "store"):
        lengths = {case["extents"][1] * probe.DTYPES[case["dtype"]][1] % 16 for case in good if case["mode"] == mode}
        assert lengths >= {0, 1, 2, 4, 6, 8, 10, 12, 14, 15}
        assert {case["swizzle"] for case in good if case["mode"] == mode} == {0, 32, 64, 128}
    assert any(min(case["at"]) < 0 for case in good if case["mode"] == "load")
    refused = [case for case in CASES if "error" in case]
    assert {case["mode"] for case in refused} == {"load", "store"}


@pytest.mark.parametrize("mode", ["load", "store"])
def test_the_engine_too_leaves_those_bytes(mode):
    """The same kernel as on the GPU, executed: one ragged case and one whole."""
    same = {"mode": mode, "dtype": "float16", "swizzle": 128, "tile": [16, 64], "offset": 0}
    ragged = [case for case in CASES if "sha256" in case and same.items() <= case.items()]
    program = None
    for case in (ragged[0], ragged[-1], ragged[len(ragged) // 2]):
        matrix, *rest = probe.operands(case, *probe.initial(case), "cpu")
        arguments = (*rest, probe.moved_bytes(case), *case["at"], *probe.constants(case))
        program = program or host.Program.compile(probe.probe, *arguments)
        report = emulator.run(program, *arguments, schedule="adversarial", check=False)
        assert report.ok, report
        after = probe.outcome(case, matrix.numpy(), rest[2].numpy()[:-16])
        assert {k: after[k] for k in ("changed", "sha256")} == {k: case[k] for k in ("changed", "sha256")}
