"""A prepared model's weights in a packed format: a second file beside the float32 one, made when first asked for.

All workers of a host map it as it is; none has a copy of its own. `weights-FORMAT.json` says what it was made of.
"""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import numpy as np
from pydantic import BaseModel, ConfigDict, ValidationError

from kernels.packing import PackedWeight, kinds_of_parts, pack, parts_of, restore
from shared.engine.weights.catalog import PreparedModel, locked
from shared.engine.weights.errors import InvalidModel
from shared.engine.weights.formats import FLOAT32, check_weights, default_weights
from shared.engine.weights.prepared import open_weights
from shared.engine.weights.progress import OnProgress, silent
from shared.engine.weights.safetensors_file import SafetensorsFile, type_name, write_tensors
from shared.engine.weights.toy import TOY

PACKED_VERSION = 1
"""Of the layout in kernels/packing.py and the choice of formats here; files of another version are made again."""

_EMBED, _LM_HEAD = "embed", "lm_head"


class PackedFile(BaseModel):
    """weights-FORMAT.json. source_digest: of the float32 weights; digest: xxh3-128 of the packed file, of `size` bytes.
    matrices: the format and the shape [outputs, width] of each packed one."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    version: int
    source_digest: str
    digest: str
    size: int
    matrices: dict[str, tuple[str, int, int]]


def prepare_weights(
    prepared: PreparedModel, device: str, dtype: str, weights: str | None, on_progress: OnProgress = silent
) -> None:
    """Makes what a worker of these settings will map, unless it is there. Raises InvalidModel or ConfigError."""
    check_weights(device, dtype, weights)
    format = weights or default_weights(device, dtype, prepared.config.architecture)
    if format != FLOAT32 and prepared.config.architecture != TOY:
        open_packed(prepared, format, on_progress)


def open_packed(
    prepared: PreparedModel, format: str, on_progress: OnProgress = silent
) -> Mapping[str, PackedWeight | np.ndarray]:
    """The model's tensors, mapped after checking every byte: matrices packed, the rest float32. Made first where they
    are not there; of processes that ask at once, one works and the others wait. Raises InvalidModel."""
    try:
        described = _described(prepared, format) or _make(prepared, format, on_progress)
        file = SafetensorsFile(_weights_path(prepared, format))
    except OSError as error:
        where = f": {error.filename}" if error.filename else ""
        raise InvalidModel(f"weights in {format} could not be made: {error.strerror or error}{where}") from error
    if file.digest() != described.digest:
        raise InvalidModel(f"{file} is damaged: its digest is not the one that was noted; delete it")
    return {name: value for name, value in _tensors(file, described)}


def _tensors(file: SafetensorsFile, described: PackedFile) -> Iterator[tuple[str, PackedWeight | np.ndarray]]:
    for name in file.names:
        if name in described.matrices:
            format, *shape = described.matrices[name]
            scales = f"{name}.scales"
            found = file.raw(scales) if scales in file.names else None
            yield name, restore(format, (shape[0], shape[1]), file.raw(name), found)
        elif name.removesuffix(".scales") not in described.matrices:
            yield name, file.raw(name)


def _described(prepared: PreparedModel, format: str) -> PackedFile | None:
    """What is there, if it is whole and of these weights."""
    with suppress(FileNotFoundError, ValidationError):
        found = PackedFile.model_validate_json(_note_path(prepared, format).read_bytes())
        current = (PACKED_VERSION, prepared.config.weights_digest, _weights_path(prepared, format).stat().st_size)
        if (found.version, found.source_digest, found.size) == current:
            return found
    return None


def _make(prepared: PreparedModel, format: str, tell: OnProgress) -> PackedFile:
    with locked(prepared.directory / f".weights-{format}.lock", tell):
        if (found := _described(prepared, format)) is not None:
            return found
        _note_path(prepared, format).unlink(missing_ok=True)
        scratch = prepared.directory / f".weights-{format}.tmp"
        try:
            described = _write(prepared, format, scratch, tell)
        except BaseException:
            scratch.unlink(missing_ok=True)  # the disk may be full
            raise
        scratch.rename(_weights_path(prepared, format))
        note = prepared.directory / f".weights-{format}.json.tmp"
        with note.open("w", encoding="utf-8") as file:
            file.write(json.dumps(described.model_dump(), indent=1) + "\n")
            file.flush()
            os.fsync(file.fileno())
        note.rename(_note_path(prepared, format))
        return described


def _write(prepared: PreparedModel, format: str, path: Path, tell: OnProgress) -> PackedFile:
    """One matrix at a time is in memory."""
    source = open_weights(prepared.directory, prepared.config)
    tied = _LM_HEAD not in source.names
    shapes = {name: source.shape(name) for name in sorted(source.names)}
    matrices = {n: (_format_of(n, format, tied), s[0], s[1]) for n, s in shapes.items() if len(s) == 2}
    # All parts of matrices are a multiple of 16 bytes, so that each tensor lies where its type may lie.
    kinds: dict[str, tuple[str, tuple[int, ...]]] = {}
    for name, matrix in matrices.items():
        kinds |= {name + suffix: (type_name(kind), shape) for suffix, (kind, shape) in kinds_of_parts(*matrix).items()}
    plain = [name for name in shapes if name not in matrices]
    kinds |= {name: (type_name(np.dtype(np.float32)), shapes[name]) for name in plain}

    def parts() -> Iterator[tuple[str, np.ndarray]]:
        for done, (name, (chosen, *_)) in enumerate(matrices.items()):
            tell("weights", done, len(matrices))
            try:
                packed = pack(source.read(name), chosen)
            except ValueError as error:
                raise InvalidModel(f"{source}: {name} cannot be kept in {chosen}: {error}") from error
            yield from ((name + suffix, part) for suffix, part in parts_of(packed).items())
        yield from ((name, source.read(name)) for name in plain)

    digest = write_tensors(path, kinds, parts(), lambda _: None)
    tell("weights", len(matrices), len(matrices))
    return PackedFile(
        version=PACKED_VERSION,
        source_digest=prepared.config.weights_digest,
        digest=digest,
        size=path.stat().st_size,
        matrices=matrices,
    )


def _format_of(name: str, format: str, tied: bool) -> str:
    """The output projection decides between tokens that are close: 4 bits are too few for it. A table of embeddings
    that is nothing else is read by rows and costs no time."""
    if name == _EMBED and not tied:
        return "float16"
    return "int8" if format == "int4" and name in (_EMBED, _LM_HEAD) else format


def _weights_path(prepared: PreparedModel, format: str) -> Path:
    return prepared.directory / f"weights-{format}.safetensors"


def _note_path(prepared: PreparedModel, format: str) -> Path:
    return prepared.directory / f"weights-{format}.json"
