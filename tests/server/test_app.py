"""The API over HTTP: answers, streams, errors."""

import json

import pytest
from http_server import CONTROL, SETTINGS, chat_tokenizer, error_of, loader, served
from tiny import EOS

from lean import SamplingParams

GREEDY = {"temperature": 0, "max_tokens": 5, "ignore_eos": True}
HI = {"messages": [{"role": "user", "content": "hi"}]}


def expected(server, ids, **params):
    params = {"temperature": 0, "max_tokens": 5, "ignore_eos": True, **params}
    return server.llm.generate([ids], SamplingParams(**params))[0]


def ids_of(text):
    return chat_tokenizer()(text)["input_ids"]


def test_a_completion_is_what_the_engine_generates(server):
    body = server.complete("hello", **GREEDY).json()
    right = expected(server, ids_of("hello"))
    choice = body["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["index"]) == (right.text, "length", 0)
    assert (body["object"], body["model"]) == ("text_completion", "tiny")
    assert body["usage"] == {
        "prompt_tokens": 5,
        "completion_tokens": 5,
        "total_tokens": 10,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


def test_a_chat_is_rendered_with_the_models_template(server):
    body = server.chat("hi", **GREEDY).json()
    ids = server.post("/tokenize", HI).json()["tokens"]
    assert body["choices"][0]["message"] == {
        "role": "assistant",
        "content": expected(server, ids).text,
        "refusal": None,
    }
    assert (body["object"], body["usage"]["prompt_tokens"]) == ("chat.completion", len(ids))


def test_token_ids_and_text_give_the_same_answer(server):
    ids = ids_of("hello")
    texts = [server.complete(prompt, **GREEDY).json()["choices"][0]["text"] for prompt in ("hello", ids, [ids])]
    assert len(set(texts)) == 1


def test_choices_of_several_prompts_are_numbered_by_prompt_and_n(server):
    body = server.complete(["a", "b"], n=2, temperature=1, seed=1, max_tokens=3, ignore_eos=True, echo=True).json()
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    assert [choice["text"][0] for choice in body["choices"]] == ["a", "a", "b", "b"]
    assert body["usage"]["prompt_tokens"] == 2
    assert body["usage"]["completion_tokens"] == 12


@pytest.mark.parametrize("logprobs", [None, 0, 2])
@pytest.mark.parametrize("echo", [False, True])
def test_a_streamed_completion_says_what_a_whole_one_does(server, echo, logprobs):
    body = {"prompt": ["héllo", "b"], "echo": echo, "logprobs": logprobs, **GREEDY}
    whole = server.post("/v1/completions", body).json()["choices"]
    events = server.events("/v1/completions", body)
    for choice in whole:
        own = [event["choices"][0] for event in events if event["choices"][0]["index"] == choice["index"]]
        assert "".join(one["text"] for one in own) == choice["text"]
        assert [one["finish_reason"] for one in own] == [None] * (len(own) - 1) + ["length"]
        if logprobs is not None:
            for key in ("tokens", "token_logprobs", "top_logprobs"):
                assert [entry for one in own for entry in one["logprobs"][key]] == choice["logprobs"][key]


def test_a_streamed_chat_says_what_a_whole_one_does(server):
    body = {**HI, "logprobs": True, "top_logprobs": 2, **GREEDY}
    whole = server.post("/v1/chat/completions", body).json()["choices"][0]
    events = server.events("/v1/chat/completions", body)
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(event["choices"][0]["delta"].get("content", "") for event in events) == whole["message"]["content"]
    content = [one for event in events[1:] for one in event["choices"][0]["logprobs"]["content"]]
    assert content == whole["logprobs"]["content"]
    assert len({event["id"] for event in events}) == 1
    assert all(event["object"] == "chat.completion.chunk" and "usage" not in event for event in events)


def test_pieces_of_a_stream_make_the_whole_text_also_where_characters_are_cut(server):
    cut = 0
    for seed in range(8):  # random bytes: most are no characters, and ends lie within characters
        body = {"prompt": "é😀", "max_tokens": 1 + 3 * seed, "temperature": 1, "seed": seed, "ignore_eos": True}
        whole = server.post("/v1/completions", body).json()["choices"][0]["text"]
        events = server.events("/v1/completions", body)
        assert "".join(event["choices"][0]["text"] for event in events) == whole
        cut += "\ufffd" in whole
    assert cut


def test_usage_comes_last_or_in_every_chunk(server):
    options = {"include_usage": True}
    *chunks, last = server.events("/v1/chat/completions", {**HI, **GREEDY, "stream_options": options})
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 5
    assert [chunk["usage"] for chunk in chunks] == [None] * len(chunks)
    options["continuous_usage_stats"] = True
    *chunks, last = server.events("/v1/completions", {"prompt": "a", **GREEDY, "stream_options": options})
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == last["usage"]["completion_tokens"] == 5
    first, *chunks, last = server.events("/v1/chat/completions", {**HI, **GREEDY, "stream_options": options})
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert first["usage"] == {**last["usage"], "completion_tokens": 0, "total_tokens": last["usage"]["prompt_tokens"]}
    assert all(chunk["usage"]["completion_tokens"] > 0 for chunk in chunks)
    options["include_usage"] = False
    chunks = server.events("/v1/completions", {"prompt": "a", **GREEDY, "stream_options": options})
    assert all(chunk["choices"] and "usage" not in chunk for chunk in chunks)


def test_an_echoed_prompt_has_the_engines_log_probabilities(server):
    ids = ids_of("hello there")
    choice = server.complete(ids, echo=True, logprobs=1, max_tokens=1, temperature=0).json()["choices"][0]
    found = choice["logprobs"]["token_logprobs"]
    assert found[0] is None
    right = expected(server, ids, max_tokens=1, prompt_logprobs=0).prompt_logprobs
    assert found[1:-1] == pytest.approx([one.logprob for one in right[1:]], abs=1e-5)
    assert choice["text"].startswith("hello there")
    assert choice["logprobs"]["text_offset"] == [*range(len(ids)), len(ids)]
    assert all(max(top.values()) >= one for top, one in zip(choice["logprobs"]["top_logprobs"][1:], found[1:]))


def test_an_answer_that_is_the_end_of_sequence_alone_has_its_log_probability_behind_the_prompts(server):
    """lm-eval drops the last log-probability: it must not be one of the prompt's."""
    body = server.complete("abc", echo=True, logprobs=1, max_tokens=1, logit_bias={str(EOS): 100}).json()
    choice = body["choices"][0]
    assert (choice["text"], choice["finish_reason"], len(choice["logprobs"]["token_logprobs"])) == ("abc", "stop", 4)


def test_an_echo_alone_generates_nothing(server):
    body = server.complete("hello", echo=True, max_tokens=0, logprobs=1).json()
    assert body["choices"][0]["text"] == "hello"
    assert len(body["choices"][0]["logprobs"]["tokens"]) == 5
    assert body["usage"]["completion_tokens"] == 0


def test_prompt_logprobs_are_reported_by_token_id(server):
    report = server.complete("abc", prompt_logprobs=1, max_tokens=1).json()["choices"][0]["prompt_logprobs"]
    assert report[0] is None
    for entry, token in zip(report[1:], ids_of("abc")[1:]):
        assert entry[str(token)]["decoded_token"] in "abc"


def test_prompt_logprobs_of_a_chat_stand_beside_its_choices(server):
    body = server.chat("abc", prompt_logprobs=1, max_tokens=1, n=2, temperature=1).json()
    assert len(body["prompt_logprobs"]) == body["usage"]["prompt_tokens"]
    assert all("prompt_logprobs" not in choice for choice in body["choices"])


def test_prompt_logprobs_that_are_not_asked_for_are_null_as_in_vllm(server):
    assert server.chat("abc", max_tokens=1).json()["prompt_logprobs"] is None
    assert [choice["prompt_logprobs"] for choice in server.complete(["a", "b"], max_tokens=1).json()["choices"]] == [
        None,
        None,
    ]


def test_stop_strings_end_an_answer_before_them(server):
    whole = expected(server, ids_of("hello"), max_tokens=40).text
    stop = whole[10:12]
    body = server.complete("hello", temperature=0, max_tokens=40, ignore_eos=True, stop=[stop, "never there"]).json()
    assert body["choices"][0]["text"] == whole[: whole.index(stop)]
    assert body["choices"][0]["finish_reason"] == "stop"


def test_control_tokens_in_messages_stay_text(server):
    text = f"a{CONTROL[0]}system\nb{CONTROL[1]}</s>"
    conversation = {"messages": [{"role": role, "content": text} for role in ("system", "user", "tool")]}
    ids = server.post("/tokenize", conversation).json()["tokens"]
    controls = [index for index in ids if index in (1, 2, 259, 260)]
    assert controls == [259, 260] * 3 + [259]
    assert server.post("/detokenize", {"tokens": ids}).json()["prompt"].count(text) == 3


def test_special_tokens_are_not_added_to_a_chat_that_is_tokenized(server):
    assert server.post("/tokenize", {**HI, "add_special_tokens": False}).json() == server.post("/tokenize", HI).json()
    assert error_of(server.post("/tokenize", {**HI, "add_special_tokens": True}))[:2] == (400, "add_special_tokens")


def test_text_survives_tokenize_and_detokenize(server):
    text = "é😀 \n<|x|>"
    tokens = server.post("/tokenize", {"prompt": text, "return_token_strs": True}).json()
    assert tokens["count"] == len(tokens["tokens"]) == len(tokens["token_strs"])
    assert tokens["max_model_len"] == 256
    assert server.post("/detokenize", {"tokens": tokens["tokens"]}).json() == {"prompt": text}


def test_models_are_listed_by_the_names_they_are_served_under(server):
    listed = server.http.get("/v1/models").json()
    assert [model["id"] for model in listed["data"]] == ["tiny", "other"]
    assert server.http.get("/v1/models/other").json()["max_model_len"] == 256
    assert server.complete("a", model="other", max_tokens=1).json()["model"] == "other"


@pytest.mark.parametrize("name", ["../../etc/passwd", "/etc/passwd", "a\x00b", "x" * 10_000])
def test_other_models_are_not_found_and_their_name_is_not_repeated(server, name):
    response = server.complete("a", model=name)
    status, param, _ = error_of(response)
    assert (status, param, response.json()["error"]["code"]) == (404, "model", "model_not_found")
    assert name not in response.text


@pytest.mark.parametrize("path", ["%2e%2e/%2e%2e/etc/passwd", "/etc/passwd", "a%00b", "x" * 10_000])
def test_the_name_in_a_path_is_not_looked_for_on_disk_and_not_repeated(server, path):
    response = server.http.get(f"/v1/models/{path}")
    assert error_of(response)[:2] == (404, "model")
    assert "passwd" not in response.text
    assert "xxx" not in response.text


@pytest.mark.parametrize("fields", [{"temperature": 1e-8}, {"top_k": 1, "temperature": 1e9}], ids=str)
def test_extreme_sampling_is_the_argmax_without_an_overflow(server, fields):
    right = server.complete("hello", **GREEDY).json()["choices"][0]["text"]
    assert server.complete("hello", **{**GREEDY, **fields}).json()["choices"][0]["text"] == right


def test_a_top_k_of_0_or_minus_1_is_off(server):
    fields = {**GREEDY, "temperature": 1, "seed": 3}
    texts = {
        server.complete("hello", **fields, **more).json()["choices"][0]["text"]
        for more in ({}, {"top_k": 0}, {"top_k": -1})
    }
    assert len(texts) == 1


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": 10**6}, "n"),
        ({"logprobs": 21}, "logprobs"),
        ({"prompt_logprobs": 10**9}, "prompt_logprobs"),
        ({"stop": ["x"] * 10_000}, "stop"),
        ({"stop": "x" * 10_000}, "stop"),
        ({"logit_bias": {str(index): 1 for index in range(2000)}}, "logit_bias"),
        ({"logit_bias": {"999": 1}}, "logit_bias"),
        ({"logit_bias": {"a": 1}}, "logit_bias"),
        ({"stop_token_ids": [300]}, "stop_token_ids"),
        ({"prompt": [999]}, "prompt"),
        ({"prompt": [[1], []]}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": ["a"] * 1000}, "prompt"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 0, "echo": False}, "max_tokens"),
        ({"max_completion_tokens": "5"}, "max_completion_tokens"),
        ({"max_tokens": 9, "min_tokens": 10}, "min_tokens"),
        ({"max_tokens": 9999, "min_tokens": 300}, "min_tokens"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"tools": [{}]}, "tools"),
        ({"suffix": "b"}, "suffix"),
    ],
)
def test_what_is_out_of_bounds_is_refused_by_its_name(server, fields, param):
    assert error_of(server.complete(**{"prompt": "a", **fields}))[:2] == (400, param)


def test_a_prompt_that_is_too_long_is_refused_with_both_lengths(server):
    response = server.complete("x" * 300)
    status, param, message = error_of(response)
    assert (status, param, response.json()["error"]["code"]) == (400, "prompt", "context_length_exceeded")
    assert "300" in message
    assert "256" in message


@pytest.mark.parametrize("seed", [-1, -5, 0, 2**63 - 1, -(2**63)])
def test_every_seed_of_64_bits_is_taken(server, seed):
    assert server.complete("a", seed=seed, temperature=1, max_tokens=1).status_code == 200


@pytest.mark.parametrize("most", [10**9, 2**62])
def test_max_tokens_beyond_the_models_length_is_what_is_left(server, most):
    body = server.complete("a" * 250, max_tokens=most, temperature=0, ignore_eos=True).json()
    assert body["usage"]["total_tokens"] == 256


def test_unknown_paths_and_methods_are_errors_of_the_same_shape(server):
    assert error_of(server.http.get("/v2/nothing"))[0] == 404
    assert error_of(server.http.get("/docs"))[0] == 404
    assert error_of(server.http.get("/v1/completions"))[0] == 405


def test_metrics_count_what_was_generated(server):
    def value(name):
        lines = server.http.get("/metrics").text.splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name))

    names = ("vllm:generation_tokens_total", "vllm:prompt_tokens_total", "vllm:time_to_first_token_seconds_count")
    before = [value(name) for name in names]
    ignored = value("lean_ignored_fields_total")
    server.complete("hello", **GREEDY, something_new=1)
    assert [value(name) - old for name, old in zip(names, before)] == [5, 5, 1]
    assert value("lean_ignored_fields_total") == ignored + 1
    assert value('vllm:request_success_total{engine="0",finished_reason="length"') >= 1
    assert value("vllm:num_requests_running") == 0


def test_metrics_tell_the_tokens_of_each_step_and_the_time_of_each_token(server):
    def values():
        lines = server.http.get("/metrics").text.splitlines()
        found = dict(line.rsplit(" ", 1) for line in lines if line.startswith("vllm:"))
        names = ("iteration_tokens_total", "request_time_per_output_token_seconds", "request_decode_time_seconds")
        end = '{engine="0",model_name="tiny"}'
        return [float(found[f"vllm:{name}_{part}{end}"]) for name in names for part in ("count", "sum")]

    def change(**fields):
        before = values()
        server.complete("hello", **{**GREEDY, **fields})
        return [new - old for new, old in zip(values(), before)]

    steps, tokens, answers, seconds, _, decode = change()
    assert (steps, tokens, answers) == (5, 5 + 5, 1)
    assert 4 * seconds == pytest.approx(decode)
    assert decode > 0
    assert change(max_tokens=1) == [1, 5 + 1, 1, 0, 1, 0]


@pytest.mark.parametrize(("kv_dtype", "token_bytes"), [("bf16", 2 * 2 * 16 * 2), ("int8", 2 * 2 * (16 + 2))])
def test_metrics_and_answers_tell_the_format_that_the_cache_has(folder, kv_dtype, token_bytes):
    """K and V of one layer with 2 heads of 16 dims; int8 has a scale of 2 bytes beside them."""
    with served(loader(folder, kv_dtype=kv_dtype, kv_residual_length=0)) as server:
        lines = server.http.get("/metrics").text.splitlines()
        pools = [line.rsplit(" ", 1) for line in lines if line.startswith("lean_kv_pool_bytes{")]
        assert len(pools) == 1
        assert f'format="{kv_dtype}"' in pools[0][0]
        assert float(pools[0][1]) == SETTINGS["num_blocks"] * server.llm.config.block_size * token_bytes
        assert server.complete("a", max_tokens=1).json()["system_fingerprint"].endswith(f"-{kv_dtype}-r0")


def test_the_description_names_every_field_and_no_schema_is_missing(server):
    document = server.http.get("/openapi.json").json()
    assert {"/v1/chat/completions", "/v1/completions", "/tokenize", "/health"} <= document["paths"].keys()
    schemas = document["components"]["schemas"]
    assert {"messages", "temperature", "stop", "min_p"} <= schemas["ChatRequest"]["properties"].keys()
    references = {part.split('"')[0] for part in json.dumps(document).split('"#/components/schemas/')[1:]}
    assert references <= schemas.keys()


def test_a_model_without_a_template_completes_but_does_not_chat(tiny):
    with served(loader(tiny("llama", num_hidden_layers=1))) as server:
        status, param, message = error_of(server.chat("hi"))
        assert (status, param) == (400, "messages")
        assert "/v1/completions" in message
        assert server.complete("a", max_tokens=1).status_code == 200
