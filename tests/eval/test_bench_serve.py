"""`lean bench serve`: what it reports of a tiny model."""

import json

from commands import lean, refused

from lean.eval.bench.serve import part_of, row


def test_every_number_of_streams_gets_a_row(tiny):
    model = str(tiny("llama", num_hidden_layers=1))
    numbers = ("--streams", "1,3", "--prompt", "8", "--tokens", "5", "--long-prompt", "40", "--rounds", "2")
    rows = [json.loads(line) for line in lean("bench", "serve", model, *numbers, "--json").splitlines()]
    assert [(one["streams"], one["prompt_tokens"], one["tokens"]) for one in rows] == [(1, 8, 5), (3, 8, 5), (1, 40, 1)]
    assert all(one["tokens_per_s"] > 0 and one["generate_tokens_per_s"] > 0 for one in rows)
    assert all(one["gap_p99"] >= one["gap_p50"] > 0 for one in rows[:2])


def test_figures_are_medians_of_rounds_and_quantiles_of_requests():
    def found(seconds):
        answers = [{"first": 0.1, "gaps": [0.01, 0.03], "tokens": 3}] * 2
        return {"seconds": seconds, "cpu_seconds": seconds / 4, "answers": answers, "health": [0.002, 0.001]}

    one = row([found(1.0), found(2.0), found(6.0)], [4.0, 5.0, 6.0], 8, 3)
    assert (one.streams, one.rounds, one.tokens_per_s, one.share) == (2, 3, 3.0, 0.6)
    assert (one.first_p50, one.gap_p50, one.gap_p99) == (100, 30, 30)
    assert (one.health_p50, one.health_p99, one.client_share) == (2, 2, 0.25)
    assert part_of(list(map(float, range(100))), 0.99) == 99_000


def test_numbers_that_measure_nothing_are_refused(tiny):
    assert "--rounds 0" in refused("bench", "serve", "m", "--rounds", "0")
