"""Load test of `lean serve` with clients of every kind: ``python -m lean.eval.soak_server``."""
