"""The product's own work in virtual time: workers that queue, commits that are shared, a node thread that is busy."""

import pytest

from skerry.core.events import Arrived
from skerry.core.facts import Checkpointed, Decision, Took
from skerry.core.messages import Contribution, Publication, Pull
from skerry.node.log import Written
from skerry.node.syncer import Inspected, Looked, Version
from skerry.proof.sim.timeline import Timeline
from skerry.proof.sim.workers import NodeThread, TimedDisk, TimedWorkers
from skerry.run.delays import Delays

SIZES = [100, 200]
# Encoding fragment 0 takes 1 s, adopting it 2 s, looking through it 0.1 s, merging it 1 s; fragment 1 twice as long.
DELAYS = Delays(encode_ns=1e7, adopt_ns=2e7, inspect_ns=1e6, merge_ns=1e7, commit_s=0.5)


def version_of(p):
    told = dict.fromkeys(Decision.__struct_fields__, 0) | {"fragment": p, "rows": (), "parts": (), "seen": ()}
    return Version(Decision(**told), None, b"", b"", "", Took(0.0, 0.0, 0.0, 0.0), 0.0)


def contribution_of(p, seq=1):
    return Contribution("a", 1, seq, p, 0, 0, 0, 1, 1, "int4", b"")


def looked_at(*fragments):
    return Looked(tuple(Inspected(Arrived(contribution_of(p), 10), None) for p in fragments))


def ended_at(count, *work, python_s=0.0):
    """When each of these, submitted at once to so many workers, is taken in."""
    timeline, heard = Timeline(), []

    def wake():
        heard.extend((round(timeline.now, 6), one) for one in pool.ended())

    pool = TimedWorkers(timeline, DELAYS, SIZES, count, wake, python_s)
    for one in work:
        pool.submit(lambda one=one: one)
    timeline.run_until(100.0)
    return [next(at for at, one in heard if one is each) for each in work]


def test_work_takes_its_time_and_waits_for_a_worker():
    assert ended_at(1, looked_at(0), looked_at(1), looked_at(0)) == pytest.approx([0.1, 0.3, 0.4])
    assert ended_at(2, looked_at(0), looked_at(1), looked_at(0)) == pytest.approx([0.1, 0.2, 0.2])
    assert ended_at(2, looked_at(0, 1), looked_at(0)) == pytest.approx([0.3, 0.1])


def test_merges_are_side_by_side_on_several_workers():
    assert ended_at(1, version_of(0), version_of(1)) == pytest.approx([1.0, 3.0])
    assert ended_at(2, version_of(0), version_of(1)) == pytest.approx([1.0, 2.0])


def test_however_many_workers_there_are_they_share_one_interpreter():
    looks = [looked_at(0), looked_at(0, 0), looked_at(0)]
    assert ended_at(4, *looks, python_s=0.3) == pytest.approx([0.3, 0.9, 1.2])
    assert ended_at(4, *looks, version_of(0), python_s=0.3) == pytest.approx([0.3, 0.9, 1.2, 1.2]), "it needs it to end"
    assert ended_at(4, *looks, version_of(1), python_s=0.3) == pytest.approx([0.3, 0.9, 1.2, 2.0])


def test_a_checkpoint_keeps_no_worker():
    assert ended_at(1, Checkpointed(0, 1, "", b""), version_of(0)) == pytest.approx([0.0, 1.0])


def test_what_is_written_is_durable_a_commit_later():
    timeline, heard = Timeline(), []
    disk = TimedDisk(timeline, DELAYS, lambda: heard.extend((timeline.now, one) for one in disk.ended()))
    disk.submit(lambda: Written(3, 0.0))
    timeline.run_until(100.0)
    assert heard == [(0.5, Written(3, 0.0))]


def test_a_node_thread_does_one_thing_after_the_other():
    timeline = Timeline()
    thread = NodeThread(timeline, DELAYS, SIZES)
    version = Publication(1, 1, 1, 1, 0, "int4", b"", 0, 0, 0.0)
    assert thread.says_in_s(contribution_of(0)) == pytest.approx(1.0)
    assert thread.hears_in_s(version) == pytest.approx(1.0 + 4.0)
    assert thread.hears_in_s(Pull(1, 1, 0, 0, False, 0.0)) == pytest.approx(5.0)
    timeline.run_until(4.0)
    assert thread.says_in_s(contribution_of(0)) == pytest.approx(1.0), "the same bytes again are not encoded again"
    timeline.run_until(10.0)
    assert thread.says_in_s(contribution_of(1, seq=2)) == pytest.approx(2.0)
