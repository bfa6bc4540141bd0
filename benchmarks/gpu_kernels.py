"""Whether every kernel computes what the reference says, and what it moves a second beside what the card can copy."""

import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.gpu_cases import ACTIVATIONS, KV_KINDS, Heads, Paged, noise_pages, packed_noise, paged, scattered_units
from benchmarks.gpu_stages import Findings
from benchmarks.report import figure
from kernels.cuda.traffic import KERNELS
from kernels.ops import Ops
from kernels.packing import FORMATS
from kernels.reference import ReferenceOps, decode_fp8

REFERENCE: Ops = ReferenceOps()
_LIMITS = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}
"""Of the largest error over the largest value, against the reference in float32 on the same inputs."""
_PACKED_LIMITS = {"cuda": 1e-2, "cpu": 3e-2}
"""Where activations are rounded too: to half on a GPU with float16 weights, to 8 bits on a CPU with int4 ones."""
_SMALL, _LARGE = Heads(64, 3, 3), Heads(128, 4, 8)
_MORE = (Heads(64, 1, 2), Heads(128, 8, 1), Heads(32, 16, 1), Heads(96, 2, 2))
_STEPS = (
    [(1, 1), (1, 2), (1, 17), (1, 700), (1, 33), (1, 0), (1, 2100)],
    [(5, 5), (33, 33), (1, 90), (70, 300), (2, 2)],
    [(1, 40)] * 40 + [(1, 0)] * 24,
)
_TINY_STEPS = ([(1, 1), (1, 17), (1, 33), (1, 0)], [(5, 5), (3, 20), (1, 9)])


def check_flat_ops(findings: Findings, ops: Ops, device: torch.device) -> None:
    """Norms, gated activation and products, over random shapes."""
    random = torch.Generator().manual_seed(1)
    for name, kind in ACTIVATIONS.items():
        for num_rows, width in ((1, 576), (3, 64), (37, 4096), (130, 1000)):
            x, residual = (torch.randn(num_rows, width, generator=random).to(device, kind) for _ in range(2))
            weight, matrix = residual[0], torch.randn(48, width, generator=random).to(device, kind)
            calls: list[tuple[str, tuple[Any, ...]]] = [
                ("rms_norm", (x, weight, 1e-5)),
                ("add_rms_norm", (x, residual, weight, 1e-5)),
                ("silu_mul", (x,)),
            ]
            if kind == torch.float32:  # in other types how torch adds up is torch's own business
                calls.append(("linear", (x, matrix, matrix[:, 0])))
            for op, arguments in calls:
                found = getattr(ops, op)(*arguments)
                expected = getattr(REFERENCE, op)(*(_wide(a) for a in arguments))
                _judge(findings, f"{op} {name} [{num_rows}, {width}]", found, expected, _LIMITS[kind])


def check_packed(findings: Findings, ops: Ops, device: torch.device) -> None:
    for format in FORMATS:
        for num_rows, num_out, width in ((1, 48, 576), (2, 160, 96), (8, 64, 1536), (31, 64, 576), (70, 1600, 64)):
            x = torch.randn(num_rows, width, generator=torch.Generator().manual_seed(num_rows)).to(device)
            weight = packed_noise(format, num_out, width)
            bias = x[0].new_ones(num_out)
            found, expected = ops.linear(x, weight, bias), REFERENCE.linear(x, weight, bias)
            _judge(findings, f"linear {format} [{num_rows}, {width}]", found, expected, _PACKED_LIMITS[device.type])


def check_paged(findings: Findings, ops: Ops, device: torch.device, *, tiny: bool) -> None:
    """Attention and the writing of pages, for every type of activations and of pages."""
    plans = [(kind, kv, _SMALL) for kind in ACTIVATIONS for kv in KV_KINDS]
    if not tiny:
        plans += [(kind, kv, _LARGE) for kind in ("bfloat16", "float32") for kv in ("float32", "float16", "fp8")]
        plans += [("bfloat16", "float16", heads) for heads in _MORE]
    for number, (kind, kv, heads) in enumerate(plans):
        for lengths in _TINY_STEPS if tiny else _STEPS:
            real = [
                (new, context) for new, context in lengths if context or device.type == "cuda"
            ]  # a CPU pads nothing
            page_tokens = (16, 4, 32)[number % 3]
            case = paged(real, heads, page_tokens, ACTIVATIONS[kind], KV_KINDS[kv], device, seed=number)
            check_step(findings, f"{kind} over {kv} {heads} {len(real)} sequences", ops, case)


def check_step(findings: Findings, what: str, ops: Ops, case: Paged) -> None:
    limit = _LIMITS[case.q.dtype]
    found = ops.paged_attention(*case.attention)
    expected = REFERENCE.paged_attention(*(_wide(a, case.kv_layer) for a in case.attention))
    _judge(findings, f"attention {what}", found, expected, limit)
    mine, theirs = case.kv_layer.clone(), case.kv_layer.clone()
    at = [id(argument) for argument in case.rotary].index(id(case.kv_layer))
    arguments = list(case.rotary)
    arguments[at] = mine
    found = ops.rotary_and_store(*arguments)
    arguments[at] = theirs
    expected = REFERENCE.rotary_and_store(*(_wide(a, theirs) for a in arguments))
    real = case.positions >= 0
    _judge(findings, f"rotary {what}", found[real], expected[real], limit)
    stored, wanted = (decode_fp8(x) if x.dtype == torch.uint8 else x.float() for x in (mine, theirs))
    empty = torch.isnan(wanted)
    if not torch.equal(torch.isnan(stored), empty):
        findings.wrong.append(f"store {what}: rows of others were written, or rows of its own were not")
    # One code of fp8 is an eighth of the value, and rounding may fall to either side.
    room = 0.13 if case.kv_layer.dtype == torch.uint8 else max(limit, _LIMITS[case.kv_layer.dtype])
    _judge(findings, f"store {what}", stored.masked_fill(empty, 0), wanted.masked_fill(empty, 0), room)


def measure_kernels(findings: Findings, ops: Ops, device: torch.device, *, tiny: bool) -> None:
    """GB/s of each kernel at a size at which nothing but memory counts, against the card's own copies."""
    copied = torch.empty((1 << 20) if tiny else (1 << 30), dtype=torch.uint8, device=device)
    target = torch.empty_like(copied)
    copy_rate = 2 * copied.nbytes / seconds_of(lambda: target.copy_(copied), device) / 1e9
    findings.rows.append(figure("copy", "GB/s", [copy_rate], less_is_better=False))
    for kernel in KERNELS:
        for label, arguments in _timed_arguments(kernel.name, device, tiny=tiny):
            op = getattr(ops, kernel.op)
            spent_s = seconds_of(lambda op=op, arguments=arguments: op(*arguments), device)  # type: ignore[misc]
            rate = kernel.num_bytes(*arguments) / spent_s / 1e9
            row = figure(f"kernel-{kernel.name}{label}", "GB/s", [rate], less_is_better=False, against=copy_rate)
            findings.rows.append(row)


def _timed_arguments(name: str, device: torch.device, *, tiny: bool) -> list[tuple[str, tuple[Any, ...]]]:
    kind = torch.float32 if device.type == "cpu" else torch.bfloat16
    if name.startswith("linear_"):
        width, num_out = (64, 32) if tiny else (8192, 32768)
        weight = packed_noise(name.removeprefix("linear_"), num_out, width)
        rows = (1, 8)
        return [(f"-b{n}", (torch.randn(n, width, device=device), weight)) for n in rows]
    if name in ("gather_units", "scatter_units"):
        sizes = {"4k": 1 << 12, "64k": 1 << 16}
        return [(f"-{label}", scattered_units(size, device, tiny=tiny)) for label, size in sizes.items()]
    if name in ("rms_norm", "add_rms_norm", "silu_mul"):
        x = torch.randn((8, 64) if tiny else (32768, 4096), device=device).to(kind)
        given = {"rms_norm": (x, x[0], 1e-5), "add_rms_norm": (x, x.clone(), x[0], 1e-5), "silu_mul": (x,)}
        return [("", given[name])]
    sequences, context = (2, 64) if tiny else (128, 4096)
    new = 1
    if name == "prefill_attention":
        sequences, new = (1, 32) if tiny else (4, 2048)
    elif name == "rotary_and_store":
        new = 16 if tiny else 256
    cases = {
        kv: noise_pages(sequences, context, _LARGE, 16, kind, KV_KINDS[kv], device, new) for kv in ("float16", "fp8")
    }
    return [(f"-{kv}", case.rotary if name == "rotary_and_store" else case.attention) for kv, case in cases.items()]


def seconds_of(work: Callable[[], Any], device: torch.device, at_least_s: float = 0.2) -> float:
    """Seconds a call, of calls that queue up one behind the other, after two that do not count."""
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    for _ in range(2):
        work()
    wait()
    began, count = time.perf_counter(), 0
    while not count or time.perf_counter() - began < (at_least_s if device.type == "cuda" else 0.01):
        for _ in range(10):
            work()
        count += 10
        wait()
    return (time.perf_counter() - began) / count


def _wide(argument: Any, kv_layer: torch.Tensor | None = None) -> Any:
    """Activations as float32; pages, numbers and the rest as they are."""
    is_activation = isinstance(argument, torch.Tensor) and argument.is_floating_point() and argument is not kv_layer
    return argument.float() if is_activation else argument


def _judge(findings: Findings, what: str, found: Any, expected: Any, limit: float) -> None:
    if isinstance(found, tuple):
        for part, (one, other) in enumerate(zip(found, expected, strict=True)):
            _judge(findings, f"{what} ({part})", one, other, limit)
        return
    error = (found.float() - expected.float()).abs().max() / expected.float().abs().max().clamp(min=1e-6)
    if found.shape != expected.shape or not float(error) <= limit:
        findings.wrong.append(f"{what}: off by {float(error):.2g} of the largest value, allowed {limit:.2g}")
