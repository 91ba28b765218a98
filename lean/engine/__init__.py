"""Requests in, tokens out: scheduling, the step, and what it draws."""
