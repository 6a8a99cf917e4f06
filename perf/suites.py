"""What is measured: the suites' shapes, and how long each suite measures.

Linear layers are y = x @ w.T, so B is K-major ("k") and A row-major ("k") unless a run says otherwise.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Shape:
    """C (m, n) = A (m, k) @ B (k, n); `name` says where such a shape comes from."""

    m: int
    n: int
    k: int
    name: str = ""

    @property
    def flops(self) -> int:
        """Multiplications and additions, 2 m n k."""
        return 2 * self.m * self.n * self.k

    def input_bytes(self, element_bytes: int = 2) -> int:
        """Bytes of A and B."""
        return element_bytes * self.k * (self.m + self.n)

    def bytes(self, element_bytes: int = 2) -> int:
        """Bytes of A, B and C, each moved once."""
        return self.input_bytes(element_bytes) + element_bytes * self.m * self.n

    @property
    def mnk(self) -> tuple[int, int, int]:
        return (self.m, self.n, self.k)

    def __str__(self) -> str:
        return f"{self.m}x{self.n}x{self.k}"

    @classmethod
    def parse(cls, text: str) -> Shape:
        """Read "8192x8192x4096" (MxNxK), or one number for a square one. Raises ValueError."""
        match = re.fullmatch(r"(\d+)(?:x(\d+)x(\d+))?", text.strip())
        if not match:
            raise ValueError(f"shape must look like 8192x8192x4096 (MxNxK) or 8192, got {text!r}")
        m, n, k = (int(v) if v else int(match.group(1)) for v in match.groups())
        if min(m, n, k) < 1:
            raise ValueError(f"shape must have positive M, N and K, got {text!r}")
        return cls(m, n, k)


MOST_TIMES = 3


@dataclass(frozen=True)
class Effort:
    """How long a suite measures.

    burst_rounds, sustained_rounds: rounds wanted; three of each are always made where the number is not 0,
    more only while the run is inside budget_s. burst_calls: samples of one burst. block_s: seconds of one
    sustained block, after lead_s of the same load that is not counted. warm_s: load before the first block.
    rest_s: wait before every burst; idle_cap_s: longest wait, for the idle state; idle_total_s: of what such waits
    take beyond rest_s, together.
    goal: rounds go on beyond those wanted, up to MOST_TIMES as many, until no ratio's interval has a larger half-width
    (a fraction of the ratio; 0: no such wish).
    """

    burst_rounds: int = 3
    sustained_rounds: int = 3
    burst_calls: int = 30
    block_s: float = 2.0
    lead_s: float = 0.25
    warm_s: float = 4.0
    rest_s: float = 1.0
    idle_cap_s: float = 20.0
    idle_total_s: float = 150.0
    budget_s: float = 3600.0
    goal: float = 0.0


@dataclass(frozen=True)
class Suite:
    """Shapes, the contenders measured when none are named, and the effort in full and `--quick`.

    variants: names, "ladder" for all registered ones, "default" for the one `matmul` takes.
    """

    name: str
    shapes: tuple[Shape, ...]
    variants: tuple[str, ...]
    peers: tuple[str, ...]
    effort: Effort
    quick: Effort
    memory_bound: bool = False


LADDER_SHAPE = Shape(8192, 8192, 8192)

SQUARE = tuple(Shape(s, s, s) for s in (512, 1024, 2048, 3072, 4096, 6144, 8192, 10240, 16384))

_LAYERS = (
    ("llama3-8b qkv", 6144, 4096),
    ("llama3-8b o", 4096, 4096),
    ("llama3-8b gate_up", 28672, 4096),
    ("llama3-8b down", 4096, 14336),
    ("llama3-70b qkv", 10240, 8192),
    ("llama3-70b o", 8192, 8192),
    ("llama3-70b gate_up", 57344, 8192),
    ("llama3-70b down", 8192, 28672),
)

MODEL = (
    *(Shape(m, n, k, name) for name, n, k in _LAYERS for m in (512, 2048, 8192)),
    Shape(4096, 4096, 14336, "tilus suite"),
    Shape(1024, 4096, 7168, "moe expert"),
    Shape(2048, 2048, 65536, "long K"),
    Shape(2048, 128256, 4096, "vocab head"),
)

DECODE = tuple(Shape(m, n, k, name) for name, n, k in _LAYERS for m in (1, 16, 64))

_FULL = Effort(burst_rounds=5, sustained_rounds=5, budget_s=450.0, goal=0.012)
_MANY = Effort(burst_rounds=3, sustained_rounds=3, idle_cap_s=5.0, idle_total_s=120.0)
_BURST = replace(_MANY, sustained_rounds=0, idle_cap_s=2.0, idle_total_s=60.0)
_SHORT = replace(_BURST, rest_s=0.2)  # a board that waits for memory draws less, and is back at rest sooner

SUITES = {
    suite.name: suite
    for suite in (
        Suite(
            "ladder",
            (LADDER_SHAPE,),
            ("ladder",),
            ("cublas", "quack"),
            _FULL,
            replace(_FULL, burst_rounds=3, sustained_rounds=3, warm_s=3.0, idle_total_s=40.0, budget_s=165.0),
        ),
        Suite("square", SQUARE, ("default",), ("cublas", "quack"), _MANY, _BURST),
        Suite("model", MODEL, ("default",), ("cublas", "quack"), _MANY, _BURST),
        Suite("decode", DECODE, ("default",), ("cublas", "quack"), _SHORT, _SHORT, memory_bound=True),
    )
}

HOST_SHAPES = (Shape(128, 128, 128), Shape(512, 512, 512))
"""Small enough that the device is done before the next call: what is timed is the host."""

HOST_CALLS = 10_000
