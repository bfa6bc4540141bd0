#!/bin/sh
# Are the GPU's kernels right, and how fast? One command, at most 8 minutes: ops/gpu_check.sh [--write] [--help …]
#
# BATON_PYTHON   the Python to use, with what it has installed. Default: .venv, else python3
# PIP_FLAGS      for pip, where packages are missing: --index-url …, --find-links …, --no-index
# BATON_INSTALL  0: install nothing, only say what is missing
#
# What is missing goes into .baton/gpu-venv, which sees the packages of the Python above. Exit status: 0 all right, 1 a
# kernel is wrong, 2 it could not run.
set -eu
started=$(date +%s)
cd "$(dirname "$0")/.."
export PYTHONPATH="$PWD" OMP_WAIT_POLICY=PASSIVE PYTHONUNBUFFERED=1
budget=480

python=${BATON_PYTHON:-}
if [ -z "$python" ]; then
    if [ -x .venv/bin/python ]; then python=.venv/bin/python; else python=python3; fi
fi
if ! command -v "$python" >/dev/null; then
    echo "gpu_check: there is no $python; name one by BATON_PYTHON" >&2
    exit 2
fi

# What is left of the time, in seconds; never 0, which `timeout` takes for no limit.
left() {
    seconds=$((budget - $(date +%s) + started))
    echo $((seconds > 1 ? seconds : 1))
}

# Prints the names of packages that cannot be imported; torch and CuPy only count where they are built for CUDA.
missing() {
    "$1" - <<'EOF'
import importlib.util as util, sys
if sys.version_info < (3, 11):
    sys.exit("gpu_check: Python 3.11 or later is needed; name one by BATON_PYTHON")
packages = {"numpy": "numpy", "numba": "numba", "pydantic": "pydantic", "pydantic_settings": "pydantic-settings",
            "xxhash": "xxhash", "zstandard": "zstandard", "rich": "rich", "tokenizers": "tokenizers", "jinja2": "jinja2"}
absent = [package for module, package in packages.items() if util.find_spec(module) is None]
cuda = "13"
if util.find_spec("torch") is None:
    absent.insert(0, "torch")
else:
    import torch
    if torch.version.cuda is None:
        absent.insert(0, "torch")
    else:
        cuda = torch.version.cuda.split(".")[0]
if util.find_spec("cupy") is None:
    absent.append(f"cupy-cuda{cuda}x[ctk]")
print(*absent)
EOF
}

wanted=$(missing "$python") || exit 2
if [ -n "$wanted" ] && [ "${BATON_INSTALL:-1}" != 0 ]; then
    echo "gpu_check: missing: $wanted; installing into .baton/gpu-venv"
    [ -x .baton/gpu-venv/bin/python ] || timeout "$(left)" "$python" -m venv --system-site-packages .baton/gpu-venv || exit 2
    base=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    python=.baton/gpu-venv/bin/python
    # A virtual environment on another one sees the first one's base only; this names its packages too.
    echo "$base" >"$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/below.pth"
    wanted=$(missing "$python") || exit 2
    for package in $wanted; do
        again=
        # A torch for CPUs would satisfy pip.
        if [ "$package" = torch ]; then again=--ignore-installed; fi
        # shellcheck disable=SC2086
        timeout --kill-after=5 "$(left)" "$python" -m pip install --quiet --disable-pip-version-check $again ${PIP_FLAGS:-} \
            -c ops/constraints.txt "$package" || echo "gpu_check: $package could not be installed" >&2
    done
    wanted=$(missing "$python") || exit 2
fi
if [ -n "$wanted" ]; then
    echo "gpu_check: cannot run: $python lacks $wanted" >&2
    echo "gpu_check: torch must be a build for CUDA; PIP_FLAGS names an index, BATON_PYTHON a Python that has them" >&2
    exit 2
fi
if ! timeout --kill-after=5 "$(left)" "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    echo "gpu_check: torch is built for CUDA and finds no GPU: is there a driver (nvidia-smi)?" >&2
    exit 2
fi

seconds=$(left)
if [ "$seconds" -lt 60 ]; then
    echo "gpu_check: installing took all of $budget s; run it again, what is installed stays" >&2
    exit 2
fi
status=0
timeout --kill-after=5 "$seconds" "$python" -m benchmarks.gpu_check --started "$started" "$@" || status=$?
if [ "$status" -eq 124 ] || [ "$status" -eq 137 ]; then
    echo "gpu_check: stopped after $budget s; benchmarks/results/gpu.json has what was measured until then" >&2
    exit 2
fi
exit "$status"
