"""Measured cells made by hand."""

from lean.eval.score.fidelity import Fidelity
from lean.eval.sweep.cells import EXACT, CacheBytes, Cell, Measured
from lean.eval.sweep.speed import Speed

CONTEXT, BF16_BYTES = 4096, 100 * 2**20


def measured(kv_dtype, mib, kld, stderr, *, residual=0, window=None, nll_delta=0.0, found=None, **more):
    """A cell that holds ``mib`` MiB of the 100 that bf16 takes. found: needles of nine."""
    fidelity = Fidelity(
        tokens_scored=2048, kld_mean=kld, kld_stderr=stderr, kld_median=kld, kld_p99=kld, kld_p999=9 * kld, top1=0.9,
        top1_stderr=0.01, top5=0.8, top5_stderr=0.01, ppl=12.0 + nll_delta, ppl_exact=12.0, nll_delta=nll_delta,
        nll_delta_stderr=0.0001,
    )  # fmt: skip
    nbytes = CacheBytes(100, 250, round(mib * 2**20), BF16_BYTES, CONTEXT)
    speed = Speed(20.0, 25.0, 0.8, 0.7, 0.9, 2048, 12)
    needle = None
    if found is not None:
        trials = [{"length": 512, "depth": depth, "correct": found // 3, "trials": 3} for depth in (0, 50, 100)]
        trials = [trial | {"accuracy": found / 9, "stderr": 0.1} for trial in trials]
        needle = {"accuracy": found / 9, "stderr": 0.05, "correct": found, "trials": 9, "cells": trials}
    cell = Cell(kv_dtype, residual, window)
    return Measured(cell, fidelity, nbytes, speed, needle=needle, date="2026-01-02T03:04:05+00:00", **more)


def exact(**more):
    return measured(EXACT, 100, 1e-9, 1e-10, **more)
