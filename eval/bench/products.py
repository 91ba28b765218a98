"""Times of a layer's product with exact and with packed weights, by number of rows.

``python -m lean.eval.bench.products 1536x576 --rows 1,8,64,512``
"""

import argparse
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from itertools import count

import torch

from lean.engine.onednn import single_row_products
from lean.eval.bench.timing import take_turns
from lean.quant.packed import int4_product, int8_product, pack_int4, pack_int8, row_parts
from lean.quant.rounding import nearest_groups
from lean.quant.unpacked import many_rows_int4, many_rows_int8
from lean.threads import fit_threads

GROUP = 32
BEYOND_CACHES = 96 * 2**20  # bytes of bfloat16 weights that take turns, so that no CPU cache holds the next one
CPU = torch.device("cpu")

Product = Callable[[torch.Tensor, int], torch.Tensor | None]


def products(outputs: int, inputs: int, copies: int) -> dict[str, Product]:
    """By name, what multiplies rows [n, inputs] bfloat16 with the copy of that number; None for too few rows."""
    weights = [torch.randn(outputs, inputs).mul_(0.02).bfloat16() for _ in range(copies)]
    four = [_int4(weight) for weight in weights]
    eight = [pack_int8(row_parts(weight), outputs, inputs)[:2] for weight in weights]
    return {
        "bfloat16": lambda x, own: torch.nn.functional.linear(x, weights[own]),
        "int4": lambda x, own: int4_product(x, four[own][0], GROUP, four[own][1], may_unpack=False),
        "int8": lambda x, own: int8_product(x, *eight[own], may_unpack=False),
        "int4 unpacked": lambda x, own: many_rows_int4(x, four[own][0], GROUP, four[own][1]),
        "int8 unpacked": lambda x, own: many_rows_int8(x, *eight[own]),
    }


def _int4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    outputs, inputs = weight.shape
    return pack_int4((nearest_groups(part, GROUP) for part in row_parts(weight)), outputs, inputs, GROUP)


def measure(outputs: int, inputs: int, rows: Sequence[int]) -> dict[int, Mapping[str, float]]:
    """By number of rows, microseconds of each product: medians of rounds in which they take turns."""
    copies = max(1, BEYOND_CACHES // (2 * outputs * inputs))
    made, found = products(outputs, inputs, copies), dict[int, Mapping[str, float]]()
    for number in rows:
        x = torch.randn(number, inputs).bfloat16()
        numbers = count()
        calls = {
            name: lambda x=x, numbers=numbers, product=product: product(x, next(numbers) % copies)
            for name, product in made.items()
            if product(x, 0) is not None
        }
        with single_row_products() if number == 1 else nullcontext():  # as the engine's steps
            times = take_turns(calls, max(9, 400 // number), CPU)
        found[number] = {name: 1e6 * times[name].median for name in times}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m lean.eval.bench.products", description=__doc__.split("\n")[0])
    parser.add_argument("shape", help="outputs and inputs of the layer, e.g. 1536x576")
    parser.add_argument("--rows", default="1,8,64,512", help="numbers of rows, separated by commas")
    options = parser.parse_args()
    match = re.fullmatch(r"(\d+)x(\d+)", options.shape)
    shape = [int(number) for number in match.groups()] if match else []
    if len(shape) != 2 or shape[0] < 16 or shape[1] % GROUP or not shape[1]:
        parser.error(f"shape {options.shape}: give OUTPUTSxINPUTS, at least 16 outputs and a multiple of 32 inputs")
    if not re.fullmatch(r"[1-9]\d*(,[1-9]\d*)*", options.rows):
        parser.error(f"--rows {options.rows}: give numbers above 0, separated by commas")
    fit_threads()
    found = measure(shape[0], shape[1], [int(number) for number in options.rows.split(",")])
    names = list(dict.fromkeys(name for times in found.values() for name in times))
    print(f"microseconds, {torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}")
    print("rows    " + "".join(f"{name:>15}" for name in names))
    for number, times in found.items():
        print(f"{number:<8}" + "".join(f"{times[name]:15,.0f}" if name in times else f"{'-':>15}" for name in names))


if __name__ == "__main__":
    main()
