"""What the compilers make of the Triton kernels, without a GPU: ``python -m lean.kernels.report``.

Kernels are planned as a step plans them, with tensors that have no memory, and compiled through Triton's own launch
path for a given target, so alignment and divisibility are those of a real launch. NVIDIA code is then read with the
cuobjdump that Triton ships, AMD code from its assembly.
"""

import argparse
import json
import re
import subprocess
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget

from lean.kernels.call import AttentionCall, WriteCall
from lean.kernels.layout import KVLayout
from lean.kernels.triton.launch import Launch, plan_kv_write, plan_paged_attention
from lean.kernels.triton.parameters import Target
from lean.quant import parse_kv_dtype, raw_format

# Warp instructions x 32 that a multiprocessor can issue while one byte arrives from memory: 128 lanes over bytes per
# clock, from vendors' bandwidth [B/s], multiprocessors and boost clock [Hz].
GPUS = {
    "H200": (4.8e12, 132, 1.785e9),
    "A100": (2.039e12, 108, 1.41e9),
    "RTX 3090": (0.936e12, 82, 1.695e9),
    "RTX 4090": (1.008e12, 128, 2.52e9),
}
# Registers, bytes of shared memory and warps of a multiprocessor, for the resident warps.
_MULTIPROCESSORS = {
    75: (64, 32),
    80: (164, 64),
    86: (100, 48),
    89: (100, 48),
    90: (228, 64),
    100: (228, 64),
    120: (100, 48),
}
FORMATS = ("bf16", "int8", "fp8", "int4", "k8v4")
TARGETS = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120", "gfx90a", "gfx942", "gfx1100")
KERNELS = ("decode", "merge", "prefill", "turn_query", "kv_write")
# Llama-like: 8 KV heads of 4 query heads, the default residual, steps of 8 sequences.
NUM_KV_HEADS, GROUP, BLOCK_SIZE, NUM_SEQS, RESIDUAL, SINKS = 8, 4, 32, 8, 64, 4


def budget(gpu: str) -> float:
    bandwidth, multiprocessors, clock = GPUS[gpu]
    return 128 / (bandwidth / (multiprocessors * clock))


@dataclass(frozen=True)
class Variant:
    """One kernel for one target; ``kernel`` is decode, prefill, kv_write, merge or turn_query."""

    target: str
    kernel: str
    format: str
    head_dim: int

    @property
    def is_nvidia(self) -> bool:
        return self.target.startswith("sm_")

    @property
    def target_tuple(self) -> Target:
        return Target("cuda", int(self.target[3:])) if self.is_nvidia else Target("hip", self.target)


@dataclass(frozen=True)
class Row:
    """A line of the report. load_bytes: width per thread of the loads that bring the codes of K and V; issue slots: of
    the main range's loop, per byte of K and V with scales; both 0 where a kernel has no such loop or for AMD."""

    target: str
    kernel: str
    format: str
    head_dim: int
    num_warps: int
    registers: int
    spill_bytes: int
    shared_bytes: int
    load_bytes: int
    matrix_instructions: int
    issue_slots_per_kv_byte: float

    @property
    def resident_warps(self) -> int:
        """Warps that a multiprocessor holds, by registers and shared memory; 0 for AMD."""
        if not self.target.startswith("sm_"):
            return 0
        kib, warps = _MULTIPROCESSORS[int(self.target[3:])]
        by_registers = 65536 // (32 * self.num_warps * (-(-self.registers // 8) * 8))
        by_shared = kib * 1024 // (self.shared_bytes + 1024)
        return min(by_registers, by_shared, warps // self.num_warps) * self.num_warps


class _Offline:
    """As much of a Triton driver as compiling needs."""

    def __init__(self, target: GPUTarget) -> None:
        self.target = target

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> str:
        return str(self.target)  # the key under which kernels keep what they compiled

    def get_current_stream(self, device: object) -> int:
        return 0


def plan(variant: Variant) -> tuple[Launch, KVLayout]:
    """The launch of a variant, as a step makes it, and the layout of its quantized pool."""
    k_format, v_format = parse_kv_dtype(variant.format)
    dim, dtype = variant.head_dim, torch.bfloat16
    layout = KVLayout(k_format, v_format, NUM_KV_HEADS, dim, dim, BLOCK_SIZE)
    exact_formats = [replace(raw_format(dtype), rotate=fmt.rotate) for fmt in (k_format, v_format)]
    exact = KVLayout(exact_formats[0], exact_formats[1], NUM_KV_HEADS, dim, dim, BLOCK_SIZE)
    residual = RESIDUAL if k_format.quantized else 0
    rows = NUM_SEQS if variant.kernel in ("decode", "merge") else 512
    with torch.device("meta"):
        arena, exact_arena = (torch.empty(1000, 4 * x.nbytes, dtype=torch.uint8) for x in (layout, exact))
        if variant.kernel == "kv_write":
            x = torch.empty(rows, NUM_KV_HEADS, dim, dtype=dtype)
            slots = torch.empty(rows, dtype=torch.int64)
            call = WriteCall(arena, x, x, slots, layout.nbytes, BLOCK_SIZE, k_format.code, v_format.code)
            return plan_kv_write(call, variant.target_tuple)[0], layout
        tables = torch.empty(NUM_SEQS, 1024, dtype=torch.int32)
        attention = AttentionCall(
            query=torch.empty(rows, NUM_KV_HEADS * GROUP, dim, dtype=dtype),
            query_sink=None,
            arena=arena,
            block_tables=tables,
            exact_arena=exact_arena if residual else None,
            exact_block_tables=tables if residual else None,
            query_start_loc=torch.empty(NUM_SEQS + 1, dtype=torch.int32),
            seq_lens=torch.empty(NUM_SEQS, dtype=torch.int32),
            sink_logits=None,
            layer_offset=layout.nbytes,
            exact_layer_offset=exact.nbytes,
            block_size=BLOCK_SIZE,
            num_kv_heads=NUM_KV_HEADS,
            v_dim=dim,
            k_format=k_format.code,
            v_format=v_format.code,
            exact_k_format=(exact if residual else layout).k_format.code,
            exact_v_format=(exact if residual else layout).v_format.code,
            scale=dim**-0.5,
            softcap=0.0,
            window=0,
            num_sink_tokens=0,
            residual_length=residual,
            num_exact_sinks=SINKS if residual else 0,
        )
        _, launches = plan_paged_attention(attention, variant.target_tuple)
    return next(launch for launch in launches if launch.kernel.__name__ == variant.kernel), layout


def compile_offline(launch: Launch, target: Target) -> Any:
    """Triton's compiled kernel for a launch that is never made."""
    warp_size = 32 if target.backend == "cuda" or target.is_rdna else 64
    triton.runtime.driver.set_active(_Offline(GPUTarget(target.backend, target.arch, warp_size)))
    return launch.kernel.warmup(grid=launch.grid, **launch.arguments, **launch.options)


@cache
def _cuobjdump() -> str:
    found = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    if not found.exists():
        raise FileNotFoundError(f"this Triton has no cuobjdump at {found}")
    return str(found)


def sass_of(cubin: bytes) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        dump = [_cuobjdump(), "-sass", "-res-usage", file.name]
        return subprocess.run(dump, check=True, capture_output=True, text=True).stdout


def instructions(sass: str) -> list[tuple[int, str]]:
    """(address, instruction without its predicate) in order."""
    found = re.findall(r"^\s+/\*([0-9a-f]{4,})\*/\s+(.*?);", sass, re.MULTILINE)
    return [(int(address, 16), re.sub(r"^@!?U?P\w+ ", "", text.strip())) for address, text in found]


def loops(code: list[tuple[int, str]]) -> Iterator[list[str]]:
    """Bodies of loops: what lies between a backward branch and its target."""
    for address, text in code:
        jump = re.match(r"BRA(?:\.\S+)* .*?0x([0-9a-f]+)", text)
        if jump and int(jump[1], 16) < address:
            yield [body for at, body in code if int(jump[1], 16) <= at <= address]


_MATRIX = re.compile(r"(HMMA|HGMMA|QGMMA|UTCHMMA|v_mfma|v_wmma)")
_LOAD = re.compile(r"(?:LDGSTS|LDG)\.E(?:\.\w+)*?(?:\.(64|128|U16|U8|S8|S16))?(?:\.\w+)* ")


def load_width(body: list[str], code_bytes: int, threads: int) -> int:
    """Bytes a thread moves at once in the narrowest of the widest loads that together bring ``code_bytes``."""
    widths = {"128": 16, "64": 8, "U16": 2, "S16": 2, "U8": 1, "S8": 1, None: 4}
    loads = [_LOAD.match(text + " ") for text in body]
    found = sorted((widths[_width(match[0])] for match in loads if match), reverse=True)
    arrived = 0
    for width in found:
        arrived += width * threads
        if arrived >= code_bytes:
            return width
    return found[-1] if found else 0


def _width(load: str) -> str | None:
    return next((part for part in ("128", "64", "U16", "S16", "U8", "S8") if f".{part}" in load), None)


def measure(variant: Variant) -> Row:
    """Compile a variant and read its code."""
    launch, layout = plan(variant)
    kernel = compile_offline(launch, variant.target_tuple)
    warps = kernel.metadata.num_warps
    common = (variant.target, variant.kernel, variant.format, variant.head_dim, warps)
    if not variant.is_nvidia:
        assembly = kernel.asm["amdgcn"]

        def number(name: str) -> int:
            found = re.search(rf"\.{name}:\s+(\d+)", assembly)
            return int(found[1]) if found else 0

        spills = 4 * number("vgpr_spill_count")  # scalar registers spill into vector registers
        # CDNA counts words (dwordx4), RDNA bits (b128).
        loads = re.findall(r"(?:global|buffer)_load_(?:dword(?:x(\d))?|b(\d+))\b", assembly)
        wide = [int(bits) // 8 if bits else 4 * int(words or 1) for words, bits in loads]
        matrix = len(_MATRIX.findall(assembly))
        return Row(*common, number("vgpr_count"), spills, kernel.metadata.shared, max(wide, default=0), matrix, 0.0)
    sass = sass_of(kernel.asm["cubin"])
    code = instructions(sass)
    usage = re.search(r"REG:(\d+) STACK:(\d+)", sass)
    assert usage is not None
    width, slots = 0, 0.0
    if variant.kernel in ("decode", "prefill"):
        tile, dim = launch.arguments["TILE"], variant.head_dim
        body = max(loops(code), key=len)
        per_key = layout.k_format.bytes_per_vector(dim) + layout.v_format.bytes_per_vector(dim)
        codes = layout.k_format.code_bytes(dim) + layout.v_format.code_bytes(dim)
        slots = len(body) * warps * 32 / (tile * per_key)
        width = load_width(body, tile * codes, warps * 32)
    matrix = sum(bool(_MATRIX.match(text)) for _, text in code)
    return Row(*common, int(usage[1]), int(usage[2]), kernel.metadata.shared, width, matrix, round(slots, 2))


def variants(targets: list[str], formats: list[str], head_dims: list[int], kernels: list[str]) -> list[Variant]:
    return [
        Variant(target, kernel, fmt, dim)
        for target in targets
        for kernel in kernels
        for fmt in formats
        for dim in head_dims
    ]


def ci_variants() -> list[Variant]:
    """What the tests compile: the wide gates on sm_86, the smallest target; a few of each of the others."""
    quantized = FORMATS[1:]
    every = variants(["sm_86"], list(FORMATS), [64, 128], ["decode"])
    every += variants(["sm_86"], ["int8", "fp8", "int4"], [256], ["decode"])
    every += variants(["sm_86"], ["int8"], [96], ["decode"])
    every += variants(["sm_86"], ["bf16", "int8", "fp8", "int4"], [128], ["prefill"])
    every += variants(["sm_86"], ["int8"], [64], ["prefill"])
    every += variants(["sm_86"], list(quantized), [128], ["kv_write"])
    every += variants(["sm_86"], ["int8"], [128], ["merge", "turn_query"])
    every += variants(["sm_80"], list(quantized), [128], ["decode"])
    every += variants(["sm_80"], ["int8", "int4"], [64], ["decode"])
    every += variants(["sm_90"], list(FORMATS), [64, 128], ["decode"])
    every += variants(["sm_90"], ["int8", "k8v4"], [128], ["prefill"])
    every += variants(["sm_90"], ["int8"], [128], ["kv_write"])
    every += variants(["gfx942"], list(FORMATS), [128], ["decode"])
    every += variants(["gfx942"], ["int8", "int4"], [64], ["decode"])
    return every + variants(["gfx942"], ["k8v4"], [128], ["prefill", "kv_write"])


def report(chosen: list[Variant], jobs: int = 1) -> list[Row]:
    """Rows in the order of the variants. Compiling takes seconds each, so it is spread over processes."""
    if jobs == 1:
        return [measure(variant) for variant in chosen]
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        return list(pool.map(measure, chosen))


def table(rows: list[Row]) -> str:
    head = (
        "| target | kernel | format | head_dim | warps | registers | spills | shared | resident warps | load bytes | "
    )
    head += "matrix instructions | issue slots per KV byte |"
    lines = [head, "|" + "---|" * 12]
    for row in rows:
        values = list(asdict(row).values())
        values.insert(8, row.resident_warps or "")
        values[-1] = row.issue_slots_per_kv_byte or ""
        lines.append("| " + " | ".join(str(value) for value in values) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m lean.kernels.report", description=__doc__.split("\n")[0])
    parser.add_argument("--target", nargs="+", default=["sm_80", "sm_86", "sm_90"], choices=TARGETS, metavar="TARGET")
    parser.add_argument("--format", nargs="+", default=list(FORMATS), choices=FORMATS)
    parser.add_argument("--head-dim", nargs="+", type=int, default=[64, 128])
    parser.add_argument("--kernel", nargs="+", default=["decode"], choices=KERNELS)
    parser.add_argument("--jobs", type=int, default=1, help="processes that compile")
    parser.add_argument("--ci", action="store_true", help="the variants that the tests compile instead")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    asked = variants(options.target, options.format, options.head_dim, options.kernel)
    rows = report(ci_variants() if options.ci else asked, options.jobs)
    if options.json:
        print(json.dumps([asdict(row) for row in rows], indent=1))
        return
    print(table(rows))
    print("\nBudgets, issue slots per byte: " + ", ".join(f"{gpu} {budget(gpu):.1f}" for gpu in GPUS))


if __name__ == "__main__":
    main()
