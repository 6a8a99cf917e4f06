"""What each rung's code shows: in PTX, and in SASS where the disassembler is there."""

from __future__ import annotations

import re

import cases
import dataflow
import pytest

from cute_matmul import inspection, registry
from cute_matmul.compile import compile_kernel
from cute_matmul.config import TileConfig, tx_bytes

needs_disassembler = pytest.mark.skipif(inspection.find_disassembler() is None, reason=inspection.NO_DISASSEMBLER)


def counts(variant: str, *arguments) -> dict[str, int]:
    return inspection.count_ptx(compile_kernel(variant, *arguments).ptx)


def test_v0_multiplies_with_mma_sync():
    found = counts("v0")
    assert found["mma.sync"] > 0 and found["ldmatrix"] > 0 and found["wgmma"] == 0


def test_v1_multiplies_with_wgmma():
    found = counts("v1")
    assert found["wgmma"] > 0 and found["mma.sync"] == 0 and found["ldmatrix"] == 0


@needs_disassembler
def test_sass_agrees():
    v0, v1 = (inspection.count_sass(inspection.disassemble(compile_kernel(name).cubin)) for name in ("v0", "v1"))
    assert v0["mma.sync"] > 0 and v0["ldmatrix"] > 0 and v0["wgmma"] == 0
    assert v1["wgmma"] > 0 and v1["mma.sync"] == 0 and v1["ldmatrix"] == 0


def test_one_wgmma_does_the_work_of_64_mma_sync():
    """What V1's docstring says: m64n128k16 against m16n8k16, per warp group and per warp."""
    assert 64 * 128 * 16 == 64 * (16 * 8 * 16)
    # Four warps of V0 issue for one tile what one warp group of V1 does.
    assert counts("v0")["mma.sync"] * 4 == counts("v1")["wgmma"] * 64


@pytest.mark.parametrize("variant", ["v0", "v1"])
def test_one_barrier_and_one_elected_thread(variant):
    found = counts(variant)
    assert (found["mbarrier init"], found["mbarrier arrive"], found["TMA load"]) == (1, 1, 2)


@pytest.mark.parametrize("num_stages", [2, 3, 4])
def test_v2_has_a_barrier_per_stage(num_stages):
    kernel = compile_kernel("v2", TileConfig((64, 128, 32), num_stages))
    found = inspection.count_ptx(kernel.ptx)
    assert found["mbarrier init"] == num_stages
    # Prologue and preload, each once: the stage is an index, not an unrolled constant.
    assert (found["mbarrier arrive"], found["TMA load"], found["mbarrier try_wait"]) == (2, 4, 1)
    addresses = re.findall(r"mbarrier\.init\.shared\.b64\s+\[([^\]]+)\]", kernel.ptx)
    assert len(set(addresses)) == num_stages


@pytest.mark.parametrize("num_stages", [2, 3, 4])
def test_v2_addresses_follow_a_loop_carried_stage(num_stages):
    kernel = compile_kernel("v2", TileConfig((64, 128, 32), num_stages))
    loop = dataflow.loop_with(kernel.ptx, "wgmma.mma_async")
    (wait,), (arrive,) = loop.find("mbarrier.try_wait"), loop.find("mbarrier.arrive.expect_tx")
    stage = loop.carried_sources(wait.operands[1])
    assert stage, "the barrier waited on is the same in every turn"
    assert loop.carried_sources(arrive.operands[1]) == stage
    for wgmma in loop.find("wgmma.mma_async"):
        _, a_descriptor, b_descriptor = wgmma.operands[:3]
        assert loop.carried_sources(a_descriptor) == stage
        assert loop.carried_sources(b_descriptor) == stage
        assert not wgmma.writes & stage, "an accumulator is no stage"
    for copy in loop.find("cp.async.bulk.tensor"):
        into, _, coordinates, barrier = copy.operands[:4]
        assert loop.carried_sources(into) == loop.carried_sources(barrier) == stage
        assert loop.carried_sources(coordinates)


def test_v1_addresses_do_not():
    """The control: with one stage nothing but coordinates and the phase moves."""
    loop = dataflow.loop_with(compile_kernel("v1").ptx, "wgmma.mma_async")
    (wait,) = loop.find("mbarrier.try_wait")
    assert not loop.carried_sources(wait.operands[1])
    assert loop.carried_sources(wait.operands[2]), "the phase must flip"
    for wgmma in loop.find("wgmma.mma_async"):
        assert not loop.carried_sources(wgmma.operands[1]) and not loop.carried_sources(wgmma.operands[2])


def test_v2_waits_in_one_thread_and_syncs_twice():
    loop = dataflow.loop_with(compile_kernel("v2").ptx, "wgmma.mma_async")
    assert len(loop.find("bar.sync")) == 2
    order = [
        i.opcode.split(".sync")[0] for i in loop.body if i.opcode.startswith(("bar.sync", "wgmma", "mbarrier", "cp"))
    ]
    kinds = [kind for i, kind in enumerate(order) if i == 0 or order[i - 1] != kind]
    assert [kind.split(".parity")[0] for kind in kinds if not kind.startswith("cp")] == [
        "mbarrier.try_wait",
        "bar",
        "wgmma.fence",
        "wgmma.mma_async",
        "wgmma.commit_group",
        "wgmma.wait_group",
        "mbarrier.arrive.expect_tx.shared.b64",
        "bar",
    ]
    assert [i.operands for i in loop.find("wgmma.wait_group")] == [("0",)]


@pytest.mark.parametrize("variant", ["v0", "v1", "v2"])
def test_expect_tx_is_the_bytes_of_both_tiles(variant):
    kernel = compile_kernel(variant)
    constants = dict(re.findall(r"mov\.b32\s+(%r\d+), (\d+);", kernel.ptx))
    announced = re.findall(r"mbarrier\.arrive\.expect_tx\.shared\.b64\s+\S+\s*\[[^\]]+\],\s*(%r\d+)", kernel.ptx)
    assert announced and {int(constants[register]) for register in announced} == {tx_bytes(kernel.config)}


def test_v2_phase_array_is_local_memory():
    """Its subject, not a spill: what the docstring says of it, in PTX and in SASS."""
    kernel = compile_kernel("v2")
    loop = dataflow.loop_with(kernel.ptx, "wgmma.mma_async")
    assert loop.find("ld.local") and loop.find("st.local")
    if inspection.find_disassembler() is not None:
        sass = inspection.count_sass(inspection.disassemble(kernel.cubin))
        assert sass["local load"] > 0 and sass["local store"] > 0
        assert inspection.spills(kernel) == 0


@pytest.mark.parametrize("variant", [name for name in cases.variants() if name != "v2"])
def test_no_other_rung_has_local_memory(variant):
    kernel = compile_kernel(variant)
    assert counts(variant)["local load"] == counts(variant)["local store"] == 0
    assert inspection.resources(kernel.cubin, kernel.symbol)[1] == 0


@pytest.mark.parametrize("variant", cases.variants())
def test_nothing_is_loaded_from_global_memory_but_by_tma(variant):
    opcodes = inspection.ptx_opcodes(compile_kernel(variant).ptx)
    assert not [opcode for opcode in opcodes if opcode.startswith("ld.global")]
    assert registry.get(variant).load().RESOURCES.epilogue_fraction or any(o.startswith("st.global") for o in opcodes)
