"""The pytest fixture `emulate`: run a kernel in the emulator, and fail the test where it has a race or a deadlock."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from cute_matmul.emulator.report import Report


@pytest.fixture
def emulate() -> Callable[..., Report]:
    """`emulate(host_fn, *args, **options)`: `emulator.run` that fails the test unless the report is ok.

    Returns the Report, for tests that look further. Options are those of `emulator.run` (schedule, seed, suppress,
    ...), and `schedules`, a sequence to run one after the other on the same arguments; the last Report is returned.
    """

    def emulate(host_fn: Any, *args: Any, schedules: tuple[str, ...] = (), **options: Any) -> Report:
        __tracebackhide__ = True
        from cute_matmul import emulator

        if schedules and "schedule" in options:
            raise TypeError("emulate() takes schedule or schedules, not both")
        if not isinstance(schedules, (tuple, list)):
            raise TypeError(f"schedules must be a tuple or list of names, got {schedules!r}")
        program = emulator.Program.of(host_fn, *args, **_for_host(options))
        for schedule in schedules or (options.pop("schedule", "round_robin"),):
            report = emulator.run(program, *args, schedule=schedule, **options)
            if not report.ok:
                pytest.fail(f"the emulator found faults under schedule {schedule}\n{report}", pytrace=False)
        return report

    return emulate


def _for_host(options: dict[str, Any]) -> dict[str, Any]:
    """The keyword arguments that are the host function's own."""
    import inspect

    from cute_matmul import emulator

    own = set(inspect.signature(emulator.run).parameters)
    return {name: value for name, value in options.items() if name not in own}
