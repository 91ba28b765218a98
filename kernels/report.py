"""Registers, loads and instructions of the compiled Triton kernels, without a GPU: ``python -m lean.kernels.report``.

Kernels are planned as a step plans them, with tensors that have no memory. They are compiled for a given target through
Triton's own launch path, so alignment and divisibility are those of a real launch. NVIDIA code is then read with the
cuobjdump that Triton ships, AMD code from its assembly.
"""

import argparse
import json
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget

from lean.kernels.call import AttentionCall, WriteCall
from lean.kernels.layout import KVLayout
from lean.kernels.triton.launch import Launch
from lean.kernels.triton.machine_code import load_width, read_amd, read_nvidia
from lean.kernels.triton.parameters import Target
from lean.kernels.triton.plan_attention import plan_paged_attention
from lean.kernels.triton.plan_kv_write import plan_kv_write
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
IN_PLANES = ("k6v4", "k=int5,v=int3")  # of which a code lies in two planes
TARGETS = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120", "gfx90a", "gfx942", "gfx1100")
KERNELS = ("decode", "merge", "prefill", "turn_query", "kv_write")
# Llama-like: 8 KV heads of 4 query heads, the default residual, steps of 8 sequences, chunks of 512 tokens.
NUM_KV_HEADS, GROUP, BLOCK_SIZE, NUM_SEQS, CHUNK, RESIDUAL, SINKS = 8, 4, 32, 8, 512, 64, 4
DTYPE = torch.bfloat16
# Latent vectors, by their size as head_dim: their beginning that is V. One KV head, query heads as in GLM-4.7-Flash.
LATENT, LATENT_HEADS = {576: 512, 288: 256}, 20


def budget(gpu: str) -> float:
    bandwidth, multiprocessors, clock = GPUS[gpu]
    return 128 / (bandwidth / (multiprocessors * clock))


@dataclass(frozen=True)
class Variant:
    """One kernel for one target; ``kernel`` is decode, prefill, kv_write, merge or turn_query. A head_dim of LATENT
    stands for latent vectors of that size."""

    target: str
    kernel: str
    format: str
    head_dim: int

    @property
    def is_nvidia(self) -> bool:
        return self.target.startswith("sm_")

    @property
    def target_tuple(self) -> Target:
        return Target.named(self.target)


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
    """The part of a Triton driver that compiling needs."""

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
    v_dim = LATENT.get(variant.head_dim)
    if v_dim is None:
        layout = KVLayout(k_format, v_format, NUM_KV_HEADS, variant.head_dim, variant.head_dim, BLOCK_SIZE)
    else:
        layout = KVLayout(k_format, k_format, 1, variant.head_dim, v_dim, BLOCK_SIZE, v_in_k=True)
    with torch.device("meta"):
        if variant.kernel == "kv_write":
            return plan_kv_write(_write_call(layout), variant.target_tuple)[0], layout
        rows = NUM_SEQS if variant.kernel in ("decode", "merge") else CHUNK
        _, launches = plan_paged_attention(_attention_call(layout, rows), variant.target_tuple)
    return next(launch for launch in launches if launch.kernel.__name__ == variant.kernel), layout


def _arena(layout: KVLayout) -> torch.Tensor:
    """A pool of four layers, of which the second is meant."""
    return torch.empty(1000, 4 * layout.nbytes, dtype=torch.uint8)


def _write_call(layout: KVLayout) -> WriteCall:
    x = torch.empty(CHUNK, layout.num_kv_heads, layout.k_dim, dtype=DTYPE)
    return WriteCall(
        arena=_arena(layout),
        key=x,
        value=x[..., : layout.v_dim],
        slot_mapping=torch.empty(CHUNK, dtype=torch.int64),
        layer_offset=layout.nbytes,
        block_size=BLOCK_SIZE,
        k_format=layout.k_format.code,
        v_format=layout.v_format.code,
        v_in_k=layout.v_in_k,
    )


def _attention_call(layout: KVLayout, rows: int) -> AttentionCall:
    """A step of ``rows`` rows; the default residual where the formats are quantized."""
    k_exact, v_exact = (replace(raw_format(DTYPE), rotate=fmt.rotate) for fmt in (layout.k_format, layout.v_format))
    exact = replace(layout, k_format=k_exact, v_format=v_exact)
    residual = RESIDUAL if layout.k_format.quantized else 0
    tables = torch.empty(NUM_SEQS, 1024, dtype=torch.int32)
    return AttentionCall(
        query=torch.empty(rows, LATENT_HEADS if layout.v_in_k else NUM_KV_HEADS * GROUP, layout.k_dim, dtype=DTYPE),
        query_sink=None,
        arena=_arena(layout),
        block_tables=tables,
        exact_arena=_arena(exact) if residual else None,
        exact_block_tables=tables if residual else None,
        query_start_loc=torch.empty(NUM_SEQS + 1, dtype=torch.int32),
        seq_lens=torch.empty(NUM_SEQS, dtype=torch.int32),
        sink_logits=None,
        layer_offset=layout.nbytes,
        exact_layer_offset=exact.nbytes,
        block_size=BLOCK_SIZE,
        num_kv_heads=layout.num_kv_heads,
        v_dim=layout.v_dim,
        k_format=layout.k_format.code,
        v_format=layout.v_format.code,
        exact_k_format=k_exact.code,
        exact_v_format=v_exact.code,
        scale=layout.k_dim**-0.5,
        softcap=0.0,
        window=0,
        num_sink_tokens=0,
        residual_length=residual,
        num_exact_sinks=SINKS if residual else 0,
        v_in_k=layout.v_in_k,
    )


def compile_offline(launch: Launch, target: Target) -> Any:
    """Triton's compiled kernel for a launch that is never made."""
    warp_size = 32 if target.backend == "cuda" or target.is_rdna else 64
    triton.runtime.driver.set_active(_Offline(GPUTarget(target.backend, target.arch, warp_size)))
    return launch.kernel.warmup(grid=launch.grid, **launch.arguments, **launch.options)


def measure(variant: Variant) -> Row:
    """Compile a variant and read its code."""
    launch, layout = plan(variant)
    kernel = compile_offline(launch, variant.target_tuple)
    warps = kernel.metadata.num_warps
    common = (variant.target, variant.kernel, variant.format, variant.head_dim, warps)
    if not variant.is_nvidia:
        amd = read_amd(kernel.asm["amdgcn"])
        figures = amd.registers, amd.spill_bytes, kernel.metadata.shared, amd.widest_load, amd.matrix_instructions
        return Row(*common, *figures, issue_slots_per_kv_byte=0.0)
    sass = read_nvidia(kernel.asm["cubin"])
    width, slots = 0, 0.0
    if variant.kernel in ("decode", "prefill"):
        tile, dim = launch.arguments["TILE"], variant.head_dim
        body = sass.main_loop()
        per_key = layout.bytes_per_token // layout.num_kv_heads
        codes = layout.k_format.code_bytes(dim) + (0 if layout.v_in_k else layout.v_format.code_bytes(dim))
        slots = len(body) * warps * 32 / (tile * per_key)
        width = load_width(body, tile * codes, warps * 32)
    return Row(
        *common, sass.registers, sass.spill_bytes, kernel.metadata.shared, width, sass.matrix_instructions,
        round(slots, 2),
    )  # fmt: skip


def variants(targets: list[str], formats: list[str], head_dims: list[int], kernels: list[str]) -> list[Variant]:
    return [
        Variant(target, kernel, fmt, dim)
        for target in targets
        for kernel in kernels
        for fmt in formats
        for dim in head_dims
    ]


def ci_variants() -> list[Variant]:
    """The variants that the tests compile: most for sm_86, the smallest target, and a few for each other target."""
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
    every += variants(["sm_100"], list(quantized), [64], ["prefill"])
    every += variants(["gfx942"], list(FORMATS), [128], ["decode"])
    every += variants(["gfx942"], ["int8", "int4"], [64], ["decode"])
    every += variants(["gfx942"], ["k8v4"], [128], ["prefill", "kv_write"])
    every += variants(["sm_86"], ["k6v4"], [64, 128], ["decode"])
    every += variants(["sm_86"], ["k6v4"], [128], ["kv_write"])
    every += variants(["sm_86"], ["bf16", "int8", "int4"], [576], ["decode"])  # latent vectors
    every += variants(["sm_86"], ["int8"], [576], ["prefill", "kv_write"])
    return every + variants(["sm_80", "sm_90"], ["int8"], [576], ["decode"])


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
    parser.add_argument(
        "--target",
        nargs="+",
        default=["sm_80", "sm_86", "sm_90"],
        choices=TARGETS,
        metavar="TARGET",
        help="GPU targets to compile for, e.g. sm_86 gfx942; default: sm_80 sm_86 sm_90",
    )
    parser.add_argument(
        "--format", nargs="+", default=list(FORMATS), choices=FORMATS + IN_PLANES, help="KV formats; default: all"
    )
    parser.add_argument(
        "--head-dim", nargs="+", type=int, default=[64, 128], help="sizes of a head; default: 64 128; 576: latent"
    )
    parser.add_argument("--kernel", nargs="+", default=["decode"], choices=KERNELS, help="default: decode")
    parser.add_argument("--jobs", type=int, default=1, help="number of compiling processes")
    parser.add_argument("--ci", action="store_true", help="compile only the variants that the tests check")
    parser.add_argument("--json", action="store_true", help="print JSON in place of a table")
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
