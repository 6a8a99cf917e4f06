"""Every rung on one small ragged problem, as a GPU computes it: python tests/gpu_probes/ladder_outputs.py OUT.npz

The outputs are kept in tests/data and compared with the emulator's by tests/test_emulator_gpu.py.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch

M, N, K = 200, 136, 328  # ragged in each tile dimension; rows of 16-byte multiples, as V6's TMA store needs them


def operands(dtype: str) -> tuple[torch.Tensor, torch.Tensor]:
    """A (M, K) and B (K, N), standard normal from NumPy's PCG64, the same on every machine."""
    rng = np.random.Generator(np.random.PCG64(20))
    a, b = rng.standard_normal((M, K)), rng.standard_normal((K, N))
    return torch.from_numpy(a).to(getattr(torch, dtype)), torch.from_numpy(b).to(getattr(torch, dtype))


def main(path: Path) -> None:
    from cute_matmul import matmul, registry

    found = {}
    for name in registry.names():
        for dtype in registry.get(name).dtypes:
            a, b = (x.cuda() for x in operands(dtype))
            out = matmul(a, b, variant=name)
            found[f"{name}_{dtype}"] = out.cpu().view(torch.int16).numpy()
    np.savez_compressed(path, **found)
    print(f"{len(found)} outputs of ({M}, {N}, {K}) on {torch.cuda.get_device_name()} to {path}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
