"""What is installed is ours, whole, and no larger than each process needs."""

import subprocess
import sys
import tomllib
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest

REPO = Path(__file__).parents[2]
PROJECT = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code]
    return subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize("package", ["kernels", "shared", "services"])
def test_packages_of_these_names_are_ours(package: str) -> None:
    """Packages of the same names exist elsewhere; one of them first on the path would be taken for ours."""
    spec = find_spec(package)
    assert spec is not None
    assert spec.origin == str(REPO / package / "__init__.py")


def test_kernels_stays_empty() -> None:
    """Other people's code imports a package of this name, and then runs ours."""
    assert (REPO / "kernels" / "__init__.py").read_text().strip() == ""
    assert not PROJECT["version"].startswith("0.18.")


def test_generic_names_are_never_requirements() -> None:
    every = [*PROJECT["dependencies"], *(item for extra in PROJECT["optional-dependencies"].values() for item in extra)]
    names = {item.split(">")[0].split("=")[0].split("[")[0].strip() for item in every}
    assert not names & {"shared", "services", "kernels", "ops"}


@pytest.mark.parametrize(
    "module",
    [
        "services.gateway.service",
        "services.kvstore.service",
        "services.sidecar.server",
        "services.cli",
        "services.launcher.up",
        "services.chat",
        "services.doctor",
    ],
)
def test_processes_without_a_model_need_no_torch(module: str) -> None:
    blocked = "import sys; sys.modules.update(dict.fromkeys(('torch', 'numba', 'cupy')))"
    done = run_python(f"{blocked}; import {module}")
    assert done.returncode == 0, done.stderr


def test_workers_do_need_it() -> None:
    """Else the test above could not fail."""
    done = run_python("import sys; sys.modules['torch'] = None; import services.decode.service")
    assert "ModuleNotFoundError" in done.stderr
    assert "torch" in done.stderr


def test_every_package_has_an_init() -> None:
    """Type checker, import contracts and wheel agree only then."""
    for tree in ("kernels", "shared", "services"):
        for folder in {path.parent for path in (REPO / tree).rglob("*.py")}:
            assert (folder / "__init__.py").exists(), folder


def test_the_wheel_holds_the_three_trees_and_nothing_else(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)],
        cwd=REPO,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    meta = f"baton_serving-{PROJECT['version']}.dist-info"
    assert {name.split("/")[0] for name in names} == {"kernels", "shared", "services", meta}
    assert "services/cli.py" in names
    assert f"{meta}/licenses/LICENSE" in names


def test_pins_cover_what_is_asked_for() -> None:
    """Each pin is inside its range and each direct requirement that is installed here has one."""
    from packaging.requirements import Requirement

    lines = (REPO / "ops" / "constraints.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    extras = PROJECT["optional-dependencies"]
    asked = [*PROJECT["dependencies"], *extras["gateway"], *extras["engine"], *extras["dev"]]
    for text in asked:
        requirement = Requirement(text)
        assert requirement.name in pins, f"{requirement.name} has no pin"
        assert requirement.specifier.contains(pins[requirement.name]), f"{text}: its pin is outside the range"
