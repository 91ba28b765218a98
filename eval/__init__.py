"""Evaluation through the cache: the accuracy and speed that each saved byte costs."""
