"""What users typed and files hold, as it is shown in errors."""

import pytest

from lean.errors import is_out_of_memory, one_line, shown


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("two\nlines\tand more", "two lines and more"),
        ("a\0b", "a\\x00b"),
        ("\x1b[31mred", "\\x1b[31mred"),
        ("half \ud800 a pair", "half \\ud800 a pair"),
        ("right\u202eto left", "right\\u202eto left"),
        ("größe 中文", "größe 中文"),
    ],
)
def test_text_of_others_is_one_line_that_a_terminal_can_only_print(text, line):
    assert one_line(text) == line
    assert one_line(text).isprintable()


def test_a_number_of_thousands_of_digits_is_named_by_its_type():
    assert shown(10**6000) == "a value of type int that is too long to show"


@pytest.mark.parametrize(
    ("error", "wanted"),
    [
        (RuntimeError("Triton Error [CUDA]: out of memory"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("CUDA error: out of memory\nCompile with TORCH_USE_CUDA_DSA"), True),
        (MemoryError(), True),
        (OSError(12, "Cannot allocate memory"), True),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
        (ValueError("a prompt about out of memory errors"), False),
    ],
)
def test_every_library_says_in_its_own_way_that_memory_has_run_out(error, wanted):
    assert is_out_of_memory(error) is wanted
