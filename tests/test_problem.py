from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from cute_matmul import problem
from cute_matmul.problem import DTYPES, Check, Problem, check, dtype_name, reference

CASES = json.loads((Path(__file__).parent / "data" / "operands.json").read_text())
SHAPES = [tuple(case["mnk"]) for case in CASES["shapes"] if math.prod(case["mnk"]) <= 2**24]


def fp32_product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """What a right kernel gives: fp32 sums, rounded once."""
    return (a.float() @ b.float()).to(a.dtype)


def by_steps(a: torch.Tensor, b: torch.Tensor, step: int = 16) -> torch.Tensor:
    """Another right kernel: fp32 sums of one step after the other."""
    total = torch.zeros(a.shape[0], b.shape[1])
    for k in range(0, a.shape[1], step):
        total += a[:, k : k + step].float() @ b[k : k + step].float()
    return total.to(a.dtype)


@pytest.mark.parametrize(("text", "name"), [("fp16", "float16"), ("bf16", "bfloat16"), ("torch.float16", "float16")])
def test_dtype_names(text, name):
    assert dtype_name(text) == name


def test_refusals_name_the_argument():
    with pytest.raises(ValueError, match=r"dtype must be one of float16, bfloat16, .*got 'fp64'"):
        Problem(1, 1, 1, "fp64")
    with pytest.raises(ValueError, match="k must be an integer of at least 0, got -1"):
        Problem(1, 1, -1)
    with pytest.raises(ValueError, match=r"m must be an integer of at least 0, got 1\.0"):
        Problem(1.0, 1, 1)
    with pytest.raises(ValueError, match="a_major must be one of k, m; got 'n'"):
        Problem(1, 1, 1, a_major="n")
    with pytest.raises(ValueError, match="b_major must be one of k, n; got 'm'"):
        Problem(1, 1, 1, b_major="m")
    with pytest.raises(ValueError, match=r"got \(2, 2\), \(2, 3\), \(3, 3\)"):
        check(torch.zeros(2, 2), torch.zeros(2, 3), torch.zeros(3, 3))


@pytest.mark.parametrize("b_major", ["k", "n"])
@pytest.mark.parametrize("a_major", ["k", "m"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_operands_have_the_strides_that_were_asked_for(dtype, a_major, b_major):
    a, b = Problem(24, 40, 56, dtype, a_major, b_major).operands()
    assert (a.shape, b.shape) == ((24, 56), (56, 40))
    assert a.dtype == b.dtype == DTYPES[dtype]
    assert a.stride() == ((56, 1) if a_major == "k" else (1, 24))
    assert b.stride() == ((1, 56) if b_major == "k" else (40, 1))


def test_operands_follow_the_seed_and_are_normal():
    a, b = Problem(256, 256, 256, seed=1).operands()
    again, _ = Problem(256, 256, 256, seed=1).operands()
    other, _ = Problem(256, 256, 256, seed=2).operands()
    assert torch.equal(a, again) and not torch.equal(a, other) and not torch.equal(a, b)
    assert abs(a.double().mean()) < 0.02 and abs(a.double().std() - 1) < 0.02


def test_figures():
    p = Problem(2, 3, 5)
    assert p.flops == 60
    assert p.bytes == 2 * (10 + 15 + 6)
    assert p.output().isnan().all()


def test_reference_in_blocks_is_the_reference(monkeypatch):
    a, b = Problem(50, 30, 70).operands()
    whole = reference(a, b)
    monkeypatch.setattr(problem, "_REFERENCE_CHUNK_BYTES", 8 * 70 * 7)
    assert torch.allclose(reference(a, b), whole, rtol=1e-14, atol=0)
    assert whole.dtype == torch.float64


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mnk", SHAPES, ids=str)
def test_right_products_pass_and_poison_does_not(mnk, dtype):
    p = Problem(*mnk, dtype, b_major="n")
    a, b = p.operands()
    for product in (fp32_product, by_steps):
        verdict = check(product(a, b), a, b)
        assert verdict.ok, str(verdict)
    assert check(p.output(), a, b).ok == (mnk[0] * mnk[1] == 0)


def one_element(out, a, b):
    out[-1, -1] += 0.5 * out.abs().max()


def last_k_dropped(out, a, b):
    out.copy_(fp32_product(a[:, :-1], b[:-1]))


def last_tile_dropped(out, a, b):
    out.copy_(fp32_product(a[:, :-16], b[:-16]))


def accumulated_in_half(out, a, b):
    total = torch.zeros_like(out)
    for k in range(a.shape[1]):
        total += a[:, k : k + 1] * b[k : k + 1]
    out.copy_(total)


def two_rows_swapped(out, a, b):
    out[[0, 1]] = out[[1, 0]]


def last_column_unwritten(out, a, b):
    out[:, -1] = float("nan")


def rounded_twice(out, a, b):
    # To one bit less than the dtype has: within a few roundings, but twice too far in norm.
    bits = {torch.float16: 10, torch.bfloat16: 7}[out.dtype] - 1
    exact = reference(a, b)
    scale = torch.exp2(torch.floor(torch.log2(exact.abs())) - bits + 1)
    out.copy_(torch.round(exact / scale) * scale)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mnk", [(128, 128, 64), (128, 8, 192), (64, 256, 2048), (2, 2, 32)], ids=str)
@pytest.mark.parametrize(
    "fault",
    [
        one_element,
        last_k_dropped,
        last_tile_dropped,
        accumulated_in_half,
        two_rows_swapped,
        last_column_unwritten,
        rounded_twice,
    ],
)
def test_faults_are_caught(fault, mnk, dtype):
    a, b = Problem(*mnk, dtype).operands()
    out = fp32_product(a, b)
    fault(out, a, b)
    assert not check(out, a, b).ok


def test_long_sum_of_ones_shows_the_accumulator():
    """2049 is no fp16 number, but 2049 + 2 = 2051 sums exactly in fp32 and rounds to 2052 or 2050."""
    ones = torch.ones(4, 2051, dtype=torch.float16)
    right = torch.full((4, 4), 2051.0).half()
    assert check(right, ones, ones.t()).ok
    assert not check(torch.full((4, 4), 2048.0).half(), ones, ones.t()).ok


def test_exact_integers_allow_only_an_fp32_unit():
    a = torch.ones(4, 8, dtype=torch.float16)
    b = torch.ones(8, 4, dtype=torch.float16)
    verdict = check(a @ b, a, b)
    assert verdict.ok and verdict.max_abs == 0
    assert verdict.max_abs_bound == pytest.approx(2 * 2**-23 * 8)
    assert not check((a @ b) * (1 + 2**-10), a, b).ok


def test_cancellation_allows_another_order_of_additions():
    """x + 1 - x: exact in torch by luck of the order; another order loses part of an fp32 unit of x."""
    big = 2.0**13
    a = torch.tensor([[big, 2**-9, -big]], dtype=torch.float16)
    b = torch.tensor([[big], [1.0], [big]], dtype=torch.float16)
    lost = torch.zeros(1, 1, dtype=torch.float16)
    assert reference(a, b).item() == 2**-9
    assert check(lost, a, b).ok
    assert not check(torch.full((1, 1), 64.0).half(), a, b).ok


def poisoned(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    a, b = (x.clone() for x in Problem(16, 24, 32, str(dtype)).operands())
    a[3, 5] = float("inf")
    b[7, 2] = float("nan")
    return a, b


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_infinities_and_nans_belong_where_the_reference_has_them(dtype):
    a, b = poisoned(dtype)
    right = fp32_product(a, b)
    assert check(right, a, b).ok
    assert right[3].isinf().sum() == 23 and right[:, 2].isnan().all()

    for place, value in [((0, 2), 0.0), ((3, 0), 1.0), ((3, 0), float("nan")), ((5, 5), float("inf"))]:
        wrong = right.clone()
        wrong[place] = value
        verdict = check(wrong, a, b)
        assert not verdict.ok and verdict.nonfinite_mismatches == 1 and verdict.worst == place
        assert "1 elements inf or nan" in str(verdict)
    flipped = right.clone()
    flipped[3, 0] = -flipped[3, 0]
    assert not check(flipped, a, b).ok

    # The finite part is still measured.
    spoiled = right.clone()
    spoiled[8, 8] += 4
    verdict = check(spoiled, a, b)
    assert not verdict.ok and verdict.nonfinite_mismatches == 0 and verdict.worst == (8, 8)


def test_overflow_of_the_output_type_is_an_infinity():
    a = torch.full((2, 64), 128.0, dtype=torch.float16)
    out = fp32_product(a, a.t())
    assert out.isposinf().all()
    assert check(out, a, a.t()).ok
    assert not check(torch.full((2, 2), 65504.0).half(), a, a.t()).ok


def test_a_verdict_is_its_numbers():
    good = Check(1.0, 1.0, 0.1, 0.1, 0, (0, 0))
    assert good and good.ok
    assert not Check(1.1, 1.0, 0.1, 0.1, 0, (0, 0))
    assert not Check(1.0, 1.0, 0.2, 0.1, 0, (0, 0))
    assert not Check(1.0, 1.0, 0.1, 0.1, 1, (0, 0))
    assert not Check(math.nan, 1.0, 0.1, 0.1, 0, (0, 0))
    assert "C[0, 0]" in str(Check(1.1, 1.0, 0.1, 0.1, 0, (0, 0))) and "C[" not in str(good)


def test_torch_is_asked_for_fp32_sums_and_left_as_it_was(monkeypatch):
    flags = torch.backends.cuda.matmul
    before = flags.allow_fp16_reduced_precision_reduction
    seen = []
    with problem._fp32_reduction():
        seen.append(flags.allow_fp16_reduced_precision_reduction)
    assert seen == [False] and flags.allow_fp16_reduced_precision_reduction == before
