"""The arguments of a host function, and the global memory behind them.

Operands stay CPU tensors. For the trace they are described as device memory, since the address space of a tensor is
part of its CuTe type; the addresses in kernel parameters and TMA descriptors are those of the CPU storage.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

_DL_CPU = 1  # DLDeviceType (DLPack)
_DL_CUDA = 2

_described_as_device: set[int] = set()  # addresses of the DLPack device types that `Operands` changed


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


class Operands:
    """Turns the caller's arguments into the DSL's, and remembers the memory behind them.

    fakes: whether fake tensors are accepted, as they are to compile but not to run.
    """

    def __init__(self, *, fakes: bool = False) -> None:
        self.keep: list[Any] = []
        self._fakes = fakes
        self._ranges: list[tuple[int, int, View]] = []  # storage base, storage bytes, view (offset from base)
        self._device_types: list[ctypes.c_int32] = []  # of DLPack capsules over CPU memory

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
            if self._fakes:
                return value
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
        self._as_device(cute_tensor, where)
        storage = tensor.untyped_storage()
        view = View(
            where,
            tensor.data_ptr() - storage.data_ptr(),
            tuple(tensor.shape),
            tuple(tensor.stride()),
            tensor.itemsize,
        )
        self._ranges.append((storage.data_ptr(), storage.nbytes(), view))
        self.keep += [tensor, cute_tensor]
        return cute_tensor

    def _cute_tensor(self, tensor: Any, where: str) -> None:
        self._as_device(tensor, where)
        shape = tuple(tensor.shape)
        stride = tuple(tensor.stride)
        bits = tensor.element_type.width
        if bits % 8:
            raise TypeError(f"argument {where}: elements of {bits} bits, accepted are whole bytes")
        itemsize = bits // 8
        empty = math.prod(shape) == 0
        reach = 0 if empty else sum((n - 1) * s for n, s in zip(shape, stride, strict=True)) + 1
        self._ranges.append((tensor.data_ptr, reach * itemsize, View(where, 0, shape, stride, itemsize)))
        self.keep.append(tensor)

    def _as_device(self, tensor: Any, where: str) -> None:
        """Describe a CuTe tensor over CPU memory as device memory, until `restore`."""
        device_type = ctypes.c_int32.from_address(capsule_tensor(tensor._dlpack_data) + 8)
        if device_type.value == _DL_CPU:
            self._device_types.append(device_type)
            self.as_device_again()
        elif ctypes.addressof(device_type) not in _described_as_device:
            raise TypeError(
                f"argument {where}: a CuTe tensor over device memory (DLPack device type {device_type.value}), "
                "accepted are CuTe tensors over CPU memory"
            )

    def restore(self) -> None:
        """Describe the tensors as CPU memory again."""
        for device_type in self._device_types:
            device_type.value = _DL_CPU
            _described_as_device.discard(ctypes.addressof(device_type))

    def as_device_again(self) -> None:
        """Undo `restore`."""
        for device_type in self._device_types:
            device_type.value = _DL_CUDA
            _described_as_device.add(ctypes.addressof(device_type))

    def allocations(self, extra: Sequence[tuple[str, Any]]) -> tuple[Allocation, ...]:
        """One `Allocation` per storage: overlapping ranges are one."""
        ranges = list(self._ranges)
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


def capsule_tensor(capsule: Any) -> int:
    """Address of the DLTensor in a DLPack capsule."""
    name_of, pointer_of = ctypes.pythonapi.PyCapsule_GetName, ctypes.pythonapi.PyCapsule_GetPointer
    name_of.restype, name_of.argtypes = ctypes.c_char_p, [ctypes.py_object]
    pointer_of.restype, pointer_of.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    name = name_of(capsule)
    # DLManagedTensorVersioned puts version, context, deleter and flags first, DLManagedTensor the tensor.
    return pointer_of(capsule, name) + (32 if b"versioned" in name else 0)


def _cuda_stream() -> Any:
    import cuda.bindings.driver as driver

    return driver.CUstream(0)


def stream() -> Any:
    """A placeholder for a CUDA stream argument; the emulator runs launches in order, whatever the stream."""
    from cutlass.cute.runtime import make_fake_stream

    return make_fake_stream()
