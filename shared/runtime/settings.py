"""Settings of every process: what can be set, and from where it is read.

Highest first: flags (`--page-tokens 32`), `BATON_<ROLE>_<FIELD>`, `BATON_<FIELD>`, then the TOML file that
`BATON_CONFIG` names: its section of the role, then its `[common]`. So every setting can differ per role. Nobody else
reads settings from the environment.
"""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

from pydantic import ByteSize, Field, SecretStr, ValidationError, field_validator, model_validator
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    InitSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
)

from shared.protocol.wire import KvPrecision
from shared.runtime.backend_names import chosen_names
from shared.runtime.config_file import CONFIG_VARIABLE as CONFIG_VARIABLE
from shared.runtime.config_file import PREFIX as PREFIX
from shared.runtime.config_file import ConfigError as ConfigError
from shared.runtime.config_file import closest, read_config
from shared.runtime.credentials import NatsSettings, masked
from shared.runtime.mistakes import explain
from shared.runtime.mode import Mode, check_budget
from shared.runtime.overlap import Overlap
from shared.runtime.politeness import PolitenessSettings
from shared.runtime.store_settings import StoreSettings

DEFAULT_MODEL = "smollm2-135m-instruct"

_NAME = re.compile(r"^[a-z0-9_-]{1,40}$")
Positive = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Port = Annotated[int, Field(ge=0, le=65535)]


def default_cache_dir() -> Path:
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "baton"


class CommonSettings(NatsSettings):
    """What every process has."""

    model_config = SettingsConfigDict(
        frozen=True, extra="forbid", env_ignore_empty=True, env_parse_none_str="none", protected_namespaces=()
    )
    role: ClassVar[str] = ""

    name: str = Field("", description="name in logs and reports; a-z, 0-9, '_', '-'. Default: the role")
    state_dir: Path = Field(Path(".baton/state"), description="where the process keeps its files")
    cache_dir: Path = Field(default_factory=default_cache_dir, description="prepared models")
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="least level that is logged")
    log_format: Literal["human", "json", "bare"] = Field("human", description="bare: without the peer's name")
    http_host: str = Field("127.0.0.1", description="address of /health and /metrics")
    http_port: Port = Field(0, description="port of /health and /metrics; 0: a free one")
    heartbeat_s: Seconds = Field(0.5, description="seconds between reports")
    connect_timeout_s: Seconds = Field(30.0, description="how long to look for nats-server at the start")
    shutdown_timeout_s: Seconds = Field(10.0, description="how long an ordered end may take")

    @field_validator("name")
    @classmethod
    def _name_is_a_token(cls, value: str) -> str:
        value = value or cls.role
        if not _NAME.match(value):
            raise ValueError("may hold only a-z, 0-9, '_' and '-' (1 to 40 characters)")
        return value

    @field_validator("log_level", mode="before")
    @classmethod
    def _lower_level(cls, value: object) -> object:
        return value.lower() if isinstance(value, str) else value

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        fields = {role: other.model_fields.keys() for role, other in ROLES.items()}
        common, own = read_config(os.environ.get(CONFIG_VARIABLE, ""), cls.role, fields)
        file = {key: value for key, value in common.items() if key in cls.model_fields} | own
        return (
            init_settings,
            EnvSettingsSource(settings_cls, env_prefix=f"{PREFIX}{cls.role.upper()}_"),
            EnvSettingsSource(settings_cls, env_prefix=PREFIX),
            InitSettingsSource(settings_cls, init_kwargs=file),
        )

    def public(self) -> dict[str, str | int | float | bool | None]:
        """What may be shown: in reports and at the start of a log. Secrets and logins in addresses are masked."""
        return {
            field: value if value is None or isinstance(value, bool | int | float) else masked(value)
            for field, value in self
        }


class LinkSettings(CommonSettings):
    """How a worker's bytes are moved: said to the worker, or to its sidecar."""

    transfer: str = Field(
        "auto",
        description="link backends, the preferred first, as in shm,nixl,tcp. auto: shm on the same host, else tcp",
    )
    ipc_dir: Path | None = Field(None, description="sockets of the sidecars of one host. Default: STATE_DIR/ipc")
    tcp_host: str = Field("127.0.0.1", description="address other hosts reach this sidecar at")
    tcp_port: Port = Field(0, description="port other hosts reach this sidecar at; 0: a free one")
    nixl_port: Port = Field(0, description="port other hosts reach this sidecar's nixl at; 0: a free one")
    listen_host: str = Field("", description="address the sidecar listens on. Default: tcp_host")

    @field_validator("transfer")
    @classmethod
    def _known_backends(cls, value: str) -> str:
        chosen_names(value)
        return value


class SidecarSettings(PolitenessSettings, LinkSettings):  # of several configurations the last one counts
    """The process that moves a worker's bytes."""

    role: ClassVar[str] = "sidecar"

    peer_timeout_s: Seconds = Field(3.0, description="a peer that does not answer within this is not there")
    tcp_streams: Annotated[int, Field(ge=1, le=16)] = Field(
        1, description="connections over which a large transfer travels side by side; each takes a core on both sides"
    )
    wire_formats: str = Field("", description="wire formats it offers, as in raw,lossless. Default: all it can")
    faults: str = Field("", description="injected faults, for tests")


class WorkerSettings(LinkSettings):
    """What prefill and decode workers have; each role has its own copy of every field."""

    role: ClassVar[str] = ""

    model: str = Field(DEFAULT_MODEL, description="name in `baton models`, a GGUF file, or a Hugging Face directory")
    device: Literal["cpu", "cuda"] = Field("cpu", description="where the model is computed")
    dtype: Literal["float32", "bfloat16", "float16"] = Field(
        "float32", description="what the model is computed in; workers of one cluster need the same"
    )
    weights: Literal["float32", "float16", "int8", "int4"] | None = Field(
        None,
        description="format of the weights on a CPU; workers of one cluster need the same. Default: by the family",
    )
    kv_dtype: Literal["float32", "float16", "fp8"] = Field(
        "float32", description="what keys and values are kept and moved in; workers of one cluster need the same"
    )
    cuda_graphs: bool = Field(True, description="device cuda: record decode steps and replay them")
    threads: Positive | None = Field(None, description="compute threads. Default: all cores, shared out by `baton up`")
    page_tokens: Positive = Field(16, description="tokens in a page")
    kv_bytes: ByteSize = Field(ByteSize(1 << 30), description="memory for the state of requests, as in 1GiB")
    num_pages: Positive | None = Field(None, description="pages of that memory, in place of kv_bytes")
    max_running: Positive = Field(64, description="sequences in one step, and request slots")
    mode: Mode = Field(
        "separated", description="separated, colocated (no prefill workers) or chunked (the same, with step_tokens)"
    )
    prefill_chunk: Positive = Field(256, description="mode separated: prompt tokens computed at a time")
    max_step_tokens: Positive = Field(512, description="modes but chunked: tokens up to which prompts share a step")
    step_tokens: Positive = Field(256, description="mode chunked: most tokens of a step, running sequences first")
    growth_tokens: Positive = Field(256, description="tokens beyond the prompt that a reservation makes room for")
    max_model_len: Positive | None = Field(None, description="longest prompt and answer. Default: the model's")
    stash_bytes: ByteSize = Field(
        ByteSize(256 << 20), description="host memory for the state of requests that had to give their pages up"
    )
    store: bool = Field(True, description="put state into the kvstores there are, and take it from them")
    store_copies: Annotated[int, Field(ge=1, le=8)] = Field(1, description="kvstores that keep each block")
    block_tokens: Positive = Field(
        64, description="tokens in a block, the unit of reuse; whole pages; all processes of one cluster need the same"
    )
    prefix_cache: bool = Field(True, description="find the state of earlier prompts again while it lies in the pool")

    @field_validator("kv_bytes")
    @classmethod
    def _some_memory(cls, value: ByteSize) -> ByteSize:
        if value < 1 << 16:
            raise ValueError("is below 64KiB; give a size such as 1GiB")
        return value

    @model_validator(mode="after")
    def _steps_hold_chunks(self) -> Self:
        check_budget(self.mode, self.step_tokens, self.max_running)
        if self.mode == "separated" and self.max_step_tokens < self.prefill_chunk:
            raise ValueError(
                f"max_step_tokens ({self.max_step_tokens}) is below prefill_chunk ({self.prefill_chunk}); "
                "raise the first or lower the second"
            )
        return self


class PrefillSettings(WorkerSettings):
    """A prefill worker."""

    role: ClassVar[str] = "prefill"

    commit_timeout_s: Seconds = Field(
        30.0, description="how long a prompt's pages are kept for a decode worker that has them and does not answer"
    )
    optimistic_attempts: Annotated[int, Field(ge=0)] = Field(
        0, description="how often a prompt may be computed before its decode worker has said where to send it"
    )
    overlap: Overlap = Field(
        "auto", description="what leaves while a prompt is computed: chunks, layers, or auto (chunks of longer prompts)"
    )
    layers_per_send: Positive = Field(8, description="overlap layers: layers that leave together")

    @model_validator(mode="after")
    def _there_are_prefill_workers(self) -> Self:
        if self.mode != "separated":
            raise ValueError(
                f"mode {self.mode} has no prefill workers: start none, or set mode to separated for all processes"
            )
        return self


class DecodeSettings(WorkerSettings):
    """A decode worker."""

    role: ClassVar[str] = "decode"


class KvstoreSettings(StoreSettings, LinkSettings):  # of several configurations the last one counts
    """A store of blocks."""

    role: ClassVar[str] = "kvstore"


class GatewaySettings(CommonSettings):
    """The OpenAI-compatible front."""

    role: ClassVar[str] = "gateway"

    host: str = Field("127.0.0.1", description="address clients reach")
    port: Port = Field(8000, description="port clients reach; 0: a free one")
    model: str = Field(DEFAULT_MODEL, description="the model whose tokenizer and chat template are used")
    max_model_len: Positive | None = Field(None, description="the workers' limit, where it is below the model's")
    body_limit_bytes: ByteSize = Field(ByteSize(8 << 20), description="largest request body, as in 8MiB")
    request_timeout_s: Seconds = Field(600.0, description="deadline of a request that brings none")
    queue_timeout_s: Seconds = Field(60.0, description="how long a request may wait for a worker with room")
    max_queued: Positive = Field(512, description="requests that may wait; one more is answered 429")
    bypass_limit: Positive = Field(32, description="how many later requests may pass one that waits for more room")
    bypass_s: Seconds = Field(2.0, description="and for how long; then workers are kept free until it fits")
    max_active: Positive = Field(2048, description="requests in hand at once; one more is answered 429")
    mode: Mode = Field("separated", description="as the workers'; where it is not separated, all prompts are local")
    path: Literal["auto", "remote", "local"] = Field("auto", description="where a request without `path` prefills")
    kv_precision: KvPrecision = Field(
        "lossless", description="wire format of requests that name none; auto: a smaller one where the link is slow"
    )
    worker_timeout_s: Seconds = Field(2.0, description="a worker silent for so long is taken for lost")
    max_recoveries: int = Field(
        8, ge=0, description="how often an answer that has begun may lose its workers and be taken up by others"
    )
    migrate_on_drain: bool = Field(
        True, description="answers leave a decode worker that is told to end, and go on at another one"
    )
    orphan_grace_s: Seconds = Field(
        30.0, description="how long a resumable stream goes on, or can still be read, when nobody reads it"
    )
    block_tokens: Positive = Field(64, description="tokens in a block, the unit of reuse; as the workers'")
    near_tokens: int = Field(
        64, ge=0, description="path auto: a decode worker that lacks no more tokens of a prompt computes them itself"
    )
    api_keys: SecretStr = Field(SecretStr(""), description="who may ask: tenant:KEY,tenant:KEY. Default: everybody")
    api_keys_file: Path | None = Field(None, description="a file of such keys, one a line; changes are taken up")

    @model_validator(mode="after")
    def _path_exists(self) -> Self:
        if self.path == "remote" and self.mode != "separated":
            raise ValueError(f"path remote needs prefill workers, and mode {self.mode} has none; set path to auto")
        return self

    @model_validator(mode="after")
    def _silence_is_longer_than_a_heartbeat(self) -> Self:
        if self.worker_timeout_s <= 2 * self.heartbeat_s:
            raise ValueError(
                f"worker_timeout_s ({self.worker_timeout_s:g}) must be more than twice heartbeat_s "
                f"({self.heartbeat_s:g}), or every worker is taken for lost between two reports"
            )
        return self


ROLES: dict[str, type[CommonSettings]] = {
    cls.role: cls for cls in (GatewaySettings, PrefillSettings, DecodeSettings, KvstoreSettings, SidecarSettings)
}
S = TypeVar("S", bound=CommonSettings)


def load_settings(cls: type[S], overrides: Mapping[str, object] | None = None) -> S:
    """The settings of one process, or ConfigError. overrides: field -> value, as flags gave it."""
    given: dict[str, Any] = {key: None if value == "none" else value for key, value in (overrides or {}).items()}
    for key in given:
        if key not in cls.model_fields:
            raise ConfigError(f"{cls.role} has no setting {key!r}{closest(key, cls.model_fields)}")
    try:
        return cls(**given)
    except ValidationError as error:
        raise ConfigError("\n".join(explain(cls, cls.role, given, dict(item)) for item in error.errors())) from error
    except SettingsError as error:
        raise ConfigError(f"{cls.role}: {error}") from error
