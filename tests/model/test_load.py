"""What comes with the weights: ends of a sequence, sampling defaults, and what transformers would print."""

import json
import logging
import shutil
import threading
import warnings

import pytest
from helpers import refusal
from huggingface_hub.utils import are_progress_bars_disabled
from tiny import EOS, VOCAB_SIZE
from transformers.utils import logging as hf_logging

from lean import LLM, EngineConfig
from lean.errors import ModelError
from lean.model.load import end_ids
from lean.store.library import attempt, quiet


@pytest.fixture
def folder(tiny, tmp_path):
    return shutil.copytree(tiny("llama"), tmp_path / "copy")


def test_ends_are_one_id_or_a_list_and_others_are_refused():
    assert end_ids(None, "here", 10) == set()
    assert end_ids(2, "here", 10) == {2}
    assert end_ids([2, 3, 3], "here", 10) == {2, 3}
    for value in (True, "2", [2, [3]], 2.0, {"a": 1}, [None], [True]):
        assert "here: eos_token_id" in refusal(end_ids, value, "here", 10)


def test_ends_that_no_token_has_are_left_out_with_a_warning_that_names_them(caplog):
    assert end_ids([2, 10, -1], "here", 10) == {2}
    assert "here: eos_token_id [-1, 10]" in caplog.text
    assert end_ids(99, "here", 10) == set()
    assert "eos_token_id 99 is no token" in caplog.text


def test_ends_come_from_all_three_files(folder, caplog):
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, VOCAB_SIZE]}))
    llm = LLM(str(folder), EngineConfig())
    assert llm.model.eos_token_ids == {5, EOS}
    assert f"generation_config.json: eos_token_id {VOCAB_SIZE}" in caplog.text


def test_a_bos_beyond_the_embedding_is_named(folder, caplog):
    vocabulary = json.loads((folder / "tokenizer.json").read_text())
    for entry in vocabulary["added_tokens"]:
        if entry["content"] == "<s>":
            entry["id"] = VOCAB_SIZE + 7
    vocabulary["model"]["vocab"]["<s>"] = VOCAB_SIZE + 7
    (folder / "tokenizer.json").write_text(json.dumps(vocabulary))
    LLM(str(folder), EngineConfig())
    assert f"bos_token '<s>' has id {VOCAB_SIZE + 7}" in caplog.text


@pytest.mark.parametrize(
    "content",
    ["[]", "null", "{", '{"do_sample": "yes"}', '{"do_sample": true, "temperature": NaN}', '{"eos_token_id": "2"}'],
)
def test_a_damaged_generation_config_is_refused_by_name(folder, content):
    (folder / "generation_config.json").write_text(content)
    assert "generation_config.json" in refusal(LLM, str(folder), EngineConfig())


def test_a_length_limit_of_the_tokenizer_says_nothing_about_prompts(folder, capfd):
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"model_max_length": 3}))
    assert len(LLM(str(folder), EngineConfig()).encode("a longer prompt")) == 15
    assert capfd.readouterr() == ("", "")


# --- what transformers prints ---


def test_loading_prints_nothing_of_transformers_and_keeps_the_users_settings(folder, capfd):
    level, hf_logger = hf_logging.get_verbosity(), logging.getLogger("transformers")
    bars = hf_logging.is_progress_bar_enabled()
    handlers, filters = list(hf_logger.handlers), list(warnings.filters)
    try:
        hf_logging.set_verbosity_info()
        hf_logging.enable_progress_bar()
        LLM(str(folder), EngineConfig())
        assert capfd.readouterr() == ("", "")
        assert hf_logging.get_verbosity() == logging.INFO
        assert hf_logging.is_progress_bar_enabled()
        assert not are_progress_bars_disabled()
        assert hf_logger.handlers == handlers
        assert warnings.filters == filters
    finally:
        hf_logging.set_verbosity(level)
        if not bars:
            hf_logging.disable_progress_bar()


def test_a_warning_about_the_files_is_said_once_by_lean(folder, caplog):
    file = folder / "config.json"
    rope = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0, "odd": 1}
    file.write_text(json.dumps(json.loads(file.read_text()) | {"rope_parameters": rope}))
    LLM(str(folder), EngineConfig())
    assert [record.name for record in caplog.records] == ["lean"]
    assert "odd" in caplog.text


class Records(logging.Handler):
    def __init__(self):
        super().__init__()
        self.seen = []

    def emit(self, record):
        self.seen.append(record.getMessage())


def test_log_lines_of_other_threads_are_shown_meanwhile():
    logger, handler = logging.getLogger("transformers"), Records()
    logger.addHandler(handler)
    try:
        with quiet():
            logger.warning("mine")
            other = threading.Thread(target=lambda: logger.warning("theirs"))
            other.start()
            other.join()
        logger.warning("after")
    finally:
        logger.removeHandler(handler)
    assert handler.seen == ["theirs", "after"]


def test_threads_that_are_quiet_at_different_times_leave_the_settings_as_they_were():
    logger = logging.getLogger("transformers")
    before = list(logger.handlers), logger.level, logger.propagate, list(warnings.filters)
    inside, leave = threading.Event(), threading.Event()

    def stay():
        with quiet():
            inside.set()
            leave.wait(30)

    with quiet():
        thread = threading.Thread(target=stay)
        thread.start()
        assert inside.wait(30)
    assert logger.handlers != before[0]  # the other thread is still quiet
    leave.set()
    thread.join()
    assert (list(logger.handlers), logger.level, logger.propagate, list(warnings.filters)) == before


class PanicException(BaseException):
    """As libraries in Rust raise it."""


@pytest.mark.parametrize("error", [ValueError("two\nlines"), KeyError("key"), PanicException("index out of bounds")])
def test_an_error_of_a_library_is_one_line(error):
    def fail():
        raise error

    with pytest.raises(ModelError, match=r"^cannot read it: ") as caught:
        attempt("cannot read it", fail)
    assert "\n" not in str(caught.value)
