"""The PTX that widens codes gives every code its number; without a GPU, the instructions are carried out here."""

import re

import pytest
import torch
import triton_interpreter  # noqa: F401 - imports the kernels in the one way this process may

from lean.kernels.triton import common
from lean.quant import decode, parse_kv_dtype

WORDS = torch.arange(256)[:, None] * torch.tensor([1, 7, 31, 255]) % 256  # every byte in every place of a word


def half2(word: int) -> torch.Tensor:
    return torch.tensor([word & 0xFFFF, word >> 16]).to(torch.uint16).view(torch.float16)


def word_of(pair: torch.Tensor) -> int:
    low, high = pair.to(torch.float16).view(torch.uint16).tolist()
    return low | high << 16


def run(ptx: str, outputs: int, word: int) -> list[float]:
    """Carry out straight-line PTX (the ISA: https://docs.nvidia.com/cuda/parallel-thread-execution/) on one input word;
    the outputs as fp16."""
    registers, halves = {f"${outputs}": word}, {}

    def value(name: str) -> int:
        return int(name, 16) if name.startswith("0x") else int(name) if name.isdigit() else registers[name]

    for text in re.findall(r"^(?!\.reg)(\w[^;]*);", ptx, re.MULTILINE):
        op, rest = text.split(maxsplit=1)
        target, *names = (name.strip() for name in rest.split(","))
        if target.startswith("{"):  # a register as two halves
            first, second = (name.strip(" {}") for name in rest.split(",")[:2])
            halves |= dict(zip((first, second), half2(value(names[-1])).tolist()))
            continue
        a, b, c, table = ([value(name) for name in names] + [0] * 4)[:4]
        if op == "mov.b32":
            out = a
        elif op == "xor.b32":
            out = a ^ b
        elif op == "and.b32":
            out = a & b
        elif op == "shl.b32":
            out = a << b
        elif op == "shr.b32":
            out = a >> b
        elif op == "prmt.b32":
            source = (a | b << 32).to_bytes(8, "little")
            out = int.from_bytes(bytes(source[c >> 4 * i & 7] for i in range(4)), "little")
        elif op == "lop3.b32":
            bits = [(table >> ((a >> i & 1) << 2 | (b >> i & 1) << 1 | (c >> i & 1)) & 1) << i for i in range(32)]
            out = sum(bits)
        elif op == "sub.f16x2":
            out = word_of(half2(a) - half2(b))
        elif op == "fma.rn.f16x2":
            out = word_of(half2(a).double() * half2(b).double() + half2(c).double())
        else:
            raise AssertionError(f"unknown instruction {op}")
        registers[target] = out & 0xFFFFFFFF
    if halves:
        return [halves[f"${i}"] for i in range(outputs)]
    return torch.cat([half2(registers[f"${i}"]) for i in range(outputs)]).tolist()


@pytest.mark.parametrize(("kv_dtype", "ptx", "unit"), [("int8", common.INT8_PTX, 1.0), ("fp8", common.FP8_PTX, 256.0)])
def test_every_code_of_a_byte_is_widened_exactly(kv_dtype: str, ptx, unit: float) -> None:
    fmt = parse_kv_dtype(kv_dtype)[0]
    for codes in WORDS:
        wanted = decode(codes.to(torch.uint8), torch.ones(1, dtype=torch.float16), fmt)
        actual = torch.tensor(run(ptx.value, 2, int.from_bytes(bytes(codes.tolist()), "little"))) * unit
        finite = wanted.isfinite()  # e4m3 has NaN codes, which nobody writes
        assert torch.equal(actual[finite], wanted[finite])


def test_the_bytes_of_a_word_are_widened_exactly() -> None:
    for codes in WORDS:
        wanted = codes.to(torch.uint8).view(torch.int8).float()
        word = int.from_bytes(bytes(codes.tolist()), "little")
        assert torch.equal(torch.tensor(run(common.WORD_PTX.value, 4, word)), wanted)


def test_both_nibbles_of_every_int4_byte_are_widened_exactly() -> None:
    for codes in WORDS:
        signed = codes.to(torch.uint8).view(torch.int8)
        wanted = torch.cat([(signed << 4) >> 4, signed >> 4]).float() + 0.5
        word = int.from_bytes(bytes(codes.tolist()), "little")
        assert torch.equal(torch.tensor(run(common.INT4_PTX.value, 4, word)) * 8, wanted)
