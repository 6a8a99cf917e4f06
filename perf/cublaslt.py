"""cuBLASLt through ctypes: all algorithms its heuristic proposes for a matmul, to choose from by measurement.

torch takes the first proposal. The library is the one torch brings; names and numbers of the enumerations are those
of the cuBLAS documentation (cublasLtMatmulDescAttributes_t, cublasLtMatmulPreferenceAttributes_t, cudaDataType_t).
"""

from __future__ import annotations

import ctypes
from typing import Any

from perf.device import Layout
from perf.suites import Shape

PROPOSALS = 16
WORKSPACE_BYTES = 32 * 2**20

_COMPUTE_32F = 68
_CUDA_R_32F = 0
_CUDA_R = {"float16": 2, "bfloat16": 14}
_DESC_TRANSA, _DESC_TRANSB = 3, 4
_PREF_MAX_WORKSPACE_BYTES = 1
_OP_N, _OP_T = 0, 1


class Unavailable(Exception):
    """The library cannot be used here."""


class _Heuristic(ctypes.Structure):
    _fields_ = (
        ("algo", ctypes.c_uint64 * 8),
        ("workspace", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    )


def _library() -> ctypes.CDLL:
    import torch

    major = (torch.version.cuda or "").split(".")[0]
    for name in (f"libcublasLt.so.{major}", "libcublasLt.so"):
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise Unavailable(f"libcublasLt of CUDA {major or '(none)'} was not found")


def _call(library: ctypes.CDLL, name: str, *arguments: Any) -> None:
    status = getattr(library, name)(*arguments)
    if status != 0:
        raise Unavailable(f"{name} returned status {status}")


class Plan:
    """The algorithms for one shape and layout; `launch(i, a, b, out)` runs the i-th.

    cuBLASLt counts columns first, so it is asked for out^T (N, M) = b^T (N, K) @ a^T (K, M).
    """

    def __init__(self, shape: Shape, layout: Layout):
        import torch

        self._torch = torch
        self._library = library = _library()
        library.cublasLtGetVersion.restype = ctypes.c_size_t
        self.version = int(library.cublasLtGetVersion())
        self._handle, self._desc = ctypes.c_void_p(), ctypes.c_void_p()
        _call(library, "cublasLtCreate", ctypes.byref(self._handle))
        _call(library, "cublasLtMatmulDescCreate", ctypes.byref(self._desc), _COMPUTE_32F, _CUDA_R_32F)
        for attribute, transposed in ((_DESC_TRANSA, layout.b_major == "k"), (_DESC_TRANSB, layout.a_major == "m")):
            value = ctypes.c_int32(_OP_T if transposed else _OP_N)
            _call(
                library,
                "cublasLtMatmulDescSetAttribute",
                self._desc,
                attribute,
                ctypes.byref(value),
                ctypes.c_size_t(4),
            )
        kind = _CUDA_R[layout.dtype]
        m, n, k = shape.mnk
        b_shape = (k, n) if layout.b_major == "k" else (n, k)
        a_shape = (k, m) if layout.a_major == "k" else (m, k)
        self._b, self._a, self._c = (self._matrix(kind, *size) for size in (b_shape, a_shape, (n, m)))
        preference = ctypes.c_void_p()
        _call(library, "cublasLtMatmulPreferenceCreate", ctypes.byref(preference))
        limit = ctypes.c_uint64(WORKSPACE_BYTES)
        _call(
            library,
            "cublasLtMatmulPreferenceSetAttribute",
            preference,
            _PREF_MAX_WORKSPACE_BYTES,
            ctypes.byref(limit),
            ctypes.c_size_t(8),
        )
        self._found = (_Heuristic * PROPOSALS)()
        count = ctypes.c_int()
        _call(
            library,
            "cublasLtMatmulAlgoGetHeuristic",
            self._handle,
            self._desc,
            self._b,
            self._a,
            self._c,
            self._c,
            preference,
            PROPOSALS,
            self._found,
            ctypes.byref(count),
        )
        library.cublasLtMatmulPreferenceDestroy(preference)
        self.count = count.value
        if not self.count:
            raise Unavailable("cuBLASLt proposes no algorithm for these operands")
        self._workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")
        self._one, self._zero = ctypes.c_float(1), ctypes.c_float(0)

    def _matrix(self, kind: int, rows: int, columns: int) -> ctypes.c_void_p:
        """A column-major matrix without gaps."""
        layout = ctypes.c_void_p()
        _call(
            self._library,
            "cublasLtMatrixLayoutCreate",
            ctypes.byref(layout),
            kind,
            ctypes.c_uint64(rows),
            ctypes.c_uint64(columns),
            ctypes.c_int64(rows),
        )
        return layout

    def launch(self, index: int, a: Any, b: Any, out: Any) -> None:
        """out (M, N) = a (M, K) @ b (K, N) by the index-th proposal, on the current stream."""
        _call(
            self._library,
            "cublasLtMatmul",
            self._handle,
            self._desc,
            ctypes.byref(self._one),
            ctypes.c_void_p(b.data_ptr()),
            self._b,
            ctypes.c_void_p(a.data_ptr()),
            self._a,
            ctypes.byref(self._zero),
            ctypes.c_void_p(out.data_ptr()),
            self._c,
            ctypes.c_void_p(out.data_ptr()),
            self._c,
            ctypes.byref(self._found[index]),
            ctypes.c_void_p(self._workspace.data_ptr()),
            ctypes.c_size_t(WORKSPACE_BYTES),
            ctypes.c_void_p(self._torch.cuda.current_stream().cuda_stream),
        )
