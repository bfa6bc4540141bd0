"""Bytes move where nothing compiles."""

import sys

import pytest

from shared.transfer import kernels


def test_without_a_compiler_there_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "numba", None)
    for name in [name for name in sys.modules if name.startswith("kernels.cpu")]:
        monkeypatch.delitem(sys.modules, name)
    assert kernels.load_kernels() is None


@pytest.mark.parametrize("error", [ImportError, RuntimeError])
def test_a_compiler_that_fails_costs_nothing_but_speed(monkeypatch: pytest.MonkeyPatch, error: type[Exception]) -> None:
    def fail(name: str) -> None:
        raise error(name)

    monkeypatch.setattr("shared.transfer.kernels.importlib.import_module", fail)
    assert kernels.load_kernels() is None


def test_here_there_are_some() -> None:
    found = kernels.load_kernels()
    assert found is not None
    assert found.can_digest(4096)
