"""Options and markers of the whole suite. Imports nothing that a machine with a GPU may lack."""

from __future__ import annotations

import os

import pytest

from cute_matmul.compile import CACHE_VARIABLE


def pytest_configure(config: pytest.Config) -> None:
    """Unless the caller names a cache, kernels are kept beside pytest's own files, not in the user's cache.

    What another checkout compiled then decides no result, and the suite leaves nothing behind outside its own checkout.
    """
    if CACHE_VARIABLE not in os.environ:
        keeps = config.pluginmanager.has_plugin("cacheprovider")
        os.environ[CACHE_VARIABLE] = str(config.cache.mkdir("kernels")) if keeps else "0"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--all-configs",
        action="store_true",
        help="every configuration of every variant, not the fast subset",
    )


@pytest.fixture(scope="session")
def all_configs(request: pytest.FixtureRequest) -> bool:
    """Whether every configuration was asked for."""
    return request.config.getoption("--all-configs")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu_items:
        return
    from cute_matmul.harness import no_hopper_gpu

    missing = no_hopper_gpu()
    if missing:
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason=f"needs a Hopper GPU: {missing}"))
