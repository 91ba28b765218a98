"""What the weights of a loaded model are: formats, numbers and bytes."""

from dataclasses import dataclass


@dataclass(frozen=True)
class WeightUse:
    """Number and size of a model's weights.

    Attributes:
        name: format of the quantized layers.
        num_quantized: layers in that format.
        num_linear: the layers that could be.
        num_weights: weights in the quantized layers.
        quantized_bytes: their codes and scales.
        exact_bytes: all other weights.
        fused: products read the codes; else every product first makes an exact copy of its layer.
        row_invariant: the bits of a row's product do not depend on the other rows.
        formats: number of tensors of each format, where there are several or the embedding is among them.
        kept: why tensors are not quantized, and how many, by reason.
    """

    name: str
    num_quantized: int
    num_linear: int
    num_weights: int
    quantized_bytes: int
    exact_bytes: int
    fused: bool
    row_invariant: bool
    formats: tuple[tuple[str, int], ...] = ()
    kept: tuple[tuple[str, int], ...] = ()

    @property
    def bits(self) -> float:
        """Bits per quantized weight, scales included; 0 where none is."""
        return 8 * self.quantized_bytes / self.num_weights if self.num_weights else 0.0
