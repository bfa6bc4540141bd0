"""A prepared model directory: what every worker maps and reads, in its final layout, written once and as a whole.

`model.json` (this file's ModelFile), `weights.safetensors` (float32), and `tokenizer.json` with `text.json`.
"""

import hashlib
import json
import os
from pathlib import Path

import xxhash
from pydantic import BaseModel, ConfigDict, JsonValue, ValidationError

from shared.engine.weights.errors import InvalidModel
from shared.engine.weights.plan import ModelPlan
from shared.engine.weights.progress import OnProgress
from shared.engine.weights.safetensors_file import SafetensorsFile, write_tensors
from shared.text.files import TOKENIZER_FILE
from shared.text.prepare import write_text_files

FORMAT_VERSION = 1
MODEL_FILE = "model.json"
WEIGHTS_FILE = "weights.safetensors"
WEIGHTS_DTYPE = "float32"
KV_DTYPE = "float32"


class ModelFile(BaseModel):
    """model.json. source: fingerprint of what it was made of. numbers: the family's own, checked by its model class.

    weights_digest: xxh3-128 of weights.safetensors, which has weights_bytes.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    format_version: int
    name: str
    architecture: str
    identity: str
    source: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    weights_digest: str
    weights_bytes: int
    numbers: dict[str, JsonValue]


def write_prepared(
    plan: ModelPlan, source: Path, directory: Path, name: str, fingerprint: str, tell: OnProgress
) -> None:
    """Fills the existing `directory`; all of it is on disk when this returns."""
    tell("text", 0, 1)
    try:
        write_text_files(source, directory, plan.gguf_fields)
    except OSError:
        raise
    except ValueError as error:
        raise InvalidModel(f"{source}: {_one_line(error)}") from error
    except Exception as error:  # the tokenizers library knows no narrower one
        raise InvalidModel(f"{source}: its tokenizer cannot be read: {_one_line(error)}") from error
    tell("text", 1, 1)
    done, total = 0, len(plan.tensors)

    def written(_: str) -> None:
        nonlocal done
        done += 1
        tell("weights", done, total)

    tell("weights", 0, total)
    weights = directory / WEIGHTS_FILE
    digest = write_tensors(
        weights,
        {tensor.name: ("F32", tensor.shape) for tensor in plan.tensors},
        ((tensor.name, tensor.build()) for tensor in plan.tensors),
        written,
    )
    model = ModelFile(
        format_version=FORMAT_VERSION,
        name=name,
        architecture=plan.architecture,
        identity=identity_digest(plan, digest, directory / TOKENIZER_FILE),
        source=fingerprint,
        vocab_size=plan.vocab_size,
        max_model_len=plan.max_model_len,
        eos_token_ids=plan.eos_token_ids,
        bos_token_id=plan.bos_token_id,
        weights_digest=digest,
        weights_bytes=weights.stat().st_size,
        numbers=plan.numbers,
    )
    (directory / MODEL_FILE).write_text(model.model_dump_json(indent=1) + "\n", encoding="utf-8")
    for path in directory.iterdir():
        _sync(path)
    _sync(directory)


def identity_digest(plan: ModelPlan, weights_digest: str, tokenizer: Path) -> str:
    """What two workers must agree on before one takes the other's state; the weights include the rope frequencies."""
    parts = {
        "architecture": plan.architecture,
        "numbers": plan.numbers,
        "weights": weights_digest,
        "weights_dtype": WEIGHTS_DTYPE,
        "kv_dtype": KV_DTYPE,
        "tokenizer": xxhash.xxh3_128_hexdigest(tokenizer.read_bytes()),
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]


def read_model_file(directory: Path) -> ModelFile:
    """InvalidModel where there is none of this format version, or the weights are not all there."""
    path = directory / MODEL_FILE
    try:
        model = ModelFile.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        raise InvalidModel(f"{directory} is not a prepared model directory: it has no {MODEL_FILE}") from None
    except ValidationError as error:
        raise InvalidModel(f"{path} cannot be read: {error.errors()[0]['msg']}") from error
    if model.format_version != FORMAT_VERSION:
        raise InvalidModel(f"{path} has format version {model.format_version}; this release reads {FORMAT_VERSION}")
    weights = directory / WEIGHTS_FILE
    size = weights.stat().st_size if weights.is_file() else 0
    if size != model.weights_bytes:
        raise InvalidModel(f"{weights}: truncated: it has {size} bytes of {model.weights_bytes}; delete {directory}")
    return model


def open_weights(directory: Path, model: ModelFile) -> SafetensorsFile:
    """Maps the weights after checking every byte: the identity a worker announces is that of what it computes with."""
    weights = SafetensorsFile(directory / WEIGHTS_FILE)
    if weights.digest() != model.weights_digest:
        raise InvalidModel(f"{weights} is damaged: its digest is not the one in {MODEL_FILE}; delete {directory}")
    return weights


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
