"""BOS before contexts and documents: at most one, never scored, as asked for."""

import shutil

import pytest
from tiny import BOS, byte_tokenizer
from tokenizers.processors import TemplateProcessing

pytest.importorskip("lm_eval")

from harness import hf, instances, lean, scored_ids


@pytest.fixture(scope="module")
def folder(tiny):
    return tiny("llama", vocab_size=259)  # no rows without a token: hf generates such ids, lean never does


@pytest.fixture(scope="module")
def bos_folder(folder, tmp_path_factory):
    """The same model with a tokenizer that begins every text with BOS."""
    copy = shutil.copytree(folder, tmp_path_factory.mktemp("bos") / "model")
    tokenizer = byte_tokenizer()
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    tokenizer.save_pretrained(copy)
    return copy


def test_without_bos_in_the_tokenizer_it_stands_before_empty_contexts_and_documents_only(folder, monkeypatch):
    seen, _ = scored_ids(lean(folder), monkeypatch, "loglikelihood", [("ab", "cd"), ("", "cd"), ("<s>ab", "cd")])
    assert [ids.count(BOS) for ids, _ in seen] == [0, 1, 1]
    assert [count for _, count in seen] == [2, 2, 2]
    seen, _ = scored_ids(lean(folder), monkeypatch, "loglikelihood_rolling", ["ten tokens", "<s>ten tokens"])
    assert [(ids[0], ids.count(BOS), count) for ids, count in seen] == [(BOS, 1, 10)] * 2


def test_with_bos_in_the_tokenizer_every_sequence_has_one_and_it_is_never_scored(bos_folder, monkeypatch):
    assert hf(bos_folder).tok_encode("ab")[0] == BOS
    pairs = [("ab", "cd"), ("", "cd"), ("<s>ab", "cd")]
    seen, answers = scored_ids(lean(bos_folder), monkeypatch, "loglikelihood", pairs)
    assert [(ids[0], ids.count(BOS), count) for ids, count in seen] == [(BOS, 1, 2)] * 3
    wanted = hf(bos_folder).loglikelihood(instances("loglikelihood", pairs))
    assert [logprob for logprob, _ in answers] == pytest.approx([logprob for logprob, _ in wanted], abs=1e-4)
    seen, (total,) = scored_ids(lean(bos_folder), monkeypatch, "loglikelihood_rolling", ["ten tokens"])
    assert [(ids[0], ids.count(BOS), count) for ids, count in seen] == [(BOS, 1, 10)]
    document = instances("loglikelihood_rolling", ["ten tokens"])
    assert total == pytest.approx(hf(bos_folder, add_bos_token=False).loglikelihood_rolling(document)[0], abs=1e-3)
    assert abs(total - hf(bos_folder).loglikelihood_rolling(document)[0]) > 0.1  # scores a second BOS


def test_bos_can_be_asked_for_and_turned_off(folder, bos_folder):
    for source in (folder, bos_folder):
        assert lean(source, add_bos_token=True).tok_encode("ab")[:2].count(BOS) == 1
        assert BOS not in lean(source, add_bos_token=False).tok_encode("ab")
    assert lean(folder, prefix_token_id=7)._pair(instances("loglikelihood", [("", "ab")])[0])[0] == [7]
    assert "never" in lean(folder, add_bos_token=False).bos_rule


def test_gemma_gets_its_bos_though_the_tokenizer_adds_none(tiny):
    assert lean(tiny("gemma3")).tok_encode("ab")[0] == BOS
