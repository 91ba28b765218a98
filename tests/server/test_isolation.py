"""Keys under load: none reads what another one has computed, and none is answered sooner for it."""

import random
import statistics
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from http_server import chat_checkpoint, loader, served

KEYS = ("first", "second", "third")
PROMPTS = [letter * 40 for letter in "abcdefgh"]  # two blocks and a half each


def cached(server, key, prompt, **fields):
    """Tokens of the prompt that the answer to it read from the cache."""
    body = {"prompt": prompt, "max_tokens": 1, "temperature": 0, **fields}
    answer = server.post("/v1/completions", body, headers={"Authorization": f"Bearer {key}"})
    assert answer.status_code == 200, answer.text
    return answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]


def hits(server):
    """Tokens that the server has found in its cache since it began."""
    return server.call(lambda: server.service.engine.snapshot.prefix.tokens_found)


def test_keys_with_the_same_prompts_at_the_same_time_share_nothing(folder):
    """Each key sends each prompt twice. Its first one finds nothing, whatever others did; its second one does."""
    start = threading.Barrier(len(KEYS))

    def work(key):
        draw, seen, found = random.Random(key), set(), []
        order = PROMPTS * 2
        draw.shuffle(order)
        start.wait()
        for prompt in order:
            found.append((prompt in seen, cached(server, key, prompt)))
            seen.add(prompt)
        return found

    with served(loader(folder, num_blocks=256), api_key=KEYS) as server, ThreadPoolExecutor(len(KEYS)) as pool:
        found = [pair for pairs in pool.map(work, KEYS) for pair in pairs]
        assert all((tokens > 0) == again for again, tokens in found)
        assert hits(server) == sum(tokens for _, tokens in found)
        server.assert_idle()


@pytest.mark.slow
def test_a_key_waits_as_long_for_what_another_key_has_cached_as_for_what_nobody_has(tiny, tmp_path, capsys):
    """The counters decide. The times are printed: another machine's load is in them."""
    folder = chat_checkpoint(
        tiny("llama", num_hidden_layers=2, hidden_size=256, intermediate_size=1024, max_position_embeddings=2048),
        tmp_path / "wide",
    )
    seconds = {"nobody": [], "another key": [], "own": []}
    settings = {"num_blocks": 2048, "max_model_len": 1536, "max_num_seqs": 4}
    with served(loader(folder, **settings), api_key=KEYS) as server:

        def ask(who, key, prompt):
            begun = time.perf_counter()
            tokens = cached(server, key, prompt)
            seconds[who].append(time.perf_counter() - begun)
            return tokens

        for number in range(12):
            prompt = f"{number:04} " * 240
            assert ask("nobody", "first", prompt) == 0
            order = [("another key", "second"), ("own", "first")]
            for who, key in order[:: 1 if number % 2 else -1]:
                tokens = ask(who, key, prompt)
                assert (tokens > 1000) if who == "own" else (tokens == 0)
    medians = {who: f"{statistics.median(times) * 1e3:.1f} ms" for who, times in seconds.items()}
    with capsys.disabled():
        print(f"\nseconds to an answer of one token, by who has cached the prompt of 1,200 tokens: {medians}")
