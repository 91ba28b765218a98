"""Attention over a quantized paged KV cache: the ops (`lean.kernels.ops`) and their back ends.

Import it as ``lean.kernels``. Other libraries probe for a package called ``kernels`` and may find this one, so this
file does nothing when imported.
"""
