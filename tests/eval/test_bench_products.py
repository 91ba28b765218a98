"""The products whose times are compared are the same product."""

import pytest
import torch

from lean.eval.bench import products
from lean.quant.unpacked import FEW_ROWS_INT4, FEW_ROWS_INT8, takes_many


def test_all_products_multiply_with_the_same_weights():
    torch.manual_seed(0)
    made = products.products(64, 96, copies=2)
    x = torch.randn(FEW_ROWS_INT4 + 1, 96).bfloat16()
    for own in range(2):
        exact = made["bfloat16"](x, own).float()
        for name in sorted(made):
            found = made[name](x, own)
            if name == "int4 unpacked" and not takes_many():
                assert found is None
                continue
            assert (found.float() - exact).norm() < 0.15 * exact.norm(), name
    assert (made["bfloat16"](x, 0) - made["bfloat16"](x, 1)).norm() > exact.norm() / 2


def test_few_rows_are_not_multiplied_with_unpacked_weights(capsys, monkeypatch):
    monkeypatch.setattr(products, "BEYOND_CACHES", 2**16)
    monkeypatch.setattr("sys.argv", ["products", "64x96", "--rows", f"1,{FEW_ROWS_INT8},{FEW_ROWS_INT8 + 1}"])
    products.main()
    head, *lines = capsys.readouterr().out.splitlines()[1:]
    assert head.split() == ["rows", "bfloat16", "int4", "int8", "int8", "unpacked"]
    assert [line.split()[-1] == "-" for line in lines] == [True, True, False]


@pytest.mark.parametrize("wrong", [["8x96"], ["64x40"], ["64"], ["64x96", "--rows", "0"]])
def test_wrong_arguments_are_refused_in_one_line(capsys, monkeypatch, wrong):
    monkeypatch.setattr("sys.argv", ["products", *wrong])
    with pytest.raises(SystemExit):
        products.main()
    assert "give" in capsys.readouterr().err.splitlines()[-1]
