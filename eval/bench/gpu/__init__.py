"""What `python -m lean.eval.bench_gpu` runs."""
