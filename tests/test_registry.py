from __future__ import annotations

import sys
import threading
import warnings
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

import cute_matmul
from cute_matmul import registry
from cute_matmul.registry import Variant

VARIANTS = Path(registry.__file__).parent / "variants"
MINE = Variant("mine", "my_package.kernel", "mine", "nothing else")


@pytest.fixture(autouse=True)
def restored(monkeypatch):
    monkeypatch.setattr(registry, "_variants", dict(registry._variants))
    monkeypatch.delenv(registry.ENVIRONMENT, raising=False)


def test_every_file_is_registered_and_every_entry_has_its_file():
    files = {f"cute_matmul.variants.{path.stem}" for path in VARIANTS.glob("*.py") if path.stem != "__init__"}
    assert {variant.module for variant in registry.BUILTIN} == files


def test_builtin_names_are_the_ladder_in_order():
    names = [variant.name for variant in registry.BUILTIN]
    assert names == [f"v{rung}" for rung in range(len(names))]
    assert registry.names()[: len(names)] == tuple(names)


@pytest.mark.parametrize("variant", registry.BUILTIN, ids=lambda variant: variant.name)
def test_entries_say_what_they_change_and_load(variant):
    assert variant.module.endswith("." + variant.name)
    assert "\n" not in variant.change and len(variant.change) <= 120
    assert variant.constraints
    module = variant.load()
    assert module.DEFAULT in module.SPACE
    assert variant.name.upper() in (module.__doc__ or "").splitlines()[0]


def test_load_refuses_a_module_that_is_no_variant():
    with pytest.raises(ImportError, match=r"'json' of variant 'odd' does not define RESOURCES, SPACE, DEFAULT, host"):
        Variant("odd", "json", "t", "c").load()


def test_get_names_what_there_is():
    assert registry.get("v1").name == "v1"
    with pytest.raises(ValueError, match=r"one of v0, v1, v2.*; got 'v99'"):
        registry.get("v99")


@pytest.mark.parametrize("field", ["name", "module", "title", "change"])
def test_fields_must_say_something(field):
    values = {"name": "x", "module": "x", "title": "x", "change": "x", field: " "}
    with pytest.raises(ValueError, match=f"{field} of a Variant"):
        Variant(**values)


def test_names_and_constraints_are_checked():
    with pytest.raises(ValueError, match="no space or comma"):
        Variant("a b", "m", "t", "c")
    with pytest.raises(ValueError, match="tuple of strings, got one string"):
        Variant("a", "m", "t", "c", constraints="K must be even")


def test_register_and_unregister():
    assert registry.register(MINE) is MINE
    assert registry.names()[-1] == "mine"
    assert registry.get("mine") is MINE
    registry.unregister("mine")
    assert "mine" not in registry.names()


def test_register_refuses_a_taken_name_and_swaps_on_request():
    swapped = Variant("v1", "my_package.kernel", "mine", "nothing else")
    with pytest.raises(ValueError, match=r"'v1' is taken by cute_matmul\.variants\.v1"):
        registry.register(swapped)
    order = registry.names()
    registry.register(swapped, replace=True)
    assert registry.get("v1") is swapped
    assert registry.names() == order
    registry.unregister("v1")
    assert registry.get("v1").module == "cute_matmul.variants.v1"


def test_register_and_unregister_refuse_the_rest():
    with pytest.raises(TypeError, match=r"must be a cute_matmul\.Variant, got str"):
        registry.register("v1")
    with pytest.raises(ValueError, match="built in"):
        registry.unregister("v1")
    with pytest.raises(ValueError, match="got 'v99'"):
        registry.unregister("v99")


def test_use_nests_and_restores_after_an_error():
    before = registry.default()
    with registry.use("v0") as variant:
        assert variant is registry.default() is registry.get("v0")
        with pytest.raises(KeyError), registry.use("v1"):
            assert registry.default().name == "v1"
            raise KeyError
        assert registry.default().name == "v0"
    assert registry.default() is before


def test_use_refuses_an_unknown_name_before_the_block():
    entered = False
    with pytest.raises(ValueError, match="got 'v99'"), registry.use("v99"):
        entered = True
    assert not entered


def test_use_is_of_its_own_thread():
    seen = {}
    inside, checked = threading.Event(), threading.Event()

    def other():
        with registry.use("v1"):
            inside.set()
            checked.wait(10)
            seen["other"] = registry.default().name

    thread = threading.Thread(target=other)
    thread.start()
    assert inside.wait(10)
    with registry.use("v0"):
        seen["this"] = registry.default().name
    checked.set()
    thread.join()
    assert seen == {"this": "v0", "other": "v1"}
    assert registry.default().name == registry.BUILTIN_DEFAULT


def test_environment_sets_the_default_and_use_goes_before_it(monkeypatch):
    monkeypatch.setenv(registry.ENVIRONMENT, "v0")
    assert registry.default().name == "v0"
    with registry.use("v1"):
        assert registry.default().name == "v1"
    monkeypatch.setenv(registry.ENVIRONMENT, "")
    assert registry.default().name == registry.BUILTIN_DEFAULT
    monkeypatch.setenv(registry.ENVIRONMENT, "v99")
    with pytest.raises(ValueError, match=r"CUTE_MATMUL_VARIANT: variant must be one of v0, .*got 'v99'"):
        registry.default()


@pytest.fixture
def entry_points(monkeypatch, tmp_path):
    """Entry points that the registry finds when it looks for the first time."""
    (tmp_path / "other_package.py").write_text(
        "from cute_matmul import Variant\n"
        "GOOD = Variant('good', 'other_package', 'good', 'something')\n"
        "TAKEN = Variant('v0', 'other_package', 'v0', 'something')\n"
        "WRONG = 'v3'\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(registry, "_entry_points", "unread")

    def provide(*names):
        points = [EntryPoint(name, f"other_package:{name}", registry.ENTRY_POINT_GROUP) for name in names]
        monkeypatch.setattr("importlib.metadata.entry_points", lambda group: points)

    yield provide
    sys.modules.pop("other_package", None)


def test_entry_points_come_after_the_ladder(entry_points):
    entry_points("GOOD")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert registry.names()[len(registry.BUILTIN) :] == ("good",)
        assert registry.get("good").module == "other_package"


@pytest.mark.parametrize(
    ("name", "reason"),
    [("MISSING", "AttributeError"), ("WRONG", "names a str"), ("TAKEN", "'v0' is taken by cute_matmul")],
)
def test_a_broken_entry_point_is_left_out_and_said(entry_points, name, reason):
    entry_points(name, "GOOD")
    with pytest.warns(RuntimeWarning, match=rf"'{name}'.*is left out: .*{reason}"):
        assert registry.names()[len(registry.BUILTIN) :] == ("good",)
    assert registry.get("v0").module == "cute_matmul.variants.v0"


def test_public_names():
    assert cute_matmul.variants() == registry.names()
    assert cute_matmul.use is registry.use
    for name in cute_matmul.__all__:
        assert getattr(cute_matmul, name) is not None
    with pytest.raises(AttributeError, match=r"'nothing'; public names: .*matmul"):
        _ = cute_matmul.nothing
