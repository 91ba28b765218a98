"""Scores read through the cache."""
