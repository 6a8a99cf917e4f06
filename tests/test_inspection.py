from __future__ import annotations

import re
import types

import pytest

from cute_matmul import inspection, registry
from cute_matmul.compile import compile_kernel
from cute_matmul.inspection import KINDS, count_ptx, count_sass, ctas_per_sm, inspect, ptx_opcodes, spills

NAMES = [variant.name for variant in registry.BUILTIN]

needs_disassembler = pytest.mark.skipif(
    inspection.find_disassembler() is None, reason=f"SASS {inspection.NO_DISASSEMBLER}"
)


def test_ptx_opcodes_are_read_from_text_as_the_compiler_writes_it():
    ptx = """
//
.version 8.8
.target sm_90a
.visible .entry k(.param .align 64 .b8 k_param_0[128]) // st.local.b32 in a comment
.reqntid 128, 1, 1
{
    .local .align 32 .b8 	__local_depot0[32];
    .reg .pred 	%p<3>;
    .loc 1 20 3
$L__BB0_1:
    .loc	1 21 7, function_name $L__info_string0, inlined_at 1 20 3
    @%p1 bra 	$L__BB0_2;
    @!%p2 mbarrier.init.shared.b64 	[%r1], %r2;
    st.local.v2.b32 	[%rd1], {0, 0};
    // begin inline asm
    {
    .reg .pred       P1;
    LAB_WAIT:
    mbarrier.try_wait.parity.shared.b64 P1, [%r1], %r3, 10000000;
    @P1 bra DONE;
    bra LAB_WAIT;
    DONE:
    }
wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%r1, %r2, %r3, %r4}, %rd1, %rd2, p, 1, 1, 0, 0;
    /* ldmatrix.sync
       mma.sync */
    ld.volatile.local.b32 %r1, [%rd1]; ret;
}
    .file 1 "ldmatrix;mma.sync; .py"
    .section .debug_str
    {
$L__info_string0:
    .b8 100, 0
    }
"""
    assert ptx_opcodes(ptx) == [
        "bra",
        "mbarrier.init.shared.b64",
        "st.local.v2.b32",
        "mbarrier.try_wait.parity.shared.b64",
        "bra",
        "bra",
        "wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16",
        "ld.volatile.local.b32",
        "ret",
    ]


@pytest.mark.parametrize(
    ("opcode", "kind"),
    [
        ("wgmma.mma_async.sp.sync.aligned.m64n8k32.f32.f16.f16", "wgmma"),
        ("wgmma.fence.sync.aligned", None),
        ("wgmma.wait_group.sync.aligned", None),
        ("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32", "mma.sync"),
        ("ldmatrix.sync.aligned.m8n8.x4.shared.b16", "ldmatrix"),
        ("stmatrix.sync.aligned.m8n8.x4.shared.b16", "stmatrix"),
        ("cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes", "TMA load"),
        ("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes", "TMA load"),
        ("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes", "TMA load"),
        ("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes", None),
        ("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group", "TMA store"),
        ("cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.tile.bulk_group", "TMA store"),
        ("cp.async.bulk.global.shared::cta.bulk_group", "TMA store"),
        ("cp.async.bulk.prefetch.tensor.2d.L2.global.tile", None),
        ("cp.async.bulk.commit_group", None),
        ("mbarrier.init.shared::cta.b64", "mbarrier init"),
        ("mbarrier.arrive.expect_tx.shared.b64", "mbarrier arrive"),
        ("mbarrier.arrive_drop.release.cta.shared.b64", "mbarrier arrive"),
        ("mbarrier.test_wait.parity.shared.b64", "mbarrier try_wait"),
        ("mbarrier.inval.shared.b64", None),
        ("bar.sync", "bar.sync"),
        ("barrier.sync.aligned", "bar.sync"),
        ("barrier.cta.sync.aligned", "bar.sync"),
        ("bar.arrive", "bar.sync"),
        ("bar.warp.sync", None),
        ("barrier.cluster.arrive.aligned", None),
        ("ld.local.v4.b32", "local load"),
        ("st.local.b32", "local store"),
        ("ld.global.b32", None),
    ],
)
def test_ptx_kinds(opcode, kind):
    assert {k for k, count in count_ptx(f"\t{opcode} \t%r1;").items() if count} == ({kind} - {None})


@pytest.mark.parametrize(
    ("instruction", "kind"),
    [
        ("HGMMA.64x128x16.F32 R24, gdesc[UR8], R24, !UPT", "wgmma"),
        ("QGMMA.64x64x32.F32.E4M3.E4M3 R24, gdesc[UR8], R24", "wgmma"),
        ("HMMA.16816.F32 R4, R8, R12, R4", "mma.sync"),
        ("LDSM.16.M88.4 R4, [R2]", "ldmatrix"),
        ("STSM.16.M88.4 [R2], R4", "stmatrix"),
        ("UTMALDG.2D [UR8], [UR4], desc[UR6]", "TMA load"),
        ("@P0 UTMASTG.2D [UR8], [UR4]", "TMA store"),
        ("SYNCS.EXCH.64 URZ, [UR5], UR6", "mbarrier init"),
        ("SYNCS.ARRIVE.TRANS64 RZ, [UR5], R4", "mbarrier arrive"),
        ("SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR5], R4", "mbarrier try_wait"),
        ("BAR.SYNC.DEFER_BLOCKING 0x0", "bar.sync"),
        ("@!P1 LDL.64 R2, [R1+0x8]", "local load"),
        ("STL [R1], RZ", "local store"),
        ("LDS R2, [R1]", None),
        ("WARPGROUP.DEPBAR.LE gsb0, 0x0", None),
    ],
)
def test_sass_kinds(instruction, kind):
    text = f"        /*04f0*/                   {instruction} ;\n"
    assert {k for k, count in count_sass(text).items() if count} == ({kind} - {None})


@pytest.mark.parametrize(
    ("threads", "registers", "smem", "expected"),
    [
        # Worked by hand from the limits: 65536 registers, 64 warps, 32 CTAs, 228 KB less 1 KB a CTA.
        (128, 32, 0, (16, "registers and threads")),
        (32, 16, 0, (32, "CTA slots")),
        (128, 16, 0, (16, "threads")),
        (128, 168, 0, (3, "registers")),  # 4 warps x 5376; 16384 // 5376 = 3 warps in each partition
        (128, 169, 0, (2, "registers")),  # rounded up to 176: 5632
        (384, 168, 0, (1, "registers")),  # three warps a partition are all there are
        (128, 64, 227 * 1024, (1, "shared memory")),
        (128, 64, 227 * 1024 + 1, (0, "shared memory")),
        (128, 64, 113 * 1024, (2, "shared memory")),
        (128, 64, 113 * 1024 + 1, (1, "shared memory")),
        (1024, 65, 0, (0, "registers")),
        (100, 16, 0, (16, "threads")),  # whole warps
        (160, 168, 0, (2, "registers")),  # twelve warps fit, five a CTA
        (544, 96, 0, (1, "registers")),
        (544, 97, 0, (0, "registers")),  # 17 warps are judged as 20, and 20 x 3328 is more than there are
    ],
)
def test_ctas_per_sm(threads, registers, smem, expected):
    assert ctas_per_sm(threads, registers, smem) == expected


def test_resources_refuse_what_they_cannot_read():
    with pytest.raises(ValueError, match="64-bit little-endian ELF"):
        inspection.resources(b"not a cubin", "k")
    kernel = compile_kernel("v1")
    with pytest.raises(ValueError, match="EIATTR_REGCOUNT and EIATTR_FRAME_SIZE of another_kernel"):
        inspection.resources(kernel.cubin, "another_kernel")


def test_static_shared_memory():
    ptx = (
        ".extern .shared .align 1024 .b8 dynamic[];\n"
        "\t.shared .align 16 .b8 __s1$x[96];\n"
        ".shared .align 8 .b64 bars[4];\n"
        ".visible .shared .align 4 .b32 one[1];\n"
        ".shared .b32 scalar;\n"
    )
    assert inspection.static_shared_bytes(ptx) == 96 + 32 + 4 + 4


@needs_disassembler
@pytest.mark.parametrize("name", NAMES)
def test_resources_are_those_the_disassembler_prints(name):
    """nvdisasm names the attributes of `.nv.info` that are read here by number."""
    import subprocess
    import tempfile

    kernel = compile_kernel(name)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.cubin)
        file.flush()
        text = subprocess.run([inspection.find_disassembler(), file.name], capture_output=True, text=True).stdout

    def value(attribute: str) -> int:
        words = re.search(attribute + r"\n.*?\.word\s+index@\(\S+\)\n.*?\.word\s+0x([0-9a-f]+)", text, re.DOTALL)
        return int(words.group(1), 16)

    printed = (value("EIATTR_REGCOUNT"), value("EIATTR_FRAME_SIZE"))
    assert inspection.resources(kernel.cubin, kernel.symbol) == printed
    # And no register beyond that count is named by an instruction.
    highest = max(int(number) for number in re.findall(r"\bR(\d+)\b", inspection.disassemble(kernel.cubin)))
    assert highest < printed[0] <= 255


@needs_disassembler
@pytest.mark.parametrize("name", NAMES)
def test_kinds_agree_between_ptx_and_sass(name):
    """Straight-line code of these kinds is neither dropped nor doubled by the assembler."""
    seen = inspect(compile_kernel(name))
    for kind in ("wgmma", "mma.sync", "ldmatrix", "TMA load", "TMA store", "mbarrier init", "mbarrier arrive"):
        assert seen.sass[kind] == seen.ptx[kind], kind
    assert seen.sass["mbarrier try_wait"] >= seen.ptx["mbarrier try_wait"] > 0


@needs_disassembler
@pytest.mark.parametrize("name", NAMES)
def test_nothing_spills(name):
    kernel = compile_kernel(name)
    assert spills(kernel) == 0
    assert inspect(kernel).spills == 0


def test_instruction_facts():
    v0, v1, v2 = (inspect(compile_kernel(name)) for name in ("v0", "v1", "v2"))
    assert v0.ptx["mma.sync"] > 0 and v0.ptx["ldmatrix"] > 0 and v0.ptx["wgmma"] == 0
    assert v1.ptx["wgmma"] > 0 and v1.ptx["mma.sync"] == v1.ptx["ldmatrix"] == 0
    assert v1.ptx["mbarrier init"] == v0.ptx["mbarrier init"] == 1
    for stages in (2, 3, 4):
        seen = inspect(compile_kernel("v2", f"128x128x32,stages={stages}"))
        # Initialised by one statement each, as the count of stages is known to the compiler.
        assert seen.ptx["mbarrier init"] == stages
    assert v2.local_bytes > 0 and v2.ptx["local load"] > 0 and v1.local_bytes == 0


@needs_disassembler
def test_spills_are_what_sass_has_beyond_ptx():
    kernel = compile_kernel("v2")
    seen = inspect(kernel)
    assert seen.sass["local load"] >= seen.ptx["local load"] > 0
    without = re.sub(r"\b(ld|st)\.local\b", r"\1.global", kernel.ptx)
    changed = types.SimpleNamespace(ptx=without, cubin=kernel.cubin)
    assert spills(changed) == seen.sass["local load"] + seen.sass["local store"]


def test_without_the_disassembler_sass_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr(inspection, "find_disassembler", lambda: None)
    inspection.disassemble.cache_clear()
    kernel = compile_kernel("v1")
    seen = inspect(kernel)
    assert seen.sass is None and seen.spills is None
    assert "pip install nvidia-cuda-nvdisasm" in seen.sass_note and seen.sass_note in str(seen)
    assert seen.registers > 0 and seen.ptx["wgmma"] > 0
    with pytest.raises(inspection.NoDisassembler, match="pip install"):
        spills(kernel)


@needs_disassembler
def test_a_failing_disassembler_is_an_error_with_its_message():
    with pytest.raises(RuntimeError, match="failed with status"):
        inspection.disassemble(b"\x7fELF not really")


def test_rows_and_dictionary_hold_everything():
    seen = inspect(compile_kernel("v2"))
    assert seen.variant == "v2" and seen.threads == 128 and seen.config == "128x128x64,stages=2"
    assert seen.as_dict()["ptx"].keys() == set(KINDS)
    text = inspection.table([seen, inspect(compile_kernel("v1"))])
    assert all(kind in text for kind in KINDS)
    assert f"{seen.registers}" in text and "v1" in text.splitlines()[0]


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_ctas_per_sm_is_what_the_driver_says(name):
    from cuda.bindings import driver

    def done(result):
        assert result[0] == driver.CUresult.CUDA_SUCCESS
        return result[1] if len(result) == 2 else result[1:]

    import torch

    torch.cuda.init()
    torch.zeros(1, device="cuda")
    kernel = compile_kernel(name)
    seen = inspect(kernel)
    library = done(driver.cuModuleLoadData(kernel.cubin))
    function = done(driver.cuModuleGetFunction(library, kernel.symbol.encode()))
    attribute = driver.CUfunction_attribute
    assert done(driver.cuFuncGetAttribute(attribute.CU_FUNC_ATTRIBUTE_NUM_REGS, function)) == seen.registers
    smem = attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    assert driver.cuFuncSetAttribute(function, smem, kernel.smem_bytes)[0] == driver.CUresult.CUDA_SUCCESS
    fit = done(driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(function, kernel.threads, kernel.smem_bytes))
    assert fit == seen.ctas_per_sm
