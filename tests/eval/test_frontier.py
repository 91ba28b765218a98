"""The frontier and the recommendation: differences within two standard errors do not count."""

import pytest
from sweeps import exact, measured

from lean.eval.sweep.cells import EXACT
from lean.eval.sweep.frontier import KLD_LIMIT, frontier, recommend, surely_closer, tied


def names(cells):
    return [cell.cell.name for cell in cells]


def test_a_cell_that_holds_more_and_loses_more_is_dominated():
    cells = [exact(), measured("int8", 52, 0.0003, 0.00001), measured("fp8", 53, 0.009, 0.0005)]
    assert names(frontier(cells)) == ["int8", "exact"]


def test_every_cell_stays_that_is_surely_closer_than_all_smaller_ones():
    cells = [measured("int4", 28, 0.06, 0.002), exact(), measured("k8v4", 40, 0.006, 0.0002)]
    assert names(frontier(cells)) == ["int4", "k8v4", "exact"]


@pytest.mark.parametrize(("kld", "apart"), [(0.0100, False), (0.0120, False), (0.0129, True)])
def test_two_combined_standard_errors_tell_cells_apart(kld, apart):
    one, other = measured("int8", 50, 0.01, 0.001), measured("fp8", 51, kld, 0.001)  # 2 sqrt(2) 0.001 = 0.0028
    assert surely_closer(one, other) is apart
    assert tied(one, other) is not apart
    assert not surely_closer(other, one)


def test_of_tied_cells_the_smaller_memory_stays():
    cells = [exact(), measured("int8", 52, 0.0010, 0.0005), measured("k8v4", 40, 0.0015, 0.0005)]
    assert names(frontier(cells)) == ["k8v4", "exact"]


def test_a_chain_of_ties_does_not_shield_the_smallest():
    small, middle, large = (measured(name, mib, kld, 0.001) for name, mib, kld in
                            [("int4", 30, 0.014), ("k8v4", 40, 0.012), ("int8", 50, 0.010)])  # fmt: skip
    assert tied(small, middle)
    assert tied(middle, large)
    assert names(frontier([large, middle, small])) == ["int4", "int8"]


def test_of_cells_that_hold_the_same_the_closer_one_stays():
    cells = [measured("fp8", 52, 0.009, 0.0005), measured("int8", 52, 0.0003, 0.00001)]
    assert names(frontier(cells)) == ["int8"]


def test_a_window_that_the_text_never_reached_is_not_ranked():
    untested = measured("int4", 1, 0.0, 0.0, window=4096, window_reached=False)
    assert names(frontier([exact(), untested])) == ["exact"]


def test_the_smallest_cell_within_the_limits_is_recommended():
    cells = [exact(), measured("int8", 52, 0.0003, 0.00001), measured("k8v4", 40, 0.006, 0.0002, residual=64),
             measured("int4", 28, 0.06, 0.002)]  # fmt: skip
    advice = recommend(cells)
    assert advice.cell.cell.name == "k8v4 + 64 exact"
    text = " ".join(advice.reasons)
    assert "40.0 MiB instead of 100.0 MiB" in text
    assert "4,096 tokens" in text
    assert "The smaller int4 (28.0 MiB) is not recommended: mean KLD 0.060000" in text


def test_a_little_more_memory_is_worth_being_many_times_closer():
    cells = [exact(), measured("k8v4", 36, 0.0057, 0.0002), measured("k8v4", 39, 0.00043, 0.00002, residual=64),
             measured("int8", 52, 0.00001, 0.000001)]  # fmt: skip
    advice = recommend(cells)
    assert advice.cell.cell.name == "k8v4 + 64 exact"
    assert advice.reasons[0].startswith("For 8% more memory than k8v4")
    assert "13 times closer" in advice.reasons[0]
    assert not any(line.startswith("The smaller") for line in advice.reasons)


@pytest.mark.parametrize("larger", [(39, 0.0020, 0.00002), (44, 0.00043, 0.00002), (39, 0.0004, 0.0006)])
def test_more_memory_must_be_little_and_surely_many_times_closer(larger):
    cells = [exact(), measured("k8v4", 36, 0.0057, 0.0002), measured("int8", *larger)]
    assert recommend(cells).cell.cell.name == "k8v4"


def test_a_loss_that_may_be_beyond_the_limit_is_not_recommended():
    near = measured("int4", 28, KLD_LIMIT - 0.001, 0.001)
    assert recommend([exact(), near]).cell.cell.kv_dtype == EXACT
    assert recommend([exact(), measured("int4", 28, KLD_LIMIT - 0.001, 0.0004)]).cell.cell.kv_dtype == "int4"


def test_a_perplexity_beyond_the_limit_is_not_recommended():
    advice = recommend([exact(), measured("int4", 28, 0.005, 0.0001, nll_delta=0.0105)])
    assert advice.cell.cell.kv_dtype == EXACT
    assert any("perplexity changes by +1.06%" in line for line in advice.reasons)


def test_a_cell_that_loses_needles_is_not_recommended():
    advice = recommend([exact(found=9), measured("int4", 28, 0.001, 0.0001, found=3)])
    assert advice.cell.cell.kv_dtype == EXACT
    assert any("finds 33% of the needles, the exact cache 100%" in line for line in advice.reasons)


def test_needles_that_the_exact_cache_misses_too_do_not_count():
    assert recommend([exact(found=3), measured("int4", 28, 0.001, 0.0001, found=3)]).cell.cell.kv_dtype == "int4"


def test_ties_are_listed():
    cells = [exact(), measured("int8", 52, 0.0010, 0.0005), measured("k8v4", 40, 0.0015, 0.0005),
             measured("fp8", 40, 0.0016, 0.0005)]  # fmt: skip
    advice = recommend(cells)
    assert advice.cell.cell.name == "k8v4"
    assert any("Equally close" in line and "int8" in line and "more memory" in line for line in advice.reasons)
    assert any("Equally close" in line and "fp8" in line and "the same memory" in line for line in advice.reasons)


def test_a_window_is_never_recommended():
    """A text of two thousand tokens cannot show what a window forgets; the cost of the window is listed separately."""
    cells = [exact(), measured(EXACT, 20, 0.05, 0.005, window=508), measured("k8v4", 10, 0.051, 0.005, window=508),
             measured("int4", 5, 0.2, 0.005, window=508), measured("int8", 52, 0.0003, 0.00001)]  # fmt: skip
    advice = recommend(cells)
    assert advice.cell.cell.name == "int8"
    (line,) = advice.windows
    assert "k8v4, window 508: 10.0 MiB" in line
    assert "0.050000" in line


def test_a_window_that_the_text_never_reached_is_listed_as_not_ranked():
    cells = [exact(), measured(EXACT, 20, 0.0, 0.0, window=4096, window_reached=False)]
    assert "not ranked" in recommend(cells).windows[0]
