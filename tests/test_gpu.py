"""On a Hopper GPU: every case for every variant, every configuration, streams, graphs, devices, large tensors.

Needs torch, numpy and pytest only. Kernels are compiled first, on all cores, into the disk cache.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import cases
import pytest
import torch

from cute_matmul import matmul
from cute_matmul.compile import CACHE_VARIABLE, compile_kernel

pytestmark = pytest.mark.gpu

variants = pytest.mark.parametrize("variant", cases.variants())
dtypes = pytest.mark.parametrize("dtype", cases.DTYPES)
variant_dtypes = pytest.mark.parametrize(("variant", "dtype"), cases.variant_dtypes())
majors = pytest.mark.parametrize("majors", cases.MAJORS, ids="".join)


@pytest.fixture(scope="module", autouse=True)
def kernels(request, tmp_path_factory):
    """Compile what the selected tests use, in parallel: one after the other would take minutes."""
    patch = pytest.MonkeyPatch()
    if os.environ.get(CACHE_VARIABLE, "0") == "0":
        patch.setenv(CACHE_VARIABLE, str(tmp_path_factory.mktemp("kernels")))
    wanted = set()
    for item in request.session.items:
        parameters = getattr(getattr(item, "callspec", None), "params", {})
        if item.module is request.module and "variant" in parameters:
            dtype, (a, b) = parameters.get("dtype", "float16"), parameters.get("majors", ("k", "n"))
            if dtype in cases.accepted_dtypes(parameters["variant"]):
                wanted.add((parameters["variant"], parameters.get("config"), dtype, a, b))
    workers = min(os.cpu_count() or 1, len(wanted) // 3)
    if workers > 1:
        # Spawned, not forked: this process may already hold a CUDA context.
        with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
            list(pool.map(compile_kernel, *zip(*sorted(wanted, key=str), strict=True)))
    yield
    patch.undo()


@variants
@pytest.mark.parametrize("shape", cases.SHAPES, ids=str)
@dtypes
@majors
def test_shape(variant, shape, dtype, majors):
    a, b = cases.operands(shape.m, shape.n, shape.k, dtype, majors, "cuda")
    cases.check_product(a, b, variant=variant)


def pytest_generate_tests(metafunc):
    """Every configuration of every space: with two of the eight (dtype, majors), or all with --all-configs."""
    if "config" in metafunc.fixturenames:
        count = 8 if metafunc.config.getoption("--all-configs") else 2
        rows = [
            pytest.param(variant, config, dtype, majors, id=f"{variant}-{config}-{dtype}-{''.join(majors)}")
            for index, (variant, config) in enumerate(cases.configs())
            for dtype, majors in cases.sample(index, count)
            if dtype in cases.accepted_dtypes(variant)
        ]
        metafunc.parametrize(("variant", "config", "dtype", "majors"), rows)


def test_config(variant, config, dtype, majors):
    """A ragged shape, for k_tiles around num_stages and for many turns of the ring."""
    m, n, k = cases.RAGGED
    stages, tile_k = config.num_stages, config.tile_shape_mnk[2]
    for tiles in sorted({1, max(1, stages - 1), stages, stages + 1, 2 * stages + 1}):
        for tail in (0, 8):
            a, b = cases.operands(m, n, tiles * tile_k - tail, dtype, majors, "cuda")
            cases.check_product(a, b, variant=variant, config=config)
    a, b = cases.operands(m, n, k, dtype, majors, "cuda")
    cases.check_product(a, b, variant=variant, config=config)
    # Whole tiles take the other path of the epilogue.
    a, b = cases.operands(512, 512, 512, dtype, majors, "cuda")
    cases.check_product(a, b, variant=variant, config=config)


@variants
@pytest.mark.parametrize("view", cases.VIEWS, ids=str)
@dtypes
def test_view(variant, view, dtype):
    cases.check_view(view, dtype, "cuda", variant=variant)


@variants
@pytest.mark.parametrize("name", cases.OVERLAPS)
def test_overlap_is_refused(variant, name):
    cases.check_overlap(name, "float16", "cuda", variant=variant)


@variants
@pytest.mark.parametrize("name", cases.NEIGHBOURS)
def test_windows_of_one_buffer(variant, name):
    cases.check_neighbours(name, "float16", "cuda", variant=variant)


@variant_dtypes
def test_ones(variant, dtype):
    cases.check_ones(variant, dtype, "cuda")


@variant_dtypes
def test_accumulates_in_fp32(variant, dtype):
    if not cases.accumulates_fp32(variant):
        pytest.skip(f"{variant} accumulates in 16 bits and says so")
    cases.check_accumulation(variant, dtype, "cuda")


@variant_dtypes
def test_nonfinite_values(variant, dtype):
    cases.check_nonfinite(variant, dtype, "cuda")


@variant_dtypes
@pytest.mark.parametrize("mnk", [(256, 256, 4160), (1000, 1000, 1008)], ids=str)
def test_fifty_times_the_same_bits(variant, dtype, mnk):
    cases.check_repeats(variant, mnk, dtype, "cuda", times=50)


def memcheck(*arguments: str) -> subprocess.CompletedProcess:
    """Every rung once, or a store past the end, under compute-sanitizer's memcheck."""
    tool = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
    if tool is None:
        pytest.skip("needs compute-sanitizer, of the CUDA toolkit, on PATH")
    probe = Path(__file__).parent / "gpu_probes" / "each_variant_once.py"
    # An error ends the kernel, not the context; and a driver call that a library tries in vain is no error of ours.
    options = ["--error-exitcode", "9", "--destroy-on-device-error", "kernel", "--report-api-errors", "no"]
    path = os.pathsep.join(filter(None, [str(probe.parents[2]), os.environ.get("PYTHONPATH")]))
    return subprocess.run(
        [tool, "--tool", "memcheck", *options, sys.executable, str(probe), *arguments],
        env={**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )


def test_memcheck_finds_nothing():
    done = memcheck()
    assert done.returncode == 0 and "all right" in done.stdout, done.stdout[-4000:] + done.stderr[-2000:]
    assert "ERROR SUMMARY: 0 errors" in done.stdout


def test_memcheck_finds_a_store_past_the_end():
    done = memcheck("--fault")
    assert done.returncode != 0 and "Invalid __global__ write" in done.stdout, done.stdout[-4000:]


TWO_TO_31 = 2**31


@variants
def test_a_of_more_than_two_to_31_elements(variant):
    m, n, k = 175_000, 128, 12_288
    assert m * k > TWO_TO_31
    a = torch.randn(m, k, dtype=torch.float16, device="cuda")
    b = cases.draw((k, n), "float16", "cuda", 1)
    cases.check_product(a, b, variant=variant)


@variants
def test_b_of_more_than_two_to_31_elements(variant):
    m, n, k = 64, 175_000, 12_288
    assert n * k > TWO_TO_31
    a = cases.draw((m, k), "float16", "cuda", 1)
    b = torch.randn(k, n, dtype=torch.float16, device="cuda")
    out = torch.full((m, n), float("nan"), dtype=a.dtype, device="cuda")
    matmul(a, b, out=out, variant=variant)
    # By columns, so that the float64 copy of B stays small.
    for first in range(0, n, 25_000):
        columns = slice(first, first + 25_000)
        cases.assert_right(out[:, columns], a, b[:, columns], variant)


@variants
def test_out_of_more_than_two_to_31_elements(variant):
    m, n, k = 46_352, 46_344, 64
    assert m * n > TWO_TO_31
    a, b = cases.draw((m, k), "float16", "cuda", 1), cases.draw((n, k), "float16", "cuda", 2).t()
    out = torch.full((m, n), float("nan"), dtype=a.dtype, device="cuda")
    matmul(a, b, out=out, variant=variant)
    cases.assert_right(out, a, b, variant, rows=4096)


@variants
def test_rows_more_than_two_to_31_elements_apart(variant):
    buffer = torch.empty((3, TWO_TO_31 + 64), dtype=torch.float16, device="cuda")
    a, out = buffer[:, -64:], buffer[:, :72]
    b = cases.draw((64, 72), "float16", "cuda", 2)
    a.copy_(cases.draw((3, 64), "float16", "cuda", 1))
    out.fill_(float("nan"))
    matmul(a, b, out=out, variant=variant)
    # cuBLAS, which the bound asks, takes no such stride.
    cases.assert_right(out.contiguous(), a.contiguous(), b, variant)


@variants
@pytest.mark.parametrize("own_output", [True, False], ids=["out", "allocated"])
def test_graph_on_another_stream(variant, own_output):
    m, n, k = cases.RAGGED
    a, b = cases.operands(m, n, k, "float16", ("k", "n"), "cuda")
    out = torch.full((m, n), float("nan"), dtype=a.dtype, device="cuda")
    matmul(a, b, out=out, variant=variant)
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        result = matmul(a, b, out=out if own_output else None, variant=variant)
    for seed in (10, 20):
        a.copy_(cases.draw((m, k), "float16", "cuda", seed))
        b.copy_(cases.draw((k, n), "float16", "cuda", seed + 1))
        result.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        cases.assert_right(result, a, b, variant)


@variants
def test_launched_on_the_current_stream(variant):
    """After the work queued on it, which a launch on any other stream would not wait for."""
    m, n, k = cases.RAGGED
    a, b = cases.operands(m, n, k, "float16", ("k", "n"), "cuda")
    new_a = cases.draw((m, k), "float16", "cuda", 30)
    out = matmul(a, b, variant=variant)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        a.copy_(new_a)
        matmul(a, b, out=out, variant=variant)
        busy = not stream.query()
    stream.synchronize()
    assert busy, "the stream had finished its earlier work before the launch: nothing was tested"
    cases.assert_right(out, new_a, b, variant)


@variants
def test_two_side_streams(variant):
    mnk = (1000, 1000, 1008)
    streams = torch.cuda.Stream(), torch.cuda.Stream()
    inputs = [
        (cases.draw((mnk[0], mnk[2]), "float16", "cuda", s), cases.draw((mnk[2], mnk[1]), "float16", "cuda", s + 1))
        for s in (40, 50)
    ]
    outputs = [
        [torch.full(mnk[:2], float("nan"), dtype=torch.float16, device="cuda") for _ in range(10)] for _ in streams
    ]
    torch.cuda.synchronize()
    for turn in range(10):
        for stream, (a, b), outs in zip(streams, inputs, outputs, strict=True):
            with torch.cuda.stream(stream):
                matmul(a, b, out=outs[turn], variant=variant)
    torch.cuda.synchronize()
    for (a, b), outs in zip(inputs, outputs, strict=True):
        cases.assert_right(outs[0], a, b, variant)
        for out in outs[1:]:
            assert torch.equal(out, outs[0])


@variants
def test_device_that_is_not_current(variant):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    with torch.cuda.device(0):
        a, b = cases.operands(*cases.RAGGED, "float16", ("k", "n"), "cuda:1")
        cases.check_product(a, b, variant=variant)
        assert matmul(a, b, variant=variant).device == torch.device("cuda:1")
        assert torch.cuda.current_device() == 0
        with cases.refused("b", ValueError, "cuda:1", "cuda:0"):
            matmul(a, b.to("cuda:0"), variant=variant)


@variants
def test_cpu_with_gpu_tensor(variant):
    a, b = cases.operands(64, 64, 64, "float16", ("k", "n"), "cuda")
    with cases.refused("b", ValueError, "cuda:0", "cpu"):
        matmul(a, b.cpu(), variant=variant)
    with cases.refused("b", ValueError, "cuda:0", "cpu"):
        matmul(a.cpu(), b, variant=variant)
    with cases.refused("out", ValueError, "cuda:0", "cpu"):
        matmul(a, b, out=torch.empty(64, 64, dtype=a.dtype), variant=variant)
    with pytest.raises(ValueError, match=r"backend 'emulator' needs CPU tensors, got a on cuda:0"):
        matmul(a, b, variant=variant, backend="emulator")


@variant_dtypes
def test_allocated_output(variant, dtype):
    a, b = cases.operands(*cases.RAGGED, dtype, ("k", "n"), "cuda")
    out = matmul(a, b, variant=variant)
    assert out.is_contiguous() and out.dtype == a.dtype and out.device == a.device
    cases.assert_right(out, a, b, variant)
