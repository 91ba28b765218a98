"""Safetensors checkpoints whose weights GPTQ, AWQ or compressed-tensors quantized."""
