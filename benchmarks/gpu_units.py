"""State that moves: whether units are gathered, scattered and staged to the byte, and how fast beside torch's indexing
and beside copies in one piece."""

from collections.abc import Callable

import torch

from benchmarks.gpu_cases import scattered_units
from benchmarks.gpu_kernels import seconds_of
from benchmarks.gpu_stages import Findings
from benchmarks.report import figure
from kernels.ops import Ops
from kernels.reference import ReferenceOps
from shared.engine.staging import Move, Staging

REFERENCE: Ops = ReferenceOps()
_SIZES = (1, 15, 16, 100, 1000, 4096, 5004, 65552)
_FAR_BYTES = 5 << 30
"""Beyond what 32 bits count."""
_SMALL_STAGE = 10_000
_RATED = {"4k": 1 << 12, "64k": 1 << 16}


def check_units(findings: Findings, ops: Ops, device: torch.device) -> None:
    """Sizes of all alignments, neighbours and strangers, pools that begin anywhere, and one that is large."""
    for number, unit_bytes in enumerate(_SIZES):
        random = torch.Generator().manual_seed(number)
        shape = (1 + number % 3, 40, unit_bytes)
        raw = torch.randint(256, (number % 5 + shape[0] * 40 * unit_bytes,), generator=random, dtype=torch.uint8)
        state = raw.to(device)[number % 5 :].view(shape)
        units = torch.cat((torch.arange(8, 20), torch.randperm(8, generator=random), torch.tensor([39, 38, 25])))
        _check(findings, f"units of {unit_bytes}", ops, state, units.to(device))
        _check_staging(findings, f"units of {unit_bytes}", Staging(device, ops, unit_bytes, _SMALL_STAGE), state, units)
    if device.type == "cuda" and torch.cuda.mem_get_info(device)[0] > 2 * _FAR_BYTES:
        far = torch.zeros(2, _FAR_BYTES >> 13, 1 << 12, dtype=torch.uint8, device=device)
        last = far.shape[1] - 1
        far[1, last - 2 :].random_(256)
        _check(findings, "units far away", ops, far, torch.tensor([last, 0, last - 2, last - 1], device=device))


def _check(findings: Findings, what: str, ops: Ops, state: torch.Tensor, units: torch.Tensor) -> None:
    found = torch.zeros(len(state), len(units), state.shape[2], dtype=torch.uint8, device=state.device)
    expected = found.clone()
    ops.gather_units(state, units, found)
    REFERENCE.gather_units(state, units, expected)
    if not torch.equal(found, expected):
        findings.wrong.append(f"gather {what}")
    mine, theirs = state.clone(), state.clone()
    expected.bitwise_not_()
    ops.scatter_units(mine, units, expected)
    REFERENCE.scatter_units(theirs, units, expected)
    if not torch.equal(mine, theirs):
        findings.wrong.append(f"scatter {what}")


def _check_staging(
    findings: Findings, what: str, staging: Staging, state: torch.Tensor, units: torch.Tensor
) -> None:  # fmt: skip
    here, back = torch.zeros(state.shape, dtype=torch.uint8), torch.zeros_like(state)
    staging.bring_out([Move(state, here, units)])
    wanted = torch.zeros_like(here)
    wanted[:, units] = state.cpu()[:, units]
    if not torch.equal(here, wanted):
        findings.wrong.append(f"brought out {what}")
    staging.bring_in([Move(back, here, units)])
    if not torch.equal(back.cpu(), wanted):
        findings.wrong.append(f"brought in {what}")


def measure_units(findings: Findings, ops: Ops, device: torch.device, *, tiny: bool) -> None:
    """GiB/s of state. gather and scatter stay on the device, against torch's own; the whole way out and in, to units in
    host memory, against a copy of as many bytes in one piece from and to page-locked memory."""
    for label, unit_bytes in _RATED.items():
        _measure(findings, ops, device, label, scattered_units(unit_bytes, device, tiny=tiny))


def _measure(
    findings: Findings, ops: Ops, device: torch.device, label: str,
    arguments: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
) -> None:  # fmt: skip
    state, units, buffer = arguments

    def rate(name: str, work: Callable[[], object], against: float | None = None) -> float:
        value = buffer.nbytes / seconds_of(work, device) / (1 << 30)
        findings.rows.append(figure(f"{name}-{label}", "GiB/s", [value], less_is_better=False, against=against))
        return value

    wide, rows = state.view(torch.float16), buffer.view(torch.float16)
    selected = rate("index-select", lambda: torch.index_select(wide, 1, units, out=rows))
    rate("gather", lambda: ops.gather_units(*arguments), selected)
    copied = rate("index-copy", lambda: wide.index_copy_(1, units, rows))
    rate("scatter", lambda: ops.scatter_units(*arguments), copied)
    pinned = torch.empty(buffer.shape, dtype=torch.uint8, pin_memory=device.type == "cuda")
    out = rate("device-to-host", lambda: pinned.copy_(buffer, non_blocking=True))
    into = rate("host-to-device", lambda: buffer.copy_(pinned, non_blocking=True))
    staging = Staging(device, ops, state.shape[2])
    moves = [Move(state, torch.zeros(state.shape, dtype=torch.uint8), units.cpu())]
    rate("bring-out", lambda: staging.bring_out(moves), out)
    rate("bring-in", lambda: staging.bring_in(moves), into)
