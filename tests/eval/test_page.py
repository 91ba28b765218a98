"""report.html is complete, well-formed and self-contained."""

import base64
import csv
import re
from html.parser import HTMLParser

import pytest
from sweeps import exact, measured

from lean.eval.sweep.cells import EXACT, Cell, Impossible
from lean.eval.sweep.page import how_measured, html, write_report
from lean.eval.sweep.plots import Look, draw_frontier, draw_needles
from lean.eval.sweep.run import Sweep
from lean.eval.sweep.table import judge, markdown, table

pytest.importorskip("matplotlib")

CONFIG = {
    "model": {"name": "tiny <b>&", "dtype": "float32", "parameters": 1000},
    "corpus": {"name": "python-docs", "sha256": "71f2ff5d", "characters": 465126},
    "grid": {"max_tokens": 2048, "context": 4096, "bos": "first"},
    "needle": {"depths": [0.0, 50.0, 100.0], "trials": 3},
    "engine": {"prefill_chunk": 512, "block_size": 32, "max_model_len": 2062},
    "environment": {"lean": "0.1.0", "torch": "2.13.0", "cpu": "a CPU", "threads": 2, "device": "cpu", "kernels": "k"},
}
CELLS = [
    exact(found=9), measured(EXACT, 26, 0.0213, 0.002, window=1024, found=3),
    measured("int8", 51.6, 0.00026, 0.00002, found=9), measured("fp8", 51.6, 0.0093, 0.0007, nll_delta=0.007, found=9),
    measured("k8v4", 39.8, 0.0057, 0.0002, nll_delta=0.006, found=9),
    measured("int4", 28.1, 0.0629, 0.0025, nll_delta=0.06, found=6),
    measured("int8", 53.0, 0.000019, 0.000001, residual=64, found=9),
    measured("k8v4", 41.3, 0.000434, 0.00002, residual=64, found=9),
    measured("int4", 29.5, 0.00568, 0.0004, residual=64, nll_delta=0.0105, found=9),
    measured("k8v4", 12.1, 0.0218, 0.002, residual=64, window=1024, found=3),
    measured("int8", 14.0, 0.0214, 0.002, window=1024, found=3),
]  # fmt: skip
REASON = "layer 0: K head_dim 12 <does> not fit int4"


@pytest.fixture(scope="module")
def judged():
    return judge(Sweep(CONFIG, [*CELLS, Impossible(Cell("int4", 0, 1024), REASON)]))


class Page(HTMLParser):
    """Checks that every opened tag is closed, and collects tags, text and addresses."""

    VOID = frozenset({"meta", "link", "img", "source", "br"})

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.words, self.addresses = [], [], [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.addresses += [value for name, value in attrs if name in ("src", "srcset", "href", "action", "data")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)


@pytest.fixture(scope="module")
def text(judged):
    return html(judged)


@pytest.fixture(scope="module")
def page(text):
    return Page(text)


@pytest.fixture(scope="module")
def files(judged, tmp_path_factory):
    return write_report(judged, tmp_path_factory.mktemp("report"))


def test_the_page_is_well_formed(page):
    assert page.open == []
    assert page.tags.count("html") == page.tags.count("body") == page.tags.count("picture") == 1


def test_the_page_loads_nothing_from_anywhere(text, page):
    assert page.addresses
    assert all(address.startswith("data:") for address in page.addresses)
    assert "http://" not in text
    assert "https://" not in text
    assert "script" not in page.tags
    assert not re.search(r"url\(|@import", text)
    for address in page.addresses:  # nor do its pictures
        if "," in address and address.endswith("="):
            picture = base64.b64decode(address.partition(",")[2]).decode()
            assert not re.search(r'href="(?!#)', picture)


def test_every_cell_has_a_row_with_its_figures(judged, page):
    words = " ".join(page.words)
    head, rows = table(judged)
    assert len(rows) == len(CELLS)
    for row in (head, *rows):
        assert len(row) == len(head)
        assert all(text in words for text in row)


def test_configurations_that_cannot_run_are_listed_with_their_reason(judged, page):
    assert any(REASON in words and "int4, window 1,024" in words for words in page.words)
    assert f"not run: int4, window 1,024: {REASON}" in markdown(judged)


def test_recommendation_environment_and_rules_are_there(judged, page):
    words = " ".join(page.words)
    assert judged.recommendation.cell.cell.name == "k8v4 + 64 exact"
    assert all(line in words for line in (*judged.recommendation.reasons, *judged.recommendation.windows))
    assert all(str(value) in words for value in CONFIG["environment"].values())
    assert "71f2ff5d" in words
    assert "2026-01-02T03:04:05+00:00" in words


def test_tasks_have_columns_and_say_how_they_were_run():
    metrics = {"acc": {"value": 0.5, "stderr": 0.1}, "note": {"value": None, "stderr": None}}
    cut = {"items": 1, "of": 40, "max_tokens_dropped": 7}
    tasks = {"tasks": {"cloze": {"metrics": metrics, "num_items": 40, "num_fewshot": 0, "truncated": cut}}}
    judged = judge(Sweep(CONFIG, [exact(tasks=tasks), measured("int8", 52, 0.0003, 0.00001, tasks=tasks)]))
    head, rows = table(judged)
    assert head[-3:] == ["cloze acc", "cloze note", ""]
    assert rows[0][-3:-1] == ["0.500 ±0.100", "-"]
    assert "Task cloze of lm-evaluation-harness: 40 items" in how_measured(judged)[-1]
    assert "1 of 40 truncated" in how_measured(judged)[-1]


def test_names_are_text_and_not_markup(judged, page):
    assert "tiny <b>&: accuracy and speed of smaller KV caches" in page.words
    assert "b" not in page.tags


def test_needles_have_a_map(page):
    assert page.words.count("1/3") == 9  # three cells with a window, three depths


def test_the_csv_has_every_cell(judged, files):
    rows = list(csv.DictReader(files[0].open()))
    assert [row["name"] for row in rows] == [cell.cell.name for cell in judged.sweep.results]
    assert [row["name"] for row in rows if row["recommended"] == "1"] == ["k8v4 + 64 exact"]
    assert {row["name"] for row in rows if row["undominated"] == "1"} == {c.cell.name for c in judged.undominated}
    assert float(rows[2]["kld_mean"]) == 0.00026
    assert rows[-1]["not_run"] == REASON


def test_the_files_are_written_and_nothing_else(files):
    assert sorted(file.name for file in files) == ["frontier.csv", "frontier.png", "needles.png", "report.html"]
    assert sorted(files[0].parent.iterdir()) == sorted(files)
    for file in files:
        if file.suffix == ".png":
            assert file.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("look", [Look(), Look(narrow=True)], ids=["wide", "narrow"])
def test_names_in_the_plot_cover_neither_each_other_nor_points(judged, look):
    figure = draw_frontier(CELLS, judged.undominated, look)
    figure.draw_without_rendering()
    for axis in figure.axes:
        names = [text for text in axis.texts if text.get_text()]
        written = [text.get_text().replace("\n", ", ") for text in names]
        assert written == [cell.cell.name for cell in judged.undominated]
        boxes = [text.get_window_extent() for text in names]
        assert not any(one.overlaps(other) for i, one in enumerate(boxes) for other in boxes[:i])
        points = [axis.transData.transform(line.get_xydata()[0]) for line in axis.lines if len(line.get_xydata()) == 1]
        assert len(points) >= len(CELLS)
        assert not any(box.contains(*point) for box in boxes for point in points)
        frame = axis.get_window_extent()
        assert all(frame.x0 <= box.x0 and box.x1 <= frame.x1 for box in boxes)


def test_the_needle_map_has_a_row_for_every_cell():
    axis = draw_needles(CELLS).axes[0]
    assert [label.get_text() for label in axis.get_yticklabels()] == [cell.cell.name for cell in CELLS]
