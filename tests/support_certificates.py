"""Certificates of an authority of our own, made by openssl."""

import json
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

OPENSSL = shutil.which("openssl")
needs_openssl = pytest.mark.skipif(OPENSSL is None, reason="openssl makes the certificates")


@dataclass(frozen=True)
class Certificates:
    """Of the server, for 127.0.0.1, and of a client, both signed by `ca`; `other_ca` signed nothing."""

    ca: Path
    other_ca: Path
    server: Path
    client: Path

    def tls(self, *, verify: bool = False) -> str:
        files = {"cert_file": self.server, "key_file": self.server.with_suffix(".key"), "ca_file": self.ca}
        entries = [f"{name}: {json.dumps(str(path))}" for name, path in files.items()]
        return f"tls {{ {', '.join([*entries, f'verify: {str(verify).lower()}'])} }}"


def make_certificates(directory: Path) -> Certificates:
    def make(name: str, *arguments: str) -> Path:
        file = directory / f"{name}.pem"
        base = [str(OPENSSL), "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
        base += ["-days", "2", "-subj", f"/CN={name}", "-keyout", str(file.with_suffix(".key")), "-out", str(file)]
        subprocess.run([*base, *arguments], check=True, capture_output=True)
        return file

    ca, other = make("ca"), make("other")
    signed = ["-CA", str(ca), "-CAkey", str(ca.with_suffix(".key")), "-addext", "basicConstraints=critical,CA:FALSE"]
    return Certificates(
        ca, other, make("server", *signed, "-addext", "subjectAltName=IP:127.0.0.1"), make("client", *signed)
    )
