"""The CUDA sources as compilers for a GPU see them."""

import shutil
import subprocess
from pathlib import Path

import pytest

from kernels.cuda import launch
from kernels.cuda.launch import Kernel, source_text
from tests.support_cuda import INSTANCES

SOURCES = sorted(path.stem for path in Path(launch.__file__).parent.glob("*.cu"))
NVCC = shutil.which("nvcc")


def a_few() -> list[Kernel]:
    """Of each kernel the first instance, and of attention the largest."""
    first = {kernel.expression.split("<")[0]: kernel for kernel in reversed(INSTANCES)}
    return [*first.values(), *(kernel for kernel in INSTANCES if "Half, Code, 128" in kernel.expression)]


def test_every_source_is_emulated() -> None:
    assert {kernel.source for kernel in INSTANCES} == set(SOURCES)


@pytest.mark.parametrize("source", SOURCES)
def test_a_source_needs_no_headers_and_nothing_of_one_compiler(source: str) -> None:
    """CuPy compiles by NVRTC, which knows neither CUDA's nor the system's headers, nor gcc's builtins."""
    text = source_text(source)
    assert "#include" not in text
    assert "__builtin" not in text
    assert "#pragma once" not in text


@pytest.mark.skipif(NVCC is None, reason="no nvcc")
def test_nvcc_makes_machine_code_of_every_source(tmp_path: Path) -> None:
    """For sm_80 and sm_90; all sources as one, which starts the compiler once, each in a namespace of its own."""
    parts = []
    for source in SOURCES:
        uses = [f"auto use_{i} = &{kernel.expression};" for i, kernel in enumerate(a_few()) if kernel.source == source]
        parts += [f"namespace of_{source} {{", source_text(source), *uses, "}"]
    (tmp_path / "all.cu").write_text("\n".join(parts), encoding="utf-8")
    targets = [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in (80, 90)]
    command = [str(NVCC), "-std=c++17", "-fatbin", "-Werror=all-warnings", *targets, "all.cu"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    made = (tmp_path / "all.fatbin").read_bytes()
    for kernel in a_few():
        assert kernel.expression.split("<")[0].encode() in made
