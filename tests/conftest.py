"""Options and markers of the whole suite. Imports nothing that a machine with a GPU may lack."""

from __future__ import annotations

import pytest


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
