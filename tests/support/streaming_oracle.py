"""StreamingLLM's cache as published (arXiv:2309.17453), on transformers' own modules in float64.

Token by token, each layer keeps unrotated keys and values of the first S and the last W tokens, numbers them 0 .. n - 1
in the order of the cache, rotates them all anew at every step, and gives the query the last number. The oracle shares
nothing with lean but the weights: transformers' modules run with their rotation turned off.
"""

from pathlib import Path

import torch
from norms import exact_norms
from transformers import AttentionInterface, AutoModelForCausalLM
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

NAME = "in_cache_positions"


class StreamingOracle:
    """transformers' model, one token a step, over a cache of unrotated keys. ``window`` 0 keeps every token.

    Layers with a sliding window keep it, without sinks.

    Args:
        pairs: neighbouring dims rotate together; else dims of the two halves.
        start: the first dim that rotates. sign: -1 where the rotation runs backwards.
        still: layers that do not rotate.
    """

    def __init__(
        self,
        folder: Path,
        window: int,
        sinks: int,
        *,
        pairs: bool = False,
        start: int = 0,
        sign: int = 1,
        still: tuple[int, ...] = (),
    ) -> None:
        AttentionInterface.register(NAME, self._attend)
        AttentionMaskInterface.register(NAME, lambda *args, **kwargs: None)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation=NAME)
        model.set_experts_implementation("eager")
        self.model = exact_norms(model.eval().requires_grad_(False))
        self.window, self.sinks = window, sinks
        self.pairs, self.start, self.sign, self.still = pairs, start, sign, still
        self.kept: dict[int, list[tuple[int, torch.Tensor, torch.Tensor]]] = {}
        self.seen: list[list[int]] = []  # per step, the tokens in the cache of the last layer
        [rotary] = [m for m in model.modules() if type(m).__name__.endswith("RotaryEmbedding")]
        kinds = rotary.rope_type if isinstance(rotary.rope_type, dict) else [None]
        self.angles = {kind: self._frequencies(rotary, kind) for kind in kinds}
        extra = [kind for kind in kinds if kind][:1]
        cos, sin = rotary(torch.zeros(1, dtype=torch.float64), torch.zeros(1, 1, dtype=torch.long), *extra)
        no_turn = torch.ones_like(cos), torch.zeros_like(sin)
        rotary.forward = lambda *args, **kwargs: no_turn
        self.position = 0

    @staticmethod
    def _frequencies(rotary: torch.nn.Module, kind: str | None) -> tuple[torch.Tensor, float]:
        prefix = "" if kind is None else f"{kind}_"
        inv_freq, scaling = getattr(rotary, f"{prefix}inv_freq"), getattr(rotary, f"{prefix}attention_scaling")
        return inv_freq.double(), float(scaling)

    def _rotated(self, x: torch.Tensor, positions: torch.Tensor, kind: str | None) -> torch.Tensor:
        """x [heads, tokens, head_dim] at positions [tokens]."""
        inv_freq, scaling = self.angles[kind if kind in self.angles else None]
        angle = positions[:, None].double() * inv_freq
        cos, sin = angle.cos() * scaling, angle.sin() * scaling * self.sign
        half, start = inv_freq.numel(), self.start
        end = start + 2 * half
        first, second = slice(start, start + half), slice(start + half, end)
        if self.pairs:
            first, second = slice(start, end, 2), slice(start + 1, end, 2)
        out = x.clone()
        out[..., first] = x[..., first] * cos - x[..., second] * sin
        out[..., second] = x[..., second] * cos + x[..., first] * sin
        return out

    def _attend(
        self, module, query, key, value, mask, scaling, sliding_window=None, softcap=None, s_aux=None, **kwargs
    ):
        own = sliding_window or 0
        window, sinks = (own, 0) if own else (self.window, self.sinks)
        kept = self.kept.setdefault(module.layer_idx, [])
        kept.append((self.position, key[0, :, 0], value[0, :, 0]))
        if window:
            kept[:] = [kept[i] for i in range(len(kept)) if kept[i][0] < sinks or i >= len(kept) - window]
        kind = "sliding_attention" if own else "full_attention"
        keys = torch.stack([k for _, k, _ in kept], dim=1)
        values = torch.stack([v for _, _, v in kept], dim=1)
        positions = torch.arange(len(kept))
        q = query[0]
        if module.layer_idx not in self.still:
            keys, q = self._rotated(keys, positions, kind), self._rotated(q, positions[-1:], kind)
        group = query.shape[1] // key.shape[1]
        keys, values = (x.repeat_interleave(group, dim=0) for x in (keys, values))
        scores = (q @ keys.transpose(1, 2))[:, 0] * scaling
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        if s_aux is not None:
            scores = torch.cat((scores, s_aux[:, None].double()), dim=1)
        p = scores.softmax(-1)[:, : len(kept)]
        self.seen.append([token for token, _, _ in kept])
        return (p[:, None] @ values).transpose(0, 1)[None], None

    @torch.inference_mode()
    def hidden(self, ids: list[int]) -> torch.Tensor:
        rows = []
        for self.position, token in enumerate(ids):
            out = self.model.model(
                input_ids=torch.tensor([[token]]), position_ids=torch.tensor([[self.position]]), use_cache=False
            )
            rows.append(out.last_hidden_state[0])
        return torch.cat(rows)


class FixedOracle(StreamingOracle):
    """Frequencies as transformers computes them for a length of ``LENGTH`` tokens."""

    LENGTH = 256

    @classmethod
    def _frequencies(cls, rotary, kind):
        inv_freq, scaling = ROPE_INIT_FUNCTIONS[rotary.rope_type](rotary.config, None, seq_len=cls.LENGTH)
        return inv_freq.double(), float(scaling)
