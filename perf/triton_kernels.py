"""Two small Triton kernels: a persistent matmul through tensor descriptors (TMA), as a peer, and a plain read.

Importing this needs Triton.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor


@dataclass(frozen=True)
class Blocks:
    """Tile of C and of K, software pipeline depth, warps, tiles along M walked together."""

    m: int
    n: int
    k: int
    stages: int
    warps: int
    group_m: int = 8

    def __str__(self) -> str:
        return f"{self.m}x{self.n}x{self.k},stages={self.stages},warps={self.warps},group={self.group_m}"


CANDIDATES = (
    Blocks(128, 256, 64, 3, 8),
    Blocks(256, 128, 64, 3, 8),
    Blocks(128, 128, 64, 4, 4),
    Blocks(128, 128, 64, 5, 8),
)


@triton.jit
def matmul_kernel(
    a_desc,
    b_desc,
    c_desc,
    M,
    N,
    K,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    PROGRAMS: tl.constexpr,
    A_M_MAJOR: tl.constexpr,
    B_N_MAJOR: tl.constexpr,
    DTYPE: tl.constexpr,
):
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    k_tiles = tl.cdiv(K, BLOCK_K)
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, PROGRAMS, flatten=True):
        group = tile // (GROUP_M * tiles_n)
        rows = min(tiles_m - group * GROUP_M, GROUP_M)
        inside = tile % (GROUP_M * tiles_n)
        m = (group * GROUP_M + inside % rows) * BLOCK_M
        n = (inside // rows) * BLOCK_N
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for k_tile in range(k_tiles):
            k = k_tile * BLOCK_K
            a = a_desc.load([k, m]).T if A_M_MAJOR else a_desc.load([m, k])
            b = b_desc.load([k, n]) if B_N_MAJOR else b_desc.load([n, k]).T
            acc = tl.dot(a, b, acc)
        c_desc.store([m, n], acc.to(DTYPE))


def matmul(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, blocks: Blocks) -> None:
    """out (M, N) = a (M, K) @ b (K, N), fp32 accumulation; a and b in either major order, out row-major."""
    (m, k), n = a.shape, b.shape[1]
    a_m_major, b_n_major = a.stride(1) != 1, b.stride(1) == 1
    a_desc = _descriptor(a.t() if a_m_major else a, [blocks.k, blocks.m] if a_m_major else [blocks.m, blocks.k])
    b_desc = _descriptor(b if b_n_major else b.t(), [blocks.k, blocks.n] if b_n_major else [blocks.n, blocks.k])
    c_desc = _descriptor(out, [blocks.m, blocks.n])
    sms = torch.cuda.get_device_properties(a.device).multi_processor_count
    programs = min(sms, triton.cdiv(m, blocks.m) * triton.cdiv(n, blocks.n))
    matmul_kernel[(programs,)](
        a_desc,
        b_desc,
        c_desc,
        m,
        n,
        k,
        BLOCK_M=blocks.m,
        BLOCK_N=blocks.n,
        BLOCK_K=blocks.k,
        GROUP_M=blocks.group_m,
        PROGRAMS=programs,
        A_M_MAJOR=a_m_major,
        B_N_MAJOR=b_n_major,
        DTYPE={torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}[a.dtype],
        num_warps=blocks.warps,
        num_stages=blocks.stages,
    )


def _descriptor(tensor: torch.Tensor, block: list[int]) -> TensorDescriptor:
    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), block)


@triton.jit
def read_kernel(words, sums, BLOCK: tl.constexpr):
    program = tl.program_id(0)
    values = tl.load(words + program.to(tl.int64) * BLOCK + tl.arange(0, BLOCK))
    tl.store(sums + program, tl.sum(values))


_sums: dict[tuple, torch.Tensor] = {}


def read(words: torch.Tensor, block: int, warps: int) -> None:
    """Load every word of `words` once; its length must be a multiple of `block`. One word a program is written."""
    programs = words.numel() // block
    key = (words.device, programs)
    if key not in _sums:
        _sums[key] = torch.empty(programs, dtype=torch.int32, device=words.device)
    read_kernel[(programs,)](words, _sums[key], BLOCK=block, num_warps=warps)
