"""Latent attention (MLA, arXiv:2405.04434): the cache holds one latent vector a token in place of all heads' K and V.

K and V of every head are products of one vector, c, with two matrices of that head: k = [W_UK c, the rotated part] and
v = W_UV c. So q . k = (W_UK^T q) . c + the rotated parts, and the weighted sum of v is W_UV times that of c. Attention
can thus run on the vectors [c, rotated part] themselves, as one KV head whose V is the beginning of its K; the query is
multiplied by W_UK before, and the outcome by W_UV after. For many queries at once, K and V are made from the vectors
again where that is less work (`lean.model.expansion`).

transformers' modules expand c into K and V in a method of their own, `expand_kv`, between RoPE and the attention
function. Only that method and the product in it are replaced, so every rotation, norm and scale stays the module's own.
"""

import copy
from typing import Any

import torch
from torch import nn

_EXPAND, _PRODUCT = "expand_kv", "kv_b_proj"  # of transformers' modules
_SIZES = ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")


class LatentProjection(nn.Module):
    """W_UK and W_UV of a layer, in the place of the product that transformers expands with.

    Both lie as the product of one row reads them fastest: every output's weights side by side. On the meta device the
    weight stays as it is, since a checkpoint is compared with its name and shape.

    Args:
        weight: a parameter, [num_heads * (nope + v_head_dim), rank].
        nope, v_head_dim: dims of a head's query that are not rotated, and of its V.
        head_by_head: products of one head each, not one of all heads: deterministic mode cuts these into row tiles.

    Attributes:
        key_weight: [num_heads, rank, nope]. value_weight: [num_heads, v_head_dim, rank].
    """

    def __init__(self, weight: torch.Tensor, nope: int, v_head_dim: int, head_by_head: bool) -> None:
        super().__init__()
        self.nope, self.v_head_dim, self.head_by_head = nope, v_head_dim, head_by_head
        self.rank = weight.shape[1]
        if weight.is_meta:
            self.weight = weight
            return
        per_head = weight.unflatten(0, (-1, nope + v_head_dim))
        self.key_weight = nn.Parameter(per_head[:, :nope].transpose(1, 2).contiguous(), weight.requires_grad)
        self.value_weight = nn.Parameter(per_head[:, nope:].contiguous(), weight.requires_grad)

    def _product(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """x [tokens, num_heads, a] times weight [num_heads, b, a]: [tokens, num_heads, b]."""
        x, matrices = x.transpose(0, 1), weight.transpose(1, 2)
        found = torch.stack(list(map(torch.mm, x, matrices))) if self.head_by_head else torch.bmm(x, matrices)
        return found.transpose(0, 1)

    def absorb(self, query: torch.Tensor) -> torch.Tensor:
        """query [tokens, num_heads, nope + rope] -> [tokens, num_heads, rank + rope]."""
        latent = self._product(query[..., : self.nope], self.key_weight)
        return torch.cat((latent, query[..., self.nope :]), dim=-1)

    def expand(self, outcome: torch.Tensor) -> torch.Tensor:
        """Weighted sums of latent vectors [tokens, num_heads, rank] -> of values [tokens, num_heads, v_head_dim]."""
        return self._product(outcome, self.value_weight)

    def keys_and_values(self, vectors: torch.Tensor, heads: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """Vectors [tokens, rank + rope] -> K [tokens, heads, nope + rope] and V [tokens, heads, v_head_dim] of some
        heads."""
        latent, rotated = vectors[:, : self.rank], vectors[:, self.rank :]
        key = torch.stack([torch.mm(latent, matrix) for matrix in self.key_weight[heads]], dim=1)
        value = nn.functional.linear(latent, self.value_weight[heads].flatten(0, 1))
        key = torch.cat((key, rotated[:, None].expand(-1, key.shape[1], -1)), dim=-1)
        return key, value.unflatten(1, (-1, self.v_head_dim))

    def extra_repr(self) -> str:
        return f"rank={self.rank}, nope={self.nope}, v_head_dim={self.v_head_dim}"


def install(model: nn.Module, head_by_head: bool = False) -> bool:
    """Make every latent attention module of a model keep its K and V latent. Returns whether it has such modules.

    Nothing is changed where one of them is not understood; the model then runs with expanded K and V.
    """
    found = [module for module in model.modules() if hasattr(module, _EXPAND)]
    understood: dict[tuple[Any, ...], bool] = {}
    for module in found:
        kind = type(module), *(getattr(module, size, None) for size in _SIZES)
        if kind not in understood:
            understood[kind] = _expands_as_known(module)
    if not found or not all(understood.values()):
        return False
    for module in found:
        weight = module.get_submodule(_PRODUCT).weight
        projection = LatentProjection(weight, module.qk_nope_head_dim, module.v_head_dim, head_by_head)  # type: ignore[arg-type]
        module.add_module(_PRODUCT, projection)
        setattr(module, _EXPAND, _keep_latent)
    return True


def _keep_latent(latent: torch.Tensor, rotated: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """In place of `expand_kv`: latent [batch, 1, tokens, rank] and rotated [batch, 1, tokens, rope] as K and V of one
    head, [batch, 1, tokens, rank + rope] and latent."""
    return torch.cat((latent, rotated), dim=-1), latent


@torch.no_grad()
def _expands_as_known(module: Any) -> bool:
    """Whether a module expands its latent vectors as this file says, found by trying it with random weights."""
    product = getattr(module, _PRODUCT, None)
    sizes = [getattr(module, size, None) for size in _SIZES]
    if type(product) is not nn.Linear or product.bias is not None or not all(type(size) is int for size in sizes):
        return False
    rank, rope, nope, v_head_dim = sizes
    heads, rest = divmod(product.out_features, nope + v_head_dim)
    if rest or product.in_features != rank:
        return False
    generator = torch.Generator().manual_seed(0)
    weight, latent, rotated = (
        torch.randn(*shape, generator=generator)
        for shape in ((product.out_features, rank), (1, 1, 2, rank), (1, 1, 2, rope))
    )
    tried = copy.copy(module)  # shares its tensors; its table of parts must not be shared
    tried.__dict__["_modules"] = dict(module._modules)
    with torch.device("meta"):
        tried.kv_b_proj = nn.Linear(rank, product.out_features, bias=False)
    tried.kv_b_proj.weight = nn.Parameter(weight)
    try:
        with torch.device("cpu"):
            key, value = tried.expand_kv(latent, rotated)
    except Exception:  # the module's own code, on tensors that it may not expect
        return False
    wanted = torch.einsum("btr,hdr->bhtd", latent[:, 0], weight.unflatten(0, (heads, nope + v_head_dim)))
    wanted_key = torch.cat((wanted[..., :nope], rotated.expand(-1, heads, -1, -1)), dim=-1)
    pairs = (key, wanted_key), (value, wanted[..., nope:])
    return all(a.shape == b.shape and torch.allclose(a, b, atol=1e-3, rtol=1e-3) for a, b in pairs)
