"""Each way a run can stand has words of its own, and a page of it looks intended."""

import pytest

from run.test_history import steered  # noqa: F401
from skerry.page.feed import Feed
from skerry.page.headline import headline

LEARNER = {"life": 1, "state": "training", "step": 5}
STATUS = {
    "run": "mine", "serving": "served", "age_s": 0.2, "epoch": 1, "phase": "steady", "progress": 0.25,
    "elapsed_s": 30.0, "budget": {"minutes": 2.0}, "merges": 7, "quorum": 1, "ready": 2, "waiting": "for steps",
    "tokens": {"produced": 100.0, "merged": 90.0, "pending": 10.0, "discarded": {}},
    "learners": {"a": LEARNER, "b": LEARNER},
}  # fmt: skip


def lost(name):
    return STATUS["learners"] | {name: LEARNER | {"state": "lost"}}


@pytest.mark.parametrize(
    ("mood", "changes", "says"),
    [
        ("training", {}, "2 of 2 learners train; 25 % of 2 minutes done, about 90 s left."),
        ("training", {"learners": lost("a")}, "1 of 2 learners train; 25 %"),
        ("training", {"quorum": 3}, "Nothing is merged before 3 learners are ready."),
        ("waiting", {"learners": {}, "phase": "created"}, "waits for its first learner"),
        ("waiting", {"phase": "created"}, "2 learners here, and nobody has taken a step yet"),
        ("stalled", {"learners": {"a": LEARNER | {"state": "stalled"}}}, "Nobody trains at present"),
        ("silent", {"age_s": 12.0}, "not been heard of for 12 s"),
        ("closing", {"phase": "closing"}, "the last work is being merged"),
        ("closing", {"phase": "closing"}, "The budget is spent: "),
        ("closing", {"phase": "closing", "finishing": True}, "The run is closed by an order: the last work"),
        (
            "finished",
            {"serving": "closed", "phase": "closed", "finishing": True},
            "finished, closed by an order. 90 of",
        ),
        ("finished", {"phase": "closed"}, "90 of 100 tokens that learners worked on are in the model, in 7 merges"),
        ("finished", {"serving": "closed", "phase": "closed", "age_s": 9e5}, "The run is finished"),
        ("paused", {"serving": "paused"}, "Paused at 25 % of 2 minutes"),
        ("died", {"serving": "died"}, "its syncer died at 25 %"),
        ("new", {"serving": "new", "epoch": 0}, "nobody serves it yet"),
        ("starting", {"serving": "starting"}, "The syncer is starting"),
        ("starting", {"serving": "away", "epoch": 0}, "The syncer is starting"),
        ("away", {"serving": "away"}, "is being started again"),
    ],
)
def test_what_a_run_does_is_said_in_a_sentence(mood, changes, says):
    told = headline(STATUS | changes)
    assert told.mood == mood
    assert says.replace("90 s", "2 min") in told.sentence


def test_who_closed_a_run_is_said_where_its_history_tells():
    told = headline(
        STATUS | {"phase": "closing", "finishing": True}, "closed by an order of ann, at 76 % of its budget"
    )
    assert (
        told.sentence == "The run is closed by an order of ann, at 76 % of its budget: the last work is being merged."
    )


def test_the_page_of_a_run_that_was_steered_has_its_orders(steered):  # noqa: F811
    record = Feed(steered.root).look()
    assert "The run is finished, closed by an order of admin.token, at " in record["headline"]["sentence"]
    orders = [event["text"] for event in record["history"]["events"] if event["kind"] == "order"]
    assert len(orders) == 5 and orders[0].startswith("admin.token set sync.quorum from 1 to 2")
    assert record["history"]["goodput"] <= 1
