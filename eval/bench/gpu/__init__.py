"""The parts of `python -m lean.eval.bench_gpu`."""
