"""Linear layers with weights that bitsandbytes quantizes to 4 or 8 bits: which ones, and by which of its kernels.

4 bits: NF4 in blocks of 64 (QLoRA, https://arxiv.org/abs/2305.14314), scales not quantized again. 8 bits: int8 rows,
and half precision for outlier columns of the activations (LLM.int8(), https://arxiv.org/abs/2208.07339). Layers are
replaced in the loaded model: transformers' loader takes one quantization_config, and a GGUF file needs that for itself.
"""

import logging
import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lean.machine.memory import give_back_freed
from lean.quant.weight_use import WeightUse

BLOCK = 64  # inputs that share an NF4 scale
TILE = 32  # outputs that bitsandbytes' CPU kernel computes side by side
OUTLIER = 6.0  # activations beyond it are multiplied in half precision, as in transformers
# Measured with bitsandbytes 0.50.2 on one core with AVX-512, one sequence: SmolLM2-135M, and 8 layers of width 2,048.
CPU_INT8 = (
    "quantization bnb-8bit is for GPUs: on a CPU a token took 1.6 to 1.8 times as long as with bnb-4bit (for "
    "SmolLM2-135M longer than in bfloat16), with 1.9 times the bytes: use bnb-4bit"
)

# bitsandbytes logs a line for every int8 product whose activations are not float16.
logging.getLogger("bitsandbytes.autograd._functions").addFilter(
    lambda record: "inputs will be cast" not in record.getMessage()
)


@dataclass(frozen=True)
class Quantizable:
    """The linear layers of a model that can be quantized: their weights and their outputs, of all layers together."""

    weights: int = 0
    outputs: int = 0

    def gpu_bytes(self, quantization: str) -> int:
        """Their bytes on a GPU: codes, and float32 scales for every BLOCK weights or for every output."""
        if quantization == "bnb-4bit":
            return self.weights // 2 + 4 * self.weights // BLOCK
        return self.weights + 4 * self.outputs


def quantizable(decoder: nn.Module) -> Quantizable:
    """Those of a decoder. The weights need no values."""
    layers = [layer for _, layer in _quantizable(decoder)]
    return Quantizable(sum(layer.weight.numel() for layer in layers), sum(layer.out_features for layer in layers))


def _quantizable(decoder: nn.Module) -> list[tuple[str, nn.Linear]]:
    """Layers whose inputs fill blocks of BLOCK and whose outputs fill tiles of TILE, by path."""
    linears = ((path, layer) for path, layer in decoder.named_modules() if type(layer) is nn.Linear)
    return [(path, layer) for path, layer in linears if not (layer.in_features % BLOCK or layer.out_features % TILE)]


class PackedLinear(nn.Module):
    """x [..., in] times NF4 weights [out, in], in the layout of bitsandbytes' AVX-512 BF16 kernel. Row-invariant.

    bitsandbytes' own module calls the same kernel with the same tensors, but its checks on every call take as long as
    the product of a narrow layer.

    Args:
        codes: [out, in / 2] uint8, tiles of 32 outputs.
        scales: [in / 64, out] bfloat16.
        levels: [16] float32, what the codes stand for.
        bias: [out], or None.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    levels: torch.Tensor

    def __init__(
        self, codes: torch.Tensor, scales: torch.Tensor, levels: torch.Tensor, bias: nn.Parameter | None
    ) -> None:
        super().__init__()
        self.out_features, self.in_features = codes.shape[0], codes.shape[1] * 2
        self.register_buffer("codes", codes)
        self.register_buffer("scales", scales)
        self.register_buffer("levels", levels)
        self.bias = bias
        self._product = torch.ops.bitsandbytes.gemv_4bit.default  # takes any number of rows, despite its name
        self._shape = [self.out_features, self.in_features]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self._product(x.contiguous(), self.codes, self._shape, self.scales, self.levels, BLOCK)
        return out if self.bias is None else out.add_(self.bias)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


def check_quantization(quantization: str, dtype: torch.dtype, device: torch.device, deterministic: bool) -> None:
    """Raise ValueError, in one line, where ``bnb-4bit`` or ``bnb-8bit`` does not work."""
    if dtype is torch.float64:
        raise ValueError(f"quantization {quantization} computes in bfloat16, float16 or float32, not in float64")
    if quantization == "bnb-8bit" and device.type == "cpu":
        raise ValueError(CPU_INT8)
    bnb = _bitsandbytes(quantization)
    if deterministic and not (quantization == "bnb-4bit" and _has_fused_product(bnb, dtype, device)):
        raise ValueError(
            f"quantization {quantization}: in {str(dtype).removeprefix('torch.')} on {device.type}, products depend "
            "on the number of rows, so --deterministic is not possible: remove one of the two options (bnb-4bit in "
            "bfloat16 on a CPU with AVX-512 BF16 supports it)"
        )


def quantize_linears(model: nn.Module, decoder: nn.Module, quantization: str, device: torch.device) -> WeightUse:
    """Replace the linear layers of ``decoder``, a part of ``model``, one by one, each new one on ``device``.

    Layers whose inputs do not fill blocks of 64, or whose outputs do not fill tiles of 32, stay exact.

    Raises:
        ValueError: no layer could be replaced.
    """
    bnb = _bitsandbytes(quantization)
    make, name = (_nf4, "NF4") if quantization == "bnb-4bit" else (_int8, "int8")
    num_linear = sum(type(module) is nn.Linear for module in decoder.modules())
    tensors: list[torch.Tensor] = []
    num_quantized = num_weights = 0
    packed = False
    for path in [path for path, _ in _quantizable(decoder)]:  # paths alone: each layer's weight is freed in its turn
        linear: Any = decoder.get_submodule(path)
        num_quantized, num_weights = num_quantized + 1, num_weights + linear.weight.numel()
        layer = make(bnb, linear, device)
        decoder.set_submodule(path, layer)
        packed = isinstance(layer, PackedLinear)
        tensors += _tensors(layer)
    if not num_quantized:
        raise ValueError(
            f"quantization {quantization}: none of {num_linear} linear layers has a multiple of {BLOCK} inputs and "
            f"of {TILE} outputs: remove --quantization"
        )
    held = {tensor.data_ptr() for tensor in tensors}
    kept = [weight for weight in model.parameters() if weight.data_ptr() not in held]
    if device.type == "cpu":
        let_go(kept)
    quantized, exact = (sum(tensor.nbytes for tensor in group) for group in (tensors, kept))
    fused = packed or device.type != "cpu" or quantization == "bnb-8bit"
    return WeightUse(name, num_quantized, num_linear, num_weights, quantized, exact, fused, row_invariant=packed)


def waits_for_host(module: nn.Module) -> bool:
    """Whether a product of the module reads numbers on the host: bitsandbytes looks for outliers in every int8 one."""
    return any(type(part).__name__ == "Linear8bitLt" for part in module.modules())


def _bitsandbytes(quantization: str) -> Any:
    """Import bitsandbytes. Raises ValueError where it is not installed.

    Where Hugging Face's package `kernels` is installed, importing bitsandbytes would download a compiled kernel from
    the hub. Here that package is hidden, so bitsandbytes uses the kernels it came with.
    """
    if "bitsandbytes" in sys.modules:
        return sys.modules["bitsandbytes"]
    log = logging.getLogger("bitsandbytes.backends.cpu.ops")  # it would warn that the package is missing
    hub, disabled = sys.modules.get("kernels"), log.disabled
    sys.modules["kernels"] = None  # type: ignore[assignment]  # importing it fails
    log.disabled = True
    try:
        import bitsandbytes
    except ImportError as error:
        raise ValueError(
            f"quantization {quantization} needs bitsandbytes ({error}): pip install 'lean-inference[bnb]'"
        ) from None
    finally:
        log.disabled = disabled
        del sys.modules["kernels"]
        if hub is not None:
            sys.modules["kernels"] = hub
    return bitsandbytes


def _has_fused_product(bnb: Any, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether a CPU product of this dtype reads 4-bit codes. The kernel always computes in bfloat16."""
    return device.type == "cpu" and dtype is torch.bfloat16 and bool(bnb.functional.has_avx512bf16())


def _nf4(bnb: Any, linear: nn.Linear, device: torch.device) -> nn.Module:
    layer = bnb.nn.Linear4bit(
        linear.in_features, linear.out_features, False, linear.weight.dtype, False, "nf4", device="meta"
    )
    weight = bnb.nn.Params4bit(linear.weight.data, False, blocksize=BLOCK, compress_statistics=False, quant_type="nf4")
    layer.weight, layer.bias = weight.to(device), linear.bias
    layer.eval()
    if not _has_fused_product(bnb, linear.weight.dtype, device):
        layer.support_avx512bf16_for_cpu = False  # it would round a float32 model's activations to bfloat16
        return layer
    layer(torch.zeros(1, linear.in_features, dtype=torch.bfloat16))  # the first product packs the codes
    state = layer.weight.quant_state
    return PackedLinear(layer.weight.data, state.absmax, state.code, linear.bias)


def _int8(bnb: Any, linear: nn.Linear, device: torch.device) -> nn.Module:
    layer = bnb.nn.Linear8bitLt(
        linear.in_features, linear.out_features, False, has_fp16_weights=False, threshold=OUTLIER, device="meta"
    )
    weight = bnb.nn.Int8Params(linear.weight.data, requires_grad=False, has_fp16_weights=False)
    layer.weight, layer.bias = weight.to(device), linear.bias
    return layer.eval()


def let_go(kept: list[nn.Parameter]) -> None:
    """Free the file that exact weights are views of, and the memory that glibc keeps of the quantizer's temporaries."""
    for weight in kept:
        weight.data = weight.data.clone()
    give_back_freed()


def _tensors(layer: Any) -> list[torch.Tensor]:
    """The tensors that hold a quantized layer's weights."""
    if isinstance(layer, PackedLinear):
        return [layer.codes, layer.scales, layer.levels]
    if getattr(layer.weight, "SCB", None) is not None:
        return [layer.weight.data, layer.weight.SCB]
    state = layer.weight.quant_state
    return [layer.weight.data, state.absmax, state.code]
