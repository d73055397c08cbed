"""The W&B workspace as it would be sent, without a network."""

import pytest

from impala.report.workspace import SECTIONS, workspace

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of wandb-workspaces' own


def test_sections_are_in_order_and_every_panel_is_over_frames():
    view = workspace("an-entity", "a-project")._to_model()
    assert (view.entity, view.project) == ("an-entity", "a-project")
    sections = view.spec.section.panel_bank_config.sections
    assert [section.name for section in sections] == [
        "Overview", "Scores", "Returns", "Shares and lag", "Losses", "Speed", "Population",
    ]  # fmt: skip
    for section in sections:
        lines = [panel for panel in section.panels if panel.view_type == "Run History Line Plot"]
        assert [panel.config.chart_title for panel in lines] == [
            title for title, _ in SECTIONS[section.name]
        ]
        assert {panel.config.x_axis for panel in lines} == {"frames"}
    kinds = {panel.view_type for panel in sections[1].panels}
    assert {"Vega2", "Media Browser", "Weave"} <= kinds  # chart, videos, table


def test_every_group_of_metrics_has_a_panel():
    patterns = {name for content in SECTIONS.values() for _, names in content for name in names}
    groups = {pattern.split("/")[0] for pattern in patterns}
    assert {"score", "hns", "return", "length", "share", "lag", "loss", "value"} <= groups
    assert {"policy", "vtrace", "grad", "lr", "rate", "time", "queue", "memory"} <= groups
