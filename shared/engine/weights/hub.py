"""Fetches a model from the Hugging Face hub by its name, `owner/name` or `owner/name@revision`.

Plain HTTP, so that nothing needs to be installed for it and an interrupted file goes on where it stopped, also in
another process. The hub's own variables are honoured: HF_ENDPOINT for a mirror, HF_TOKEN for models that ask for one.
"""

import hashlib
import http.client
import json
import os
import re
import shutil
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from shared.engine.weights.errors import InvalidModel
from shared.engine.weights.progress import OnProgress

_NAME = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(@(?P<revision>[\w./-]+))?")
_NEEDED = re.compile(r"[^/]+\.(json|jinja)|model[^/]*\.safetensors")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_PUBLIC = "https://huggingface.co"
_TIMEOUT_S = 30.0
_RETRY_S = 1.0
_TRIES = 4
_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class HubName:
    """revision: None where the name leaves it open; whatever was fetched once is then as good."""

    repo: str
    revision: str | None

    @property
    def slug(self) -> str:
        return re.sub(r"[^a-z0-9._-]+", "--", self.repo.lower())

    def fingerprint(self, commit: str) -> str:
        return f"hub:{self.repo}@{commit}"


@dataclass(frozen=True, slots=True)
class HubFile:
    """sha256: None for small files, for which the hub does not say it."""

    path: str
    num_bytes: int
    sha256: str | None


@dataclass(frozen=True, slots=True)
class HubModel:
    """One commit of a repository, and those of its files that serving needs."""

    name: HubName
    commit: str
    files: tuple[HubFile, ...]


def hub_name(model: str) -> HubName | None:
    found = _NAME.fullmatch(model)
    return None if found is None else HubName(found["repo"], found["revision"])


def look_up(name: HubName) -> HubModel:
    """What the hub has under that name now. InvalidModel where there is no hub, no such model, or none we can read."""
    revision = quote(name.revision or "main", safe="")
    try:
        with _open(f"api/models/{name.repo}/revision/{revision}?blobs=true") as response:
            info = json.load(response)
        files = tuple(_file(item) for item in info["siblings"])
        commit = str(info["sha"])
    except (OSError, http.client.HTTPException) as error:
        raise _unreachable(name, error) from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InvalidModel(f"{_endpoint()} answers for {name.repo} like no Hugging Face hub ({error})") from error
    needed = tuple(file for file in files if _NEEDED.fullmatch(file.path))
    if not any(file.path.endswith(".safetensors") for file in needed):
        hint = "; give the path of one of its GGUF files" if any(file.path.endswith(".gguf") for file in files) else ""
        raise InvalidModel(f"{name.repo} on the hub holds no model*.safetensors file{hint}")
    if not _COMMIT.fullmatch(commit):
        raise InvalidModel(f"{_endpoint()} names no commit for {name.repo} but {commit!r}")
    return HubModel(name, commit, needed)


def fetch(model: HubModel, store: Path, tell: OnProgress) -> Path:
    """The files of `model` in a directory under `store`; what is already there is not loaded again. Blocks."""
    directory = store / "hub" / f"{model.name.slug}@{model.commit}"
    directory.mkdir(parents=True, exist_ok=True)
    download = _Download(model, directory, tell)
    free = shutil.disk_usage(directory).free
    if download.missing_bytes > free:
        needed = f"{download.missing_bytes >> 20} MiB"
        raise InvalidModel(f"{model.name.repo} needs {needed} more in {store}, which has {free >> 20} MiB left")
    for file in model.files:
        download.complete(file)
    return directory


class _Download:
    """The files of one model, one after the other. An unfinished one is called `.part`."""

    def __init__(self, model: HubModel, directory: Path, tell: OnProgress) -> None:
        self._model, self._directory, self._tell = model, directory, tell
        self._total = sum(file.num_bytes for file in model.files)
        self._done = sum(self._present(file) for file in model.files)

    @property
    def missing_bytes(self) -> int:
        return self._total - self._done

    def complete(self, file: HubFile) -> None:
        target, part = self._directory / file.path, self._part(file)
        if not target.is_file():
            self._load(file, part)
            if part.stat().st_size != file.num_bytes or (file.sha256 is not None and _sha256(part) != file.sha256):
                part.unlink()
                raise InvalidModel(f"{self._model.name.repo}: {file.path} came damaged; try again")
            part.rename(target)
        self._tell("fetch", self._done, self._total)

    def _load(self, file: HubFile, part: Path) -> None:
        """Goes on after a broken connection as long as that brings something, and a few times where it does not."""
        failures, before = 0, self._present(file)

        def unfinished() -> bool:
            return not part.exists() or self._present(file) < file.num_bytes

        while unfinished():
            try:
                self._append(file, part, before)
                error: Exception = ConnectionError("the connection ended too soon")
            except (OSError, http.client.HTTPException) as caught:
                if isinstance(caught, urllib.error.HTTPError) and caught.code < 500:
                    raise _unreachable(self._model.name, caught) from caught
                error = caught
            now = self._present(file)
            failures = failures + 1 if now == before else 1
            if unfinished():
                if failures >= _TRIES:
                    raise _unreachable(self._model.name, error) from error
                time.sleep(_RETRY_S)
            before = now

    def _append(self, file: HubFile, part: Path, begin: int) -> None:
        path = f"{self._model.name.repo}/resolve/{self._model.commit}/{quote(file.path)}"
        with _open(path, begin) as response, part.open("ab") as out:
            if begin and response.status != http.HTTPStatus.PARTIAL_CONTENT:
                out.truncate(0)
                self._done -= begin
            while chunk := response.read(_CHUNK_BYTES):
                out.write(chunk)
                self._done += len(chunk)
                self._tell("fetch", self._done, self._total)

    def _present(self, file: HubFile) -> int:
        if (self._directory / file.path).is_file():
            return file.num_bytes
        part = self._part(file)
        return part.stat().st_size if part.is_file() else 0

    def _part(self, file: HubFile) -> Path:
        return self._directory / f"{file.path}.part"


def _open(path: str, begin: int = 0) -> Any:
    """The hub's answer to a GET. The token goes to the hub alone, not where it redirects to."""
    request = urllib.request.Request(f"{_endpoint()}/{path}", headers={"User-Agent": "baton"})
    if begin:
        request.add_header("Range", f"bytes={begin}-")
    if token := os.environ.get("HF_TOKEN"):
        request.add_unredirected_header("Authorization", f"Bearer {token}")
    return urllib.request.urlopen(request, timeout=_TIMEOUT_S)


def _endpoint() -> str:
    return (os.environ.get("HF_ENDPOINT") or _PUBLIC).rstrip("/")


def _file(item: dict[str, Any]) -> HubFile:
    return HubFile(str(item["rfilename"]), int(item.get("size") or 0), (item.get("lfs") or {}).get("sha256"))


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _unreachable(name: HubName, error: Exception) -> InvalidModel:
    reason: object = error
    if isinstance(error, urllib.error.HTTPError):
        reason = f"it answers {error.code} {error.reason}"
        if error.code in (401, 403, 404):
            reason = "there is none of this name, or it is gated or private: then accept its terms and set HF_TOKEN"
    elif isinstance(error, urllib.error.URLError):
        reason = error.reason
    return InvalidModel(
        f"{name.repo} is no path on this machine, and could not be fetched from {_endpoint()}: "
        f"{' '.join(str(reason).split())}"
    )
