"""Reads a Hugging Face model directory: config.json and its safetensors files, sharded or not."""

import json
from collections.abc import Mapping, Set
from pathlib import Path
from typing import Any

import numpy as np

from shared.engine.weights.errors import InvalidModel
from shared.engine.weights.plan import whole_number
from shared.engine.weights.safetensors_file import SafetensorsFile

_INDEX = "model.safetensors.index.json"
_WHOLE = "model.safetensors"


class HfDir:
    """A model directory (a TensorSource). config: config.json as it stands."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config: Mapping[str, Any] = read_json_object(path / "config.json")
        self._tensors: dict[str, SafetensorsFile] = {}
        if (path / _INDEX).is_file():
            self._open_indexed()
            return
        whole = path / _WHOLE  # beside which some publish the same weights under other names
        for file in [whole] if whole.is_file() else sorted(path.glob("*.safetensors")):
            opened = SafetensorsFile(file)
            self._tensors.update(dict.fromkeys(opened.names, opened))
        if not self._tensors:
            raise InvalidModel(f"{path} has no *.safetensors file")

    def __str__(self) -> str:
        return str(self.path)

    @property
    def names(self) -> Set[str]:
        return self._tensors.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._file(name).shape(name)

    def read(self, name: str) -> np.ndarray:
        return self._file(name).read(name)

    def eos_token_ids(self) -> tuple[int, ...]:
        """generation_config.json wins over config.json, as it does for the model's own authors."""
        generation = self.path / "generation_config.json"
        for config in (read_json_object(generation) if generation.is_file() else {}, self.config):
            eos = config.get("eos_token_id")
            if eos is not None:
                ids = eos if isinstance(eos, list) else [eos]
                return tuple(whole_number(self.path, "eos_token_id", token) for token in ids)
        return ()

    def _file(self, name: str) -> SafetensorsFile:
        try:
            return self._tensors[name]
        except KeyError:
            raise InvalidModel(f"{self.path} has no tensor {name}") from None

    def _open_indexed(self) -> None:
        weight_map = read_json_object(self.path / _INDEX).get("weight_map")
        if not isinstance(weight_map, dict):
            raise InvalidModel(f"{self.path / _INDEX} has no weight_map")
        opened: dict[str, SafetensorsFile] = {}
        for name, shard in weight_map.items():
            file = self.path / shard
            if file.parent != self.path or not file.is_file():
                raise InvalidModel(f"{self.path} lacks the file {shard} that holds tensor {name}")
            if shard not in opened:
                opened[shard] = SafetensorsFile(file)
            if name not in opened[shard].names:
                raise InvalidModel(f"{file} has no tensor {name}")
            self._tensors[name] = opened[shard]


def read_json_object(path: Path) -> Mapping[str, Any]:
    """The JSON object in a file. InvalidModel where there is none."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InvalidModel(f"{path.parent} has no {path.name}") from None
    except (OSError, ValueError) as error:
        raise InvalidModel(f"{path} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise InvalidModel(f"{path} does not hold a JSON object")
    return value
