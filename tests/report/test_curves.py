"""X9: curves.png."""

from megastep.report import curves, page
from megastep.report.meanings import MEANINGS, meaning_of
from tests.report.pages import ROWS


def test_panels_without_values_are_left_out():
    def panels(rows):
        return [
            p.title for p in (*curves.PANELS, curves._time_panel(rows)) if curves._lines(p, rows)
        ]

    assert panels(ROWS) == [
        "success",
        "reward",
        "loss",
        "KL between engine and trainer",
        "seconds per training step",
    ]
    assert panels([{"step": 1, "train/loss": None}]) == []


def test_curves_and_headlines_name_documented_metrics():
    for panel in curves.PANELS:
        for name in panel.lines:
            assert meaning_of(name), name
    for name in (*page.HEADLINES, *page.HIGHER_IS_BETTER, *page.LOWER_IS_BETTER):
        assert (
            any(known.startswith(name) for known in MEANINGS)
            or meaning_of(f"{name}1")
            or meaning_of(name)
        ), name


def test_time_panel_leaves_out_the_time_of_the_run():
    panel = curves._time_panel([{"time/step_s": 2.0, "time/run_s": 300.0, "time/sync_s": 1.0}])
    assert list(panel.lines) == ["time/step_s", "time/sync_s"]
