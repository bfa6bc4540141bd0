"""API keys: who may ask, and as which tenant. A key is kept as its SHA-256 only, and nothing here ever shows one.

An entry is `tenant:KEY`, or `tenant:sha256:HEX` where the operator keeps no clear keys either. A tenant may have
several keys, so that they can be exchanged without a pause; a key belongs to one tenant.
"""

import hashlib
import hmac
import logging
import os
import re
from pathlib import Path
from typing import Self

from shared.runtime.settings import ConfigError, GatewaySettings

log = logging.getLogger(__name__)

_TENANT = re.compile(r"[a-z0-9_-]{1,64}")
_KEY = re.compile(r"[\x21-\x7e]{8,256}")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_HASHED = "sha256:"


class InvalidKeys(ValueError):
    """What is wrong, without a word of the key."""


class Keyring:
    """The keys of the setting `api_keys` and of the file `api_keys_file`; `refresh` takes up a changed file."""

    def __init__(self, inline: str, file: Path | None) -> None:
        """ConfigError where one of the two is wrong; it names the setting."""
        self._file = file
        self._stamp: tuple[int, int, int] | None = None
        try:
            self._inline = parse_keys(inline, ",")
        except InvalidKeys as error:
            raise ConfigError(f"gateway: api_keys: {error}") from error
        self._tenants = self._inline
        if file is not None:
            try:
                self._stamp, self._tenants = self._read(file)
            except (InvalidKeys, OSError) as error:
                raise ConfigError(f"gateway: api_keys_file: {file}: {_plainly(error)}") from error

    @classmethod
    def from_settings(cls, settings: GatewaySettings) -> Self | None:
        """None where no keys are set: then everybody may ask."""
        inline = settings.api_keys.get_secret_value()
        return cls(inline, settings.api_keys_file) if inline or settings.api_keys_file else None

    def __len__(self) -> int:
        return len(self._tenants)

    def tenant_of(self, key: str) -> str | None:
        """Whose key it is. Takes the same time whichever key it is, and wherever a wrong one differs."""
        digest, found = _digest(key), None
        for known, tenant in self._tenants.items():
            if hmac.compare_digest(known, digest):
                found = tenant
        return found

    def refresh(self) -> None:
        """Takes up the file if it changed. Is it wrong or gone, the keys stay as they were, and the log says so."""
        if self._file is None:
            return
        try:
            stamp = _stamp(self._file)
            if stamp == self._stamp:
                return
            self._stamp, self._tenants = self._read(self._file)
            log.info("api_keys_file: %d keys of %d tenants", len(self._tenants), len(set(self._tenants.values())))
        except (InvalidKeys, OSError) as error:
            log.error("api_keys_file: %s: %s; the keys stay as they were", self._file, _plainly(error))

    def _read(self, file: Path) -> tuple[tuple[int, int, int], dict[bytes, str]]:
        stamp = _stamp(file)  # before its content: a change in between is then seen the next time
        try:
            found = parse_keys(file.read_text(), "\n")
        except UnicodeDecodeError as error:
            raise InvalidKeys("is not UTF-8") from error
        if not found:
            raise InvalidKeys("holds no key")
        if clash := [tenant for digest, tenant in found.items() if self._inline.get(digest, tenant) != tenant]:
            raise InvalidKeys(f"a key of {clash[0]!r} is another tenant's in api_keys")
        if os.stat(file).st_mode & 0o004:
            log.warning("api_keys_file: %s can be read by every user of this host", file)
        return stamp, self._inline | found


def parse_keys(text: str, separator: str) -> dict[bytes, str]:
    """digest -> tenant. InvalidKeys names the entry by its number."""
    found: dict[bytes, str] = {}
    for number, raw in enumerate(text.split(separator), 1):
        entry = raw.strip()
        if not entry or entry.startswith("#"):
            continue
        tenant, colon, key = entry.partition(":")
        if not colon or not _TENANT.fullmatch(tenant):
            raise InvalidKeys(f"entry {number}: write tenant:KEY; a tenant has 1 to 64 of a-z, 0-9, '_' and '-'")
        digest = _entry_digest(key, number)
        if found.get(digest, tenant) != tenant:
            raise InvalidKeys(f"entry {number}: the same key belongs to {found[digest]!r} already")
        found[digest] = tenant
    return found


def _entry_digest(key: str, number: int) -> bytes:
    if key.startswith(_HASHED):
        hexadecimal = key.removeprefix(_HASHED).lower()
        if not _DIGEST.fullmatch(hexadecimal):
            raise InvalidKeys(f"entry {number}: sha256: is followed by 64 hexadecimal digits")
        return bytes.fromhex(hexadecimal)
    if not _KEY.fullmatch(key):
        raise InvalidKeys(f"entry {number}: a key has 8 to 256 printable ASCII characters, and no space")
    return _digest(key)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def digest_of(key: str) -> str:
    """What may be written down of a key."""
    return _digest(key).hex()


def _stamp(file: Path) -> tuple[int, int, int]:
    stat = os.stat(file)
    return stat.st_mtime_ns, stat.st_size, stat.st_ino


def _plainly(error: Exception) -> str:
    return (error.strerror or type(error).__name__) if isinstance(error, OSError) else str(error)
