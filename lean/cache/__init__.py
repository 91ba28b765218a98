"""The KV cache: its plan, its blocks and its tensors."""
