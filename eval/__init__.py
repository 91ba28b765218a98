"""Evaluation through the cache: what each saved byte costs."""
