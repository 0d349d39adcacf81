"""The numbers for machines, and that the dashboard and the alerts in docs/grafana use none that there is not."""

import json
import re
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from skerry.page.metrics import exposition

GRAFANA = Path(__file__).parents[2] / "docs" / "grafana"
NAME = re.compile(r"\bskerry_[a-z_]+")
LEARNER = {
    "life": 1, "state": "training", "step": 9, "tokens_per_s": 5.0, "step_s": 0.1, "unmerged_steps": 2, "loss": 2.5,
}  # fmt: skip
RECORD = {
    "disk_free_bytes": 1 << 30,
    "status": {
        "run": 'a "run"\nof\\ours', "serving": "served", "age_s": 0.5, "progress": 0.5, "elapsed_s": 9.0, "epoch": 3,
        "quorum": 2, "ready": 3, "rounds_open": 1, "sync_every": 12, "sync_every_configured": 10, "versions": [4, 5],
        "sync_every_reached": 13.5, "merges": 9, "contributors_mean": 2.0, "refused": {"duplicate": 2},
        "tokens": {"produced": 100.0, "merged": 80.0, "pending": 15.0, "discarded": {"died": 5.0}},
        "learners": {"a": LEARNER, "b": LEARNER | {"state": "lost"}},
        "evaluated": {"figures": {"loss": 2.25, "other": None}},
    },
    "history": {
        "traffic": {"up": 1, "down": 2, "data_parallel": 300}, "merges_alone": 4, "goodput": 0.9, "ledger_balance": 0.0,
        "learners": {"a": {"merged_share": 0.75}, "b": {"merged_share": 0.25}},
    },
}  # fmt: skip


def families():
    return list(text_string_to_metric_families(exposition(RECORD).decode()))


def samples():
    return {(s.name, *s.labels.values()): s.value for family in families() for s in family.samples}


def test_each_number_is_what_the_record_says():
    found = samples()
    assert found["skerry_merges_total",] == 9
    assert found["skerry_contributions_merged_total",] == 18
    assert found["skerry_tokens_total", "merged"] == 80
    assert found["skerry_tokens_total", "died"] == 5
    assert found["skerry_learners", "training"] == found["skerry_learners", "lost"] == 1
    assert found["skerry_learners", "stalled"] == 0
    assert [found["skerry_sync_every_steps", kind] for kind in ("configured", "asked", "reached")] == [10, 12, 13.5]
    assert found["skerry_syncer_restarts_total",] == 2
    assert found["skerry_serving", "served"] == 1
    assert found["skerry_evaluation", "loss"] == 2.25
    assert found["skerry_data_parallel_bytes_total",] == 300


def test_every_family_has_a_help_text_and_a_type():
    for family in families():
        assert family.documentation.endswith("."), family.name
        assert family.type in ("gauge", "counter"), family.name


def test_a_directory_that_cannot_be_read_is_a_number_too():
    assert b"skerry_readable 0.0" in exposition({"trouble": "nothing here"})


@pytest.mark.parametrize("file", ["skerry.json", "alerts.yml"])
def test_what_grafana_and_prometheus_are_given_uses_only_names_that_there_are(file):
    given = {name for name, *_ in samples()}
    used = set(NAME.findall((GRAFANA / file).read_text()))
    assert used
    assert used <= given


def test_the_dashboard_is_one_that_grafana_can_load():
    dashboard = json.loads((GRAFANA / "skerry.json").read_text())
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])
    assert all(target["expr"] for panel in dashboard["panels"] for target in panel["targets"])
