"""Stop strings in a stream: the same end for all ways to cut it, and text once given out stays."""

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from lean.text.stop_strings import StopStrings

TEXTS = st.text("ab", max_size=40)
STOPS = st.lists(st.text("ab", min_size=1, max_size=6), min_size=1, max_size=4)
RARE_STOPS = st.lists(st.text("abc", min_size=3, max_size=8), min_size=1, max_size=3)


@st.composite
def cut_texts(draw, alphabet="ab"):
    """A text in pieces, empty ones among them."""
    text = draw(st.text(alphabet, max_size=40))
    cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=12)))
    return [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)])]


def filtered(stop, pieces):
    """(what came out per piece, what finish gave, stopped)"""
    strings = StopStrings(stop)
    out = [strings.add(piece) for piece in pieces]
    return out, strings.finish(), strings.stopped


def cut(stop, text):
    """The naive way: (text before the stop string that is complete first, whether there is one)."""
    for end in range(1, len(text) + 1):
        found = [len(s) for s in stop if text[:end].endswith(s)]
        if found:
            return text[: end - max(found)], True
    return text, False


@given(STOPS | RARE_STOPS, cut_texts("ab") | cut_texts("abc"))
@settings(max_examples=500)
def test_pieces_give_what_cutting_the_joined_text_gives(stop, pieces):
    out, rest, stopped = filtered(stop, pieces)
    assert ("".join(out) + rest, stopped) == cut(stop, "".join(pieces))


@given(STOPS | RARE_STOPS, cut_texts("ab") | cut_texts("abc"))
@settings(max_examples=500)
def test_the_earliest_start_wins_where_no_stop_string_lies_inside_another(stop, pieces):
    assume(not any(inner in outer[1:-1] for inner in stop for outer in stop))
    text = "".join(pieces)
    starts = [text.find(s) for s in stop if s in text]
    out, rest, stopped = filtered(stop, pieces)
    assert ("".join(out) + rest, stopped) == (text[: min(starts)] if starts else text, bool(starts))


@given(STOPS | RARE_STOPS, cut_texts("ab") | cut_texts("abc"))
@settings(max_examples=500)
def test_exactly_what_could_still_begin_a_stop_string_is_held_back(stop, pieces):
    strings = StopStrings(stop)
    out = text = ""
    for piece in pieces:
        text += piece
        out += strings.add(piece)
        before, stopped = cut(stop, text)
        assert strings.stopped == stopped
        if stopped:
            assert out == before
        else:
            held = max(n for s in stop for n in range(len(s)) if text.endswith(s[:n]))
            assert out == text[: len(text) - held]


@given(STOPS, TEXTS, TEXTS)
def test_what_was_given_out_is_right_however_the_text_goes_on(stop, start, more):
    strings = StopStrings(stop)
    assert cut(stop, start + more)[0].startswith(strings.add(start))


@pytest.mark.parametrize("pieces", [["abcd"], ["abc", "d"], ["a", "b", "c", "d"]])
def test_a_stop_string_inside_another_is_complete_first_in_any_pieces(pieces):
    out, rest, stopped = filtered(["abcd", "bc"], pieces)
    assert ("".join(out), rest, stopped) == ("a", "", True)


@pytest.mark.parametrize(
    ("stop", "text", "expected"),
    [
        (["ab", "abc"], "xabcy", "x"),  # equal starts
        (["bc", "abc"], "xabcy", "x"),  # equal ends
        (["c", "ab"], "xabcab", "x"),
        (["aab"], "aaab", "a"),  # the match begins inside a failed one
        (["abab"], "abaabab", "aba"),
        (["x"], "x", ""),
        (["\n\n"], "a\n\n\nb", "a"),
        (["삼겹", "😀"], "é삼😀", "é삼"),
    ],
)
def test_known_cases_in_one_piece_and_by_character(stop, text, expected):
    for pieces in ([text], text):
        out, rest, stopped = filtered(stop, pieces)
        assert ("".join(out), rest, stopped) == (expected, "", True)


def test_what_was_held_back_comes_once_when_the_text_ends():
    strings = StopStrings(["STOP"])
    assert strings.add("go STO") == "go "
    assert strings.add("") == ""
    assert strings.finish() == "STO"
    assert strings.finish() == ""
    assert not strings.stopped


def test_after_a_stop_string_nothing_comes():
    strings = StopStrings(["STOP"])
    assert strings.add("go ST") == "go "
    assert strings.add("OP on") == ""
    assert strings.stopped
    assert strings.add("more STOP") == ""
    assert strings.finish() == ""


def test_without_stop_strings_text_passes_as_it_is():
    strings = StopStrings(())
    piece = "anything at all"
    assert strings.add(piece) is piece
    assert strings.finish() == ""
    assert not strings.stopped


def test_streams_do_not_share_what_they_held_back():
    first, second = StopStrings(["ab"]), StopStrings(["ab"])
    first.add("a")
    assert second.add("b") == "b"
    assert first.add("b") == ""
    assert (first.stopped, second.stopped) == (True, False)
