"""`ops/gpu_check.sh`: are the GPU's kernels right, and how fast are they? One run within a budget of time.

Correctness comes first: every kernel against the reference, graphs against eager steps, the engine against the CPU. The
exit status is 1 where anything is wrong. Stages for which no time is left are named. `--device cpu --tiny` runs the
same program on a CPU, to prove all of it up to the device.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from rich.console import Console

from benchmarks.gpu_engine import check_engine
from benchmarks.gpu_kernels import check_flat_ops, check_packed, check_paged, measure_kernels
from benchmarks.gpu_models import LLAMA_8B, SMOLLM2_135M, TINY, Geometry
from benchmarks.gpu_speed import compare_graphs, measure_decode, measure_prefill
from benchmarks.gpu_stages import Findings, Stage, run_stages
from benchmarks.gpu_units import check_units, measure_units
from benchmarks.report import RESULTS, Machine, Row, print_rows, write_rows
from kernels.ops import get_ops
from kernels.reference import ReferenceOps
from shared.engine.graphs import Replay, record_cuda
from shared.engine.models.registry import check_device
from shared.runtime.settings import ConfigError

BUDGET_S = 480.0
_LEFT_OVER_S = 15.0
"""For what comes after the last stage."""
_DOCS = Path(__file__).parents[1] / "docs" / "gpu.md"
_HEADING = "## Results"
_BYTES_A_WEIGHT = 2
_SPARE_BYTES = 16 << 30
"""Beside the weights of a large model: pages, what steps compute in, and graphs."""


@dataclass(frozen=True, slots=True)
class GpuMachine(Machine):
    gpu: str
    cuda: str
    cupy: str


def main(argv: Sequence[str] | None = None) -> int:
    args = _arguments(argv)
    console = Console(highlight=False)
    try:
        check_device(args.device)
    except ConfigError as error:
        console.print(str(error), style="red")
        return 2
    torch.backends.cuda.matmul.allow_tf32 = False
    machine = _machine(args.device)
    console.print(f"{machine.gpu}, CUDA {machine.cuda}, torch {machine.torch}, cupy {machine.cupy}")
    ends_at = time.monotonic() + args.budget_s - _LEFT_OVER_S - max(0.0, time.time() - args.started)
    stages = make_stages(torch.device(args.device), tiny=args.tiny)
    if args.only:
        stages = [stage for stage in stages if stage.name in args.only]

    def keep(findings: Findings) -> None:
        write_rows("gpu", findings.rows, machine, args.results)

    findings = run_stages(stages, ends_at, console, keep)
    print_rows(console, "gpu_check", findings.rows, machine)
    _say(console, "left out", findings.skipped, "yellow")
    _say(console, "WRONG", findings.wrong, "red")
    console.print(f"{len(findings.wrong)} wrong; {args.results / 'gpu.json'}", soft_wrap=True)
    if args.write:
        write_section(args.docs, section(findings, machine))
        console.print(f"{args.docs}: {_HEADING}", soft_wrap=True)
    return 1 if findings.wrong else 0


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="ops/gpu_check.sh", description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small sizes, to try the program itself")
    parser.add_argument("--budget-s", type=float, default=BUDGET_S, help="seconds for everything")
    parser.add_argument("--started", type=float, default=time.time(), help="when that began, as `date +%%s` says it")
    parser.add_argument("--only", action="append", help="a stage by its name; several times")
    parser.add_argument("--write", action="store_true", help=f"put the figures into docs/gpu.md under {_HEADING}")
    parser.add_argument("--docs", type=Path, default=_DOCS, help=argparse.SUPPRESS)
    parser.add_argument("--results", type=Path, default=RESULTS, help="where gpu.json goes")
    return parser.parse_args(argv)


def make_stages(device: torch.device, *, tiny: bool) -> list[Stage]:
    """The most important first. Seconds are guesses, on the safe side, for a card of the H200's kind."""
    ops = get_ops(device.type)
    padded = ops if device.type == "cuda" else ReferenceOps()  # a CPU's kernels know no padding
    record = record_cuda() if device.type == "cuda" else _not_recorded
    small, large = (TINY, replace(TINY, name="tiny-large")) if tiny else (SMOLLM2_135M, LLAMA_8B)
    sizes = (1, 2, 4) if tiny else (1, 2, 4, 8, 16, 32, 64, 128)
    scale = 0.0 if tiny else 1.0

    def decode(findings: Findings, geometry: Geometry) -> None:
        if _fits(findings, geometry, device):
            measure_decode(findings, geometry, ops, device, record, tiny=tiny)

    def prefill(findings: Findings, geometry: Geometry) -> None:
        if _fits(findings, geometry, device):
            measure_prefill(findings, geometry, ops, device, record, tiny=tiny)

    return [
        Stage("flat-ops", 20 * scale, lambda f: check_flat_ops(f, ops, device)),
        Stage("paged-ops", 120 * scale, lambda f: check_paged(f, ops, device, tiny=tiny)),
        Stage("packed-ops", 15 * scale, lambda f: check_packed(f, ops, device)),
        Stage("unit-ops", 10 * scale, lambda f: check_units(f, ops, device)),
        Stage("graphs", 20 * scale, lambda f: compare_graphs(f, small, padded, device, record, sizes)),
        Stage("engine", 30 * scale, lambda f: check_engine(f, ops, device, record if device.type == "cuda" else None)),
        Stage("decode-small", 30 * scale, lambda f: decode(f, small)),
        Stage("kernel-rates", 40 * scale, lambda f: measure_kernels(f, ops, device, tiny=tiny)),
        Stage("unit-rates", 20 * scale, lambda f: measure_units(f, ops, device, tiny=tiny)),
        Stage("prefill-small", 10 * scale, lambda f: prefill(f, small)),
        Stage("decode-large", 60 * scale, lambda f: decode(f, large)),
        Stage("prefill-large", 20 * scale, lambda f: prefill(f, large)),
    ]


def _not_recorded(work: Replay) -> Replay:
    return work


def _fits(findings: Findings, geometry: Geometry, device: torch.device) -> bool:
    if device.type != "cuda":
        return True
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(device)
    wanted = _BYTES_A_WEIGHT * geometry.num_weights() + (_SPARE_BYTES if geometry is LLAMA_8B else 0)
    if wanted > free:
        findings.skipped.append(f"{geometry.name}: wants {wanted >> 30} GiB, {free >> 30} GiB are free")
    return wanted <= free


def _machine(device: str) -> GpuMachine:
    try:
        import cupy

        cupy_version = str(cupy.__version__)
    except ImportError:
        cupy_version = "not installed"
    gpu = torch.cuda.get_device_name() if device == "cuda" else "no GPU: a trial run on the CPU"
    return GpuMachine(**asdict(Machine.here()), gpu=gpu, cuda=torch.version.cuda or "none", cupy=cupy_version)


def section(findings: Findings, machine: GpuMachine) -> str:
    """What docs/gpu.md says under its heading."""
    lines = [
        f"{machine.gpu}, CUDA {machine.cuda}, torch {machine.torch}, CuPy {machine.cupy}, Python {machine.python}.",
        f"Kernels that were wrong: {len(findings.wrong)}.",
        "",
        "| figure | value | unit | against | ratio |",
        "| --- | ---: | --- | ---: | ---: |",
    ]
    lines += [_line(row) for row in findings.rows]
    for label, texts in (("Wrong", findings.wrong), ("Left out", findings.skipped)):
        lines += ["", f"{label}:", "", *(f"* {text}" for text in texts)] if texts else []
    return "\n".join(lines) + "\n"


def _line(row: Row) -> str:
    against = "" if row.against is None else f"{row.against:,.0f}"
    ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
    return f"| {row.name} | {row.value:,.0f} | {row.unit} | {against} | {ratio} |"


def write_section(path: Path, text: str) -> None:
    """Replaces what stands under the heading, up to the next one or the end."""
    before, heading, after = path.read_text(encoding="utf-8").partition(f"{_HEADING}\n")
    if not heading:
        raise ValueError(f"{path} has no section {_HEADING!r}")
    _, next_heading, rest = after.partition("\n## ")
    path.write_text(f"{before}{heading}\n{text}{next_heading}{rest}", encoding="utf-8")


def _say(console: Console, label: str, texts: Sequence[str], style: str) -> None:
    for text in texts:
        console.print(f"{label}: {text}", style=style, soft_wrap=True)


if __name__ == "__main__":
    sys.exit(main())
