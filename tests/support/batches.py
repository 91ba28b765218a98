"""An engine that needs no model, and rows and results of batches."""

import json
from types import SimpleNamespace

from lean.cli.batch_rows import Row
from lean.engine.request import RequestOutput
from lean.errors import RequestError
from lean.sampling_params import SamplingParams

PARAMS = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
TEXTS = ("one", "three", "seven", "a", "longer ones", "bb", "ccc", "dddd")
USER = {"role": "user", "content": "hi"}


class Engine:
    """Answers a prompt with its own letters in upper case, one a step, for max_num_seqs requests at a time.

    ``before_step`` is called with the number of the step, and may raise.
    """

    def __init__(self, max_num_seqs=2, before_step=lambda step: None):
        self.config = SimpleNamespace(max_num_seqs=max_num_seqs)
        self.before_step = before_step
        self.steps = self.most = 0
        self.encoded, self.aborted = [], []
        self.requests = {}

    @property
    def has_work(self):
        return bool(self.requests)

    def encode(self, prompt, *, chat=None):
        if prompt.startswith("bad"):
            raise RequestError("it is bad")
        self.encoded.append((prompt, chat))
        return [ord(letter) for letter in prompt]

    def encode_chat(self, messages):
        return self.encode(" ".join(message["content"] for message in messages), chat="messages")

    def add_request(self, ids, params):
        if len(ids) > 50:
            raise RequestError("it is long")
        number = len(self.encoded)
        self.requests[number] = (ids, 0, params)
        self.most = max(self.most, len(self.requests))
        return number

    def abort(self, number):
        self.aborted.append(number)
        self.requests.pop(number, None)

    def step(self):
        self.steps += 1
        self.before_step(self.steps)
        outputs = []
        for number, (ids, place, params) in list(self.requests.items())[: self.config.max_num_seqs]:
            last = place + 1 == min(len(ids), params.max_tokens)
            text = chr(ids[place]).upper()
            outputs.append(RequestOutput(number, text, [ids[place]], len(ids), "length" if last else None))
            self.requests[number] = (ids, place + 1, params)
            if last:
                del self.requests[number]
        return outputs


def rows_of(*texts):
    return [Row(number, text, None, {}) for number, text in enumerate(texts, 1)]


def results(out):
    """The lines by id; every id once, every line whole."""
    data = out.read_bytes()
    assert data == b"" or data.endswith(b"\n")
    found = [json.loads(line) for line in data.split(b"\n")[:-1]]
    by_id = {result["id"]: result for result in found}
    assert len(by_id) == len(found)
    return by_id
