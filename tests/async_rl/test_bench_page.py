"""The table of the performance page: what each row says, and that only what lies between the marks changes."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

from bench_page import BEGIN, END, replaced, tables

from async_rl.bench.figures import Figure, show


def test_a_row_holds_median_spread_baseline_ratio_and_bar(tmp_path):

    figures = [
        Figure("speed", "GB/s", (1.0, 2.0, 3.0), "raw", (2.0, 2.0, 2.0), bar=0.8),
        Figure("wait", "ms", (4321.0,), bar=5.0, at_most=True),
        Figure("plain", "", (0.5,)),
    ]
    show("transport", figures, tmp_path / "a.json")
    table = tables([json.loads((tmp_path / "a.json").read_text())])
    assert "| speed | 2 GB/s | ±25 % | raw: 2 | 1.00 | ≥ 0.8 met |" in table
    assert "| wait | 4,321 ms | ±0 % |  |  | ≤ 5 **missed** |" in table
    assert "| plain | 0.5 | ±0 % |  |  |  |" in table
    assert table.startswith("**transport (")


def test_only_the_table_is_replaced():
    page = f"# Title\n{BEGIN}\nold\n{END}\nthe end\n"
    assert replaced(page, "new\n") == f"# Title\n{BEGIN}\n\nnew\n\n{END}\nthe end\n"
    assert replaced(replaced(page, "a\n"), "new\n") == replaced(page, "new\n")
    with pytest.raises(ValueError, match="are missing"):
        replaced("# Title\n", "new")
