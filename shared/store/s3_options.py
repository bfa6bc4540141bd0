"""How an S3 bucket is reached, out of one address. Who we are there comes from the environment, never from a setting
that others can read."""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import parse_qsl, urlsplit

if TYPE_CHECKING:
    from obstore.store import ClientConfig, RetryConfig, S3Config

_FLAGS = {"0": False, "1": True}
_CONNECT_S = 3.0
_RETRIES = 2


def _flag(text: str) -> bool:
    if text not in _FLAGS:
        raise ValueError(f"a flag is 0 or 1, not {text!r}")
    return _FLAGS[text]


_KINDS: dict[str, Callable[[str], Any]] = {
    "endpoint": str,
    "region": str,
    "virtual_hosted": _flag,
    "anonymous": _flag,
    "timeout_s": float,
    "requests": int,
    "ca_file": str,
}


@dataclass(frozen=True, slots=True)
class S3Options:
    """prefix: of the names of all our objects; others' beside them are let alone. endpoint: the service's address,
    empty: that of AWS. virtual_hosted: the bucket's name stands in the host's, else in the path. anonymous: nothing is
    signed. timeout_s: a call's whole time, repetitions included. requests: calls that run at once. ca_file: PEM, which
    is trusted beside the system's authorities."""

    bucket: str
    prefix: str = "baton"
    endpoint: str = ""
    region: str = ""
    virtual_hosted: bool = False
    anonymous: bool = False
    timeout_s: float = 30.0
    requests: int = 8
    ca_file: str = ""

    def __post_init__(self) -> None:
        if not self.bucket:
            raise ValueError("an S3 address names a bucket: s3://BUCKET/PREFIX")
        if not (0 < self.timeout_s < inf and self.requests > 0):
            raise ValueError("a time limit and the number of requests are more than nothing")
        if self.endpoint and not self.endpoint.startswith(("http://", "https://")):
            raise ValueError("an endpoint begins with http:// or https://")

    @classmethod
    def parse(cls, url: str) -> Self:
        """`s3://BUCKET[/PREFIX]`, the fields above as its query. ValueError for others."""
        parts = urlsplit(url)
        if parts.scheme != "s3" or parts.username or parts.port:
            raise ValueError("not an S3 address: one is s3://BUCKET/PREFIX, and keys come from the environment")
        query = dict(parse_qsl(parts.query, strict_parsing=True)) if parts.query else {}
        if unknown := query.keys() - _KINDS.keys():
            raise ValueError(f"no such option of S3: {', '.join(sorted(unknown))}")
        prefix = parts.path.strip("/") or "baton"
        return cls(parts.netloc, prefix, **{name: _KINDS[name](text) for name, text in query.items()})

    def __str__(self) -> str:
        """For people."""
        return f"s3://{self.bucket}/{self.prefix}" + (f" at {self.endpoint}" if self.endpoint else "")

    def config(self) -> "S3Config":
        """Digests of our own are checked on every read: over TLS the body need not be hashed for the signature too."""
        found: S3Config = {
            "virtual_hosted_style_request": self.virtual_hosted,
            "skip_signature": self.anonymous,
            "unsigned_payload": not self.endpoint.startswith("http://"),
            "disable_bulk_delete": True,
        }
        if self.endpoint:
            found["endpoint"] = self.endpoint
        if self.region:
            found["region"] = self.region
        return found

    def client(self) -> "ClientConfig":
        """OSError where a file cannot be read."""
        found: ClientConfig = {
            "allow_http": self.endpoint.startswith("http://"),
            "connect_timeout": timedelta(seconds=min(_CONNECT_S, self.timeout_s)),
            "timeout": timedelta(seconds=self.timeout_s),
        }
        if self.ca_file:
            found["root_certificate"] = Path(self.ca_file).read_bytes()
        return found

    def retries(self) -> "RetryConfig":
        return {"max_retries": _RETRIES, "retry_timeout": timedelta(seconds=self.timeout_s)}
