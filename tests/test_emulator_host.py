"""The host side of the emulator: what the DSL's own launch code computes, caught with no GPU."""

from __future__ import annotations

import ctypes
import dataclasses
import os
import struct
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import NamedTuple

import cuda.bindings.driver as driver
import cutlass
import cutlass.cute as cute
import numpy as np
import pytest
import torch
from cutlass.base_dsl.compiler import DumpDir
from cutlass.cute.nvgpu import cpasync
from cutlass.cute.runtime import from_dlpack, make_fake_stream, make_fake_tensor, make_ptr

from cute_matmul.emulator import host
from cute_matmul.emulator.operands import Operands, capsule_tensor
from cute_matmul.emulator.tensormap import TensorMap


@cute.kernel
def scale_kernel(source: cute.Tensor, target: cute.Tensor, factor: cutlass.Float32):
    thread, _, _ = cute.arch.thread_idx()
    target[thread] = (source[thread] * factor).to(target.element_type)


@cute.kernel
def fill_kernel(target: cute.Tensor, value: cutlass.Int64, wide: cutlass.Int8):
    thread, _, _ = cute.arch.thread_idx()
    target[thread] = (value + wide).to(target.element_type)


@cute.jit
def scale(
    source: cute.Tensor,
    target: cute.Tensor,
    factor: cutlass.Float32,
    repeats: cutlass.Constexpr,
    stream: driver.CUstream,
):
    for _ in cutlass.range_constexpr(repeats):
        scale_kernel(source, target, factor).launch(grid=[3, 2, 1], block=[64, 2, 1], stream=stream)


@cute.kernel
def descriptor_kernel(atom: cute.CopyAtom, coordinates: cute.Tensor, tile: cutlass.Constexpr):
    cpasync.prefetch_descriptor(atom)


@cute.jit
def describe(matrix: cute.Tensor, tile: cutlass.Constexpr, cluster: cutlass.Constexpr, smem: cutlass.Int32):
    layout = cute.make_composed_layout(cute.make_swizzle(3, 4, 3), 0, cute.make_ordered_layout(tile, order=(1, 0)))
    atom, coordinates = cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SOp(), matrix, layout, tile)
    rows, columns = cute.ceil_div(matrix.shape, tile)
    grid = cute.round_up((rows, columns, 1), (*cluster, 1))
    descriptor_kernel(atom, coordinates, tile).launch(grid=grid, block=[128, 1, 1], cluster=(*cluster, 1), smem=smem)


def test_launch_is_what_the_host_function_asked_for():
    source, target = torch.zeros(128), torch.zeros(128, dtype=torch.float16)
    arguments = (source, target, 2.5, 2, host.stream())
    program = host.Program.compile(scale, *arguments)
    seen = []
    launches = program.run(*arguments, on_launch=seen.append)
    assert launches == tuple(seen)
    assert [launch.index for launch in launches] == [0, 1]
    first = launches[0]
    assert first.kernel in program.kernels and "scale_kernel" in first.kernel
    assert f".entry {first.kernel}(" in first.ptx and ".target sm_90a" in first.ptx
    assert (first.grid, first.block, first.cluster) == ((3, 2, 1), (64, 2, 1), (1, 1, 1))
    assert (first.smem_bytes, first.stream, first.cooperative, first.programmatic) == (0, 0, False, False)
    assert [struct.unpack_from("<Q", p)[0] for p in first.params[:2]] == [source.data_ptr(), target.data_ptr()]
    assert struct.unpack("<f", first.params[2]) == (2.5,)


def test_ptx_names_python_lines_and_scalars_reach_it():
    program = host.Program.compile(scale, torch.zeros(64), torch.zeros(64), 1.0, 1, host.stream())
    assert "test_emulator_host.py" in program.ptx
    values = []
    for factor in (3.0, 4, cutlass.Float32(5.0)):
        launch = program.run(torch.zeros(64), torch.zeros(64), factor, 1, host.stream())[0]
        values.append(struct.unpack("<f", launch.params[2])[0])
    assert values == [3.0, 4.0, 5.0]


def test_one_program_serves_every_shape():
    matrix = torch.zeros(100, 136, dtype=torch.float16)
    program = host.Program.compile(describe, matrix, (64, 64), (1, 1), 0)
    for rows, columns, pitch in ((100, 136, 136), (65, 40, 72), (300, 64, 64)):
        matrix = torch.zeros(rows, pitch, dtype=torch.float16)[:, :columns]
        launch = program.run(matrix, (64, 64), (1, 1), 0)[0]
        assert launch.grid == (-(-rows // 64), -(-columns // 64), 1)
        decoded = TensorMap.decode(launch.params[0])
        assert (decoded.dtype, decoded.rank, decoded.address) == ("float16", 2, matrix.data_ptr())
        assert decoded.extents == (columns, rows)
        assert decoded.strides == (2, 2 * pitch)
        assert (decoded.box, decoded.swizzle, decoded.fill) == ((64, 64), 128, "zero")


def test_cluster_and_dynamic_shared_memory():
    matrix = torch.zeros(100, 136, dtype=torch.float16)
    program = host.Program.compile(describe, matrix, (64, 64), (2, 1), 0)
    launch = program.run(matrix, (64, 64), (2, 1), 4096)[0]
    assert (launch.grid, launch.cluster, launch.smem_bytes) == ((2, 3, 1), (2, 1, 1), 4096)


def test_shared_memory_beyond_the_limit_is_an_error():
    matrix = torch.zeros(100, 136, dtype=torch.float16)
    program = host.Program.compile(describe, matrix, (64, 64), (1, 1), 0)
    with pytest.raises(host.LaunchError, match="232449 bytes of dynamic shared memory, at most 232448"):
        program.run(matrix, (64, 64), (1, 1), 232_449)
    assert program.run(matrix, (64, 64), (1, 1), 232_448)[0].smem_bytes == 232_448


@cute.jit
def grid_from(target: cute.Tensor, grid: cutlass.Constexpr, block: cutlass.Constexpr, cluster: cutlass.Constexpr):
    fill_kernel(target, 1, 2).launch(grid=grid, block=block, cluster=cluster)


@pytest.mark.parametrize(
    ("grid", "block", "cluster", "message"),
    [
        ([3, 1, 1], [32, 1, 1], [2, 1, 1], r"grid \(3, 1, 1\) is not a multiple of cluster \(2, 1, 1\)"),
        ([32, 1, 1], [32, 1, 1], [32, 1, 1], "at most 16 CTAs"),
        ([0, 1, 1], [32, 1, 1], None, "each dimension is from 1"),
        ([1, 70_000, 1], [32, 1, 1], None, "each dimension is from 1"),
    ],
)
def test_limits_of_a_launch(grid, block, cluster, message):
    target = torch.zeros(32, dtype=torch.int64)
    with pytest.raises(host.LaunchError, match=message):
        host.Program.compile(grid_from, target, grid, block, cluster).run(target, grid, block, cluster)


@cute.jit
def fill(target: cute.Tensor, value: cutlass.Int64, wide: cutlass.Int8):
    fill_kernel(target, value, wide).launch(grid=[1, 1, 1], block=[32, 1, 1])


def test_integer_parameters_keep_their_size_and_value():
    arguments = (torch.zeros(32, dtype=torch.int64), -(1 << 40), cutlass.Int8(-3))
    _, value, wide = host.Program.compile(fill, *arguments).run(*arguments)[0].params
    assert struct.unpack("<q", value) == (-(1 << 40),)
    assert struct.unpack("<b", wide) == (-3,)


def test_signatures_of_parameters():
    ptx = """
    .visible .entry first(
        .param .align 64 .b8 first_param_0[128],
        .param .u64 .ptr .global .align 16 first_param_1,
        .param .u32 first_param_2,
        .param .b8 first_param_3
    )
    .reqntid 128, 2, 1
    .reqnctapercluster 2, 1, 1
    { ret; }
    .visible .entry second() .maxntid 384 { ret; }
    """
    first, second = host.kernel_signatures(ptx).values()
    assert first.param_bytes == (128, 8, 4, 1)
    assert (first.reqntid, first.maxntid, first.cluster) == ((128, 2, 1), None, (2, 1, 1))
    assert (second.param_bytes, second.reqntid, second.maxntid) == ((), None, (384, 1, 1))


class Pair(NamedTuple):
    source: cute.Tensor
    target: cute.Tensor


@dataclasses.dataclass
class Parts:
    source: cute.Tensor
    factor: cutlass.Float32


@cute.jit
def scale_pair(pair: Pair, more: list, parts: Parts, nothing: cutlass.Constexpr = None):
    scale_kernel(pair.source, pair.target, parts.factor).launch(grid=[1, 1, 1], block=[32, 1, 1])
    scale_kernel(parts.source, more[0], parts.factor).launch(grid=[1, 1, 1], block=[32, 1, 1])


def test_tensors_inside_tuples_lists_and_dataclasses():
    tensors = [torch.zeros(32) for _ in range(4)]
    arguments = (Pair(*tensors[:2]), [tensors[2]], Parts(tensors[3], 1.5))
    first, second = host.Program.compile(scale_pair, *arguments).run(*arguments)
    pointers = [struct.unpack_from("<Q", p)[0] for launch in (first, second) for p in launch.params[:2]]
    assert pointers == [tensors[i].data_ptr() for i in (0, 1, 3, 2)]
    labels = {a.base: a.label for a in first.allocations}
    assert [labels[t.data_ptr()] for t in tensors] == ["pair[0]", "pair[1]", "more[0]", "parts.source"]


class Scaler:
    def __init__(self, factor: float):
        self.factor = factor

    @cute.jit
    def __call__(self, source: cute.Tensor, target: cute.Tensor, stream: driver.CUstream):
        self.launch(source, target, stream)

    @cute.jit
    def launch(self, source: cute.Tensor, target: cute.Tensor, stream: driver.CUstream):
        scale_kernel(source, target, self.factor).launch(grid=[1, 1, 1], block=[32, 1, 1], stream=stream)


@pytest.mark.parametrize("stream", [make_fake_stream(), driver.CUstream(0), None], ids=["fake", "CUstream", "None"])
@pytest.mark.parametrize("form", ["object", "method"])
def test_callable_objects_methods_and_streams(form, stream):
    scaler = Scaler(2.0)
    function = scaler if form == "object" else scaler.launch
    source, target = torch.zeros(32), torch.zeros(32)
    launch = host.Program.compile(function, source, target, stream).run(source, target, stream)[0]
    assert struct.unpack_from("<Q", launch.params[0])[0] == source.data_ptr()
    assert {a.label for a in launch.allocations} == {"source", "target"}


def test_keyword_arguments():
    tensors = {"source": torch.zeros(32), "target": torch.zeros(32)}
    rest = {"factor": 1.0, "repeats": 1, "stream": host.stream()}
    launch = host.Program.compile(scale, **tensors, **rest).run(**tensors, **rest)[0]
    assert {a.label for a in launch.allocations} == {"source", "target"}


DTYPES = [
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int8,
    torch.uint8,
    torch.int32,
    torch.int64,
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtypes_of_torch_tensors(dtype):
    @cute.jit
    def touch(tensor: cute.Tensor, width: cutlass.Constexpr):
        assert tensor.element_type.width == width
        assert tensor.memspace == cute.AddressSpace.gmem
        descriptor_kernel_for(tensor).launch(grid=[1, 1, 1], block=[1, 1, 1])

    @cute.kernel
    def descriptor_kernel_for(tensor: cute.Tensor):
        tensor[0] = tensor[1]

    tensor = torch.zeros(64, dtype=torch.uint8).view(dtype)
    launch = host.Program.compile(touch, tensor, 8 * dtype.itemsize).run(tensor, 8 * dtype.itemsize)[0]
    assert struct.unpack_from("<Q", launch.params[0])[0] == tensor.data_ptr()
    assert "st.global" in launch.ptx and "ld.global" in launch.ptx


def test_the_callers_marks_are_kept():
    matrix = torch.zeros(100, 136, dtype=torch.float16)
    static = from_dlpack(matrix, assumed_align=16)
    assert host.Program.compile(describe, static, (64, 64), (1, 1), 0).run(static, (64, 64), (1, 1), 0)
    dynamic = from_dlpack(matrix, assumed_align=16).mark_layout_dynamic(leading_dim=1)
    program = host.Program.compile(describe, dynamic, (64, 64), (1, 1), 0)
    other = torch.zeros(200, 64, dtype=torch.float16)
    launch = program.run(from_dlpack(other, assumed_align=16).mark_layout_dynamic(leading_dim=1), (64, 64), (1, 1), 0)
    assert TensorMap.decode(launch[0].params[0]).extents == (64, 200)
    compact = from_dlpack(matrix, assumed_align=16).mark_compact_shape_dynamic(0, (0, 1), divisibility=4)
    launch = host.Program.compile(describe, compact, (64, 64), (1, 1), 0).run(compact, (64, 64), (1, 1), 0)[0]
    assert TensorMap.decode(launch.params[0]).strides == (2, 272)
    assert static.memspace == dynamic.memspace == cute.AddressSpace.generic  # as the caller made them


def test_fake_tensors_compile_and_real_ones_run():
    fake = make_fake_tensor(
        cutlass.Float16,
        (cute.sym_int(), cute.sym_int()),
        (cute.sym_int64(divisibility=8), 1),
        assumed_align=16,
    )
    program = host.Program.compile(describe, fake, (64, 64), (1, 1), 0)
    matrix = torch.zeros(100, 136, dtype=torch.float16)
    assert program.run(matrix, (64, 64), (1, 1), 0)[0].grid == (2, 3, 1)
    with pytest.raises(TypeError, match="argument matrix: a fake tensor has no memory"):
        program.run(fake, (64, 64), (1, 1), 0)


def test_numpy_arrays():
    array = np.zeros((100, 136), dtype=np.float16)
    launch = host.Program.compile(describe, array, (64, 64), (1, 1), 0).run(array, (64, 64), (1, 1), 0)[0]
    assert TensorMap.decode(launch.params[0]).address == array.ctypes.data
    array.flags.writeable = False
    with pytest.raises(TypeError, match="argument matrix: a read-only NumPy array"):
        host.Program.compile(describe, array, (64, 64), (1, 1), 0)


def test_unsupported_arguments_are_named():
    good = torch.zeros(32)
    cases = [
        ((object(), good), "argument source: builtins.object is not supported; accepted are"),
        ((good, torch.zeros(32, dtype=torch.complex64)), "argument target: dtype torch.complex64, accepted are"),
        ((torch.zeros(32, device="meta"), good), "argument source: a tensor on meta, accepted are CPU tensors"),
        ((good.to_sparse(), good), "argument source: layout torch.sparse_coo"),
        ((good, "text"), "argument target: builtins.str is not supported"),
    ]
    for (source, target), message in cases:
        with pytest.raises(TypeError, match=message):
            host.Program.compile(scale, source, target, 1.0, 1, host.stream())


def test_an_exception_in_the_launch_function_surfaces():
    class Stop(BaseException):
        pass

    arguments = (torch.zeros(32), torch.zeros(32), 1.0, 3, host.stream())
    program = host.Program.compile(scale, *arguments)
    calls = []

    def fail(launch):
        calls.append(launch.index)
        raise Stop

    with pytest.raises(Stop):
        program.run(*arguments, on_launch=fail)
    assert calls == [0]  # the host code stops at its first failed launch
    assert len(program.run(*arguments)) == 3


def test_a_program_can_run_inside_a_launch_of_another():
    arguments = (torch.zeros(32), torch.zeros(32), 1.0, 2, host.stream())
    program = host.Program.compile(scale, *arguments)
    inner = []
    outer = program.run(*arguments, on_launch=lambda launch: inner.extend(program.run(*arguments)))
    assert [launch.index for launch in outer] == [0, 1]
    assert [launch.index for launch in inner] == [0, 1, 0, 1]


def test_allocations_are_whole_storages_over_the_tensors_memory():
    storage = torch.arange(1000, dtype=torch.float32)
    source, target = storage[100:132], storage[500:532]
    arguments = (source, target, 1.0, 1, host.stream())
    launch = host.Program.compile(scale, *arguments).run(*arguments)[0]
    (allocation,) = launch.allocations
    assert (allocation.label, allocation.base) == ("source+target", storage.data_ptr())
    assert allocation.nbytes == 4000 == len(allocation.data)
    viewed = allocation.viewed()
    assert viewed.sum() == 2 * 32 * 4
    assert viewed[400] and not viewed[399] and viewed[527] and not viewed[528]
    assert allocation.describe(100 * 4 + 5) == "source[1]"
    assert allocation.describe(0) == "source+target storage byte 0, outside the view"
    memory = host.Memory(launch.allocations)
    memory.view(source.data_ptr(), 4).view(np.float32)[0] = -7.0
    assert storage[100] == -7.0


def test_a_strided_view_knows_its_own_bytes():
    matrix = torch.zeros(6, 10, dtype=torch.int16).t()[1:9:2]  # (4, 6), strides (2, 10)
    view = host.View("m", matrix.storage_offset() * 2, tuple(matrix.shape), tuple(matrix.stride()), 2)
    mask = view.byte_mask(120)
    expected = torch.zeros(60, dtype=torch.bool)
    expected.as_strided(matrix.shape, matrix.stride(), matrix.storage_offset())[...] = True
    assert (mask.reshape(60, 2) == expected.numpy()[:, None]).all()
    for offset in range(120):
        index = view.index_of(offset)
        assert (index is not None) == mask[offset]
        if index is not None:
            at = view.offset + 2 * sum(i * s for i, s in zip(index, view.stride, strict=True))
            assert at <= offset < at + 2


def test_memory_outside_every_allocation():
    first, second = torch.zeros(64, dtype=torch.uint8), torch.zeros(64, dtype=torch.uint8)
    arguments = (first, second, 1.0, 1, host.stream())
    memory = host.Memory(host.Program.compile(scale, *arguments).run(*arguments)[0].allocations)
    for tensor, label in ((first, "source"), (second, "target")):
        assert memory.find(tensor.data_ptr() + 63).label == label
        with pytest.raises(host.OutOfBounds, match=r"8 bytes at .* are in no allocation; nearest is") as info:
            memory.view(tensor.data_ptr() + 60, 8)
        assert (info.value.address, info.value.nbytes) == (tensor.data_ptr() + 60, 8)
        assert info.value.nearest.label == label and "4 bytes past its end" in str(info.value)
    with pytest.raises(host.OutOfBounds, match="no allocation is known"):
        host.Memory(()).view(4096, 1)


def test_memory_given_beside_the_arguments():
    arguments = (torch.zeros(32), torch.zeros(32), 1.0, 1, host.stream())
    extra = torch.zeros(10)
    launch = host.Program.compile(scale, *arguments).run(*arguments, memory=[("workspace", extra)])[0]
    assert host.Memory(launch.allocations).find(extra.data_ptr()).label == "workspace"


def compiled_for_ffi(dump_folder: Path, keep_ptx: bool = True):
    fake = make_fake_tensor(cutlass.Float32, (cute.sym_int(),), (1,), assumed_align=4)
    options = (cute.GPUArch("sm_90a"), cute.KeepPTX(keep_ptx), cute.EnableTVMFFI(True), DumpDir(str(dump_folder)))
    return cute.compile[options](scale, fake, fake, 1.0, 2, make_fake_stream(use_tvm_ffi_env_stream=True))


@pytest.fixture(scope="module")
def ffi_function(tmp_path_factory):
    return compiled_for_ffi(tmp_path_factory.mktemp("dump"))


def test_an_exported_ffi_object_runs_without_compiling_again(ffi_function, tmp_path):
    ffi_function.export_to_c(object_file_path=str(tmp_path / "scale.o"), function_name="scale")
    for source_of in (str, lambda path: path.read_bytes()):
        program = host.Program.from_object(source_of(tmp_path / "scale.o"), ffi_function.__ptx__, names=("x", "y"))
        x, y = torch.zeros(64), torch.zeros(64)
        launches = program.run(x, y, 2.0)
        assert len(launches) == 2
        assert [struct.unpack_from("<Q", p)[0] for p in launches[0].params[:2]] == [x.data_ptr(), y.data_ptr()]
        assert struct.unpack("<f", launches[0].params[2]) == (2.0,)
        assert {a.label for a in launches[0].allocations} == {"x", "y"}
        assert x.__dlpack_device__()[0] == 1


def test_the_ffi_entrys_own_checks_surface(ffi_function):
    program = host.Program.of(ffi_function)
    x = torch.zeros(64)
    with pytest.raises(TypeError, match="Expects 3 parameters"):
        program.run(x, x)
    with pytest.raises(ValueError, match="expected dtype=float32"):
        program.run(x.double(), x, 1.0)
    with pytest.raises(ValueError, match="ndim"):
        program.run(x.reshape(8, 8), x, 1.0)
    with pytest.raises(TypeError, match="positional arguments only"):
        program.run(x, target=x)
    with pytest.raises(KeyError):
        program.run(x, x, 1.0, on_launch=lambda launch: {}["missing"])
    assert len(program.run(x, x, 1.0)) == 2


class Kernel:
    def __init__(self, object_code: bytes, ptx: str):
        self.object_code, self.ptx = object_code, ptx

    def __call__(self, left, right, factor):
        raise AssertionError("the emulator does not launch")


def test_program_of_what_it_is_given(ffi_function, tmp_path):
    ffi_function.export_to_c(object_file_path=str(tmp_path / "scale.o"), function_name="scale")
    kernel = Kernel((tmp_path / "scale.o").read_bytes(), ffi_function.__ptx__)
    program = host.Program.of(kernel)
    assert host.Program.of(kernel) is program is host.Program.of(program)
    x = torch.zeros(64)
    assert program.run(x, torch.zeros(64), 1.0)[0].allocations[0].label in ("left", "right")
    arguments = (x, torch.zeros(64), 1.0, 1, host.stream())
    assert host.Program.of(scale, *arguments).run(*arguments)


@cute.kernel
def pointer_kernel(pointer: cute.Pointer, value: cutlass.Float32):
    cute.make_tensor(pointer, cute.make_layout(64))[cute.arch.thread_idx()[0]] = value


@cute.jit
def through_pointer(pointer: cute.Pointer, value: cutlass.Float32):
    pointer_kernel(pointer, value).launch(grid=[1, 1, 1], block=[64, 1, 1])


def test_pointers_reach_memory_given_beside_them():
    tensor = torch.zeros(64)
    pointer = make_ptr(cutlass.Float32, tensor.data_ptr(), cute.AddressSpace.gmem, assumed_align=16)
    program = host.Program.compile(through_pointer, pointer, 1.0)
    (launch,) = program.run(pointer, 2.0, memory=[("workspace", tensor)])
    assert struct.unpack("<Q", launch.params[0]) == (tensor.data_ptr(),)
    assert [a.label for a in launch.allocations] == ["workspace"]
    assert program.run(pointer, 2.0)[0].allocations == ()


def test_compiled_without_ptx_is_an_error(tmp_path):
    with pytest.raises(host.HostError, match="kept no PTX"):
        host.Program.of(compiled_for_ffi(tmp_path, keep_ptx=False))


def test_objects_that_are_not_programs(tmp_path):
    with pytest.raises(host.HostError, match="not a little-endian ELF64 object"):
        host.Program.from_object(b"text", "")
    library = np._core._multiarray_umath.__file__
    with pytest.raises(host.HostError, match="defines 0 TVM-FFI functions"):
        host.Program.from_object(library, "")


def test_ptx_of_another_architecture_is_refused(ffi_function, tmp_path):
    ffi_function.export_to_c(object_file_path=str(tmp_path / "scale.o"), function_name="scale")
    for target in ("sm_100a", "sm_120", "sm_80a"):
        with pytest.raises(host.HostError, match=rf"\.target {target}, the emulator runs sm_90a"):
            host.Program.from_object(
                tmp_path / "scale.o", ffi_function.__ptx__.replace(".target sm_90a", f".target {target}")
            )
    with pytest.raises(host.HostError, match="has no "):
        host.Program.from_object(tmp_path / "scale.o", "")
    for target in ("sm_80", "sm_90"):
        ptx = ffi_function.__ptx__.replace(".target sm_90a", f".target {target}")
        assert host.Program.from_object(tmp_path / "scale.o", ptx).run(torch.zeros(64), torch.zeros(64), 1.0)


def test_cute_tensors_over_device_memory_are_refused():
    source = from_dlpack(torch.zeros(32))
    operands = Operands()
    operands.convert(source, "source")  # now described as device memory, by the emulator itself
    operands.convert(source, "source")
    operands.restore()
    device_type = ctypes.c_int32.from_address(capsule_tensor(source._dlpack_data) + 8)
    device_type.value = 2
    with pytest.raises(TypeError, match="argument source: a CuTe tensor over device memory"):
        host.Program.compile(scale, source, torch.zeros(32), 1.0, 1, host.stream())
    device_type.value = 1
    host.Program.compile(scale, source, torch.zeros(32), 1.0, 1, host.stream())
    assert device_type.value == 1


def test_another_release_of_the_dsl_is_refused(monkeypatch):
    monkeypatch.setattr(host.importlib.metadata, "version", lambda name: "4.9.0")
    host._check_dsl.cache_clear()
    try:
        with pytest.raises(
            host.HostError, match=r"nvidia-cutlass-dsl 4\.9\.0 is installed; the emulator needs 4\.8\.1"
        ):
            host.Program.compile(scale, torch.zeros(32), torch.zeros(32), 1.0, 1, host.stream())
    finally:
        host._check_dsl.cache_clear()


def test_host_code_that_needs_more_than_the_emulator_has(monkeypatch):
    arguments = (torch.zeros(32), torch.zeros(32), 1.0, 1, host.stream())
    program = host.Program.compile(scale, *arguments)
    monkeypatch.setattr(host, "RUNTIME", {k: v for k, v in host.RUNTIME.items() if k != "_cudaLaunchKernelEx"})
    # The DSL's own runtime library has the name too, once something in this process has loaded it.
    has = host._process_has
    monkeypatch.setattr(host, "_process_has", lambda symbol: symbol != "_cudaLaunchKernelEx" and has(symbol))
    with pytest.raises(host.HostError, match="calls _cudaLaunchKernelEx, which the emulator does not provide"):
        program.run(*arguments)


@pytest.mark.parametrize("arch", [None, "sm_100a"])
def test_the_environment_does_not_matter(arch, tmp_path):
    """Whatever CUTE_DSL_ARCH was at import, and with nothing left in the working folder."""
    script = textwrap.dedent("""
        import os, sys
        import torch
        sys.path.insert(0, sys.argv[1])
        from tests.test_emulator_host import describe
        from cute_matmul.emulator import host
        matrix = torch.zeros(100, 136, dtype=torch.float16)
        launch = host.Program.compile(describe, matrix, (64, 64), (1, 1), 0).run(matrix, (64, 64), (1, 1), 0)[0]
        assert ".target sm_90a" in launch.ptx, launch.ptx[:200]
        print(launch.grid, os.listdir("."))
    """)
    environment = {k: v for k, v in os.environ.items() if k != "CUTE_DSL_ARCH"}
    if arch:
        environment["CUTE_DSL_ARCH"] = arch
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script, str(Path(__file__).parents[1])],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "(2, 3, 1) []"


def test_every_dimension_of_a_grid_is_a_multiple_of_its_cluster():
    target = torch.zeros(32, dtype=torch.int64)
    arguments = (target, [2, 3, 1], [32, 1, 1], [1, 2, 1])
    with pytest.raises(host.LaunchError, match=r"grid \(2, 3, 1\) is not a multiple of cluster \(1, 2, 1\)"):
        host.Program.compile(grid_from, *arguments).run(*arguments)


def test_ranges_that_only_touch_are_two_allocations():
    whole = torch.zeros(64)
    operands = Operands()
    for name, part in (("first", whole[:32]), ("second", whole[32:])):
        operands.convert(from_dlpack(part), name)
    operands.restore()
    assert [(a.label, a.nbytes) for a in operands.allocations(())] == [("first", 128), ("second", 128)]
