"""Which formats weights can be kept in, and which one is taken where none is asked for. Needs no torch."""

from kernels.packing import FORMATS
from shared.runtime.settings import ConfigError

FLOAT32 = "float32"

_ANY_FAMILY = ""
_DEFAULTS = {("cpu", _ANY_FAMILY): "float16", ("cuda", _ANY_FAMILY): FLOAT32}
"""By device and family. On a GPU the type that is computed in is also that of the weights."""


def default_weights(device: str, dtype: str, family: str) -> str:
    if dtype != FLOAT32:
        return FLOAT32
    return _DEFAULTS.get((device, family)) or _DEFAULTS[device, _ANY_FAMILY]


def check_weights(device: str, dtype: str, weights: str | None) -> None:
    """ConfigError where that format cannot be had; None always can."""
    if weights in (None, FLOAT32):
        return
    if weights not in FORMATS:
        raise ConfigError(f"weights: {weights!r} is not a format; there are {', '.join((FLOAT32, *FORMATS))}")
    if device != "cpu" or dtype != FLOAT32:
        raise ConfigError(f"weights: {weights} is for device cpu and dtype float32; here they are {device} and {dtype}")
