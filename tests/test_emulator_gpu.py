"""The whole ladder on one ragged problem: the emulator's output against an H200's, bit for bit.

The GPU's outputs were written by tests/gpu_probes/ladder_outputs.py. The truncating model of the tensor cores' sums is
the GPU's own arithmetic, so nothing may differ; the fast model is held to the stated bound.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from gpu_probes import ladder_outputs

from cute_matmul import problem, registry
from cute_matmul.launch import emulate

pytest.importorskip("llvmlite", reason="the emulator needs llvmlite")

MEASURED = np.load(Path(__file__).parent / "data" / "ladder_outputs_h200.npz")


def test_every_rung_and_type_was_measured():
    wanted = {f"{name}_{dtype}" for name in registry.names() for dtype in registry.get(name).dtypes}
    assert set(MEASURED.files) == wanted


@pytest.mark.parametrize("case", sorted(MEASURED.files))
def test_output_is_the_gpus(case):
    name, _, dtype = case.partition("_")
    a, b = ladder_outputs.operands(dtype)
    gpu = torch.from_numpy(MEASURED[case]).view(a.dtype)
    out, report = emulate(a, b, variant=name, arithmetic="truncating")
    assert report.ok, report
    differ = (out.view(torch.int16) != gpu.view(torch.int16)).sum().item()
    assert differ == 0, f"{differ} of {out.numel()} elements differ"
    assert problem.check(out, a, b, accumulator=registry.get(name).accumulator)
