"""Every metric and label in the dashboard's queries exists, and every metric is on the dashboard."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shared.runtime import metrics

ROOT = Path(__file__).resolve().parents[3]
DASHBOARD = ROOT / "compose" / "grafana" / "dashboards" / "fusequeue.json"
OF_PROMETHEUS = {"le", "instance", "job", "pod"}
FUNCTIONS = {"rate", "increase", "delta", "sum", "max", "min", "histogram_quantile", "vector", "scalar", "absent"}
WORDS = {"by", "without", "or", "and", "unless", "on", "ignoring"}
TOKEN = re.compile(
    r"""(?P<string>"[^"]*")|(?P<range>\[[^\]]*\])|(?P<name>[a-zA-Z_:][\w:]*)|(?P<number>\d+(\.\d+)?)"""
    r"""|(?P<sign>[-+*/(){},]|=~|!~|!=|==|>=|<=|[=<>])|(?P<space>\s+)"""
)


def queries() -> list[str]:
    panels = json.loads(DASHBOARD.read_text("utf-8"))["panels"]
    return [target["expr"] for panel in panels for target in panel.get("targets", ())]


def tokens(query: str) -> Iterator[tuple[str, str]]:
    """Yield the (kind, text) tokens of a query; raises ValueError for unsupported PromQL."""
    at = 0
    while at < len(query):
        match = TOKEN.match(query, at)
        if match is None:
            raise ValueError(f"{query!r} is not understood from {query[at:]!r} on")
        at = match.end()
        if match.lastgroup != "space" and match.lastgroup is not None:
            yield match.lastgroup, match.group()


def faults(query: str) -> list[str]:
    """Return unknown metrics and labels, and unbalanced brackets, of a query."""
    labels = label_names()
    named: set[str] = set()
    errors, open_brackets, grouping = [], [], False
    last = ""
    for kind, text in tokens(query):
        inside = open_brackets[-1] if open_brackets else ""
        if text in "({":
            open_brackets.append("labels" if text == "{" or grouping else "plain")
            grouping = False
        elif text in ")}":
            if not open_brackets:
                return [f"{text} closes nothing"]
            open_brackets.pop()
        elif kind == "name" and inside == "labels":
            named.add(text)
        elif kind == "name" and text in WORDS:
            grouping = text in ("by", "without", "on", "ignoring")
        elif kind == "name" and text not in FUNCTIONS | {"up"} and text not in labels:
            errors.append(f"no metric {text}")
        last = text
    metrics_of_query = {text for kind, text in tokens(query) if kind == "name" and text in labels}
    known = OF_PROMETHEUS.union(*(labels[name] for name in metrics_of_query))
    errors += [f"no label {name} on {sorted(metrics_of_query)}" for name in sorted(named - known)]
    return errors + (["brackets stay open"] if open_brackets else []) + (["nothing follows"] if last in "+-*/" else [])


def label_names() -> dict[str, set[str]]:
    """Return the labels of each series."""
    known: dict[str, set[str]] = {name: set() for name in metrics.names()}
    for metric in vars(metrics).values():
        family: Any = metric
        for described in family.describe() if hasattr(family, "_labelnames") else ():
            for name in known:
                if name.removesuffix("_total") == described.name or name.rpartition("_")[0] == described.name:
                    known[name] |= set(family._labelnames)
    return known


def test_metrics_and_labels_of_the_dashboard_exist() -> None:
    """A renamed metric would leave an empty panel."""
    assert len(queries()) > 30
    assert {query: faults(query) for query in queries() if faults(query)} == {}


def test_variables_choose_the_source_and_the_models() -> None:
    """Of every series that has a model, and of no other; panels name no source of one installation."""
    dashboard = json.loads(DASHBOARD.read_text("utf-8"))
    assert [variable["name"] for variable in dashboard["templating"]["list"]] == ["datasource", "model"]
    assert {panel["datasource"]["uid"] for panel in dashboard["panels"] if "datasource" in panel} == {"${datasource}"}
    labels = label_names()
    for query in queries():
        for name, selector in re.findall(r"(fusequeue_\w+)(\{[^}]*\})?", query):
            assert ('model=~"$model"' in selector) == ("model" in labels[name]), query


@pytest.mark.parametrize(
    ("query", "fault"),
    [
        ("rate(fusequeue_batch_total[5m])", "no metric fusequeue_batch_total"),
        ("sum by (worker) (fusequeue_workers)", "no label worker on ['fusequeue_workers']"),
        ('fusequeue_workers{stat="ready"}', "no label stat on ['fusequeue_workers']"),
        ("sum(fusequeue_workers", "brackets stay open"),
    ],
)
def test_a_wrong_query_is_an_error(query: str, fault: str) -> None:
    assert faults(query) == [fault]


BY_THE_API = {"worker_busy_seconds", "worker_idle_while_queued_seconds"}  # as the workers', for who scrapes no worker


def test_every_metric_is_on_the_dashboard_and_documented() -> None:
    dashboard, page = " ".join(queries()), (ROOT / "docs/operations/monitoring.md").read_text("utf-8")
    families = [family for family in metrics.REGISTRY.collect() if family.name.startswith("fusequeue_")]
    assert len(families) > 30
    for family in families:
        name = family.name.removeprefix("fusequeue_") + ("_total" if family.type == "counter" else "")
        assert family.name in dashboard or name in BY_THE_API, name
        assert re.search(rf"`(fusequeue_)?{name}[`{{]", page), f"{name} is not explained"


def test_the_dashboard_covers_the_main_figures() -> None:
    """Batch fill, waits, forwards by rows, GPU time, stop reasons, failures, spool, scale; panels do not overlap."""
    panels = json.loads(DASHBOARD.read_text("utf-8"))["panels"]
    dashboard = " ".join(queries())
    for name in ("forward_rows", "queue_wait", "forward_seconds", "gpu_busy", "batches", "job_failures", "spool_bytes"):
        assert f"fusequeue_{name}" in dashboard
    assert "fusequeue_workers_wanted" in dashboard
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        at = panel["gridPos"]
        cells = {(at["x"] + x, at["y"] + y) for x in range(at["w"]) for y in range(at["h"])}
        assert not cells & taken, panel["title"]
        taken |= cells
    assert len({panel["id"] for panel in panels}) == len(panels)
