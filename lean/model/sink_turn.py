"""Queries for the sinks: turned back by as many positions as tokens are gone between the sinks and the window.

Under a window, the distance from a query to the sinks shrinks by the number of tokens evicted in between (in-cache
positions of StreamingLLM, arXiv:2309.17453). Stored keys stay as they are: rotations commute, so the query is turned
back for the sink keys, by the angle alone and on the rotary dims only.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Pairing:
    """Which dims of a query rotate together.

    Attributes:
        neighbours: dim 2k with dim 2k + 1; else dim k with dim k + half.
        start: the first dim that rotates.
        backwards: the rotation runs in the other direction.
    """

    neighbours: bool = False
    start: int = 0
    backwards: bool = False


@dataclass(frozen=True)
class SinkTurn:
    """Turns the query rows of one step back.

    Attributes:
        cos, sin: [num_tokens, 1, rotary_dim / 2], float64, or the dtype that layers compute in.
        layers: how the dims of each layer with full attention pair up; None: the layer does not rotate.
    """

    cos: torch.Tensor
    sin: torch.Tensor
    layers: Mapping[int, Pairing | None]

    def __call__(self, query: torch.Tensor, layer: int) -> torch.Tensor:
        """query [num_tokens, heads, head_dim] -> the same, turned; rows without a shift keep their bits."""
        pairing = self.layers[layer]
        if pairing is None:
            return query
        half, start = self.cos.shape[-1], pairing.start
        dtype = torch.promote_types(query.dtype, torch.float32)
        cos, sin = self.cos.to(dtype), self.sin.to(dtype)
        if pairing.backwards:
            sin = -sin
        if pairing.neighbours:
            first, second = slice(start, start + 2 * half, 2), slice(start + 1, start + 2 * half, 2)
        else:
            first, second = slice(start, start + half), slice(start + half, start + 2 * half)
        a, b = query[..., first].to(dtype), query[..., second].to(dtype)
        turned = query.clone()
        turned[..., first] = (a * cos + b * sin).to(query.dtype)
        turned[..., second] = (b * cos - a * sin).to(query.dtype)
        return turned


@dataclass(frozen=True)
class SinkRotary:
    """The rotation of the layers with full attention.

    Attributes:
        inv_freq: float64 [rotary_dim / 2].
        layers: as of `SinkTurn`.
    """

    inv_freq: torch.Tensor
    layers: Mapping[int, Pairing | None]

    def back(self, shifts: torch.Tensor, device: torch.device) -> SinkTurn:
        """shifts: int64 [num_tokens], by how many positions each row's query is turned back."""
        angle = (shifts[:, None, None].double() * self.inv_freq).to(device)
        return SinkTurn(angle.cos(), angle.sin(), self.layers)


def pairings(inv_freq: torch.Tensor, head_dim: int) -> Iterator[Pairing | None]:
    """The ways in which transformers' models pair the dims of a head, the usual ones first; None: not at all."""
    rotary_dim = 2 * len(inv_freq)
    if 0 < rotary_dim <= head_dim:
        for backwards in (False, True):
            for start in dict.fromkeys((0, head_dim - rotary_dim)):
                for neighbours in (False, True):
                    yield Pairing(neighbours, start, backwards)
    yield None
