"""The rules of a view, one by one, with time passed in."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from mesh_llm.defaults import MEMBER_KNOWN_LIMIT
from mesh_llm.errors import Forged
from mesh_llm.lab.simulate.signing import opened, seal
from mesh_llm.lab.simulate.world import facts
from mesh_llm.membership import gossip
from mesh_llm.membership.checked_fields import WHOLE_LIMIT
from mesh_llm.membership.dial_backoff import MEMBER_DIAL_FIRST_S
from mesh_llm.membership.effects import Changed, Connect, Disconnect, Duplicate, Effect, Send
from mesh_llm.membership.member import Member, Standing
from mesh_llm.membership.messages import (
    Ack,
    Compare,
    Entry,
    GuestMessage,
    Hears,
    Leave,
    Message,
    Ping,
    Summary,
    Update,
    Want,
)
from mesh_llm.membership.outbox import Outbox
from mesh_llm.membership.own_record import COPIED_HOME, MEMBER_REFUTATIONS
from mesh_llm.membership.record import Record, Told, joined, record_text
from mesh_llm.membership.record import told as as_told
from mesh_llm.membership.ring import MEMBER_SMALL, chosen
from mesh_llm.membership.view import MEMBER_REMEMBER_S, MEMBER_TOMBSTONE_S, View
from mesh_llm.types import Address, NodeId, Role, State

ME, ANN, BEN, CAT = (NodeId(sign * 64) for sign in "5139")
"""Ann has a lower id than we, Cat a higher one."""
START = 100.0


def a_view(me: NodeId = ME) -> View:
    return View(me, incarnation=1000, facts=facts("me"), now=START, seed=1, seal=seal, open=opened)


def a_record(
    node: NodeId, *, incarnation: int = 7, sequence: int = 0, standing: Standing = Standing.ALIVE
) -> Record:
    return signed(
        Record(
            node=node,
            incarnation=incarnation,
            sequence=sequence,
            standing=standing,
            facts=facts(node[:4]),
            left=standing is Standing.LEFT,
        )
    )


def signed(record: Record) -> Record:
    return replace(record, signed=seal(record_text(record)))


def update(*records: Record) -> Update:
    return Update(records=tuple(map(as_told, records)))


def hint(record: Record) -> Update:
    """What others think of a node, without its own words."""
    return Update(records=(as_told(record).hint(),))


def sent(effects: list[Effect], to: NodeId | None = None) -> list[Message]:
    return [effect.message for effect in effects if isinstance(effect, Send) and to in (None, effect.to)]


def told(effects: list[Effect], to: NodeId) -> list[Told]:
    return [
        record for message in sent(effects, to) if isinstance(message, Update) for record in message.records
    ]


def changed(effects: list[Effect]) -> list[NodeId]:
    return [node for effect in effects if isinstance(effect, Changed) for node in effect.nodes]


def seen(view: View, node: NodeId) -> Member:
    member = view.member(node)
    assert member is not None
    return member


def join(view: View, *nodes: NodeId, now: float = START) -> list[Effect]:
    effects = []
    for node in nodes:
        effects += view.on_connected(node, now)
        effects += view.on_message(node, update(a_record(node)), now)
    return effects


def ticks(view: View, begin: float, end: float, *, pinged_by: tuple[NodeId, ...] = ()) -> list[Effect]:
    """Tick after tick, with a ping from some before each."""
    effects: list[Effect] = []
    now = begin
    while now <= end:
        for node in pinged_by:
            effects += view.on_message(node, a_ping(view), now)
        effects += view.on_tick(now)
        now += 0.25
    return effects


def a_leave(node: NodeId) -> Leave:
    return Leave(record=as_told(a_record(node, sequence=1, standing=Standing.LEFT)))


def a_ping(view: View, *, incarnation: int = 7, keep: bool = True) -> Ping:
    return Ping(number=1, incarnation=incarnation, digest=view.digest, hears=0, keep=keep)


def test_a_view_begins_with_itself() -> None:
    view = a_view()
    (me,) = view.members
    assert (me.id, me.standing, me.incarnation, me.since) == (ME, Standing.ALIVE, 1000, START)
    assert view.member(ANN) is None


def test_a_connection_begins_with_ones_own_record() -> None:
    view = a_view()
    effects = view.on_connected(ANN, START)
    assert [record.node for record in told(effects, ANN)] == [ME]
    assert view.member(ANN) is None
    effects = view.on_message(ANN, update(a_record(ANN)), START)
    assert changed(effects) == [ANN]
    ann = seen(view, ANN)
    assert (ann.standing, ann.connected, ann.via, ann.facts) == (Standing.ALIVE, True, (), facts(ANN[:4]))


def test_the_lower_id_compares_ledgers_first() -> None:
    assert any(isinstance(message, Compare) for message in sent(a_view().on_connected(CAT, START)))
    assert not any(isinstance(message, Compare) for message in sent(a_view().on_connected(ANN, START)))


def test_news_go_to_all_but_their_source() -> None:
    view = a_view()
    join(view, ANN, BEN)
    view.on_tick(START + 0.25)
    effects = view.on_message(ANN, update(a_record(CAT)), START + 0.5)
    assert told(effects, BEN) == [as_told(a_record(CAT))]
    assert told(effects, ANN) == []
    # The same again is no news.
    assert view.on_message(BEN, update(a_record(CAT)), START + 0.6) == []


def test_one_pings_every_second() -> None:
    view = a_view()
    join(view, ANN)
    pings = 0
    for step in range(40):
        for message in sent(view.on_tick(START + step * 0.25)):
            if isinstance(message, Ping):
                pings += 1
                ack = Ack(number=message.number, incarnation=7, digest=view.digest)
                view.on_message(ANN, ack, START + step * 0.25 + 0.01)
    assert pings in (9, 10)


def test_delay_is_a_median_and_not_of_the_first_samples() -> None:
    view = a_view()
    join(view, ANN)
    (first,) = [message for message in sent(view.on_tick(START + 1)) if isinstance(message, Ping)]
    delays = iter([0.9, 0.020, 0.030, 0.020, 0.9, 0.020])
    shown = []
    ping, at = first, START + 1
    for number, delay in enumerate(delays, start=2):
        ack = Ack(number=ping.number, incarnation=7, digest=view.digest)
        view.on_message(ANN, ack, at + delay)
        shown.append(seen(view, ANN).rtt_s)
        at = START + number
        (ping,) = [message for message in sent(view.on_tick(at)) if isinstance(message, Ping)]
    assert shown[:3] == [None, None, None]
    assert shown[3:] == [
        pytest.approx(0.02, abs=1e-6),
        pytest.approx(0.025, abs=1e-6),
        pytest.approx(0.02, abs=1e-6),
    ]


def test_an_answer_to_no_ping_says_nothing() -> None:
    view = a_view()
    join(view, ANN)
    for number in range(50, 60):
        view.on_message(ANN, Ack(number=number, incarnation=7, digest=0), START + 1)
    assert seen(view, ANN).rtt_s is None


def test_silence_is_suspicion_then_death() -> None:
    view = a_view()
    join(view, ANN)
    ticks(view, START + 0.25, START + 1.75)
    assert seen(view, ANN).standing is Standing.ALIVE
    effects = view.on_tick(START + 2.0)
    assert seen(view, ANN).standing is Standing.SUSPECT
    # It is told of the suspicion itself, if it can hear us.
    assert [record.standing for record in told(effects, ANN)] == [Standing.SUSPECT]
    effects = ticks(view, START + 2.25, START + 2.75)
    assert seen(view, ANN).standing is Standing.DEAD
    assert Disconnect(node=ANN, reason="it is silent") in effects
    assert seen(view, ANN).since == START + 2.75


def test_a_late_word_ends_the_suspicion() -> None:
    view = a_view()
    join(view, ANN)
    ticks(view, START + 0.25, START + 2.25)
    effects = view.on_message(ANN, a_ping(view), START + 2.4)
    assert changed(effects) == [ANN]
    assert seen(view, ANN).standing is Standing.ALIVE
    # And the node gets to know, so that it can refute what others may have heard from us.
    assert [record.standing for record in told(effects, ANN)] == [Standing.SUSPECT]


def test_a_closed_connection_is_suspicion_at_once() -> None:
    view = a_view()
    join(view, ANN, BEN)
    view.on_tick(START + 0.25)
    effects = view.on_disconnected(ANN, START + 0.4)
    assert seen(view, ANN).standing is Standing.SUSPECT
    assert [record.standing for record in told(effects, BEN)] == [Standing.SUSPECT]
    ticks(view, START + 0.5, START + 1.25)
    assert seen(view, ANN).standing is Standing.DEAD


def test_a_connection_that_comes_back_in_time_is_no_death() -> None:
    view = a_view()
    join(view, ANN)
    view.on_tick(START + 0.25)
    effects = view.on_disconnected(ANN, START + 0.4)
    effects += ticks(view, START + 0.5, START + 0.75)
    assert any(isinstance(effect, Connect) and effect.node == ANN for effect in effects)
    view.on_connected(ANN, START + 0.8)
    assert seen(view, ANN).standing is Standing.ALIVE


def test_a_neighbour_that_hears_it_vouches() -> None:
    view = a_view()
    join(view, ANN, BEN)
    view.on_message(BEN, Hears(nodes=(ANN,)), START)
    view.on_tick(START + 0.25)
    view.on_disconnected(ANN, START + 0.4)
    ticks(view, START + 0.5, START + 30, pinged_by=(BEN,))
    ann = seen(view, ANN)
    assert (ann.standing, ann.connected, ann.via) == (Standing.ALIVE, False, (BEN,))
    # Until it no longer does, and nobody can reach it.
    effects = view.on_message(BEN, Hears(nodes=()), START + 30.1)
    assert changed(effects) == [ANN]
    ticks(view, START + 30.25, START + 45, pinged_by=(BEN,))
    assert seen(view, ANN).standing is Standing.DEAD


def test_a_voucher_that_is_silent_itself_does_not_count() -> None:
    view = a_view()
    join(view, ANN, BEN)
    view.on_message(BEN, Hears(nodes=(ANN,)), START)
    view.on_message(ANN, Hears(nodes=(BEN,)), START)
    ticks(view, START + 0.25, START + 3)
    assert {seen(view, node).standing for node in (ANN, BEN)} == {Standing.DEAD}


def test_a_refuted_suspicion_ends() -> None:
    view = a_view()
    join(view, ANN, BEN)
    view.on_tick(START + 0.25)
    view.on_disconnected(ANN, START + 0.4)
    view.on_message(BEN, update(a_record(ANN, incarnation=8)), START + 0.6)
    assert seen(view, ANN).standing is Standing.ALIVE
    ticks(view, START + 0.75, START + 3, pinged_by=(BEN,))
    assert seen(view, ANN).standing is Standing.ALIVE


def test_a_silent_connection_to_one_that_refutes_is_given_up() -> None:
    """Ann restarted, and knows nothing of the connection that we still hold; Ben tells what she says."""
    view = a_view()
    join(view, ANN, BEN)
    effects: list[Effect] = []
    doubts, now = 0, START
    while now < START + 6:
        now += 0.25
        effects += ticks(view, now, now, pinged_by=(BEN,))
        if seen(view, ANN).standing is Standing.SUSPECT:
            doubts += 1
            renewed = a_record(ANN, incarnation=seen(view, ANN).incarnation + 1)
            effects += view.on_message(BEN, update(renewed), now + 0.1)
    assert effects.count(Disconnect(node=ANN, reason="it is silent")) == 1
    assert doubts <= 4
    assert seen(view, ANN).standing is Standing.ALIVE


def test_what_is_heard_is_not_dead_whatever_others_say() -> None:
    view = a_view()
    join(view, ANN, BEN)
    view.on_tick(START + 0.25)
    dead = a_record(ANN, standing=Standing.DEAD)
    effects = view.on_message(BEN, hint(dead), START + 0.5)
    assert changed(effects) == []
    assert told(effects, ANN) == [as_told(dead)]
    assert seen(view, ANN).standing is Standing.ALIVE


def test_we_refute_what_is_said_about_us() -> None:
    view = a_view()
    join(view, ANN, BEN)
    view.on_tick(START + 0.25)
    said = a_record(ME, incarnation=1000, standing=Standing.SUSPECT)
    effects = view.on_message(ANN, hint(said), START + 0.5)
    for node in (ANN, BEN):
        (record,) = told(effects, node)
        assert (record.node, record.incarnation, record.standing) == (ME, 1001, Standing.ALIVE)
    assert not any(isinstance(effect, Duplicate) for effect in effects)
    # An old story is not worth an answer.
    assert told(view.on_message(BEN, update(said), START + 0.7), BEN) == []


def test_a_higher_incarnation_of_ours_is_exceeded() -> None:
    view = a_view()
    join(view, ANN)
    view.on_message(ANN, update(a_record(ME, incarnation=5000)), START + 0.5)
    assert seen(view, ME).incarnation == 5001


def test_old_gossip_does_not_wake_the_dead() -> None:
    view = a_view()
    join(view, ANN, BEN)
    view.on_message(BEN, a_leave(BEN), START + 0.1)
    assert seen(view, BEN).standing is Standing.LEFT
    effects = view.on_message(ANN, update(a_record(BEN, sequence=3)), START + 0.2)
    assert seen(view, BEN).standing is Standing.LEFT
    view.on_message(ANN, update(a_record(BEN, incarnation=8)), START + 0.3)
    assert seen(view, BEN).standing is Standing.ALIVE
    assert effects == [] or changed(effects) == []


def test_an_unknown_tombstone_is_kept_but_not_told_on() -> None:
    view = a_view()
    join(view, ANN, BEN)
    view.on_tick(START + 0.25)
    effects = view.on_message(ANN, update(a_record(CAT, standing=Standing.DEAD)), START + 0.5)
    assert told(effects, BEN) == []
    view.on_message(BEN, update(a_record(CAT)), START + 0.6)
    assert seen(view, CAT).standing is Standing.DEAD


def test_tombstones_are_forgotten_and_the_address_is_kept() -> None:
    view = a_view()
    join(view, ANN, BEN)
    view.on_message(BEN, a_leave(BEN), START)
    view.on_disconnected(BEN, START)
    ticks(view, START + 0.25, START + 3)
    assert seen(view, ANN).standing is Standing.DEAD
    view.on_tick(START + MEMBER_TOMBSTONE_S + 60)
    assert [member.id for member in view.members] == [ME]
    tried = ticks(view, START + MEMBER_TOMBSTONE_S + 61, START + MEMBER_TOMBSTONE_S + 161)
    assert {effect.node for effect in tried if isinstance(effect, Connect)} == {ANN}
    view.on_tick(START + MEMBER_TOMBSTONE_S + MEMBER_REMEMBER_S + 120)
    later = START + MEMBER_TOMBSTONE_S + MEMBER_REMEMBER_S + 121
    assert not [effect for effect in ticks(view, later, later + 100) if isinstance(effect, Connect)]


def test_a_member_that_died_is_tried_less_and_less_often() -> None:
    view = a_view()
    join(view, ANN)
    tried = []
    now = START
    while now < START + 600:
        now += 0.25
        tried += [now for effect in view.on_tick(now) if isinstance(effect, Connect)]
    assert 600 / 40 < len(tried) < 600 / 20
    pauses = [later - earlier for earlier, later in itertools.pairwise(tried)]
    assert pauses[0] < 4
    assert max(pauses) <= 38
    assert len(set(pauses[-8:])) > 3, "in step with everybody else"


def test_the_lower_id_dials_first() -> None:
    for node, first_s in ((CAT, 0.0), (ANN, 1.0)):
        view = a_view()
        view.know([a_record(node)], START)
        now = START
        while not any(isinstance(effect, Connect) for effect in view.on_tick(now)):
            now += 0.05
        assert first_s <= now - START <= first_s + 0.35


def test_the_remembered_are_no_members_until_they_are_heard() -> None:
    view = a_view()
    view.know([a_record(CAT, incarnation=900)], START)
    assert [member.id for member in view.members] == [ME]
    assert Connect(node=CAT, address=facts("").address) in view.on_tick(START)
    join(view, ANN)
    # Alive by gossip, although with a lower incarnation than remembered: its clock was set back.
    view.on_message(ANN, update(a_record(CAT, incarnation=8)), START + 1)
    assert seen(view, CAT).standing is Standing.ALIVE


def test_in_another_network_everybody_is_tried_again_soon() -> None:
    view = a_view()
    view.know([a_record(CAT)], START)
    now = tried_at = START
    while tried_at < START + 120:
        now += 0.25
        if any(isinstance(effect, Connect) for effect in view.on_tick(now)):
            tried_at = now
    # Half a minute would pass until the next attempt.
    view.publish(facts(ME[:4], address=Address(direct=("192.0.2.9:1",))), now)
    assert Connect(node=CAT, address=facts("").address) in ticks(view, now, now + MEMBER_DIAL_FIRST_S)


def test_nobody_dials_nowhere() -> None:
    view = a_view()
    view.know([replace(a_record(CAT), facts=facts("x", address=Address()))], START)
    assert ticks(view, START, START + 30) == []


def test_the_expelled_stay_out_while_nobody_verifies_them() -> None:
    out: set[NodeId] = set()
    view = View(
        ME,
        incarnation=1000,
        facts=facts("me"),
        now=START,
        seed=1,
        seal=seal,
        open=lambda told: None if told.node in out else opened(told),
    )
    join(view, ANN, CAT)
    out.add(CAT)
    effects = view.forget(CAT, START + 0.1)
    assert Disconnect(node=CAT, reason="it has been expelled") in effects
    assert changed(effects) == [CAT]
    view.on_message(ANN, update(a_record(CAT, incarnation=99)), START + 0.2)
    view.on_message(CAT, update(a_record(CAT, incarnation=99)), START + 0.2)
    assert view.member(CAT) is None
    out.clear()
    join(view, CAT, now=START + 0.3)
    assert seen(view, CAT).standing is Standing.ALIVE


def test_who_passes_on_a_forged_record_is_disconnected() -> None:
    def refuse(told: Told) -> Record:
        raise Forged("a record with an invalid signature")

    view = View(ME, incarnation=1000, facts=facts("me"), now=START, seed=1, seal=seal, open=refuse)
    view.on_connected(ANN, START)
    effects = view.on_message(ANN, update(a_record(CAT)), START)
    assert Disconnect(node=ANN, reason="a record with an invalid signature") in effects
    assert view.member(CAT) is None


def test_a_hint_counts_only_for_the_life_that_its_node_has_signed() -> None:
    view = a_view()
    join(view, ANN)
    view.on_message(ANN, update(a_record(CAT)), START + 0.1)
    for incarnation in (8, 1 << 52):
        hinted = hint(a_record(CAT, incarnation=incarnation, standing=Standing.DEAD))
        effects = view.on_message(ANN, hinted, START + 0.2)
        assert seen(view, CAT).standing is Standing.ALIVE
        assert seen(view, CAT).incarnation == 7
        # It may be so: then there is something that Cat has signed.
        assert Want(nodes=(CAT,)) in sent(effects, ANN)
    view.on_message(ANN, hint(a_record(CAT, standing=Standing.DEAD)), START + 0.3)
    assert seen(view, CAT).standing is Standing.DEAD


def test_nobody_but_the_node_itself_says_that_it_left() -> None:
    view = a_view()
    join(view, ANN, BEN)
    forged = replace(as_told(a_record(CAT)), standing=Standing.LEFT)
    view.on_message(ANN, update(a_record(CAT)), START + 0.1)
    view.on_message(ANN, Update(records=(forged,)), START + 0.2)
    assert seen(view, CAT).standing is Standing.ALIVE
    view.on_message(ANN, a_leave(CAT), START + 0.3)
    assert seen(view, CAT).standing is Standing.ALIVE, "brought by somebody else than Cat"
    view.on_message(ANN, Update(records=(a_leave(CAT).record,)), START + 0.4)
    assert seen(view, CAT).standing is Standing.LEFT


def test_a_closed_goodbye_is_told_to_nobody() -> None:
    view = a_view()
    join(view, ANN, BEN)
    view.on_tick(START + 0.25)
    effects = view.on_left(ANN, START + 0.5)
    assert seen(view, ANN).standing is Standing.LEFT
    assert told(effects, BEN) == []


def test_hints_are_refuted_now_and_then_and_not_each_time() -> None:
    view = a_view()
    join(view, ANN)
    for count in range(1000):
        mine = seen(view, ME).incarnation
        said = a_record(ME, incarnation=mine, standing=Standing.SUSPECT)
        view.on_message(ANN, hint(said), START + 1 + count / 1000)
    assert 1000 + MEMBER_REFUTATIONS <= seen(view, ME).incarnation <= 1000 + MEMBER_REFUTATIONS + 3


# -- clients ---------------------------------------------------------------------------------------


def a_client() -> View:
    known = replace(facts("laptop"), role=Role.CLIENT)
    return View(ME, incarnation=1000, facts=known, now=START, seed=1, seal=seal, open=opened)


def test_a_client_tells_its_name_and_no_record() -> None:
    client = a_client()
    effects = client.on_connected(ANN, START)
    assert told(effects, ANN) == []
    assert [message for message in sent(effects) if isinstance(message, GuestMessage)] == [
        GuestMessage(name="laptop", version="1.0", state=State.STARTING, reason="")
    ]
    assert client.records == ()
    assert seen(client, ME).facts.role is Role.CLIENT


def test_a_client_is_known_where_it_is_connected_and_nowhere_else() -> None:
    view = a_view()
    join(view, ANN)
    view.on_tick(START + 0.25)
    effects = view.on_visitor(CAT, START + 0.5)
    guest = GuestMessage(name="laptop", version="1.0", state=State.SERVING, reason="")
    effects += view.on_message(CAT, guest, START + 0.6)
    effects += ticks(view, START + 0.75, START + 3, pinged_by=(ANN, CAT))
    assert (seen(view, CAT).facts.name, seen(view, CAT).facts.role) == ("laptop", Role.CLIENT)
    assert not [effect for effect in effects if isinstance(effect, Connect)]
    assert [record.node for record in view.records] == sorted((ANN, ME))
    assert not any(CAT in message.nodes for message in sent(effects, ANN) if isinstance(message, Hears))
    view.on_disconnected(CAT, START + 3.1)
    assert view.member(CAT) is None


def test_a_client_is_believed_nothing_about_members() -> None:
    view = a_view()
    join(view, ANN)
    view.on_visitor(CAT, START)
    dead = a_record(ANN, standing=Standing.DEAD)
    for message in (
        hint(dead),
        update(a_record(BEN)),
        update(a_record(CAT)),
        Hears(nodes=(BEN,)),
        a_leave(CAT),
        Summary(buckets=(1,), entries=()),
    ):
        assert [
            effect for effect in view.on_message(CAT, message, START + 0.1) if isinstance(effect, Send)
        ] == []
    assert [member.id for member in view.members] == sorted((ANN, ME, CAT))
    assert seen(view, ANN).standing is Standing.ALIVE


def test_a_client_learns_what_members_know() -> None:
    node, client = a_view(ANN), a_client()
    for other in (BEN, CAT):
        join(node, other)
    messages = [(client, ANN, message) for message in sent(node.on_visitor(ME, START), ME)]
    messages += [(node, ME, message) for message in sent(client.on_connected(ANN, START), ANN)]
    while messages:
        view, sender, message = messages.pop(0)
        effects = view.on_message(sender, message, START)
        far, me = (client, ANN) if view is node else (node, ME)
        messages += [(far, me, each) for each in sent(effects, ANN if view is client else ME)]
    assert {member.id for member in client.members if member.present} == {ME, ANN, BEN, CAT}
    assert client.digest == node.digest


def test_a_client_that_took_a_node_for_dead_hears_it_again() -> None:
    client = a_client()
    client.on_connected(ANN, START)
    client.on_message(ANN, update(a_record(ANN)), START)
    ticks(client, START + 0.25, START + 4)
    assert seen(client, ANN).standing is Standing.DEAD
    client.on_connected(ANN, START + 5)
    client.on_message(ANN, a_ping(client), START + 5.1)
    assert seen(client, ANN).standing is Standing.ALIVE


def test_a_client_looks_for_a_node_that_left() -> None:
    """Nobody dials a client: a node that is back after a restart would never be heard of."""
    client = a_client()
    client.on_connected(ANN, START)
    client.on_message(ANN, update(a_record(ANN)), START)
    client.on_message(ANN, a_leave(ANN), START + 1)
    client.on_left(ANN, START + 1.1)
    client.on_disconnected(ANN, START + 1.1)
    assert seen(client, ANN).standing is Standing.LEFT
    dialled = [effect for effect in ticks(client, START + 1.25, START + 10) if isinstance(effect, Connect)]
    assert {effect.node for effect in dialled} == {ANN}
    client.on_connected(ANN, START + 11)
    client.on_message(ANN, update(a_record(ANN, incarnation=2000)), START + 11)
    assert seen(client, ANN).standing is Standing.ALIVE
    assert not [each for each in ticks(client, START + 11.25, START + 13) if isinstance(each, Connect)]


def test_a_silent_client_is_let_go() -> None:
    view = a_view()
    view.on_visitor(CAT, START)
    effects = ticks(view, START + 0.25, START + 40)
    assert Disconnect(node=CAT, reason="it is silent") in effects
    assert view.member(CAT) is None


def test_leaving_tells_everybody_and_then_nothing() -> None:
    view = a_view()
    join(view, ANN, BEN)
    view.on_tick(START + 0.25)
    effects = view.leave(START + 0.5)
    (first, second) = sent(effects)
    assert first == second
    assert isinstance(first, Leave)
    record = opened(first.record)
    assert record is not None
    assert (record.node, record.incarnation, record.standing) == (ME, 1000, Standing.LEFT)
    assert seen(view, ME).standing is Standing.LEFT
    assert view.on_tick(START + 1) == []
    said = a_record(ME, incarnation=1000, standing=Standing.DEAD)
    assert view.on_message(ANN, update(said), START + 1) == []
    assert view.on_disconnected(ANN, START + 1.2)[1:] == []


@pytest.mark.parametrize("jump_s", [60.0, 7200.0, -50.0])
def test_after_a_jump_of_the_clock_nobody_is_dead(jump_s: float) -> None:
    view = a_view()
    join(view, ANN, CAT)
    ticks(view, START + 0.25, START + 2, pinged_by=(ANN, CAT))
    woken = START + 2 + jump_s
    effects = view.on_tick(woken)
    assert {
        effect.to for effect in effects if isinstance(effect, Send) and isinstance(effect.message, Ping)
    } == {ANN, CAT}
    effects = ticks(view, woken + 0.25, woken + 3)
    assert {seen(view, node).standing for node in (ANN, CAT)} == {Standing.SUSPECT}
    # The connections are given up, and new ones tried.
    assert {effect.node for effect in effects if isinstance(effect, Disconnect)} == {ANN, CAT}
    effects = ticks(view, woken + 3.25, woken + 6)
    assert {effect.node for effect in effects if isinstance(effect, Connect)} == {ANN, CAT}
    view.on_connected(ANN, woken + 6.1)
    ticks(view, woken + 6.25, woken + 11, pinged_by=(ANN,))
    assert (seen(view, ANN).standing, seen(view, CAT).standing) == (Standing.ALIVE, Standing.DEAD)


def test_what_we_could_not_hear_is_nobodys_silence() -> None:
    view = a_view()
    join(view, ANN)
    now = START
    while now < START + 6:
        now += 1.25
        view.on_tick(now)
        assert seen(view, ANN).standing is Standing.ALIVE
        if now > START + 3:
            view.on_message(ANN, a_ping(view), now)

    # One that is gone is missed all the same, if later.
    looks = 0
    while seen(view, ANN).standing is not Standing.DEAD:
        looks += 1
        view.on_tick(now + 1.25 * looks)
    assert 5 <= looks <= 7


def test_a_doubt_waits_while_we_cannot_listen() -> None:
    view = a_view()
    join(view, ANN)
    ticks(view, START + 0.25, START + 2)
    assert seen(view, ANN).standing is Standing.SUSPECT
    view.on_tick(START + 3.4)
    assert seen(view, ANN).standing is Standing.SUSPECT
    view.on_message(ANN, a_ping(view), START + 3.4)
    assert seen(view, ANN).standing is Standing.ALIVE


def test_our_own_id_on_the_other_side_is_a_copied_home() -> None:
    view = a_view()
    effects = view.on_connected(ME, START)
    assert Duplicate(reason=COPIED_HOME) in effects
    assert Disconnect(node=ME, reason="it has this node's own id") in effects
    assert not any(isinstance(effect, Duplicate) for effect in view.on_connected(ME, START + 1))


def claims_until_duplicate(view: View, first: int) -> int:
    claimed = first
    for count in range(1, 20):
        effects = view.on_message(ANN, update(a_record(ME, incarnation=claimed)), START + count * 0.2)
        if any(isinstance(effect, Duplicate) for effect in effects):
            return count
        claimed = seen(view, ME).incarnation + 1
    raise AssertionError("never")


def test_a_newcomer_gives_up_before_the_original() -> None:
    newcomer, original = a_view(), a_view()
    join(newcomer, ANN)
    join(original, ANN)
    assert claims_until_duplicate(newcomer, 1001) == 3
    assert claims_until_duplicate(original, 900_000) == 6


def test_the_highest_incarnation_cannot_be_exceeded() -> None:
    view = a_view()
    join(view, ANN)
    said = a_record(ME, incarnation=WHOLE_LIMIT, standing=Standing.DEAD)
    assert not any(isinstance(e, Duplicate) for e in view.on_message(ANN, hint(said), START + 0.4))
    # Signed with our own key it is no invention.
    assert Duplicate(reason=COPIED_HOME) in view.on_message(ANN, update(said), START + 0.5)
    assert seen(view, ME).incarnation == 1000


def test_facts_are_published_once() -> None:
    view = a_view()
    join(view, ANN)
    view.on_tick(START + 0.25)
    effects = view.publish(facts("me", lent_bytes=5), START + 0.5)
    assert [record.sequence for record in told(effects, ANN)] == [1]
    assert changed(effects) == [ME]
    assert view.publish(facts("me", lent_bytes=5), START + 0.6) == []


def test_older_facts_do_not_replace_newer_ones() -> None:
    view = a_view()
    join(view, ANN)
    newer = signed(replace(a_record(ANN, sequence=4), facts=facts("new")))
    view.on_message(ANN, update(newer), START + 0.1)
    view.on_message(ANN, update(a_record(ANN, sequence=3)), START + 0.2)
    assert seen(view, ANN).facts == facts("new")


def test_strangers_are_not_listened_to() -> None:
    view = a_view()
    assert view.on_message(ANN, update(a_record(ANN)), START) == []
    assert view.member(ANN) is None


def test_who_pings_unknown_is_asked_for_its_record() -> None:
    view = a_view()
    view.on_connected(ANN, START)
    effects = view.on_message(ANN, a_ping(view), START + 0.1)
    assert Want(nodes=(ANN,)) in sent(effects, ANN)


def test_what_is_known_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    assert MEMBER_KNOWN_LIMIT >= 4000
    monkeypatch.setattr(gossip, "MEMBER_KNOWN_LIMIT", 20)
    view = a_view()
    join(view, ANN)
    for number in range(100):
        stranger = NodeId(f"{number:064x}")
        view.on_message(ANN, update(a_record(stranger, standing=Standing.DEAD)), START + number / 100)
    assert len(view.members) == 20
    view.on_message(
        ANN, update(*(a_record(NodeId(f"{n:064x}"), incarnation=9) for n in range(200, 300))), START + 1
    )
    assert len(view.members) == 20
    assert seen(view, ANN).standing is Standing.ALIVE
    view.know((a_record(NodeId(f"{n:064x}")) for n in range(500, 600)), START + 1)


def test_records_join_the_same_in_any_order() -> None:
    alive, later = a_record(ANN), a_record(ANN, sequence=2)
    suspect = a_record(ANN, standing=Standing.SUSPECT)
    dead = a_record(ANN, standing=Standing.DEAD)
    back = a_record(ANN, incarnation=8)
    for one in (alive, later, suspect, dead, back):
        for other in (alive, later, suspect, dead, back):
            assert joined(one, other).version == joined(other, one).version
    assert joined(later, dead).standing is Standing.DEAD
    assert joined(later, dead).facts == later.facts
    assert joined(dead, back) == back


@pytest.mark.parametrize("count", [2, 16, 17, 100, 1000])
def test_the_active_graph_is_connected_and_of_bounded_degree(count: int) -> None:
    ring = sorted(
        NodeId(f"{number * 0x9E3779B97F4A7C15 % (1 << 64):016x}" * 4) for number in range(1, count + 1)
    )
    edges: dict[NodeId, set[NodeId]] = {node: set() for node in ring}
    for node in ring:
        for other in chosen(node, ring):
            edges[node].add(other)
            edges[other].add(node)
    assert max(map(len, edges.values())) <= 30
    reached, front, hops = {ring[0]}, {ring[0]}, 0
    while front:
        front = {other for node in front for other in edges[node]} - reached
        reached |= front
        hops += 1
    assert reached == set(ring)
    assert hops <= 9


def test_a_new_node_moves_few_connections() -> None:
    ring = sorted(NodeId(f"{number * 0x9E3779B97F4A7C15 % (1 << 64):016x}" * 4) for number in range(1, 301))
    without = ring[:150] + ring[151:]
    moved = [node for node in without if chosen(node, ring) != chosen(node, without)]
    assert len(moved) < 20


def test_in_a_large_mesh_news_of_others_are_announced_and_asked_for_once() -> None:
    view = a_view()
    join(view, ANN)
    join(view, BEN)
    for number in range(MEMBER_SMALL):
        view.on_message(ANN, update(a_record(NodeId(f"{number:064x}"))), START + 0.1)
    news = a_record(NodeId("e" * 64))
    announced = Summary(buckets=(), entries=(entry_of(news),))
    assert Want(nodes=(news.node,)) in sent(view.on_message(ANN, announced, START + 1.0), ANN)
    assert sent(view.on_message(BEN, announced, START + 1.1), BEN) == []
    effects = view.on_message(ANN, update(news), START + 1.2)
    assert sent(effects, BEN) == [announced]
    assert view.member(news.node) is not None


def test_a_large_mesh_announces_together_and_tells_deaths_at_once() -> None:
    dead = as_told(a_record(CAT, standing=Standing.DEAD)).hint()
    known: dict[NodeId, Told | Entry] = {node: entry_of(a_record(node)) for node in (ANN, BEN)} | {CAT: dead}
    outbox = Outbox()

    def flushed(*news: NodeId, at: float, members: int = 10_000) -> list[Message]:
        for node in news:
            outbox.tell(node, None)
        outbox.flush(lambda node: known[node], [ME], at, members)
        return sent(outbox.take())

    def announced(*nodes: NodeId) -> Summary:
        return Summary(buckets=(), entries=tuple(entry_of(a_record(node)) for node in nodes))

    assert flushed(ANN, at=0.0) == [announced(ANN)]
    assert flushed(BEN, at=0.1) == []
    assert flushed(CAT, at=0.2) == [Update(records=(dead,))]
    assert flushed(ANN, at=0.4) == []
    assert flushed(at=0.6) == [announced(BEN, ANN)]
    assert flushed(at=9.0) == []
    assert flushed(BEN, at=9.1, members=100) == [announced(BEN)]
    assert flushed(ANN, at=9.2, members=100) == [announced(ANN)]


@pytest.mark.parametrize(("often_to", "compared"), [(500, 10), (0.2, 1)])
def test_large_tables_are_compared_less_often(
    monkeypatch: pytest.MonkeyPatch, often_to: float, compared: int
) -> None:
    """Two members are ten times as many as the table that is compared every two seconds, or few."""
    monkeypatch.setattr(gossip, "_OFTEN_COMPARED", often_to)
    view = a_view()
    join(view, CAT)
    effects: list[Effect] = []
    for number in range(40):
        ping = Ping(number=number, incarnation=7, digest=1, hears=0, keep=True)
        effects += view.on_message(CAT, ping, START + 0.5 * number)
    assert sum(isinstance(message, Compare) for message in sent(effects)) == pytest.approx(compared, abs=1)


def test_who_does_not_answer_is_not_the_last_that_is_asked() -> None:
    view = a_view()
    join(view, ANN)
    join(view, BEN)
    announced = Summary(buckets=(), entries=(entry_of(a_record(NodeId("e" * 64))),))
    view.on_message(ANN, announced, START + 1.0)
    assert Want(nodes=(NodeId("e" * 64),)) in sent(view.on_message(BEN, announced, START + 2.5), BEN)


def entry_of(record: Record) -> Entry:
    return Entry(
        node=record.node,
        incarnation=record.incarnation,
        standing=record.standing,
        sequence=record.sequence,
    )
