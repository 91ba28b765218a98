"""GGUF files: a file is served with everything that its metadata and tensors say, or refused by name."""
