"""The CUDA kernels on a CPU, for whichever test asks; compiled once a session."""

import pytest

from tests.support_cuda import GXX, EmulatedLauncher


@pytest.fixture(scope="session")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> EmulatedLauncher:
    if GXX is None:
        pytest.skip("no g++ to compile the CUDA sources for a CPU with")
    return EmulatedLauncher(tmp_path_factory.mktemp("cuda_on_cpu"))


@pytest.fixture
def launcher(emulated: EmulatedLauncher) -> EmulatedLauncher:
    """With its switches where they stand at first."""
    emulated.num_processors, emulated.backwards = 8, False
    return emulated
