"""Triton kernels for CUDA and HIP devices. Nothing here is imported before a tensor of such a device arrives."""
