"""What a process shows to be let in, and what of it must never be shown to anybody else."""

import re
from pathlib import Path
from typing import Any, Self

from pydantic import Field, SecretStr, field_validator, model_validator
from pydantic_settings import BaseSettings

_LOGIN = re.compile(r"(\w+://)?.*@")


class NatsSettings(BaseSettings):
    """Part of every process's settings."""

    nats_url: str = Field("nats://127.0.0.1:4222", description="where nats-server listens; tls://… insists on TLS")
    nats_user: str | None = Field(None, description="who we are to nats-server")
    nats_password: SecretStr | None = Field(None, description="the user's password")
    nats_token: SecretStr | None = Field(None, description="in place of user and password")
    nats_tls_ca: Path | None = Field(None, description="PEM file of the authority that nats-server must be known to")
    nats_tls_cert: Path | None = Field(None, description="PEM file of our own certificate, where nats-server wants one")
    nats_tls_key: Path | None = Field(None, description="PEM file of that certificate's key")

    @field_validator("nats_url")
    @classmethod
    def _is_an_address(cls, value: str) -> str:
        """So that a login in it is known as one, wherever it is shown."""
        return ",".join(part if "://" in part or not part else f"nats://{part}" for part in value.split(","))

    @field_validator("nats_tls_ca", "nats_tls_cert", "nats_tls_key")
    @classmethod
    def _file_is_there(cls, value: Path | None) -> Path | None:
        if value is not None and not value.is_file():
            raise ValueError("there is no such file")
        return value

    @model_validator(mode="after")
    def _nats_parts_fit(self) -> Self:
        for one, other in (("nats_user", "nats_password"), ("nats_tls_cert", "nats_tls_key")):
            if (getattr(self, one) is None) != (getattr(self, other) is None):
                raise ValueError(f"{one} and {other} go together; set both or none")
        if self.nats_token is not None and self.nats_user is not None:
            raise ValueError("nats_token stands in place of nats_user and nats_password; set one of the two ways")
        return self

    def nats_variables(self, role: str) -> dict[str, str]:
        """The same for a process of another role, as environment: no list of processes shows that."""
        found: dict[str, str] = {}
        for field in NatsSettings.model_fields:
            value: Any = getattr(self, field)
            plain = value.get_secret_value() if isinstance(value, SecretStr) else value
            found[f"BATON_{role}_{field}".upper()] = "none" if plain is None else str(plain)
        return found


def secret_fields(cls: type[BaseSettings]) -> tuple[str, ...]:
    """Settings whose values are shown nowhere."""
    return tuple(field for field, info in cls.model_fields.items() if "SecretStr" in str(info.annotation))


def masked(value: object) -> str:
    """A setting as it may be shown: no secret, and no login in an address or in several of them with commas."""
    if isinstance(value, SecretStr):
        return "***" if value.get_secret_value() else ""
    text = str(value)
    return ",".join(_LOGIN.sub(r"\1***@", url) for url in text.split(",")) if "://" in text else text
