"""Attention over a quantized paged KV cache: the ops (`lean.kernels.ops`) and their back ends.

Import it as ``lean.kernels``. Another package of this machine may be called ``kernels`` and be probed for under that
name, so this file does nothing when imported.
"""
