"""What all messages are made of: frozen, closed models (an unknown field is an error) and the types of their fields."""

from typing import Annotated, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from shared.protocol.packing import PackedBytes

Room = Annotated[int, Field(gt=0, lt=1 << 63)]
Generation = Annotated[int, Field(ge=1)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
PeerName = Annotated[str, Field(pattern=r"^[a-z0-9_-]{1,64}$")]
"""Becomes part of a subject, so nothing else may be in it."""
Index = Annotated[int, Field(ge=0)]
Priority = Annotated[int, Field(ge=-(1 << 31), lt=1 << 31)]
"""Of a request: the smaller the number, the sooner its turn."""
TokenId = Annotated[int, Field(ge=-(1 << 31), lt=1 << 31)]
MAX_CHOICES = 128
MAX_ROLL_CALL = 1024
_MAX_NOTE_LEN = 1000
Note = Annotated[str, AfterValidator(lambda text: text[:_MAX_NOTE_LEN])]
"""Words for people. Cut short, because receivers keep them with the memory of ended tickets."""
Leg = Annotated[str, Field(pattern=r"^(|prefill|decode|gateway|link)$")]
Code = Annotated[str, Field(pattern=r"^[a-z_]{0,40}$")]
Secret = Annotated[PackedBytes, Field(max_length=64)]
Salt = Annotated[str, Field(max_length=200)]
FormatName = Annotated[str, Field(pattern=r"^[a-z0-9_]{1,16}$")]
KvPrecision = Literal["lossless", "raw", "fp16", "fp8", "int8", "delta", "auto"]
"""How a request's state may travel: in this format or, where that is not to be had, in an exact one. `auto`: in
whatever format pays."""


class WireModel(BaseModel):
    # A log probability may be -inf, which the default would write as null and no peer could read.
    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="constants")


M = TypeVar("M", bound=WireModel)


class MalformedMessage(ValueError):
    """Bytes from the bus that are not a message of the expected kind."""


def encode(message: WireModel) -> bytes:
    return message.model_dump_json(exclude_defaults=False).encode()


def decode(kind: type[M], data: bytes) -> M:
    """The message in `data`, or MalformedMessage. Never raises anything else."""
    try:
        return kind.model_validate_json(data)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise MalformedMessage(f"{kind.__name__}: {where}: {first['msg']}") from error
