"""Compiling for sm_90a on any machine: every variant, type, major order and configuration."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import threading
from dataclasses import replace
from itertools import product
from pathlib import Path

import cases
import pytest

from cute_matmul import compile as compiling
from cute_matmul import hopper, inspection, registry
from cute_matmul.compile import CACHE_VARIABLE, compile_kernel
from cute_matmul.config import TileConfig
from cute_matmul.variants import v1

REPOSITORY = Path(__file__).parent.parent


def kernels(all_configs: bool) -> list[tuple[str, TileConfig, str, tuple[str, str]]]:
    """(variant, config, dtype, majors): everything, or two of each default and one of each space's first."""
    if all_configs:
        return [
            (variant, config, dtype, majors)
            for variant, config in cases.configs()
            for dtype, majors in product(cases.accepted_dtypes(variant), cases.MAJORS)
        ]
    chosen = []
    for variant in cases.variants():
        module = registry.get(variant).load()
        two = cases.quick(variant)
        chosen += [(variant, module.DEFAULT, *row) for row in two] + [(variant, module.SPACE[0], *two[1])]
    return chosen


def pytest_generate_tests(metafunc):
    if "majors" in metafunc.fixturenames:
        rows = [
            pytest.param(*row, id=f"{row[0]}-{row[1]}-{row[2]}-{''.join(row[3])}")
            for row in kernels(metafunc.config.getoption("--all-configs"))
        ]
        metafunc.parametrize(("variant", "config", "dtype", "majors"), rows)


def test_compiles_without_spills(variant, config, dtype, majors):
    kernel = compile_kernel(variant, config, dtype, *majors)
    assert (kernel.variant, kernel.config, kernel.dtype) == (variant, config, dtype)
    assert re.search(r"^\.target sm_90a$", kernel.ptx, re.MULTILINE)
    assert kernel.symbol in kernel.ptx and f"matmul_{variant}_kernel" in kernel.symbol
    assert kernel.cubin.startswith(b"\x7fELF") and kernel.object_code.startswith(b"\x7fELF")
    resources = registry.get(variant).load().RESOURCES
    assert (kernel.threads, kernel.smem_bytes) == (resources.threads, resources.smem_bytes(config))
    if inspection.find_disassembler() is not None:
        assert inspection.spills(kernel) == 0

    element = {"float16": "f16", "bfloat16": "bf16"}[dtype]
    accumulator = "f32" if resources.accumulator_bytes == 4 else "f16"
    shape = {"v0": r"mma\.sync\.aligned\.m16n8k16\.row\.col"}.get(
        variant, rf"wgmma\.mma_async\.sync\.aligned\.m64n{config.tile_shape_mnk[1]}k16"
    )
    assert re.search(rf"{shape}\.{accumulator}\.{element}\.{element}", kernel.ptx)


def test_wgmma_and_ldmatrix_transpose_what_is_not_k_major():
    for a_major, b_major in cases.MAJORS:
        v1 = compile_kernel("v1", TileConfig((64, 128, 16)), "float16", a_major, b_major).ptx
        flags = {
            (int(a), int(b))
            for a, b in re.findall(r"wgmma\.mma_async[^;]*?,\s*(\d),\s*(\d);", v1)  # imm-trans-a, imm-trans-b
        }
        assert flags == {(int(a_major == "m"), int(b_major == "n"))}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("v9",), "variant must be one of v0, v1, v2"),
        (("v1", None, "float32"), "dtype must be one of float16, bfloat16, got 'float32'"),
        (("v1", None, "float16", "n"), "a_major must be one of k, m, got 'n'"),
        (("v1", None, "float16", "k", "m"), "b_major must be one of k, n, got 'm'"),
        (("v1", TileConfig((64, 64, 64))), "config 64x64x64 is not one of v1's"),
        (("v1", "64x64x64"), "accepted: 64x128x16, "),
        (("v1", "64"), "config must look like 128x128x64"),
        (("v6", None, "bfloat16"), "dtype must be one of float16 for v6, got 'bfloat16'"),
    ],
    ids=str,
)
def test_refusals(arguments, message):
    with pytest.raises(ValueError) as caught:
        compile_kernel(*arguments)
    assert message in str(caught.value)


def test_defaults_and_memory():
    with registry.use("v1"):
        kernel = compile_kernel()
    assert kernel.variant == "v1" and kernel.config == registry.get("v1").load().DEFAULT
    assert compile_kernel("v1") is kernel
    assert compile_kernel("v1", str(kernel.config)) is kernel
    assert compile_kernel("v1", kernel.config, "float16", "k", "k") is kernel
    assert compile_kernel("v1", TileConfig((64, 128, 16))) is not kernel


def test_threads_share_one_compile(monkeypatch, tmp_path):
    monkeypatch.setenv(CACHE_VARIABLE, "0")
    monkeypatch.setattr(compiling, "_memory", {})
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    registry.register(registry.Variant("tiny", "tiny_variant", "the smallest kernel", "nothing"))
    try:
        found = []
        threads = [threading.Thread(target=lambda: found.append(compile_kernel("tiny"))) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        registry.unregister("tiny")
    assert len(found) == 4 and all(kernel is found[0] for kernel in found)


@pytest.mark.parametrize("version", ["4.7.0", None])
def test_another_dsl_version_is_an_error(monkeypatch, version):
    def installed(name: str) -> str:
        if version is None:
            raise compiling.metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(compiling.metadata, "version", installed)
    what = f"nvidia-cutlass-dsl {version} is installed" if version else "nvidia-cutlass-dsl is not installed"
    with pytest.raises(ImportError, match=rf"^{what}; this release of cute_matmul supports 4\.8\.1 exactly$"):
        compiling.check_dsl_version()


def test_the_supported_dsl_is_the_pinned_one():
    pins = re.findall(r"nvidia-cutlass-dsl(?:\[\w+\])?==([\w.]+)", (REPOSITORY / "pyproject.toml").read_text())
    assert pins and set(pins) == {compiling.SUPPORTED_DSL}


def test_the_fingerprint_is_of_the_code_and_not_of_where_its_source_stands():
    kernel = compile_kernel("v1")
    moved = re.sub(r"(\.loc\s+\d+) \d+", r"\1 4321", kernel.ptx).replace(str(REPOSITORY), "/elsewhere")
    assert moved != kernel.ptx and replace(kernel, ptx=moved).fingerprint == kernel.fingerprint
    assert re.fullmatch(r"[0-9a-f]{16}", kernel.fingerprint)
    other_wheel = re.sub(r"^\.version .*$", ".version 99.9", kernel.ptx, flags=re.MULTILINE).replace(
        "// Cuda", "// cuda"
    )
    assert other_wheel != kernel.ptx and replace(kernel, ptx=other_wheel).fingerprint == kernel.fingerprint
    changed = kernel.ptx.replace("st.global.b16", "st.global.u16", 1)
    assert changed != kernel.ptx and replace(kernel, ptx=changed).fingerprint != kernel.fingerprint


COMPILE = """
import hashlib, json
from cute_matmul.compile import compile_kernel
kernel = compile_kernel("v1", "64x128x16")
print(json.dumps([hashlib.sha256(data).hexdigest() for data in (kernel.ptx.encode(), kernel.cubin)]))
"""


def test_the_same_code_whatever_the_environment(tmp_path):
    """CUTE_DSL_ARCH unset or of another architecture, no GPU, another hash seed: the same PTX and machine code.

    Compiled afresh here too: line information holds when each source was written, and a cache may be of an older clone.
    """
    settings = ({}, {"CUTE_DSL_ARCH": "sm_100a", "CUTE_DSL_DUMP_DIR": "/nonexistent"})
    processes = []
    for number, variables in enumerate(settings):
        environment = {name: value for name, value in os.environ.items() if not name.startswith("CUTE_")}
        environment |= {"CUDA_VISIBLE_DEVICES": "", CACHE_VARIABLE: "0", "PYTHONPATH": str(REPOSITORY)}
        environment |= {"PYTHONHASHSEED": str(number + 1), **variables}
        folder = tmp_path / str(number)
        folder.mkdir()
        processes.append(
            subprocess.Popen(
                [sys.executable, "-c", COMPILE],
                env=environment,
                cwd=folder,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    outputs = [process.communicate(timeout=300) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], [error[-2000:] for _, error in outputs]
    facts = {"variant": "v1", "config": "64x128x16", "dtype": "float16", "a_major": "k", "b_major": "k"}
    here = compiling._compile(v1, TileConfig.parse(facts["config"]), facts)
    expected = [hashlib.sha256(data).hexdigest() for data in (here.ptx.encode(), here.cubin)]
    assert [json.loads(output) for output, _ in outputs] == [expected, expected]
    assert not [path for folder in tmp_path.iterdir() for path in folder.iterdir()], "files were left behind"


def test_a_fragment_of_several_instructions_along_n_is_refused(monkeypatch):
    """store_direct would leave out what the second instruction computed."""
    whole = hopper.wgmma
    monkeypatch.setattr(hopper, "wgmma", lambda mA, mB, tile_n, **more: whole(mA, mB, tile_n // 2, **more))
    facts = {"variant": "v1", "config": "", "dtype": "float16", "a_major": "k", "b_major": "k"}
    with pytest.raises(ValueError, match="acc must be of one WGMMA along N"):
        compiling._compile(v1, v1.DEFAULT, facts)
