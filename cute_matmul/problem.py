"""What is multiplied, and how right the answer is.

A `Problem` makes the operands; `check` compares a result with the float64 reference.

**Metric.** Two distances to the reference R = A @ B in float64: the largest absolute error,
max |C - R|, which one wrong element shows, and the relative norm |C - R| / |R| (Frobenius), which an
error spread over all elements shows.

**Bound.** Each at most twice the larger of

- the same distance of torch's own matmul on the same operands, dtype and device, with fp32 accumulation;
- the distance of R rounded once to the output's dtype: no kernel that writes this dtype can do better on
  purpose, and torch may only be better by luck (short K, few elements);
- one unit in the last place of an fp32 accumulator that holds the largest magnitude the operands allow,
  2^-23 * max_i |A[i, :]| * max_j |B[:, j]| (Cauchy-Schwarz on the sum of |a b|): what the order of additions
  may change where the sum cancels and both distances above are zero.

A kernel that accumulates in fp16 (V6) has its own bound on top of these. WGMMA rounds the sum to 11 bits once for
each 16 products, by at most 2^-11 of the partial sum (half a unit in the last place), S = ceil(K / 16) times:

- largest error: S * 2^-11 * max_i |A[i, :]| * max_j |B[:, j]|, which holds for any operands;
- relative norm: sqrt(S) * 2^-11, for roundings that are independent of each other, as random operands make them
  (measured on an H200: a third of it).

Infinities and nans must be where R, rounded to the output's dtype, has them, with the same sign; distances
are taken over the finite elements.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass

import torch

DTYPES = {
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}
ALIASES = {"fp16": "float16", "half": "float16", "f16": "float16", "bf16": "bfloat16"}
A_MAJORS = ("k", "m")
B_MAJORS = ("k", "n")

FACTOR = 2.0
"""How much farther from the reference a result may be than torch's own."""

FP32_ULP = 2.0**-23
FP16_ROUNDING = 2.0**-11
FP16_STEP = 16
"""Products that an fp16-accumulating WGMMA adds before it rounds the sum: its K extent."""
ACCUMULATORS = ("float32", "float16")

_REFERENCE_CHUNK_BYTES = 1 << 30


def dtype_name(text: str) -> str:
    """torch's name of an input dtype, from that name or a short one ("fp16", "bf16").

    Raises ValueError with the accepted names.
    """
    name = ALIASES.get(text, text).removeprefix("torch.")
    if name not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join([*DTYPES, *ALIASES])}; got {text!r}")
    return name


@dataclass(frozen=True)
class Problem:
    """C (m, n) = A (m, k) @ B (k, n), random normal operands of unit variance.

    a_major: "k" for rows of A contiguous, "m" for columns. b_major: "n" for rows of B (as torch makes a
    (k, n) tensor) contiguous, "k" for columns, which is what `x @ w.T` has.
    """

    m: int
    n: int
    k: int
    dtype: str = "float16"
    a_major: str = "k"
    b_major: str = "k"
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("m", "n", "k"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 0:
                raise ValueError(f"{name} must be an integer of at least 0, got {value!r}")
        object.__setattr__(self, "dtype", dtype_name(self.dtype))
        for name, accepted in (("a_major", A_MAJORS), ("b_major", B_MAJORS)):
            value = getattr(self, name)
            if value not in accepted:
                raise ValueError(f"{name} must be one of {', '.join(accepted)}; got {value!r}")

    def __str__(self) -> str:
        return f"{self.m}x{self.n}x{self.k} {self.dtype} A {self.a_major}-major, B {self.b_major}-major"

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    @property
    def flops(self) -> int:
        """Multiplications and additions, 2 m n k."""
        return 2 * self.m * self.n * self.k

    @property
    def bytes(self) -> int:
        """Bytes of A, B and C, each moved once."""
        return self.torch_dtype.itemsize * (self.m * self.k + self.k * self.n + self.m * self.n)

    def operands(self, device: torch.device | str = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
        """A (m, k) and B (k, n) in their major orders.

        The same values for the same seed on every device: they are drawn on the CPU.
        """
        generator = torch.Generator().manual_seed(self.seed)

        def draw(rows: int, columns: int, transposed: bool) -> torch.Tensor:
            shape = (columns, rows) if transposed else (rows, columns)
            values = torch.randn(shape, generator=generator).to(self.torch_dtype).to(device)
            return values.t() if transposed else values

        return draw(self.m, self.k, self.a_major == "m"), draw(self.k, self.n, self.b_major == "k")

    def output(self, device: torch.device | str = "cpu") -> torch.Tensor:
        """C (m, n), filled with nan so that an element nobody writes shows."""
        return torch.full((self.m, self.n), float("nan"), dtype=self.torch_dtype, device=device)


@dataclass(frozen=True)
class Check:
    """Distance of a result from the reference, and how far it may be. True where the result is right."""

    max_abs: float
    max_abs_bound: float
    relative: float
    relative_bound: float
    nonfinite_mismatches: int
    worst: tuple[int, int] | None

    @property
    def ok(self) -> bool:
        return (
            self.nonfinite_mismatches == 0
            and self.max_abs <= self.max_abs_bound
            and self.relative <= self.relative_bound
        )

    def __bool__(self) -> bool:
        return self.ok

    def __str__(self) -> str:
        text = (
            f"max |C - R| {self.max_abs:.3g} (bound {self.max_abs_bound:.3g}), "
            f"|C - R| / |R| {self.relative:.3g} (bound {self.relative_bound:.3g})"
        )
        if self.nonfinite_mismatches:
            text += f", {self.nonfinite_mismatches} elements inf or nan where the reference differs"
        if not self.ok and self.worst is not None:
            text += f", first of the worst at C[{self.worst[0]}, {self.worst[1]}]"
        return text


def reference(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """A (m, k) @ B (k, n) in float64 on their device; float64 A is kept near 1 GiB."""
    b64 = b.double()
    rows = max(1, _REFERENCE_CHUNK_BYTES // (8 * max(1, a.shape[1])))
    if rows >= a.shape[0]:
        return a.double() @ b64
    return torch.cat([block.double() @ b64 for block in a.split(rows)])


def torch_matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """torch's own product in the operands' dtype, with sums kept in fp32 throughout."""
    with _fp32_reduction():
        return a @ b


def check(
    out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, accumulator: str = "float32", factor: float = FACTOR
) -> Check:
    """How far `out` (m, n) is from a (m, k) @ b (k, n); metric and bound are at the top of this module.

    accumulator: the type the kernel adds in, "float32" or "float16". Raises ValueError for another one, and where
    the shapes do not belong together.
    """
    if accumulator not in ACCUMULATORS:
        raise ValueError(f"accumulator must be one of {', '.join(ACCUMULATORS)}; got {accumulator!r}")
    if a.ndim != 2 or b.ndim != 2 or a.shape[1] != b.shape[0] or out.shape != (a.shape[0], b.shape[1]):
        shapes = ", ".join(str(tuple(x.shape)) for x in (out, a, b))
        raise ValueError(f"out must be (m, n), a (m, k), b (k, n); got {shapes}")
    if out.numel() == 0:
        return Check(0.0, 0.0, 0.0, 0.0, 0, None)

    exact = reference(a, b)
    rounded = exact.to(out.dtype)
    finite = rounded.isfinite()
    mismatch = ~_same_nonfinite(out, rounded)
    measured = finite & ~mismatch
    norm = _zero_outside(exact, measured).norm().item()

    def distances(candidate: torch.Tensor) -> tuple[float, float]:
        error = _zero_outside(candidate.double() - exact, measured & candidate.isfinite())
        return error.abs().max().item(), error.norm().item() / norm if norm else error.norm().item()

    # Row and column norms over finite values only: where there is an infinity, its row is not measured.
    largest = _row_norms(a).max().item() * _row_norms(b.t()).max().item() if a.shape[1] else 0.0
    floor = FP32_ULP * largest
    floors = (floor, floor * measured.sum().item() ** 0.5 / norm if norm else floor)
    at_best = [max(pair) for pair in zip(distances(torch_matmul(a, b)), distances(rounded), floors, strict=True)]
    max_abs, relative = distances(out)

    worst = None
    if mismatch.any():
        worst = divmod(int(mismatch.flatten().nonzero()[0]), out.shape[1])
    elif measured.any():
        error = _zero_outside(out.double() - exact, measured)
        worst = divmod(int(error.abs().argmax()), out.shape[1])
    bounds = [factor * best for best in at_best]
    if accumulator == "float16":
        steps = -(-a.shape[1] // FP16_STEP)
        bounds[0] += steps * FP16_ROUNDING * largest
        bounds[1] += steps**0.5 * FP16_ROUNDING
    return Check(max_abs, bounds[0], relative, bounds[1], int(mismatch.sum()), worst)


def _same_nonfinite(out: torch.Tensor, rounded: torch.Tensor) -> torch.Tensor:
    """Where both are finite, both nan, or both the same infinity."""
    both_finite = out.isfinite() & rounded.isfinite()
    return both_finite | (out.isnan() & rounded.isnan()) | (out.isinf() & (out == rounded))


def _zero_outside(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return torch.where(mask, values, torch.zeros((), dtype=values.dtype, device=values.device))


def _row_norms(x: torch.Tensor) -> torch.Tensor:
    return torch.nan_to_num(x.float(), nan=0.0, posinf=0.0, neginf=0.0).norm(dim=1)


@contextmanager
def _fp32_reduction():
    """cuBLAS must not add partial sums in fp16 or bf16, or the bound would be as loose as those."""
    flags = torch.backends.cuda.matmul
    names = ("allow_fp16_reduced_precision_reduction", "allow_bf16_reduced_precision_reduction")
    saved = [getattr(flags, name) for name in names]
    for name in names:
        setattr(flags, name, False)
    try:
        yield
    finally:
        for name, value in zip(names, saved, strict=True):
            setattr(flags, name, value)
