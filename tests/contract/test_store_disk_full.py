"""The driver `disk` on a device that is really full, really read-only, or allows files of some size only."""

import os
import shlex
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

REPO = Path(__file__).parents[2]


@cache
def _namespace() -> tuple[str, ...]:
    """What runs a command where it may mount file systems that nobody else sees; nothing if that is forbidden here."""
    ways = (("unshare", "--mount"), ("unshare", "--map-root-user", "--mount"))
    if shutil.which("unshare") is None:
        return ()
    for way in ways:
        if (
            subprocess.run([*way, "mount", "-t", "tmpfs", "none", "/mnt"], capture_output=True, check=False).returncode
            == 0
        ):
            return way
    return ()


def _run(argv: list[str], what: str, directory: Path) -> None:
    env = {**os.environ, "PYTHONPATH": str(REPO)}
    ended = subprocess.run(argv, cwd=REPO, env=env, capture_output=True, text=True, check=False, timeout=120)
    assert (ended.returncode, ended.stdout) == (0, "went on\n"), f"{what}: {ended.stdout}{ended.stderr}"


def _filler(what: str, directory: Path) -> list[str]:
    return [sys.executable, "-m", "tests.contract.store_filler", what, str(directory)]


@pytest.mark.parametrize("what", ["full", "read-only"])
def test_a_file_system_that_takes_no_more(tmp_path: Path, what: str) -> None:
    if not _namespace():
        pytest.skip("this system does not let us mount a small file system")
    mount = f"mount -t tmpfs -o size=4m none {shlex.quote(str(tmp_path))}"
    command = f"{mount} && exec {shlex.join(_filler(what, tmp_path / 'store'))}"
    _run([*_namespace(), "sh", "-c", command], what, tmp_path)


def test_a_file_that_may_not_grow(tmp_path: Path) -> None:
    _run(_filler("limited", tmp_path / "store"), "limited", tmp_path)
