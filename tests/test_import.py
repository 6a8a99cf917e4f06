from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

LIMIT_SECONDS = 0.3


def python(code: str, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **environment},
    )


def test_import_is_quick_and_silent():
    # Least of a few: the rest is what else the machine was doing. The interpreter's own start counts too.
    seconds = []
    for _ in range(5):
        started = time.perf_counter()
        done = python("import cute_matmul")
        seconds.append(time.perf_counter() - started)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert min(seconds) < LIMIT_SECONDS


@pytest.mark.parametrize(
    "module", ["cute_matmul", "cute_matmul.registry", "cute_matmul.config", "cute_matmul.variants"]
)
def test_light_modules_load_nothing_heavy(module):
    heavy = "{'torch', 'numpy', 'cutlass', 'tvm_ffi', 'llvmlite'}"
    done = python(f"import sys, {module}\nprint(sorted({heavy} & set(sys.modules)))")
    assert (done.stdout.strip(), done.stderr) == ("[]", "")


def test_the_folder_of_variants_is_callable_whatever_was_imported_first():
    code = (
        "import cute_matmul.variants, cute_matmul\n"
        "assert cute_matmul.variants() == cute_matmul.registry.names()\n"
        "assert 'matmul' in dir(cute_matmul)"
    )
    done = python(code)
    assert (done.returncode, done.stderr) == (0, "")


def test_importing_starts_no_thread_and_changes_no_environment():
    code = (
        "import os, threading\n"
        "before = dict(os.environ)\n"
        "import cute_matmul\n"
        "assert dict(os.environ) == before\n"
        "assert threading.active_count() == 1"
    )
    done = python(code)
    assert (done.returncode, done.stderr) == (0, "")
