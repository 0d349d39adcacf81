"""Who a connection is and what it may say, on both sides: real nodes on a real store behind frames in memory."""

import logging
from dataclasses import dataclass, field

import msgspec
import numpy as np
import pytest
import xxhash

from node.pair import Pair, config_of
from skerry import config as configs
from skerry.algo.fragments import Tensor, encode_fragments, encode_layout, layout_of, split
from skerry.core.events import Leave
from skerry.core.facts import LifeStarted, Witnessed
from skerry.core.messages import (
    FULL,
    PROTOCOL,
    Answer,
    Ask,
    Contribution,
    DropLearner,
    FragmentPosition,
    Hello,
    Lent,
    Publication,
    Pull,
    ReadmitLearner,
    Refused,
    Report,
    Stop,
    Welcome,
)
from skerry.core.state import decode_fact
from skerry.errors import ProtocolError
from skerry.node.cells import Boxes
from skerry.node.learner import LearnerNode
from skerry.node.mailbox import mailbox
from skerry.node.peers import COMPARED_BYTES_MAX, Learners, Uplink
from skerry.node.syncer import SyncerNode
from skerry.store import Store
from skerry.wire.frames import learner_dialect, syncer_dialect
from skerry.wire.transport import Inbox, Instructed, Lost, MemoryEndpoint, Opened, Received, join

replace = msgspec.structs.replace


class House:
    """A syncer's node and its door; `settle` lets it take in whatever has arrived."""

    def __init__(self, root, **settings):
        with Pair(root, config_of(learners=2, **settings)) as pair:
            self.layout, self.fragments = pair.layout, pair.fragments
        self.store = Store.open(root)
        self.learners = Learners()
        self.node = self.learners.node = SyncerNode(self.store, self.learners, lambda: 0.0)
        self.inbox = Inbox()
        self.endpoint = MemoryEndpoint(self.inbox, syncer_dialect(self.learners.payload_bytes))
        self.learners.endpoint = self.endpoint

    def settle(self):
        while not self.inbox.empty():
            self.learners.take(self.inbox.get_nowait(), 0.0)
            self.node.look(0.0)

    def is_connected(self, learner):
        return self.node.machine.members[learner].connected

    @property
    def lives(self):
        facts = (decode_fact(record.body) for record in self.store.history())
        return [(fact.learner, fact.life) for fact in facts if isinstance(fact, LifeStarted)]


@dataclass
class Caller:
    """A connection that says what a test says; it hears messages, and why it was hung up on."""

    house: House
    name: str = "a"
    process: str = "first"
    key: str = ""  # the name that its connection proves
    inbox: Inbox = field(default_factory=Inbox)

    def __post_init__(self):
        self.endpoint = MemoryEndpoint(self.inbox, learner_dialect(self._payload_bytes))
        self.at_house, self.peer = join(self.house.endpoint, self.endpoint, self.key)
        self.house.settle()

    def _payload_bytes(self, publication):
        return self.house.node.algebra.payload_bytes("fp32", self.house.fragments[publication.fragment])

    def hello(self, **changes):
        layout = self.house.layout
        return replace(Hello(PROTOCOL, self.name, self.process, 0, encode_layout(layout), layout.digest), **changes)

    def report(self, life=1, positions=3):
        return Report(self.name, life, 1, 0, 0, 0.0, "training", (FragmentPosition(FULL, 0, 0, 0),) * positions)

    def contribution(self, payload, fragment=0, codec="fp32", life=1):
        digest = xxhash.xxh3_128_digest(payload)
        return Contribution(self.name, life, 1, fragment, 0, 0, 0, 4, 32, codec, digest)

    def payload(self, fragment=0):
        return np.zeros(self.house.fragments[fragment].size, np.float32).tobytes()

    def say(self, message, payload=None):
        """What comes back: messages, and the end of the connection."""
        self.endpoint.send(self.peer, message, payload)
        self.house.settle()
        return self.heard()

    def heard(self):
        found = []
        while not self.inbox.empty():
            event = self.inbox.get_nowait()
            if not isinstance(event, Opened):
                found.append(event.message if isinstance(event, Received) else event)
        return found

    @property
    def is_in(self):
        return self.at_house in self.house.learners.peers


@pytest.fixture
def house(tmp_path):
    house = House(tmp_path)
    yield house
    house.store.close()


def dropped(house, caplog, caller, message, payload=None):
    """The caller says this and is hung up on without a word; why, as the syncer's log has it."""
    caplog.clear()
    assert [type(heard) for heard in caller.say(message, payload)] == [Lost]
    assert not caller.is_in
    (line,) = [record.getMessage() for record in caplog.records if record.getMessage().startswith("dropped ")]
    return line.partition(": ")[2]


# ------------------------------------------------------------------------------------------ the syncer's door


def test_a_hello_makes_a_connection_one_life_of_one_learner(house):
    a, b = Caller(house), Caller(house, "b")
    (welcome,), (other,) = a.say(a.hello()), b.say(b.hello())
    assert (welcome.learner, welcome.life, welcome.index) == ("a", 1, 0) and (other.learner, other.index) == ("b", 1)
    assert house.learners.peers == {a.at_house: ("a", 1), b.at_house: ("b", 1)} and house.learners.joining == {}
    assert house.lives == [("a", 1), ("b", 1)]


def test_a_first_report_is_answered_with_every_fragment(house):
    a = Caller(house)
    a.say(a.hello())
    heard = a.say(a.report())
    published = {message.fragment for message in heard if isinstance(message, Publication)}
    assert published == set(range(len(house.fragments)))


def test_who_asks_is_told_the_configuration_and_is_nobody(house):
    a = Caller(house)
    (answer,) = a.say(Ask())
    assert isinstance(answer, Answer) and configs.decode(answer.config) == house.node.config
    assert not a.is_in and house.lives == []


def test_nothing_is_taken_in_before_a_hello(house, caplog):
    a = Caller(house)
    assert dropped(house, caplog, a, a.report()) == "Report before a hello"
    again = Caller(house)
    payload = again.payload()
    assert dropped(house, caplog, again, again.contribution(payload), payload) == "Contribution before a hello"


def test_a_second_hello_ends_the_connection_and_the_learner_is_away(house, caplog):
    a = Caller(house)
    a.say(a.hello())
    assert dropped(house, caplog, a, a.hello()) == "a second hello"
    assert not house.is_connected("a") and house.learners.links == {}


@pytest.mark.parametrize(
    ("state", "mark", "says"),
    [
        ("left", 9, "a left in order (9 steps handed over or given up, 0 of 90 tokens merged)"),
        ("left", 4, "a left before all was handed over (4 of 9 steps)"),
        ("leaving", 9, "a lost: it hung up"),
        (None, 0, "a lost: it hung up"),
    ],
)
def test_the_log_tells_who_left_from_who_was_lost(house, caplog, state, mark, says):
    a = Caller(house)
    a.say(a.hello())
    if state:
        position = FragmentPosition(FULL, mark, 10 * mark, 0)
        a.say(replace(a.report(), state=state, step=9, tokens=90, step_s=0.1, positions=(position,) * 3))
    with caplog.at_level(logging.INFO, "skerry.syncer"):
        house.learners.take(Lost(a.at_house, "it hung up"), 0.0)
    assert [record.getMessage() for record in caplog.records][-1] == says


@pytest.mark.parametrize("changes", [{"learner": "b"}, {"life": 2}, {"life": 0}], ids=str)
def test_a_message_in_anothers_name_ends_the_connection_it_came_on_and_no_other(house, caplog, changes):
    a, b = Caller(house), Caller(house, "b")
    a.say(a.hello())
    b.say(b.hello())
    says = dropped(house, caplog, a, replace(a.report(), **changes))
    assert says.startswith("a message in the name of ")
    assert b.is_in and house.is_connected("b") and not house.is_connected("a")
    assert house.node.machine.members["b"].report is None


def test_a_contribution_in_anothers_name_is_not_held(house, caplog):
    a, b = Caller(house), Caller(house, "b")
    a.say(a.hello())
    b.say(b.hello())
    payload = a.payload()
    says = dropped(house, caplog, a, replace(a.contribution(payload), learner="b"), payload)
    assert says == "a message in the name of 'b' life 1" and house.node.held == {}


@pytest.mark.parametrize("count", [0, 2, 4])
def test_a_report_on_another_number_of_fragments_never_reaches_the_machine(house, caplog, count):
    a = Caller(house)
    a.say(a.hello())
    assert dropped(house, caplog, a, a.report(positions=count)) == f"a report on {count} fragments"
    assert house.node.machine.members["a"].report is None


@pytest.mark.parametrize("bytes_more", [-4, 4])
def test_a_payload_of_another_length_is_refused_before_it_is_received(house, bytes_more):
    a = Caller(house)
    a.say(a.hello())
    payload = (a.payload() + bytes(4))[: len(a.payload()) + bytes_more]
    (lost,) = a.say(a.contribution(payload), payload)
    assert isinstance(lost, Lost) and not a.is_in and not house.is_connected("a")
    assert house.node.held == {}


def test_the_only_legal_length_is_that_of_the_fragment_in_the_runs_codec(house):
    a, limit = Caller(house), house.learners.payload_bytes
    for fragment in range(len(house.fragments)):
        assert limit(a.contribution(b"", fragment)) == len(a.payload(fragment))
    wrong = {
        "fragment -1 of 3": a.contribution(b"", fragment=-1),
        "fragment 3 of 3": a.contribution(b"", fragment=3),
        "codec 'int4' is not the run's fp32": a.contribution(b"", codec="int4"),
        f"codec '{16 * 'x'}' is not the run's fp32": a.contribution(b"", codec=99 * "x"),
        "Lent carries no payload": Lent("a", 0, 0, b""),
    }
    for says, message in wrong.items():
        with pytest.raises(ProtocolError) as error:
            limit(message)
        assert str(error.value) == says


def test_lossless_contributions_are_for_the_end_alone(tmp_path):
    house = House(tmp_path, wire={"codec_up": "int8"})
    a, limit = Caller(house), house.learners.payload_bytes
    with pytest.raises(ProtocolError, match="codec 'fp32' is not the run's int8"):
        limit(a.contribution(b"", codec="fp32"))
    house.node.machine.state.phase = "closing"
    assert limit(a.contribution(b"", codec="fp32")) == len(a.payload(0))
    house.store.close()


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"learner": ""}, "use 1 to 64 of"),
        ({"learner": "../run"}, "use 1 to 64 of"),
        ({"learner": "x" * 65}, "use 1 to 64 of"),
        ({"learner": "__proto__"}, "begin with a letter or a digit"),
        ({"learner": ".."}, "begin with a letter or a digit"),
        ({"learner": "-x"}, "begin with a letter or a digit"),
        ({"layout": encode_layout(layout_of([Tensor("bias", (6,))])), "layout_digest": "?"}, "the model differs"),
    ],
    ids=str,
)
def test_who_cannot_take_part_is_told_why_and_leaves_no_trace(house, changes, says):
    a = Caller(house)
    refused, lost = a.say(a.hello(**changes))
    assert isinstance(refused, Refused) and refused.is_final and says in refused.text and "\n" not in refused.text
    assert isinstance(lost, Lost) and not a.is_in and house.lives == []


def test_a_foreign_layout_of_very_many_tensors_is_told_from_the_runs_by_its_digest_alone(house):
    """Whoever decides for all has no time to read it: it is not even looked at whether it can be."""
    a = Caller(house)
    refused, lost = a.say(a.hello(layout=b"{" * (COMPARED_BYTES_MAX + 1), layout_digest="?"))
    assert isinstance(refused, Refused) and refused.is_final and "too large to be compared here" in refused.text
    assert isinstance(lost, Lost) and not a.is_in and house.lives == []


@pytest.mark.parametrize("protocol", [PROTOCOL - 1, PROTOCOL + 1])
def test_who_speaks_another_protocol_is_turned_away_but_not_for_good_and_said_once(house, caplog, protocol):
    for _ in range(3):
        a = Caller(house)
        refused, lost = a.say(a.hello(protocol=protocol, layout=b"whatever that is", layout_digest="?"))
        assert isinstance(refused, Refused) and not refused.is_final and isinstance(lost, Lost) and not a.is_in
        assert refused.text == f"the syncer speaks protocol {PROTOCOL} and the learner {protocol}: upgrade the older"
    assert house.lives == []
    assert [message for message in caplog.messages if "protocol" in message] == [
        f"refused a, which will come again: {refused.text}"
    ]
    (row,) = house.learners.turned_away.rows(60.0)
    assert row == {"who": "a", "why": refused.text, "count": 3, "ago_s": 60.0}


def test_a_layout_nobody_can_read_is_no_hello(house, caplog):
    a = Caller(house)
    assert dropped(house, caplog, a, a.hello(layout=b"junk", layout_digest="?")).endswith("layout cannot be read")


def test_the_same_process_on_a_second_connection_goes_on_there(house):
    """Its old connection may be dead without anybody knowing; when its end is noticed, nobody departs."""
    first, second = Caller(house), Caller(house)
    first.say(first.hello())
    (welcome,) = second.say(second.hello(life=1))
    assert isinstance(welcome, Welcome) and welcome.life == 1
    assert [type(heard) for heard in first.heard()] == [Lost]
    assert house.learners.links == {("a", 1): second.at_house} and house.learners.peers == {second.at_house: ("a", 1)}
    assert house.is_connected("a") and house.lives == [("a", 1)]


def test_a_new_process_with_the_names_key_takes_it_over_and_the_old_one_is_dismissed(house):
    old, new = Caller(house), Caller(house, process="second", key="a")
    old.say(old.hello())
    (welcome,) = new.say(new.hello())
    assert welcome.life == 2 and house.lives == [("a", 1), ("a", 2)]
    refused, lost = old.heard()
    assert refused.is_final and "taken over by a newer process" in refused.text and isinstance(lost, Lost)
    assert new.is_in and not old.is_in and house.is_connected("a")


def test_a_live_name_is_taken_over_only_with_its_key_and_is_free_when_its_process_is_gone(house):
    old, new = Caller(house), Caller(house, process="second")
    old.say(old.hello())
    refused, lost = new.say(new.hello())
    assert not refused.is_final and refused.why == "in use" and isinstance(lost, Lost)
    assert old.is_in and not old.heard() and house.lives == [("a", 1)]
    old.endpoint.drop(old.peer, "killed")
    house.settle()
    again = Caller(house, process="second")
    assert isinstance(again.say(again.hello())[0], Welcome) and house.lives == [("a", 1), ("a", 2)]


def test_a_name_that_comes_and_goes_without_end_has_few_lines_and_it_is_counted_what_was_left_out(house, caplog):
    caplog.set_level(logging.INFO, "skerry.syncer")
    for number in range(70):
        caller = Caller(house, process=str(number))
        caller.say(caller.hello())
        caller.endpoint.drop(caller.peer, "killed")
        house.settle()
    assert 2 <= len(caplog.messages) < 30 and house.learners.left_out(0.0) > 100
    (row,) = house.learners.turned_away.rows(0.0)
    assert row["who"] == "a" and row["count"] == 70 - len(house.lives) and "is not let in at present" in row["why"]


def test_a_link_that_comes_and_goes_without_end_has_to_wait_and_no_other_does(house):
    """Within one life, which costs no name and no life, but a record each time it is lost."""
    for _ in range(100):
        caller = Caller(house)
        heard = caller.say(caller.hello())
        caller.endpoint.drop(caller.peer, "gone")
        house.settle()
    refused = heard[0]
    assert not refused.is_final and "has come and gone 60 times" in refused.text
    lost = [fact for fact in map(decode_fact, (r.body for r in house.store.history())) if isinstance(fact, Witnessed)]
    assert 60 <= len(lost) <= 62 and house.lives == [("a", 1)]
    other = Caller(house, "b")
    assert isinstance(other.say(other.hello())[0], Welcome)


def test_who_says_a_name_that_is_in_use_uses_up_none_of_its_links(house):
    honest = Caller(house)
    honest.say(honest.hello())
    for number in range(100):
        liar = Caller(house, process=str(number))
        assert liar.say(liar.hello())[0].why == "in use"
    honest.endpoint.drop(honest.peer, "lost")
    house.settle()
    again = Caller(house)
    assert isinstance(again.say(again.hello())[0], Welcome)


def test_a_key_is_good_for_its_own_name_alone(house):
    other = Caller(house, key="b")
    refused, lost = other.say(other.hello())
    assert refused.is_final and refused.text == "its key is that of b, and it calls itself 'a'"
    assert isinstance(lost, Lost) and house.lives == []


def test_a_learner_that_was_turned_out_and_has_another_key_comes_as_another_life(house):
    old = Caller(house, key="a")
    old.say(old.hello())
    house.learners.expel("a", "its key was revoked", 0.0)
    house.learners.readmit("a", 0.0)
    new = Caller(house, process="second", key="a")
    assert isinstance(new.say(new.hello())[0], Welcome) and house.lives == [("a", 1), ("a", 2)]


def test_every_connection_of_a_key_is_hung_up_on_and_no_other(house):
    joined, waiting, other = Caller(house, key="a"), Caller(house, key="a"), Caller(house, name="b", key="b")
    joined.say(joined.hello())
    other.say(other.hello())
    house.learners.hang_up("a", "another key was issued")
    house.settle()
    assert isinstance(joined.heard()[-1], Lost) and isinstance(waiting.heard()[-1], Lost)
    assert other.is_in and not house.is_connected("a")


def test_a_learner_that_is_turned_out_hears_why_and_cannot_come_again(house):
    a, b = Caller(house), Caller(house, name="b")
    a.say(a.hello())
    b.say(b.hello())
    house.learners.expel("a", "its key was revoked", 0.0)
    refused, lost = a.heard()
    assert refused.is_final and refused.why == "expelled" and refused.text.endswith("operator: its key was revoked")
    assert isinstance(lost, Lost) and not a.is_in and b.is_in
    for again in (Caller(house), Caller(house, process="second")):
        refused, lost = again.say(again.hello(life=1 if again.process == a.process else 0))
        assert refused.is_final and refused.why == "expelled" and not again.is_in
    house.learners.expel("c", "it never was here", 0.0)
    c = Caller(house, name="c")
    assert c.say(c.hello())[0].why == "expelled" and house.lives == [("a", 1), ("b", 1)]


def test_a_learner_that_was_let_in_again_is_in_no_list_of_those_that_were_turned_away(house):
    def rows():
        return [(row["who"], row["count"]) for row in house.learners.turned_away.rows(0.0)]

    for name in ("a", "b"):
        one = Caller(house, name=name)
        one.say(one.hello())
        house.learners.take(Instructed(9, DropLearner(name), "admin.token"), 0.0)
    assert rows() == [("a", 1), ("b", 1)]
    house.learners.take(Instructed(9, ReadmitLearner("a"), "admin.token"), 0.0)
    assert rows() == [("b", 1)]
    house.learners.expel("b", "its key was revoked", 0.0)
    house.learners.take(Instructed(9, ReadmitLearner("b"), "admin.token"), 0.0)
    assert [who for who, _ in rows()] == ["b"], "it has no key yet"
    house.learners.readmit("b", 0.0)
    assert rows() == []


def test_what_was_on_its_way_from_a_dismissed_peer_is_not_taken_for_anybodys(house):
    """The old process reports while the new one says hello: its peer is nobody by the time that is read."""
    old, new = Caller(house), Caller(house, process="second", key="a")
    old.say(old.hello())
    new.endpoint.send(new.peer, new.hello())
    old.endpoint.send(old.peer, old.report())
    house.settle()
    assert house.node.machine.members["a"].report is None and house.is_connected("a") and new.is_in


def test_a_life_this_syncer_never_gave_out_is_turned_away_but_not_for_good(house):
    a = Caller(house)
    refused, lost = a.say(a.hello(life=5))
    assert isinstance(refused, Refused) and refused.why == "ahead" and "says it is in life 5" in refused.text
    assert isinstance(lost, Lost) and house.learners.joining == {} and house.lives == []


def test_a_connection_that_ends_is_a_learner_that_departs_once(house):
    a = Caller(house)
    a.say(a.hello())
    a.endpoint.drop(a.peer, "gone")
    house.settle()
    assert not a.is_in and house.learners.links == {} and not house.is_connected("a")


def test_what_is_sent_to_somebody_who_is_not_there_is_lost(house):
    house.learners.send("nobody", 1, Stop(1, 1), None, None)
    house.learners.dismiss("nobody", 1, Refused("whoever you are"))
    a = Caller(house)
    a.say(a.hello())
    house.learners.send("a", 2, Stop(1, 2), None, None)
    assert a.heard() == [] and a.is_in


# ------------------------------------------------------------------------------------------ the learner's side


class Island:
    """A learner's node and its uplink, joined to an endpoint that a test speaks through."""

    def __init__(self, config):
        self.config = config
        layout = layout_of([Tensor("w", (300,))])
        self.table = encode_fragments(split(layout, 1))
        self.uplink = Uplink()
        self.node = self.uplink.node = LearnerNode(
            "a", layout, self.uplink, "process", lambda: 0.0, mailbox()[1], Boxes()
        )
        self.inbox, self.syncer_inbox = Inbox(), Inbox()
        self.endpoint = self.uplink.endpoint = MemoryEndpoint(self.inbox, learner_dialect(self.uplink.payload_bytes))
        self.syncer = MemoryEndpoint(self.syncer_inbox, syncer_dialect(lambda message: 0))

    def link(self):
        self.at_syncer, self.peer = join(self.syncer, self.endpoint)
        return self.settle()

    def settle(self):
        """What the syncer hears once the learner has taken in what was said to it."""
        while not self.inbox.empty():
            self.uplink.take(self.inbox.get_nowait())
        found = []
        while not self.syncer_inbox.empty():
            event = self.syncer_inbox.get_nowait()
            if isinstance(event, Received):
                found.append(event.message)
        return found

    def tell(self, message, payload=None):
        self.syncer.send(self.at_syncer, message, payload)
        return self.settle()

    def welcome(self):
        return self.tell(Welcome("run", 1, "a", 1, 0, configs.encode(self.config), self.table, 0, 0, 0.0))

    def publication(self, fragment=0, base_version=FULL, codec="fp32"):
        return Publication(1, 1, fragment, 1, base_version, codec, b"", 0, 0, 0.0)


@pytest.fixture
def island():
    return Island(config_of(sync={"num_fragments": 1}, wire={"codec_down": "int8"}))


def test_a_new_process_says_hello_and_one_that_comes_back_says_which_life_it_is(island):
    (hello,) = island.link()
    assert (hello.learner, hello.life, hello.protocol) == ("a", 0, PROTOCOL)
    island.welcome()
    island.syncer.drop(island.at_syncer, "gone")
    island.settle()
    assert island.uplink.peer is None
    again = next(message for message in island.link() if isinstance(message, Hello))
    assert (again.process, again.life) == (hello.process, 1)


def test_the_end_of_an_older_connection_is_not_the_end_of_this_one(island):
    island.link()
    island.welcome()
    island.uplink.take(Lost(island.peer + 1, "long gone"))
    assert island.uplink.peer == island.peer


def test_a_refusal_ends_the_learner_only_if_it_is_final(island):
    island.link()
    island.tell(Refused("the tape lost its end", "ahead"))
    assert island.node.left is None and island.uplink.turned_away == "the tape lost its end"
    island.tell(Refused("use another name"))
    assert island.node.left == Leave("refused", Refused("use another name"))


def test_a_publication_has_one_legal_length_and_none_before_the_welcome(island):
    limit = island.uplink.payload_bytes
    island.link()
    with pytest.raises(ProtocolError):
        limit(island.publication())
    island.welcome()
    (fragment,) = island.node.fragments
    whole, delta = limit(island.publication()), limit(island.publication(base_version=0, codec="int8"))
    assert whole == 4 * fragment.size and delta == island.node.algebra.payload_bytes("int8", fragment) < whole
    for wrong in (
        island.publication(fragment=1),
        island.publication(fragment=-1),
        island.publication(base_version=0, codec="int4"),
        Pull(1, 1, 0, 0, False, 0.0),
    ):
        with pytest.raises(ProtocolError):
            limit(wrong)


def test_what_is_sent_without_a_syncer_is_lost(island):
    island.uplink.send(Ask())
    assert [type(message) for message in island.link()] == [Hello]
    assert (island.uplink.bytes_up, island.uplink.bytes_down) == (island.endpoint.bytes_out, island.endpoint.bytes_in)
