"""What `matmul` refuses, before anything runs: the argument, what came, what is accepted. And what it must not."""

from __future__ import annotations

import re
from types import SimpleNamespace

import cases
import pytest
import torch
from torch.autograd import forward_ad

from cute_matmul import TileConfig, launch, matmul, registry
from cute_matmul.launch import Unsupported

F16, BF16 = torch.float16, torch.bfloat16
# torch 2.13 gives it of itself where derivatives are first asked for.
torchs_own_warning = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")


@pytest.fixture(autouse=True)
def nothing_runs(monkeypatch):
    """In place of the emulator: says with what it would have run."""
    runs = []

    def record(plan, a, b, out, **options):
        runs.append(SimpleNamespace(plan=plan, arguments=plan.arguments(a, b, out), options=options))
        out.zero_()

    monkeypatch.setattr(launch, "_emulate", record)
    return runs


def ab(m=64, n=72, k=80, dtype=F16, **options):
    return torch.zeros(m, k, dtype=dtype, **options), torch.zeros(k, n, dtype=dtype, **options)


def refusal(kind, a, b, **options) -> str:
    with pytest.raises(kind) as caught:
        matmul(a, b, **options)
    assert type(caught.value) is kind
    return str(caught.value)


# Arguments that are wrong for any matmul


@pytest.mark.parametrize(
    ("a", "b", "message"),
    [
        ([[1.0]], ab()[1], "a must be a torch.Tensor, got list"),
        (ab()[0], None, "b must be a torch.Tensor, got NoneType"),
        (ab()[0].numpy(), ab()[1], "a must be a torch.Tensor, got ndarray"),
        (ab()[0].float(), ab()[1], "a must be float16 or bfloat16, got float32"),
        (ab()[0].double(), ab()[1].double(), "a must be float16 or bfloat16, got float64"),
        (ab()[0].to(torch.int64), ab()[1], "a must be float16 or bfloat16, got int64"),
        (ab()[0], ab()[1].to(torch.complex64), "b must be float16 or bfloat16, got complex64"),
        (ab()[0].bool(), ab()[1], "a must be float16 or bfloat16, got bool"),
        (ab()[0], ab(dtype=BF16)[1], "b must have a's type, float16, got bfloat16"),
    ],
)
def test_types(nothing_runs, a, b, message):
    assert refusal(TypeError, a, b) == message
    assert not nothing_runs


@pytest.mark.parametrize(
    ("a", "b", "message"),
    [
        (torch.zeros(80, dtype=F16), ab()[1], "a must have 2 dimensions, got 1: shape (80,)"),
        (ab()[0], torch.zeros(2, 80, 72, dtype=F16), "b must have 2 dimensions, got 3: shape (2, 80, 72)"),
        (torch.zeros((), dtype=F16), ab()[1], "a must have 2 dimensions, got 0: shape ()"),
        (ab()[0], ab(k=88)[1], "b must have a's K = 80 rows, got shape (88, 72) for a (64, 80)"),
        (ab()[0], ab()[1].t(), "b must have a's K = 80 rows, got shape (72, 80) for a (64, 80)"),
    ],
)
def test_shapes(nothing_runs, a, b, message):
    assert refusal(ValueError, a, b) == message
    assert not nothing_runs


@pytest.mark.parametrize(
    ("out", "kind", "message"),
    [
        (torch.zeros(64, 72), TypeError, "out must have a's type, float16, got float32"),
        (torch.zeros(64, 72, dtype=BF16), TypeError, "out must have a's type, float16, got bfloat16"),
        (torch.zeros(72, 64, dtype=F16), ValueError, "out must have shape (64, 72), got (72, 64)"),
        (torch.zeros(64, 72, 1, dtype=F16), ValueError, "out must have shape (64, 72), got (64, 72, 1)"),
        ("a string", TypeError, "out must be a torch.Tensor, got str"),
    ],
)
def test_out(nothing_runs, out, kind, message):
    assert refusal(kind, *ab(), out=out) == message
    assert not nothing_runs


def test_dtype_that_the_variant_has_not(nothing_runs):
    message = refusal(TypeError, *ab(dtype=BF16), variant="v6")
    assert message == "a must be float16 for variant v6, got bfloat16"
    assert not nothing_runs


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"variant": "v99"}, r"variant must be one of v0, v1, v2.*; got 'v99'"),
        ({"config": "128x128"}, r"config must look like 128x128x64,stages=3.*, got '128x128'"),
        ({"variant": "v1", "config": "64x64x64"}, r"config 64x64x64 is not one of v1's; accepted: 64x128x16"),
        ({"variant": "v1", "config": TileConfig((256, 256, 64))}, r"config .* 512 accumulator registers a thread"),
        ({"backend": "cpu"}, r"backend must be one of auto, gpu, emulator, got 'cpu'"),
        ({"backend": "gpu"}, r"backend 'gpu' needs CUDA tensors, got a on cpu"),
    ],
    ids=str,
)
def test_options(nothing_runs, options, message):
    assert re.match(message, refusal(ValueError, *ab(), **options))
    assert not nothing_runs


def test_options_are_keywords():
    with pytest.raises(TypeError):
        matmul(*ab(), torch.zeros(64, 72, dtype=F16))


# Tensors without plain data


@pytest.mark.parametrize("warm", [False, True], ids=["first", "after plain tensors of these shapes"])
@pytest.mark.parametrize("which", ["a", "b", "both"])
def test_meta_tensors(nothing_runs, monkeypatch, which, warm):
    monkeypatch.setattr(launch, "_plans", {})
    a, b = ab()
    out = torch.zeros(64, 72, dtype=F16)
    if warm:
        matmul(a, b, out=out)
        nothing_runs.clear()
    if which != "b":
        a = a.to("meta")
    if which != "a":
        b = b.to("meta")
    message = refusal(Unsupported, a, b, out=out)
    name = "b" if which == "b" else "a"
    assert message == f"{name} must be a plain CUDA or CPU tensor that holds data, got Tensor on meta"
    assert not nothing_runs


def test_meta_output(nothing_runs):
    a, b = ab()
    matmul(a, b, out=torch.zeros(64, 72, dtype=F16))
    nothing_runs.clear()
    message = refusal(Unsupported, a, b, out=torch.zeros(64, 72, dtype=F16, device="meta"))
    assert message.startswith("out must be a plain CUDA or CPU tensor")
    assert not nothing_runs


class Named(torch.Tensor):
    pass


@pytest.mark.parametrize("warm", [False, True])
def test_subclasses(nothing_runs, warm):
    a, b = ab()
    if warm:
        matmul(a, b)
        nothing_runs.clear()
    message = refusal(Unsupported, a.as_subclass(Named), b)
    assert message == "a must be a plain CUDA or CPU tensor that holds data, got Named on cpu"
    assert not nothing_runs


def test_sparse(nothing_runs):
    a, b = ab()
    assert refusal(Unsupported, a.to_sparse(), b).startswith("a must be a dense strided tensor, got layout")
    assert not nothing_runs


@pytest.mark.parametrize("warm", [False, True], ids=["first", "after plain tensors of these shapes"])
@pytest.mark.parametrize("name", ["a", "b", "out"])
@pytest.mark.parametrize(
    ("disguised", "said"),
    [
        (torch._neg_view, "must hold its own values, got a view that negates them; pass {name}.resolve_neg()"),
        (
            lambda t: torch._efficientzerotensor(t.shape, dtype=t.dtype),
            "must be a plain tensor that holds data, got one of a torch.func transform or of known zeros",
        ),
    ],
    ids=["negated", "zeros"],
)
def test_storage_that_does_not_hold_the_values(nothing_runs, monkeypatch, name, disguised, said, warm):
    """torch's own type and strides, and a pointer to something else."""
    monkeypatch.setattr(launch, "_plans", {})
    a, b = ab()
    tensors = {"a": a, "b": b, "out": torch.zeros(64, 72, dtype=F16)}
    if warm:
        matmul(**tensors)
        nothing_runs.clear()
    tensors[name] = disguised(tensors[name])
    assert refusal(Unsupported, **tensors) == f"{name} {said.format(name=name)}"
    assert not nothing_runs


@torchs_own_warning
@pytest.mark.parametrize("warm", [False, True])
def test_inside_a_transform(nothing_runs, monkeypatch, warm):
    monkeypatch.setattr(launch, "_plans", {})
    a, b = ab()
    if warm:
        matmul(a, b)
        nothing_runs.clear()
    said = "a must be a plain tensor that holds data, got one of a torch.func transform or of known zeros"
    for transformed in (
        lambda: torch.func.vmap(lambda x: matmul(x, b))(torch.stack([a, a])),
        lambda: torch.func.grad(lambda x: matmul(x, b).sum())(a),
        lambda: torch.func.jvp(lambda x: matmul(x, b), (a,), (a,)),
    ):
        with pytest.raises(Unsupported, match=f"^{re.escape(said)}$"):
            transformed()
    assert not nothing_runs


def test_empty_tensors_hold_no_data_and_are_plain(nothing_runs):
    for _ in range(2):
        assert matmul(torch.zeros(0, 64, dtype=F16), torch.zeros(64, 72, dtype=F16)).shape == (0, 72)


# Gradients


@torchs_own_warning
@pytest.mark.parametrize("name", ["a", "b", "out"])
def test_tangents(nothing_runs, name):
    """Forward-mode derivatives would be dropped without a word."""
    a, b = ab()
    tensors = {"a": a, "b": b, "out": torch.zeros(64, 72, dtype=F16)}
    with forward_ad.dual_level():
        matmul(**tensors)
        nothing_runs.clear()
        tensors[name] = forward_ad.make_dual(tensors[name], torch.ones_like(tensors[name]))
        message = refusal(Unsupported, **tensors)
        assert message.startswith(f"{name} carries a tangent, and matmul has no forward-mode derivative yet")
    assert not nothing_runs


@pytest.mark.parametrize("name", ["a", "b", "out"])
def test_requires_grad(nothing_runs, name):
    a, b = ab()
    tensors = {"a": a, "b": b, "out": torch.zeros(64, 72, dtype=F16)}
    tensors[name].requires_grad_()
    message = refusal(Unsupported, **tensors)
    assert message.startswith(f"{name} requires grad, and matmul has no backward yet")
    assert "torch.no_grad()" in message and f"detach {name}" in message
    assert not nothing_runs
    with torch.no_grad():
        matmul(**tensors)
    with torch.inference_mode():
        matmul(**tensors)
    assert len(nothing_runs) == 2


def test_parameters_without_grad_are_plain(nothing_runs):
    a, b = ab()
    weight = torch.nn.Parameter(b, requires_grad=False)
    matmul(a, weight)
    matmul(a, weight)
    assert len(nothing_runs) == 2


# What TMA cannot describe


@pytest.mark.parametrize(
    ("a", "reason"),
    [
        (torch.zeros(64, 65, dtype=F16)[:, :64], "a has stride of 130 bytes along dimension 0, not a multiple of 16"),
        (torch.zeros(64, 128, dtype=F16)[:, ::2], "a has no dimension of unit stride (strides (128, 2))"),
        (torch.zeros(1, 64, dtype=F16).expand(64, 64), "a has stride 0 along dimension 0"),
        (torch.zeros(64, 1, dtype=F16).expand(64, 64), "a has stride 0 along dimension 1"),
        (torch.zeros(64, 1, dtype=F16).expand(64, 64).t(), "a has stride 0 along dimension 0"),
        (torch.zeros(65, 72, dtype=F16)[1:, 3:67], "a must start at a multiple of 16 bytes for TMA, got an address"),
    ],
)
def test_operands_that_tma_cannot_describe(nothing_runs, a, reason):
    b = torch.zeros(64, 72, dtype=F16)
    message = refusal(Unsupported, a, b)
    assert message.startswith(reason), message
    # The same as B, whose K is its first dimension.
    message = refusal(Unsupported, torch.zeros(72, a.shape[0], dtype=F16), a)
    assert message.startswith("b" + reason[1:]), message
    assert not nothing_runs


def test_a_stride_too_large(nothing_runs, monkeypatch):
    monkeypatch.setattr(launch, "MAX_STRIDE_BYTES", 256)
    a, b = torch.zeros(64, 128, dtype=F16), torch.zeros(128, 72, dtype=F16)
    message = refusal(Unsupported, a, b)
    assert message.startswith("a has stride of 256 bytes along dimension 0, not below 256")
    assert not nothing_runs


def test_limits_are_those_of_the_descriptor_and_the_grid():
    assert launch.MAX_STRIDE_BYTES == 2**40 and launch.MAX_GRID_Y == 2**16 - 1


def test_every_tile_of_the_largest_matrix_ends_at_a_32_bit_coordinate():
    """A tile that began below 2**31 and ended above had columns of negative number, which are below any bound."""
    for name in registry.names():
        module = registry.get(name).load()
        for config in (module.DEFAULT, *module.SPACE):
            for tile in config.tile_shape_mnk:
                assert -(-launch.MAX_EXTENT // tile) * tile <= 2**31 - 1, (name, config)


def test_extents_beyond_the_coordinates(nothing_runs):
    """Of rows of one element, which few bytes hold; each of M, N and K."""
    at, past = launch.MAX_EXTENT, launch.MAX_EXTENT + 1
    one = torch.zeros(1, dtype=F16)
    for extent in (at, past):
        m, n, k = one.expand(extent, 1), one.expand(1, extent), one.expand(1, 1)
        for name, (a, b, out) in {"M": (m, k, m), "N": (k, n, n), "K": (n, m, k)}.items():
            with pytest.raises(ValueError) as error:
                matmul(a, b, out=out)
            refused = str(error.value) == f"{name} must be at most {at}, got {extent}"
            assert refused == (extent == past), str(error.value)
    assert not nothing_runs


def test_too_many_tiles_along_the_second_grid_dimension(nothing_runs, monkeypatch):
    monkeypatch.setattr(launch, "MAX_GRID_Y", 2)
    message = refusal(Unsupported, *ab(n=264), variant="v1")
    assert message == "N must be at most 256 for v1 with config 128x128x64, got 264"
    # A column-major output swaps the two.
    message = refusal(Unsupported, *ab(m=264), variant="v1", out=torch.zeros(72, 264, dtype=F16).t())
    assert message == "M must be at most 256 for v1 with config 128x128x64, got 264"
    assert not nothing_runs
    monkeypatch.setattr(launch, "_plans", {})
    matmul(*ab(n=256), variant="v1")
    assert len(nothing_runs) == 1


# Overlaps


@pytest.mark.parametrize("name", cases.OVERLAPS)
def test_overlap(nothing_runs, name):
    cases.check_overlap(name, "float16", "cpu", variant="v1")
    assert not nothing_runs


@pytest.mark.parametrize("name", cases.NEIGHBOURS)
def test_no_overlap(nothing_runs, name):
    a, b, out = cases.NEIGHBOURS[name](torch.zeros(256, 512, dtype=F16))
    assert matmul(a, b, out=out, variant="v1") is out
    assert len(nothing_runs) == 1


def test_overlap_is_exact_for_windows_of_one_buffer(nothing_runs):
    """Against the places of their elements, for windows at every distance around each other."""
    buffer = torch.zeros(96, 64, dtype=F16)
    a = buffer[40:56, 24:40]
    b = torch.zeros(16, 16, dtype=F16)
    taken = set(cases.places(a).flatten().tolist())
    for row in range(20, 76, 5):
        for column in range(0, 48, 3):
            out = buffer[row : row + 16, column : column + 16]
            shared = not taken.isdisjoint(cases.places(out).flatten().tolist())
            before = len(nothing_runs)
            if shared:
                assert refusal(ValueError, a, b, out=out).startswith("out must not overlap a")
            else:
                matmul(a, b, out=out)
            assert len(nothing_runs) == before + (not shared)


def test_a_and_b_may_be_one(nothing_runs):
    a = torch.zeros(64, 64, dtype=F16)
    matmul(a, a)
    matmul(a, a.t())
    assert [run.plan.b_major for run in nothing_runs] == ["n", "k"]


@pytest.mark.parametrize(
    "out",
    [torch.zeros(1, 72, dtype=F16).expand(64, 72), torch.zeros(64, 1, dtype=F16).expand(64, 72)],
    ids=["rows", "columns"],
)
def test_out_that_overlaps_itself(nothing_runs, out):
    message = refusal(ValueError, *ab(), out=out)
    assert message == f"out must not overlap itself, got shape (64, 72) with strides {tuple(out.stride())}"
    out = torch.zeros(400, dtype=F16).as_strided((64, 72), (1, 2))
    assert refusal(ValueError, *ab(), out=out).startswith("out must not overlap itself")
    assert not nothing_runs


def test_out_without_unit_stride(nothing_runs):
    message = refusal(Unsupported, *ab(), out=torch.zeros(64, 144, dtype=F16)[:, ::2])
    assert message == "out must have a dimension of unit stride, got strides (144, 2)"
    assert not nothing_runs


def test_out_that_tma_cannot_store(nothing_runs):
    message = refusal(Unsupported, *ab(), variant="v6", out=torch.zeros(64, 73, dtype=F16)[:, :72])
    assert message.startswith("out must have rows that start at multiples of 16 bytes for variant v6")
    message = refusal(Unsupported, *ab(n=76), variant="v6", out=torch.zeros(64, 80, dtype=F16)[:, :76])
    assert message.startswith("out must have rows whose length is a multiple of 16 bytes for variant v6")
    message = refusal(Unsupported, *ab(), variant="v6", out=torch.zeros(64, 80, dtype=F16)[:, 1:73])
    assert message.startswith("out must start at a multiple of 16 bytes for TMA")
    assert not nothing_runs


# What must be accepted, and what the kernel then gets


def tma_shape(tensor: torch.Tensor) -> bool:
    return 1 in tensor.stride() and max(tensor.stride()) * 2 % 16 == 0


@pytest.mark.parametrize("a_major", "km")
@pytest.mark.parametrize("b_major", "kn")
@pytest.mark.parametrize("transposed", [False, True], ids=["out", "out transposed"])
def test_majors(nothing_runs, a_major, b_major, transposed):
    a, b = cases.operands(64, 72, 80, "float16", (a_major, b_major), "cpu")
    out = torch.zeros(72, 64, dtype=F16).t() if transposed else torch.zeros(64, 72, dtype=F16)
    assert matmul(a, b, out=out, variant="v1") is out
    (run,) = nothing_runs
    ka, kb, kout = run.arguments
    given = (b.t(), a.t(), out.t()) if transposed else (a, b, out)
    for got, expected in zip((ka, kb, kout), given, strict=True):
        assert (got.data_ptr(), got.shape, got.stride()) == (expected.data_ptr(), expected.shape, expected.stride())
    assert kout.stride(1) == 1
    kernel = run.plan.kernel()
    assert (kernel.a_major == "k") == (ka.stride(1) == 1)
    assert (kernel.b_major == "k") == (kb.stride(0) == 1)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (torch.zeros(1, 64, dtype=F16), torch.zeros(64, 1, dtype=F16)),
        (torch.zeros(1, 65, dtype=F16)[:, :64], torch.zeros(64, 72, dtype=F16)),
        (torch.zeros(64, 1, dtype=F16), torch.zeros(1, 64, dtype=F16)),
        (torch.zeros(64, 16, dtype=F16)[:, :1], torch.zeros(1, 64, dtype=F16)),
        (torch.zeros(1, 1, dtype=F16), torch.zeros(1, 1, dtype=F16)),
        (torch.zeros(7, 1, dtype=F16).expand(7, 1), torch.zeros(1, 9, dtype=F16)),
        (torch.zeros(1, 64, dtype=F16).expand(1, 64), torch.zeros(64, 72, dtype=F16)),
        (torch.zeros(64, 3, dtype=F16).t()[:1], torch.zeros(72, 64, dtype=F16).t()),
    ],
)
def test_strides_of_dimensions_of_one_are_ignored(nothing_runs, a, b):
    if not (cases.describable(a) and cases.describable(b)):
        refusal(Unsupported, a, b)
        return
    out = matmul(a, b, variant="v1")
    assert out.shape == (a.shape[0], b.shape[1])
    (run,) = nothing_runs
    assert all(tma_shape(tensor) for tensor in run.arguments[:2])
    assert [tuple(tensor.shape) for tensor in run.arguments] == [tuple(a.shape), tuple(b.shape), tuple(out.shape)]


@pytest.mark.parametrize("variant", ["v1", "v6"])
@pytest.mark.parametrize(("m", "n"), [(1, 40), (40, 1), (1, 1)])
def test_outputs_of_one_row_or_column(nothing_runs, variant, m, n):
    a, b = torch.zeros(m, 64, dtype=F16), torch.zeros(n, 64, dtype=F16).t()
    for out in (
        torch.zeros(m, n, dtype=F16),
        torch.zeros(n, m, dtype=F16).t(),
        torch.zeros(m, 8 * n, dtype=F16)[:, :n],
    ):
        nothing_runs.clear()
        if not cases.storable(out, 16 if variant == "v6" else 2):
            refusal(Unsupported, a, b, out=out, variant=variant)
            continue
        matmul(a, b, out=out, variant=variant)
        (run,) = nothing_runs
        kernel_out = run.arguments[2]
        assert kernel_out.stride(1) == 1 and sorted(kernel_out.shape) == sorted((m, n))


@pytest.mark.parametrize(("m", "n", "k"), [(0, 72, 80), (64, 0, 80), (64, 72, 0), (0, 0, 0)])
@pytest.mark.parametrize("own_out", [False, True])
def test_empty(nothing_runs, monkeypatch, m, n, k, own_out):
    monkeypatch.undo()  # the real `_emulate`, which must not start the emulator
    a, b = ab(m, n, k)
    out = torch.full((m, n), float("nan"), dtype=F16) if own_out else None
    result = matmul(a, b, out=out)
    assert result.shape == (m, n) and not result.any() and (out is None or result is out)


def test_allocates_what_torch_would(nothing_runs):
    a, b = ab(dtype=BF16)
    out = matmul(a, b)
    assert (out.dtype, out.device, tuple(out.shape), out.is_contiguous()) == (BF16, a.device, (64, 72), True)
    assert not out.requires_grad


def test_variant_and_config_reach_the_kernel(nothing_runs):
    a, b = ab()
    with registry.use("v1"):
        matmul(a, b)
    matmul(a, b, variant="v2", config="64x128x32,stages=4")
    matmul(a, b, variant="v2", config=TileConfig((64, 128, 32), 3))
    chosen = [(run.plan.variant, str(run.plan.config)) for run in nothing_runs]
    assert chosen == [("v1", "128x128x64"), ("v2", "64x128x32,stages=4"), ("v2", "64x128x32,stages=3")]


def test_a_swapped_variant_is_not_served_from_an_old_plan(nothing_runs):
    a, b = ab()
    matmul(a, b, variant="v1")
    v1 = registry.get("v1")
    registry.register(registry.Variant("v1", registry.get("v0").module, v1.title, v1.change), replace=True)
    try:
        matmul(a, b, variant="v1")
    finally:
        registry.unregister("v1")
    matmul(a, b, variant="v1")
    assert len({id(run.plan) for run in nothing_runs}) == 3


# Devices


def test_a_gpu_that_is_no_hopper(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "NVIDIA A100")
    with pytest.raises(RuntimeError) as caught:
        launch._check_device(0)
    assert str(caught.value) == (
        "the kernels need a Hopper GPU (compute capability 9.0), found NVIDIA A100 (8.0); "
        "with CPU tensors they run in the emulator"
    )


def test_the_emulator_is_not_started_for_a_large_product_unless_asked(nothing_runs, monkeypatch):
    a, b = ab(512, 512, 512)
    seconds = launch.estimate_emulator_seconds(512, 512, 512, registry.default().load().DEFAULT)
    monkeypatch.setenv(launch.EMULATOR_LIMIT_VARIABLE, str(seconds / 2))
    with pytest.raises(RuntimeError) as caught:
        matmul(a, b)
    assert re.fullmatch(
        r"a is on the CPU, where the emulator would take about \d+ s for this product \(limit \d+ s, "
        r"CUTE_MATMUL_EMULATOR_SECONDS\); pass backend='emulator' to insist, or CUDA tensors",
        str(caught.value),
    )
    assert not nothing_runs
    matmul(a, b, backend="emulator")
    monkeypatch.setenv(launch.EMULATOR_LIMIT_VARIABLE, str(seconds * 2))
    matmul(a, b)
    assert len(nothing_runs) == 2


def test_a_large_product_is_refused_by_default(nothing_runs):
    a, b = (torch.empty(1, dtype=F16).expand(1, 1) for _ in range(2))
    assert launch.estimate_emulator_seconds(8192, 8192, 8192, registry.default().load().DEFAULT) > launch.EMULATOR_LIMIT
    matmul(a, b)
    assert len(nothing_runs) == 1


def test_what_the_emulator_finds_is_an_error(monkeypatch):
    class Report:
        ok = False

        def __str__(self) -> str:
            return "stage 1 overwritten"

    monkeypatch.setattr(launch, "_emulate", lambda *_, **__: Report())
    with pytest.raises(RuntimeError, match=r"the emulator found faults in v2 with config .*\nstage 1 overwritten"):
        matmul(*ab(), variant="v2")


def test_emulate_checks_its_operands_too(nothing_runs):
    a, b = ab()
    with cases.refused("a", Unsupported, "130 bytes"):
        launch.emulate(torch.zeros(64, 65, dtype=F16)[:, :64], ab(k=64)[1])
    square = torch.zeros(64, 64, dtype=F16)
    with cases.refused("out", ValueError, "overlap a"):
        launch.emulate(square, ab(k=64, n=64)[1], out=square)
    assert not nothing_runs
    out, report = launch.emulate(a, b, schedule="random", seed=3)
    assert out.shape == (64, 72) and report is None
    assert nothing_runs[0].options == {"schedule": "random", "seed": 3}
