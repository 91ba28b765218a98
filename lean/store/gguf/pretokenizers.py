r"""How a byte-level BPE vocabulary wants text cut into words before its merges apply, by `tokenizer.ggml.pre`.

A rule is a sequence of regular expressions in the syntax of Oniguruma, which the tokenizers library uses. Each cuts the
pieces of the one before it: every match is a piece, and so is what stands between two matches. The expressions are
those of the models' own tokenizer.json. Names, groups and switches are those of llama.cpp:
https://github.com/ggml-org/llama.cpp/blob/master/src/llama-vocab.cpp
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class PreTokenizer:
    """What one name of `tokenizer.ggml.pre` stands for.

    Attributes:
        splits: regular expressions, applied one after another.
        ignore_merges: a word that is a token is that token, whatever the merges would make of it.
        add_bos: a BOS begins every text, where the file does not say.
        nfc: text is brought into Unicode's normal form C first.
    """

    splits: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False
    nfc: bool = False


_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SYMBOLS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_ENGLISH = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"  # GPT-2

# Words are cut where they change from lower to upper case, and keep their contractions.
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_BEFORE = r"[^\r\n\p{L}\p{N}]?"
_O200K_WORDS = rf"{_BEFORE}{_UPPER}*{_LOWER}+{_CONTRACTION}?|{_BEFORE}{_UPPER}+{_LOWER}*{_CONTRACTION}?"
_O200K_REST = rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
_NOT_HAN = r"&&[^\p{Han}]]"
_UPPER_NOT_HAN, _LOWER_NOT_HAN = _UPPER[:-1] + _NOT_HAN, _LOWER[:-1] + _NOT_HAN

_CJK = r"[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_DEEPSEEK_CJK = r"[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_DEEPSEEK_WORDS = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+"
)
# Letters that have a case, in the scripts and the version of Unicode that DeepSeek LLM lists.
_DEEPSEEK_CASED = (
    r"\s?[A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373"
    r"\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f"
    r"\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77"
    r"\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d"
    r"\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4"
    r"\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139"
    r"\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d"
    r"\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a"
    r"\uff41-\uff5a\x{10400}-\x{1044f}\x{104b0}-\x{104d3}\x{104d8}-\x{104fb}\x{10c80}-\x{10cb2}\x{10cc0}-\x{10cf2}"
    r"\x{118a0}-\x{118df}\x{1e900}-\x{1e943}]+"
)

_GPT2 = PreTokenizer((_ENGLISH,))
_ONE_DIGIT = PreTokenizer((r"\p{N}", _ENGLISH))
_CL100K = PreTokenizer((rf"{_CONTRACTION}|{_WORD}|\p{{N}}{{1,3}}|{_SYMBOLS}|{_SPACES}",))
_LLAMA3 = replace(_CL100K, ignore_merges=True, add_bos=True)
_QWEN2 = PreTokenizer((rf"{_CONTRACTION}|{_WORD}|\p{{N}}|{_SYMBOLS}|{_SPACES}",))
_DEEPSEEK_V3 = PreTokenizer((r"\p{N}{1,3}", _CJK, rf"{_DEEPSEEK_WORDS}[\r\n]*|{_SPACES}"))
_O200K = PreTokenizer((rf"{_O200K_WORDS}|\p{{N}}{{1,3}}|{_O200K_REST}",))
_BLOOM = PreTokenizer((r" ?[^(\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+",))
_BAILING = PreTokenizer(
    (r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",)
)
_COHERE2 = PreTokenizer((r"\d{1,3}(?=(?:\d{3})*\b)", *_O200K.splits))
# What llama.cpp applies to a file that names none.
DEFAULT = PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _ENGLISH, r"\p{N}+", r"[0-9][0-9][0-9]"))

_GROUPS: tuple[tuple[str, PreTokenizer], ...] = (
    ("default", DEFAULT),
    ("gpt-2 phi-2 jina-es jina-de jina-v2-es jina-v2-de jina-v1-en jina-v2-code roberta-bpe gigachat a.x-4.0", _GPT2),
    ("mellum modern-bert jais trillion granite-docling exaone4", _GPT2),
    ("mpt olmo", replace(_GPT2, nfc=True)),
    ("smollm starcoder refact codeshell exaone minerva-7b mellum2", _ONE_DIGIT),
    ("command-r", replace(_ONE_DIGIT, nfc=True)),
    ("llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano", _LLAMA3),
    ("smaug-bpe dbrx chatglm-bpe glm4", _CL100K),
    ("qwen2", replace(_QWEN2, nfc=True)),
    ("deepseek-r1-qwen stablelm2 megrez kormo f2llmv2 hunyuan solar-open grok-2", _QWEN2),
    (
        "qwen35",
        PreTokenizer(
            (
                rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
                rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}",
            ),
            nfc=True,
        ),
    ),
    ("ufakzeka", PreTokenizer((rf"{_WORD}|\p{{N}}|{_SYMBOLS}|{_SPACES}",))),
    ("laguna", PreTokenizer((r"[^\n]+|[\n]+", *_QWEN2.splits))),
    ("seed-coder", PreTokenizer((rf"{_CONTRACTION}|{_WORD}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}",))),
    ("bailingmoe bailingmoe2 llada-moe", _BAILING),
    (
        "minicpm5",
        PreTokenizer(
            (r"\p{N}{1,3}", rf"{_CONTRACTION}|{_WORD}|\p{{N}}+|{_SYMBOLS}|{_SPACES}"),
            ignore_merges=True,
        ),
    ),
    (
        "jais-2",
        PreTokenizer(
            (
                rf"{_CONTRACTION}|{_WORD}|\p{{N}}{{1,3}}|{_SYMBOLS}|\s*[\r\n]+"
                r"|\s{512}(?!\S)|\s{256}(?!\S)|\s{128}(?!\S)|\s{64}(?!\S)|\s{32}(?!\S)|\s{16}(?!\S)|\s{8}(?!\S)"
                r"|\s{4}(?!\S)|\s{1,2}(?!\S)|\s{1}",
            )
        ),
    ),
    ("deepseek-v3 hunyuan-dense joyai-llm hy_v4", _DEEPSEEK_V3),
    (
        "spark2_5",
        PreTokenizer((r"\p{N}{1,3}", _CJK, rf"{_DEEPSEEK_WORDS}|[\r\n]|\s+(?!\S)|\s+", r"\p{N}")),
    ),
    (
        "deepseek-llm",
        PreTokenizer(
            (
                r"[\r\n]",
                _DEEPSEEK_CASED,
                r"\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
                r"\s+$",
                _DEEPSEEK_CJK,
                r"\p{N}+",
            )
        ),
    ),
    ("deepseek-coder", PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _DEEPSEEK_CJK, r"\p{N}"))),
    ("falcon", PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", _ENGLISH, r"[0-9][0-9][0-9]"))),
    ("bloom poro-chat gpt3-finnish", _BLOOM),
    ("viking", PreTokenizer((*_BLOOM.splits, r"\p{N}"))),
    ("superbpe", PreTokenizer((r"\p{N}+", r"(?=(\d{3})+(?!\d))"))),
    ("gpt-4o llama4 kanana2 talkie minimax-m2", _O200K),
    ("tiny_aya cohere2moe", _COHERE2),
    (
        "tekken",
        PreTokenizer(
            (rf"{_BEFORE}{_UPPER}*{_LOWER}+|{_BEFORE}{_UPPER}+{_LOWER}*|\p{{N}}|{_O200K_REST}",),
            ignore_merges=True,
            add_bos=True,
        ),
    ),
    (
        "kimi-k2",
        PreTokenizer(
            (
                rf"[\p{{Han}}]+|{_BEFORE}{_UPPER_NOT_HAN}*{_LOWER_NOT_HAN}+{_CONTRACTION}?"
                rf"|{_BEFORE}{_UPPER_NOT_HAN}+{_LOWER_NOT_HAN}*{_CONTRACTION}?|\p{{N}}{{1,3}}|{_SYMBOLS}|{_SPACES}",
            )
        ),
    ),
    (
        "exaone-moe",
        PreTokenizer(
            (
                rf"{_CONTRACTION}|{_BEFORE}(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
                r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+",
            )
        ),
    ),
    (
        "youtu",
        PreTokenizer(
            (
                r"[\uac00-\ud7a3\u3131-\u318e]+"
                r"|[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b\uff0c\u3001-\u303f\ufe30-\ufe4f]+"
                rf"|[\u3105-\u312f]+|{_CJK}",
                rf"{_O200K_WORDS}|\p{{N}}|{_O200K_REST}",
            ),
            ignore_merges=True,
        ),
    ),
)

PRE_TOKENIZERS = {name: rule for names, rule in _GROUPS for name in names.split()}
