"""Run the host side of a CuTe DSL program with no GPU: compile it, execute its own launch code, catch its launches.

A `@cute.jit` host function is compiled for sm_90a to PTX and to an x86 or ARM object. The object is loaded into
this process with the names of the CUDA runtime bound to Python functions, so that the DSL's own code computes
grid, cluster, shared memory, kernel parameters and TMA descriptors. What would have been a launch becomes a
`Launch` handed to a Python function, which may execute the PTX. Nothing here needs a driver or a C compiler.

Operands stay CPU tensors. For the trace they are described as device memory, since the address space of a tensor
is part of its CuTe type; the addresses in parameters and descriptors are those of the CPU storage.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import importlib.metadata
import inspect
import itertools
import math
import re
import struct
import tempfile
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

SUPPORTED_DSL = "4.8.1"
ARCH = "sm_90a"

# CUDA C programming guide, technical specifications of compute capability 9.0.
MAX_SHARED_BYTES = 232_448  # per block, opt-in
MAX_THREADS_PER_BLOCK = 1024
MAX_PORTABLE_CLUSTER = 8
MAX_CLUSTER = 16  # with the non-portable attribute, which the DSL sets on every kernel
MAX_GRID = (2**31 - 1, 65_535, 65_535)
MAX_BLOCK = (1024, 1024, 64)

# cudaDeviceAttr (CUDA runtime API) of an H200, the ones that host code asks for.
DEVICE_ATTRIBUTES = {
    1: MAX_THREADS_PER_BLOCK,  # MaxThreadsPerBlock
    2: MAX_BLOCK[0],
    3: MAX_BLOCK[1],
    4: MAX_BLOCK[2],
    5: MAX_GRID[0],
    6: MAX_GRID[1],
    7: MAX_GRID[2],
    8: 49_152,  # MaxSharedMemoryPerBlock
    10: 32,  # WarpSize
    12: 65_536,  # MaxRegistersPerBlock
    16: 132,  # MultiProcessorCount
    39: 2048,  # MaxThreadsPerMultiProcessor
    75: 9,  # ComputeCapabilityMajor
    76: 0,  # ComputeCapabilityMinor
    81: 233_472,  # MaxSharedMemoryPerMultiprocessor
    82: 65_536,  # MaxRegistersPerMultiprocessor
    95: 1,  # CooperativeLaunch
    97: MAX_SHARED_BYTES,  # MaxSharedMemoryPerBlockOptin
    106: 32,  # MaxBlocksPerMultiprocessor
    111: 1024,  # ReservedSharedMemoryPerBlock
}

_CUDA_SUCCESS = 0
_CUDA_ERROR_UNKNOWN = 999
_DL_CPU = 1
_DL_CUDA = 2


class HostError(RuntimeError):
    """Host code could not be compiled, loaded or run, or it returned a CUDA error."""


class LaunchError(HostError):
    """A launch that the CUDA runtime would refuse: its message names the figure and the limit."""


class OutOfBounds(IndexError):
    """An access to global memory outside every allocation.

    Attributes: `address`, `nbytes`, and `nearest`, the closest `Allocation` or None where there is none.
    """

    def __init__(self, address: int, nbytes: int, nearest: Allocation | None):
        self.address = address
        self.nbytes = nbytes
        self.nearest = nearest
        where = "no allocation is known"
        if nearest is not None:
            where = f"nearest is {nearest.label}, {_distance(nearest, address, nbytes)}"
        super().__init__(f"{nbytes} bytes at {address:#x} are in no allocation; {where}")


def _distance(allocation: Allocation, address: int, nbytes: int) -> str:
    if address >= allocation.base:
        past = address + nbytes - (allocation.base + allocation.nbytes)
        return f"{allocation.nbytes} bytes at {allocation.base:#x}, {past} bytes past its end"
    return f"{allocation.nbytes} bytes at {allocation.base:#x}, {allocation.base - address} bytes before its start"


@dataclasses.dataclass(frozen=True)
class View:
    """What one argument covers of an allocation. Shape and stride count elements, offset and itemsize bytes."""

    label: str
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    itemsize: int

    def byte_mask(self, nbytes: int) -> np.ndarray:
        """Which of the allocation's `nbytes` bytes belong to an element of the view: bool (nbytes,)."""
        mask = np.zeros(nbytes, dtype=bool)
        if math.prod(self.shape) == 0:
            return mask
        offsets = np.full((1,) * (len(self.shape) + 1), self.offset, dtype=np.int64)
        for axis, (extent, stride) in enumerate(zip(self.shape, self.stride, strict=True)):
            steps = np.arange(extent, dtype=np.int64) * (stride * self.itemsize)
            offsets = offsets + steps.reshape([-1 if i == axis else 1 for i in range(len(self.shape) + 1)])
        mask[(offsets + np.arange(self.itemsize)).reshape(-1)] = True
        return mask

    def index_of(self, offset: int) -> tuple[int, ...] | None:
        """Index of the element that holds the allocation's byte `offset`, or None where no element does."""
        rest = offset - self.offset
        index = [0] * len(self.shape)
        for axis in sorted(range(len(self.shape)), key=lambda i: -abs(self.stride[i])):
            step = self.stride[axis] * self.itemsize
            if step <= 0:
                continue
            index[axis] = min(max(rest // step, 0), self.shape[axis] - 1)
            rest -= index[axis] * step
        inside = math.prod(self.shape) > 0 and 0 <= rest < self.itemsize
        return tuple(index) if inside else None


@dataclasses.dataclass(frozen=True, eq=False)
class Allocation:
    """One block of global memory: the whole storage behind one or more tensor arguments.

    `base` is the address of its first byte, `nbytes` its size, `data` a writable uint8 array over the memory itself.
    """

    label: str
    base: int
    nbytes: int
    data: np.ndarray
    views: tuple[View, ...]

    def viewed(self) -> np.ndarray:
        """bool (nbytes,): bytes that some argument's view covers; the rest is padding between or around views."""
        mask = np.zeros(self.nbytes, dtype=bool)
        for view in self.views:
            mask |= view.byte_mask(self.nbytes)
        return mask

    def describe(self, offset: int) -> str:
        """Name the byte `offset`: `mA[3, 17]`, or that it lies outside every view."""
        for view in self.views:
            index = view.index_of(offset)
            if index is not None:
                return f"{view.label}[{', '.join(map(str, index))}]"
        return f"{self.label} storage byte {offset}, outside the view"


@dataclasses.dataclass(frozen=True, eq=False)
class Launch:
    """One kernel launch as the host code asked for it. Dimensions are (x, y, z), sizes bytes."""

    kernel: str
    ptx: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int]
    smem_bytes: int
    params: tuple[bytes, ...]
    stream: int
    cooperative: bool
    programmatic: bool
    allocations: tuple[Allocation, ...]
    index: int


class Memory:
    """Global memory of a launch: byte views by address over the allocations.

    Reads and writes go to the tensors themselves. Raises `OutOfBounds` outside every allocation.
    """

    def __init__(self, allocations: Sequence[Allocation]):
        self.allocations = tuple(sorted(allocations, key=lambda a: a.base))
        self._bases = np.array([a.base for a in self.allocations], dtype=np.uint64)
        self._ends = np.array([a.base + a.nbytes for a in self.allocations], dtype=np.uint64)

    def find(self, address: int, nbytes: int = 1) -> Allocation:
        """The allocation that holds all of [address, address + nbytes)."""
        nearest = None
        i = int(np.searchsorted(self._bases, address, side="right")) - 1
        if i >= 0:
            allocation = self.allocations[i]
            if address + nbytes <= allocation.base + allocation.nbytes:
                return allocation
            nearest = allocation
        following = self.allocations[i + 1] if i + 1 < len(self.allocations) else None
        if nearest is None or (
            following is not None and following.base - address < address - (nearest.base + nearest.nbytes)
        ):
            nearest = following
        raise OutOfBounds(address, nbytes, nearest)

    def view(self, address: int, nbytes: int) -> np.ndarray:
        """uint8 (nbytes,) over the bytes at `address`; writing to it writes the tensor."""
        allocation = self.find(address, nbytes)
        start = address - allocation.base
        return allocation.data[start : start + nbytes]


# --- arguments -------------------------------------------------------------------------------------------------


class _Operands:
    """Turns the caller's arguments into the DSL's, and remembers the memory behind them."""

    def __init__(self) -> None:
        self.ranges: list[tuple[int, int, View]] = []  # storage base, storage bytes, view (offset from base)
        self.keep: list[Any] = []
        self._flipped: list[ctypes.Array] = []

    def convert(self, value: Any, where: str, constexpr: bool = False) -> Any:
        """The DSL argument for `value`; `where` names it in labels and errors."""
        if constexpr or value is None or isinstance(value, (bool, int, float, type)):
            return value
        kind = _kind(value)
        if kind == "torch":
            return self._torch(value, where)
        if kind == "numpy":
            import torch

            if not value.flags.writeable:
                raise TypeError(f"argument {where}: a read-only NumPy array, accepted are writable ones")
            return self._torch(torch.from_numpy(value), where)
        if kind == "tensor":
            self._cute_tensor(value, where)
            return value
        if kind == "fake_tensor":
            raise TypeError(
                f"argument {where}: a fake tensor has no memory; pass a CPU tensor, or compile with "
                "`Program.compile` and run with real ones"
            )
        if kind == "stream":
            return _cuda_stream()
        if isinstance(value, tuple):
            items = [self.convert(item, f"{where}[{i}]") for i, item in enumerate(value)]
            return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
        if isinstance(value, list):
            return [self.convert(item, f"{where}[{i}]") for i, item in enumerate(value)]
        if dataclasses.is_dataclass(value):
            changes = {
                field.name: self.convert(getattr(value, field.name), f"{where}.{field.name}")
                for field in dataclasses.fields(value)
                if field.init
            }
            if all(changes[name] is getattr(value, name) for name in changes):
                return value
            return dataclasses.replace(value, **changes)
        if hasattr(value, "__c_pointers__") or hasattr(value, "__get_mlir_types__"):
            for name, item in vars(value).items() if hasattr(value, "__dict__") else ():
                if _kind(item) == "tensor":
                    self._cute_tensor(item, f"{where}.{name}")
            return value
        from cutlass.base_dsl.runtime.jit_arg_adapters import JitArgAdapterRegistry

        with JitArgAdapterRegistry.using_scope(JitArgAdapterRegistry.CUDA_DIALECT_SCOPE):
            if JitArgAdapterRegistry.get_registered_adapter(value) is not None:
                return value
        raise TypeError(
            f"argument {where}: {type(value).__module__}.{type(value).__qualname__} is not supported; accepted are CPU "
            "torch tensors, CuTe tensors over CPU memory, CuTe pointers, Python and cutlass scalars, streams, None, "
            "tuples, lists and dataclasses of these, and anything where the parameter is a Constexpr"
        )

    def _torch(self, tensor: Any, where: str) -> Any:
        import torch

        if tensor.device.type != "cpu":
            raise TypeError(f"argument {where}: a tensor on {tensor.device}, accepted are CPU tensors")
        if tensor.layout != torch.strided or tensor.is_conj() or tensor.is_neg():
            raise TypeError(
                f"argument {where}: layout {tensor.layout}, accepted are dense strided tensors, neither conj nor neg"
            )
        dtypes = _cute_dtypes()
        if tensor.dtype not in dtypes:
            accepted = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
            raise TypeError(f"argument {where}: dtype {tensor.dtype}, accepted are {accepted}")
        from cutlass.cute.runtime import from_dlpack

        plain = tensor.detach()
        narrow = tensor.dtype.itemsize == 1
        align = max(tensor.itemsize, min(16, _alignment(tensor.data_ptr())))
        cute_tensor = from_dlpack(plain.view(torch.uint8) if narrow else plain, assumed_align=align)
        if narrow:
            cute_tensor.element_type = dtypes[tensor.dtype]
        if tensor.dim():
            cute_tensor.mark_layout_dynamic()
        self._as_device(cute_tensor)
        storage = tensor.untyped_storage()
        view = View(
            where,
            tensor.data_ptr() - storage.data_ptr(),
            tuple(tensor.shape),
            tuple(tensor.stride()),
            tensor.itemsize,
        )
        self.ranges.append((storage.data_ptr(), storage.nbytes(), view))
        self.keep += [tensor, cute_tensor]
        return cute_tensor

    def _cute_tensor(self, tensor: Any, where: str) -> None:
        self._as_device(tensor)
        shape = tuple(tensor.shape)
        stride = tuple(tensor.stride)
        bits = tensor.element_type.width
        if bits % 8:
            raise TypeError(f"argument {where}: elements of {bits} bits, accepted are whole bytes")
        itemsize = bits // 8
        empty = math.prod(shape) == 0
        reach = 0 if empty else sum((n - 1) * s for n, s in zip(shape, stride, strict=True)) + 1
        self.ranges.append((tensor.data_ptr, reach * itemsize, View(where, 0, shape, stride, itemsize)))
        self.keep.append(tensor)

    def _as_device(self, tensor: Any) -> None:
        """Describe a CuTe tensor over CPU memory as device memory until `restore` (DLPack's `device_type`)."""
        name = _capsule_name(tensor._dlpack_data)
        address = _capsule_pointer(tensor._dlpack_data, name)
        # DLManagedTensorVersioned starts with version, manager_ctx, deleter and flags; DLManagedTensor does not.
        address += 32 if b"versioned" in name else 0
        device = (ctypes.c_int32 * 1).from_address(address + 8)
        if device[0] == _DL_CPU:
            device[0] = _DL_CUDA
            self._flipped.append(device)

    def restore(self) -> None:
        for device in self._flipped:
            device[0] = _DL_CPU
        self._flipped.clear()

    def allocations(self, extra: Sequence[tuple[str, Any]]) -> tuple[Allocation, ...]:
        """One `Allocation` per storage: overlapping ranges are one."""
        ranges = list(self.ranges)
        for label, tensor in extra:
            storage = tensor.untyped_storage()
            offset = tensor.data_ptr() - storage.data_ptr()
            view = View(label, offset, tuple(tensor.shape), tuple(tensor.stride()), tensor.itemsize)
            ranges.append((storage.data_ptr(), storage.nbytes(), view))
            self.keep.append(tensor)
        groups: list[tuple[int, int, list[tuple[int, View]]]] = []
        for base, nbytes, view in sorted((r for r in ranges if r[1] > 0), key=lambda r: r[:2]):
            if groups and base < groups[-1][1]:
                start, end, members = groups[-1]
                groups[-1] = (start, max(end, base + nbytes), [*members, (base, view)])
            else:
                groups.append((base, base + nbytes, [(base, view)]))
        result = []
        for start, end, members in groups:
            views = tuple(dataclasses.replace(view, offset=view.offset + base - start) for base, view in members)
            data = np.ctypeslib.as_array((ctypes.c_uint8 * (end - start)).from_address(start))
            label = "+".join(dict.fromkeys(view.label for view in views))
            result.append(Allocation(label, start, end - start, data, views))
        return tuple(result)


def _kind(value: Any) -> str | None:
    """Which family of argument `value` is, by its real class (the DSL's runtime tensors disguise theirs)."""
    names = {f"{base.__module__}.{base.__qualname__}" for base in type(value).__mro__}
    if "torch.Tensor" in names:
        return "torch"
    if "numpy.ndarray" in names:
        return "numpy"
    if "cutlass.cute.runtime._FakeTensor" in names:
        return "fake_tensor"
    if "cutlass.cute.runtime._Tensor" in names:
        return "tensor"
    streams = {
        "cutlass.runtime._FakeStream",
        "cuda.bindings.driver.CUstream",
        "cuda.bindings.runtime.cudaStream_t",
        "cuda.bindings.cydriver.CUstream",
        "torch.cuda.streams.Stream",
    }
    return "stream" if names & streams else None


def _alignment(address: int) -> int:
    """Largest power of two that divides `address` (bytes)."""
    return address & -address if address else 1 << 30


@functools.cache
def _cute_dtypes() -> dict[Any, Any]:
    import cutlass
    import torch

    return {
        torch.float16: cutlass.Float16,
        torch.bfloat16: cutlass.BFloat16,
        torch.float32: cutlass.Float32,
        torch.float64: cutlass.Float64,
        torch.float8_e4m3fn: cutlass.Float8E4M3FN,
        torch.float8_e5m2: cutlass.Float8E5M2,
        torch.int8: cutlass.Int8,
        torch.uint8: cutlass.Uint8,
        torch.int16: cutlass.Int16,
        torch.uint16: cutlass.Uint16,
        torch.int32: cutlass.Int32,
        torch.uint32: cutlass.Uint32,
        torch.int64: cutlass.Int64,
        torch.uint64: cutlass.Uint64,
        torch.bool: cutlass.Boolean,
    }


def _capsule_name(capsule: Any) -> bytes:
    get = ctypes.pythonapi.PyCapsule_GetName
    get.restype, get.argtypes = ctypes.c_char_p, [ctypes.py_object]
    return get(capsule)


def _capsule_pointer(capsule: Any, name: bytes) -> int:
    get = ctypes.pythonapi.PyCapsule_GetPointer
    get.restype, get.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    return get(capsule, name)


def _cuda_stream() -> Any:
    import cuda.bindings.driver as driver

    return driver.CUstream(0)


def stream() -> Any:
    """A placeholder for a CUDA stream argument; the emulator runs launches in order, whatever the stream."""
    from cutlass.cute.runtime import make_fake_stream

    return make_fake_stream()


# --- PTX signatures --------------------------------------------------------------------------------------------

_ENTRY = re.compile(r"\.entry\s+([\w$.]+)\s*\((.*?)\)(.*?)\{", re.S)
_PARAM_BYTES = re.compile(r"\.param\b[^\[\]]*?\.b8\s+[\w$.]+\s*\[\s*(\d+)\s*\]\s*$", re.S)
_PARAM_SCALAR = re.compile(r"\.param\s+\.[a-z]+(\d+)\b", re.S)
_STATIC_SHARED = re.compile(r"^\s*\.shared\s+\.align\s+\d+\s+\.b8\s+[\w$.]+\s*\[\s*(\d+)\s*\]", re.M)


@dataclasses.dataclass(frozen=True)
class KernelSignature:
    """What a PTX `.entry` declares: parameter sizes in bytes, and the block and cluster it insists on."""

    name: str
    param_bytes: tuple[int, ...]
    reqntid: tuple[int, int, int] | None
    maxntid: tuple[int, int, int] | None
    cluster: tuple[int, int, int] | None


def kernel_signatures(ptx: str) -> dict[str, KernelSignature]:
    """The `.entry` functions of a PTX module by name. Raises `HostError` for a parameter it cannot size."""
    result = {}
    for name, params, directives in _ENTRY.findall(ptx):
        sizes = []
        for param in filter(None, (p.strip() for p in params.split(","))):
            by_bytes, scalar = _PARAM_BYTES.search(param), _PARAM_SCALAR.match(param)
            if by_bytes:
                sizes.append(int(by_bytes[1]))
            elif scalar:
                sizes.append(int(scalar[1]) // 8)
            else:
                raise HostError(f"kernel {name}: the size of parameter {param!r} is not understood")
        result[name] = KernelSignature(
            name,
            tuple(sizes),
            _dims(directives, "reqntid"),
            _dims(directives, "maxntid"),
            _dims(directives, "reqnctapercluster"),
        )
    return result


def _dims(directives: str, name: str) -> tuple[int, int, int] | None:
    match = re.search(rf"\.{name}\s+(\d+)(?:\s*,\s*(\d+))?(?:\s*,\s*(\d+))?", directives)
    return tuple(int(d or 1) for d in match.groups()) if match else None


# --- the CUDA runtime, as far as host code uses it -------------------------------------------------------------


class _Session:
    """One run of one program: what the bound CUDA runtime functions read and fill in."""

    def __init__(
        self,
        signatures: dict[str, KernelSignature],
        ptx: str,
        allocations: tuple[Allocation, ...],
        on_launch: Callable[[Launch], Any] | None,
    ) -> None:
        self.signatures = signatures
        self.ptx = ptx
        self.allocations = allocations
        self.on_launch = on_launch
        self.kernels: dict[int, str] = {}
        self.launches: list[Launch] = []
        self.error: BaseException | None = None

    def launch(
        self,
        handle: int,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        smem_bytes: int,
        stream_handle: int,
        attributes: dict[int, bytes],
        args: int,
    ) -> None:
        if handle not in self.kernels:
            raise HostError(f"the host code launched an unknown kernel handle {handle:#x}")
        name = self.kernels[handle]
        signature = self.signatures[name]
        params = []
        for i, nbytes in enumerate(signature.param_bytes):
            pointer = ctypes.c_uint64.from_address(args + 8 * i).value
            params.append(ctypes.string_at(pointer, nbytes))
        cluster = (1, 1, 1)
        if _ATTRIBUTE_CLUSTER in attributes:
            cluster = struct.unpack_from("<3I", attributes[_ATTRIBUTE_CLUSTER])
        elif signature.cluster:
            cluster = signature.cluster
        launch = Launch(
            kernel=name,
            ptx=self.ptx,
            grid=grid,
            block=block,
            cluster=cluster,
            smem_bytes=smem_bytes,
            params=tuple(params),
            stream=stream_handle,
            cooperative=any(attributes.get(_ATTRIBUTE_COOPERATIVE, b"\0")[:4]),
            programmatic=any(attributes.get(_ATTRIBUTE_PROGRAMMATIC, b"\0")[:4]),
            allocations=self.allocations,
            index=len(self.launches),
        )
        _check_limits(launch, signature)
        self.launches.append(launch)
        if self.on_launch is not None:
            self.on_launch(launch)


# cudaLaunchAttributeID (CUDA runtime API)
_ATTRIBUTE_COOPERATIVE = 2
_ATTRIBUTE_CLUSTER = 4
_ATTRIBUTE_PROGRAMMATIC = 6
_ATTRIBUTE_BYTES = 72
_CONFIG = struct.Struct("<3I3IQQQI")  # cudaLaunchConfig_t: grid, block, dynamic smem, stream, attributes, count


def _check_limits(launch: Launch, signature: KernelSignature) -> None:
    """Refuse what the CUDA runtime refuses on compute capability 9.0."""
    who = f"launch of {launch.kernel}"
    threads = math.prod(launch.block)
    if not 1 <= threads <= MAX_THREADS_PER_BLOCK or any(
        not 1 <= d <= m for d, m in zip(launch.block, MAX_BLOCK, strict=True)
    ):
        raise LaunchError(f"{who}: block {launch.block}, at most {MAX_BLOCK} and {MAX_THREADS_PER_BLOCK} threads")
    if signature.reqntid is not None and launch.block != signature.reqntid:
        raise LaunchError(f"{who}: block {launch.block}, the kernel was compiled for {signature.reqntid}")
    if signature.maxntid is not None and threads > math.prod(signature.maxntid):
        raise LaunchError(f"{who}: {threads} threads, the kernel was compiled for {math.prod(signature.maxntid)}")
    if any(not 1 <= d <= m for d, m in zip(launch.grid, MAX_GRID, strict=True)):
        raise LaunchError(f"{who}: grid {launch.grid}, each dimension is from 1 to {MAX_GRID}")
    if not 1 <= math.prod(launch.cluster) <= MAX_CLUSTER:
        raise LaunchError(f"{who}: cluster {launch.cluster}, at most {MAX_CLUSTER} CTAs")
    if any(g % c for g, c in zip(launch.grid, launch.cluster, strict=True)):
        raise LaunchError(f"{who}: grid {launch.grid} is not a multiple of cluster {launch.cluster}")
    limit = MAX_SHARED_BYTES - sum(int(size) for size in _STATIC_SHARED.findall(launch.ptx))
    if launch.smem_bytes > limit:
        raise LaunchError(f"{who}: {launch.smem_bytes} bytes of dynamic shared memory, at most {limit}")


_active = threading.local()


def _session() -> _Session:
    return _active.session


def _library_load_data(library: int, *_rest: int) -> int:
    ctypes.c_uint64.from_address(library).value = 1
    return _CUDA_SUCCESS


def _library_get_kernel(kernel: int, _library: int, name: int) -> int:
    session = _session()
    symbol = ctypes.string_at(name).decode()
    if symbol not in session.signatures:
        raise HostError(f"the host code asks for kernel {symbol}, the PTX has {', '.join(session.signatures)}")
    handle = 0x1000 + 16 * len(session.kernels)
    session.kernels[handle] = symbol
    ctypes.c_uint64.from_address(kernel).value = handle
    return _CUDA_SUCCESS


def _kernel_get_attribute(value: int, attribute: int, handle: int, _device: int) -> int:
    if attribute != 1:  # CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, static shared memory
        raise HostError(f"the host code asks for function attribute {attribute}, known is 1 (static shared memory)")
    session = _session()
    static = sum(int(size) for size in _STATIC_SHARED.findall(session.ptx))
    ctypes.c_int32.from_address(value).value = static
    return _CUDA_SUCCESS


def _set_attribute(*_args: int) -> int:
    return _CUDA_SUCCESS


def _device_get_attribute(value: int, attribute: int, _device: int) -> int:
    if attribute not in DEVICE_ATTRIBUTES:
        raise HostError(f"the host code asks for device attribute {attribute}, which the emulator does not define")
    ctypes.c_int32.from_address(value).value = DEVICE_ATTRIBUTES[attribute]
    return _CUDA_SUCCESS


def _get_device(device: int) -> int:
    ctypes.c_int32.from_address(device).value = 0
    return _CUDA_SUCCESS


def _get_device_count(count: int) -> int:
    ctypes.c_int32.from_address(count).value = 1
    return _CUDA_SUCCESS


def _set_device(_device: int) -> int:
    return _CUDA_SUCCESS


def _launch_kernel_ex(config: int, kernel: int, args: int) -> int:
    fields = _CONFIG.unpack(ctypes.string_at(config, _CONFIG.size))
    attributes = {}
    for i in range(fields[9]):
        raw = ctypes.string_at(fields[8] + i * _ATTRIBUTE_BYTES, _ATTRIBUTE_BYTES)
        attributes[int.from_bytes(raw[:4], "little")] = raw[8:]
    _session().launch(kernel, fields[0:3], fields[3:6], fields[6], fields[7] or 0, attributes, args)
    return _CUDA_SUCCESS


def _launch_kernel(
    kernel: int, gx: int, gy: int, gz: int, bx: int, by: int, bz: int, stream_handle: int, smem: int, args: int
) -> int:
    _session().launch(kernel, (gx, gy, gz), (bx, by, bz), smem, stream_handle or 0, {}, args)
    return _CUDA_SUCCESS


_P, _I, _L = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64
_RUNTIME: dict[str, tuple[Callable[..., int], tuple[Any, ...]]] = {
    "_cudaLibraryLoadData": (_library_load_data, (_P, _P, _P, _P, _I, _P, _P, _I)),
    "_cudaLibraryGetKernel": (_library_get_kernel, (_P, _P, _P)),
    "_cuKernelGetAttribute": (_kernel_get_attribute, (_P, _I, _P, _I)),
    "_cudaKernelSetAttributeForDevice": (_set_attribute, (_P, _I, _I, _I)),
    "_cudaFuncSetAttribute": (_set_attribute, (_P, _I, _I)),
    "_cudaDeviceGetAttribute": (_device_get_attribute, (_P, _I, _I)),
    "_cudaGetDevice": (_get_device, (_P,)),
    "_cudaGetDeviceCount": (_get_device_count, (_P,)),
    "_cudaSetDevice": (_set_device, (_I,)),
    "_cudaLaunchKernelEx": (_launch_kernel_ex, (_P, _P, _P)),
    "_cudaLaunchKernel": (_launch_kernel, (_P, _I, _I, _I, _I, _I, _I, _P, _L, _P)),
}


def _guarded(function: Callable[..., int]) -> Callable[..., int]:
    """Keep an exception from being lost in C code: remember it, and return a CUDA error in its place."""

    @functools.wraps(function)
    def call(*args: int) -> int:
        session = _session()
        if session.error is not None:
            return _CUDA_ERROR_UNKNOWN
        try:
            return function(*args)
        except BaseException as error:
            session.error = error
            return _CUDA_ERROR_UNKNOWN

    return call


@functools.cache
def _bind_runtime() -> dict[str, Any]:
    """Bind the CUDA runtime names for objects that llvmlite loads, once in a process."""
    import llvmlite.binding as llvm

    with contextlib.suppress(RuntimeError):  # llvmlite 0.45 and later initialise themselves and say so
        llvm.initialize()
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    bound = {}
    for name, (function, types) in _RUNTIME.items():
        callback = ctypes.CFUNCTYPE(ctypes.c_int32, *types)(_guarded(function))
        llvm.add_symbol(name, ctypes.cast(callback, ctypes.c_void_p).value)
        bound[name] = callback
    return bound


def _undefined_symbols(elf: bytes) -> list[str]:
    """Names an ELF64 relocatable object needs from outside. MCJIT ends the process on one it cannot find."""
    if elf[:6] != b"\x7fELF\x02\x01":
        raise HostError("the host object is not a little-endian ELF64 object")
    (section_table,) = struct.unpack_from("<Q", elf, 40)
    entry_bytes, count = struct.unpack_from("<HH", elf, 58)
    sections = [struct.unpack_from("<IIQQQQIIQQ", elf, section_table + i * entry_bytes) for i in range(count)]
    names = []
    for _, kind, _, _, offset, size, link, _, _, step in sections:
        if kind != 2:  # SHT_SYMTAB
            continue
        strings = sections[link][4]
        for at in range(offset + step, offset + size, step):
            name, _, _, section = struct.unpack_from("<IBBH", elf, at)
            if section == 0 and name:
                names.append(elf[strings + name : elf.index(b"\0", strings + name)].decode())
    return names


def _process_has(name: str) -> bool:
    try:
        getattr(ctypes.CDLL(None), name)
    except AttributeError:
        return False
    return True


# --- programs --------------------------------------------------------------------------------------------------

_ENTRY_SYMBOL = "emulator_entry"
_LOADED = itertools.count()


class Program:
    """A compiled host function: run it any number of times, with any operands its compiled types accept."""

    def __init__(self, host_object: bytes, ptx: str, execution_args: Any, name: str) -> None:
        self.host_object = host_object
        self.ptx = ptx
        self.name = name
        self.signatures = kernel_signatures(ptx)
        self._execution_args = execution_args
        self._engine: Any = None
        self._lock = threading.Lock()

    @property
    def kernels(self) -> tuple[str, ...]:
        """Names of the kernels in the PTX."""
        return tuple(self.signatures)

    @classmethod
    def compile(cls, host_fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Program:
        """Compile a `@cute.jit` function, method or callable object for the given arguments.

        A torch or NumPy argument becomes a CuTe tensor with a dynamic layout, as the DSL itself converts it, with
        up to 16 bytes of alignment where its address has it. A CuTe tensor keeps the caller's marks.

        Raises TypeError for an argument that has no place in a kernel, HostError where the DSL is not the
        supported release, and the DSL's own errors for what it refuses.
        """
        _check_dsl()
        import cutlass.cute as cute
        from cutlass.base_dsl.compiler import DumpDir

        operands = _Operands()
        with tempfile.TemporaryDirectory(prefix="cute_matmul_") as scratch:
            options = (
                cute.GPUArch(ARCH),
                cute.KeepPTX(True),
                cute.GenerateLineInfo(True),
                cute.EnableTVMFFI(False),
                DumpDir(scratch),
            )
            try:
                converted, named = _convert_call(operands, host_fn, args, kwargs)
                compiled = cute.compile[options](host_fn, *converted, no_jit_engine=True, **named)
            finally:
                operands.restore()
            return cls.from_compiled(compiled)

    @classmethod
    def from_compiled(cls, compiled: Any) -> Program:
        """A program from what `cute.compile[cute.KeepPTX(True)]` returned (compiled for sm_90a)."""
        _check_dsl()
        ptx = compiled.__ptx__
        if not ptx:
            raise HostError("the compiled function kept no PTX; compile it with cute.compile[cute.KeepPTX(True)]")
        host_object = _host_object(compiled.ir_module, compiled.function_name)
        return cls(host_object, ptx, compiled.execution_args, compiled.function_name)

    def run(
        self,
        *args: Any,
        on_launch: Callable[[Launch], Any] | None = None,
        memory: Sequence[tuple[str, Any]] = (),
        **kwargs: Any,
    ) -> tuple[Launch, ...]:
        """Execute the host code on `args` and hand each launch to `on_launch` as it happens.

        args, kwargs: as the host function takes them, compile-time constants included.
        memory: (label, CPU torch tensor) pairs that kernels reach by pointer only.

        Returns the launches in order. Raises what `on_launch` raised, LaunchError for a launch that the CUDA
        runtime would refuse, HostError where the host code returns an error of its own.
        """
        operands = _Operands()
        try:
            converted, named = _convert_call(operands, self._execution_args.original_signature, args, kwargs)
            runtime = self._execution_args.get_rectified_args_from_original_args(converted, named)
            pointers, adapted = self._execution_args.generate_execution_args(runtime, {})
            operands.keep.append(adapted)
        finally:
            operands.restore()
        session = _Session(self.signatures, self.ptx, operands.allocations(memory), on_launch)
        packed = (ctypes.c_void_p * max(len(pointers), 1))(
            *(p.value if isinstance(p, ctypes.c_void_p) else p for p in pointers)
        )
        self._call(session, packed)
        return tuple(session.launches)

    def _call(self, session: _Session, packed: ctypes.Array) -> None:
        with self._lock:
            engine = self._load()
        outer = getattr(_active, "session", None)
        _active.session = session
        try:
            self._load_kernels(engine, session)
            status = self._invoke(engine, _ENTRY_SYMBOL, ctypes.addressof(packed))
        finally:
            _active.session = outer
        if session.error is not None:
            raise session.error
        if status != _CUDA_SUCCESS:
            raise HostError(f"the host code of {self.name} returned CUDA error {status}")

    def _load(self) -> Any:
        if self._engine is None:
            import llvmlite.binding as llvm

            _bind_runtime()
            unknown = [
                name
                for name in _undefined_symbols(self.host_object)
                if name not in _RUNTIME and name != "_GLOBAL_OFFSET_TABLE_" and not _process_has(name)
            ]
            if unknown:
                raise HostError(
                    f"the host code of {self.name} calls {', '.join(unknown)}, which the emulator does not provide"
                )
            machine = llvm.Target.from_default_triple().create_target_machine()
            engine = llvm.create_mcjit_compiler(llvm.parse_assembly(f'source_filename = "{next(_LOADED)}"'), machine)
            engine.add_object_file(llvm.ObjectFileRef.from_data(self.host_object))
            engine.finalize_object()
            self._engine = engine
        return self._engine

    def _load_kernels(self, engine: Any, session: _Session) -> None:
        if not engine.get_function_address("cuda_num_binaries"):
            return
        libraries = (ctypes.c_uint64 * max(self._invoke(engine, "cuda_num_binaries"), 1))()
        for name, extra in (("cuda_init", ()), ("cuda_load_to_device", (0,))):
            status = self._invoke(engine, name, ctypes.addressof(libraries), *extra)
            if session.error is not None:
                raise session.error
            if status != _CUDA_SUCCESS:
                raise HostError(f"{name} of {self.name} returned CUDA error {status}")

    def _invoke(self, engine: Any, symbol: str, *args: int) -> int:
        address = engine.get_function_address(symbol)
        if not address:
            raise HostError(f"the host object of {self.name} does not define {symbol}")
        types = [ctypes.c_void_p, ctypes.c_int32][: len(args)]
        return ctypes.CFUNCTYPE(ctypes.c_int32, *types)(address)(*args)


def compile_host(host_fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Program:
    """`Program.compile`: compile a `@cute.jit` host function for these arguments, with no GPU."""
    return Program.compile(host_fn, *args, **kwargs)


@functools.cache
def _check_dsl() -> None:
    try:
        version = importlib.metadata.version("nvidia-cutlass-dsl")
    except importlib.metadata.PackageNotFoundError as error:
        raise HostError(f"nvidia-cutlass-dsl is not installed; the emulator needs {SUPPORTED_DSL}") from error
    if version != SUPPORTED_DSL:
        raise HostError(f"nvidia-cutlass-dsl {version} is installed; the emulator needs {SUPPORTED_DSL}")


def _convert_call(
    operands: _Operands, host: Callable[..., Any] | inspect.Signature, args: tuple, kwargs: dict
) -> tuple[list[Any], dict[str, Any]]:
    """Convert positional and keyword arguments, labelled by parameter name and spared where Constexpr."""
    from cutlass.base_dsl.runtime.jit_arg_adapters import is_arg_annotation_constexpr

    signature = host if isinstance(host, inspect.Signature) else _signature(host)
    parameters = [p for name, p in signature.parameters.items() if name != "self"]
    by_name = {p.name: p for p in parameters}

    def constexpr(parameter: inspect.Parameter | None) -> bool:
        return parameter is not None and is_arg_annotation_constexpr(parameter.annotation, parameter.name, -1, None)

    converted = []
    for i, value in enumerate(args):
        parameter = parameters[i] if i < len(parameters) else None
        variadic = parameter is None or parameter.kind is inspect.Parameter.VAR_POSITIONAL
        label = f"args[{i}]" if variadic else parameter.name
        converted.append(operands.convert(value, label, constexpr(parameter)))
    named = {name: operands.convert(value, name, constexpr(by_name.get(name))) for name, value in kwargs.items()}
    return converted, named


def _signature(host_fn: Callable[..., Any]) -> inspect.Signature:
    target = host_fn if inspect.isroutine(host_fn) else type(host_fn).__call__
    try:
        return inspect.signature(target, eval_str=True)
    except (NameError, TypeError, SyntaxError):  # annotations that only the DSL's own preprocessor can resolve
        return inspect.signature(target)


def _host_object(ir_module: Any, function_name: str) -> bytes:
    """Object code of the host function plus `emulator_entry(void** args)`, which unpacks one pointer per argument."""
    from cutlass._mlir import ir
    from cutlass._mlir._mlir_libs._cutlass_ir import _aot_support

    with ir.Context():
        module = ir.Module.parse(str(ir_module))
        inputs = next(
            [str(kind) for kind in op.attributes["function_type"].value.inputs]
            for op in module.body.operations
            if op.operation.name == "llvm.func" and op.attributes["sym_name"].value == function_name
        )
        body = []
        for i, kind in enumerate(inputs):
            body += [
                f"%p{i} = llvm.getelementptr %args[{i}] : (!llvm.ptr) -> !llvm.ptr, !llvm.ptr",
                f"%q{i} = llvm.load %p{i} : !llvm.ptr -> !llvm.ptr",
                f"%v{i} = llvm.load %q{i} : !llvm.ptr -> {kind}",
            ]
        values = ", ".join(f"%v{i}" for i in range(len(inputs)))
        body.append(f"%r = llvm.call @{function_name}({values}) : ({', '.join(inputs)}) -> i32")
        entry = "llvm.func @{}(%args: !llvm.ptr) -> i32 {{\n{}\nllvm.return %r : i32\n}}\n"
        text = str(module).rstrip()
        wrapped = text[: text.rindex("}")] + entry.format(_ENTRY_SYMBOL, "\n".join(body)) + "}\n"
        return _aot_support.export_module_to_bytes(ir.Module.parse(wrapped), format="o", opt_level=3, enable_pic=True)
