import json
import re
from html.parser import HTMLParser

import pytest
from run_folder import make_run

from async_rl.errors import ConfigError
from async_rl.launch.interfaces import Outcome
from async_rl.report.page import write_report
from async_rl.report.svg import Series, bar_chart, line_chart, nice_ticks, running_mean, shares_chart, short
from async_rl.summary import write_summary

VOID = {"meta", "br", "img", "link", "input", "hr"}


class Balanced(HTMLParser):
    """Collects tags, attributes and text; every element must be closed in order."""

    def __init__(self):
        super().__init__(convert_charrefs=True)
        self.open, self.tags, self.attributes, self.text = [], [], [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag):
        assert self.open.pop() == tag, f"</{tag}> closes another element"

    def handle_data(self, data):
        self.text.append(data)


def parse(html):
    page = Balanced()
    page.feed(html)
    assert page.open == []
    return page


def report_of(out):
    html = write_report(out).read_text()
    return html, parse(html)


@pytest.fixture
def finished(tmp_path):
    make_run(tmp_path)
    cpu_s, restarts = {"learner": 30.0}, {"learner": 2}
    outcome = Outcome(status="completed", reason="", exit_code=0, wall_s=125.0, cpu_s=cpu_s, restarts=restarts)
    write_summary(tmp_path, outcome)
    return tmp_path


def test_the_page_shows_every_part_of_the_run(finished):
    html, page = report_of(finished)
    text = " ".join(page.text)
    for part in ("0.960", "0.500", "2 min 05 s", "2 of 2", "67%", "80%", "zero_variance", "bad_shape", "2.4 MB"):
        assert part in text, part
    equation = "issued 10 = open 1 + scoring 0 + ready 2 + delivered 0 + trained 6 + filtered 1 + failed 0"
    assert equation in text
    assert "the books close" in text
    assert "The learner waited 33% of its time for data" in text
    assert html.count("<svg") >= 6


def test_what_scorers_did_is_shown_where_there_were_any(finished):
    assert "groups/s" not in " ".join(report_of(finished)[1].text)
    summary = json.loads((finished / "summary.json").read_text())
    summary["utilization"]["scorers"] = 0.25
    summary["stages"] = {"reward": {"annotated": 1234, "groups_per_s": 18.94, "failed": 3, "returned": 0}}
    summary["stages"]["reference"] = {"annotated": 0, "groups_per_s": None, "failed": 0, "returned": 0}
    (finished / "summary.json").write_text(json.dumps(summary))
    text = " ".join(report_of(finished)[1].text)
    assert all(part in text for part in ("25%", "scorers at work", "1,234", "18.9", "reference"))


def test_the_page_fetches_and_runs_nothing(finished):
    html, page = report_of(finished)
    assert not {"script", "link", "img", "iframe", "object"} & set(page.tags)
    addresses = [value for name, value in page.attributes if name in ("src", "href") or name.startswith("on")]
    assert addresses == []
    assert "url(" not in html
    assert "@import" not in html
    assert "default-src 'none'" in html


def test_what_the_model_wrote_is_shown_as_text(finished):
    html, page = report_of(finished)
    assert "<script>" not in html
    assert "<script>alert('1+1=')</script>" in page.text
    assert "<b>2</b>" in page.text
    assert "reward 1" in " ".join(page.text)


def test_books_that_do_not_close_are_said_not_to(finished):
    summary = json.loads((finished / "summary.json").read_text())
    summary["ledger"]["issued"] = 11
    (finished / "summary.json").write_text(json.dumps(summary))
    assert "do not close" in " ".join(report_of(finished)[1].text)


def test_a_run_that_has_only_started_has_a_page(tmp_path):
    (tmp_path / "config.toml").write_text('name = "x"\n')
    _, page = report_of(tmp_path)
    assert "running" in page.text


def test_a_run_without_a_summary_has_a_page_from_what_is_there(tmp_path):
    _, page = report_of(make_run(tmp_path))
    assert "0.960" in " ".join(page.text)


def test_the_end_of_a_failed_run_is_shown(tmp_path):
    make_run(tmp_path)
    outcome = Outcome(status="failed", reason="learner <died>\nlast", exit_code=1, wall_s=1.0, cpu_s={}, restarts={})
    write_summary(tmp_path, outcome)
    assert "learner <died>\nlast" in report_of(tmp_path)[1].text


def test_a_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="no run folder"):
        write_report(tmp_path)


# ------------------------------------------------------------------ charts


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (0.0, 1.0, [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        (0.0, 100.0, [0, 20, 40, 60, 80, 100]),
        (-3.0, 7.0, [-2, 0, 2, 4, 6]),
        (2.0, 2.0, [2.0]),
    ],
)
def test_ticks_are_round_numbers_inside_the_range(low, high, ticks):
    assert nice_ticks(low, high) == pytest.approx(ticks)


def test_a_line_goes_through_its_points_and_breaks_at_gaps():
    chart = line_chart([Series(label="a", xs=[0, 1, 2, 3], ys=[0.0, 1.0, None, 0.5])], x_label="s", y_range=(0, 1))
    path = re.search(r'<path class="line c0" d="([^"]*)"', chart)[1]
    # x: 54 ... 648, y: 206 (0) ... 12 (1)
    assert path == "M54.0 206.0L252.0 12.0M648.0 109.0"
    parse(chart)


def test_a_long_line_keeps_its_last_point_and_is_thinned():
    n = 5000
    chart = line_chart([Series(label="a", xs=list(range(n)), ys=[float(i) for i in range(n)])], x_label="s")
    points = re.search(r'd="([^"]*)"', chart)[1].count("L")
    assert 500 < points < 800
    assert "648.0" in chart


def test_no_points_give_no_chart():
    assert line_chart([Series(label="a", xs=[0], ys=[None])], x_label="s") == ""
    assert bar_chart([], x_label="s") == ""
    assert shares_chart({}, ["idle"], seconds=1.0) == ""


def test_bars_are_as_high_as_their_values():
    chart = bar_chart([("0", 100.0), ("1", 50.0)], x_label="age", mark=1)
    heights = [float(h) for h in re.findall(r'<rect class="c0"[^>]*height="([\d.]+)"', chart)]
    assert heights[0] == pytest.approx(2 * heights[1], abs=0.2)
    assert ">67%<" in chart
    assert 'class="mark"' in chart


def test_shares_stack_from_the_ground_in_the_order_of_states():
    chart = shares_chart({"p": [{"idle": 0.25, "training": 0.75}]}, ["training", "idle"], seconds=10.0)
    training = re.search(r'class="s-training" d="M96.0 ([\d.]+)v-([\d.]+)', chart)
    idle = re.search(r'class="s-idle" d="M96.0 ([\d.]+)v-([\d.]+)', chart)
    assert (float(training[1]), float(training[2])) == (58.0, 34.5)  # band of 46 from y = 12
    assert (float(idle[1]), float(idle[2])) == (23.5, 11.5)


def test_the_running_mean_skips_what_is_missing():
    assert running_mean([1.0, None, 3.0, 5.0], 2) == [1.0, 1.0, 3.0, 4.0]
    assert running_mean([None], 2) == [None]


def test_labels_are_short():
    assert [short(v) for v in (0.05, 1500.0, 350_000.0, 1_200_000.0, 0.0)] == ["0.05", "1500", "350k", "1.2M", "0"]
