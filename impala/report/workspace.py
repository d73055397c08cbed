"""A Weights & Biases workspace whose panels are in order without work by hand.

What is in it is a pure function; only `save` needs a network and a login.
"""

from __future__ import annotations

from typing import Any

FRAMES = "frames"

# Section -> (title of a panel, names of its metrics or, with a star, of all that match). The order
# is that of the questions: how good is it, in which tasks, what does it learn from, is it well?
SECTIONS: dict[str, tuple[tuple[str, tuple[str, ...]], ...]] = {
    "Overview": (
        ("Median human-normalised score, %", ("score/median", "evaluation/median")),
        ("Mean capped human-normalised score, %", ("score/mean_capped", "evaluation/mean_capped")),
        ("Frames per second", ("rate/frames_per_s",)),
        ("Coverage", ("score/coverage",)),
    ),
    "Scores": (
        ("Aggregates, %", ("score/median", "score/mean", "score/mean_capped", "score/iqm")),
        (
            "Aggregates of evaluations, %",
            (
                "evaluation/median", "evaluation/mean", "evaluation/mean_capped", "evaluation/iqm",
            ),
        ),
        ("Human-normalised score of each task, %", ("hns/*",)),
        ("Human-normalised score of each task in evaluations, %", ("evaluation/hns/*",)),
    ),
    "Returns": (
        ("Return of each task", ("return/*",)),
        ("Return of each task in evaluations", ("evaluation/return/*",)),
        ("Length of games, frames", ("length/*",)),
    ),
    "Shares and lag": (
        ("Share of the learner's frames", ("share/*",)),
        ("Policy lag, updates", ("lag/*",)),
        ("Policy lag, 95th percentile, updates", ("lag_p95/*",)),
        ("Policy lag, seconds", ("lag_s/*",)),
    ),
    "Losses": (
        ("Loss", ("loss/*",)),
        ("Value", ("value/*",)),
        ("Policy", ("policy/*",)),
        ("V-trace", ("vtrace/*",)),
        ("Gradient", ("grad/*",)),
        ("Learning rate", ("lr",)),
    ),
    "Speed": (
        ("Rates", ("rate/*",)),
        ("Where the learner's and the actors' time goes", ("time/*",)),
        ("Queue", ("queue/*",)),
        ("Memory", ("memory/*",)),
        ("Restarts", ("restarts/*",)),
    ),
    "Population": (("Population", ("population/*",)),),
}  # fmt: skip


def sections() -> list[Any]:
    """`wandb_workspaces.workspaces.Section`s in order, the first two open. Needs no network."""
    import wandb_workspaces.reports.v2 as panels
    import wandb_workspaces.workspaces as workspaces

    made = []
    for number, (name, content) in enumerate(SECTIONS.items()):
        drawn: list[Any] = [
            panels.LinePlot(
                title=title,
                x=FRAMES,
                y=[metric for metric in metrics if "*" not in metric],
                metric_regex=_regex(metrics),
            )
            for title, metrics in content
        ]
        if name == "Overview":
            drawn[:0] = [
                panels.ScalarChart(title="Headline score, %", metric="headline/score"),
                panels.ScalarChart(title="Headline evaluation, %", metric="headline/evaluation"),
            ]
        if name == "Scores":
            drawn += [
                panels.CustomChart(
                    query={"summaryTable": {"tableKey": "evaluation/table"}},
                    chart_fields={"label": "task", "value": "human-normalised %"},
                    chart_name="wandb/bar/v0",
                    chart_strings={"title": "Human-normalised scores, %"},
                ),
                panels.WeavePanelSummaryTable(table_name="evaluation/table"),
                panels.MediaBrowser(title="Games", media_keys=["evaluation/videos"]),
            ]
        made.append(workspaces.Section(name=name, panels=drawn, is_open=number < 2))
    return made


def workspace(entity: str, project: str) -> Any:
    """A `wandb_workspaces.workspaces.Workspace` with these sections. Needs no network."""
    import wandb_workspaces.workspaces as workspaces

    return workspaces.Workspace(
        entity=entity,
        project=project,
        name="Scores",
        sections=sections(),
        settings=workspaces.WorkspaceSettings(x_axis=FRAMES, max_runs=100),
    )


def save(entity: str, project: str) -> str:
    """Saves it as a view of the project; returns its address.

    Raises: ValueError if wandb-workspaces is not installed; what W&B raises without a login, a
    network or such a project.
    """
    import importlib.util

    if importlib.util.find_spec("wandb_workspaces") is None:
        raise ValueError(
            "--wandb-workspace needs wandb-workspaces, which cannot be imported: pip install"
            " 'impala[workspace]'"
        )
    return workspace(entity, project).save().url


def _regex(metrics: tuple[str, ...]) -> str | None:
    stars = [metric for metric in metrics if "*" in metric]
    return "|".join(f"^{star.replace('*', '.*')}$" for star in stars) or None
