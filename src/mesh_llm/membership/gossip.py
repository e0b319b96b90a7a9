"""How ledgers become equal: news are passed on, and digests show what was missed."""

from __future__ import annotations

from math import inf

from mesh_llm.defaults import MEMBER_KNOWN_LIMIT
from mesh_llm.errors import Forged
from mesh_llm.membership.effects import Disconnect, Duplicate
from mesh_llm.membership.failure_detector import FailureDetector
from mesh_llm.membership.heartbeat import Heartbeat
from mesh_llm.membership.member import Standing
from mesh_llm.membership.messages import ENTRY_LIMIT, Compare, Summary, Update, Want
from mesh_llm.membership.own_record import COPIED_HOME, RecordVerdict
from mesh_llm.membership.record import Record, Told
from mesh_llm.membership.view_state import Remembered, ViewState
from mesh_llm.types import NodeId

MEMBER_SYNC_S = 2.0
"""Between two comparisons of everything with the same peer: changes are on their way for a while."""
_OFTEN_COMPARED = 500
"""Members up to which that is so. Of more there are always news on their way, and tables are larger."""


MEMBER_ASK_AGAIN_S = 1.0
"""After which another neighbour that announces a record is asked, too: three round trips of a slow relay."""
_SETTLE_S = 1.5
"""That digests may differ while news are on their way; the lower id then asks first."""
_SETTLE_SECOND_S = 4.0
_CHALLENGE_S = 0.5
_COMPARE_S = 0.5
"""Between two comparisons that we answer."""


def sync_s(members: int) -> float:
    """Between two comparisons of so many members with the same peer."""
    return MEMBER_SYNC_S * max(1.0, members / _OFTEN_COMPARED)


class Gossip:
    def __init__(self, state: ViewState, judge: FailureDetector) -> None:
        self._state = state
        self._failure_detector = judge
        self._duplicate = False
        self._asked: dict[NodeId, float] = {}
        """When a neighbour was asked for a record that it had announced."""

    # -- records --------------------------------------------------------------------------------

    def update(self, link: Heartbeat, message: Update) -> None:
        """Read what is news, believe what its node has signed, and ask for what was only hinted at."""
        asked: list[NodeId] = []
        try:
            for told in message.records:
                if not self.merge(told, link.node):
                    asked.append(told.node)
        except Forged as error:
            # Whoever passes something on has verified it, or made it up.
            self._state.outbox.add(Disconnect(node=link.node, reason=error.message))
        if link.node in self._state.links:
            self._state.outbox.ask(link.node, asked)

    def merge(self, told: Told, source: NodeId) -> bool:
        """Take what is news in it; False where the record itself is needed to tell."""
        state, node = self._state, told.node
        if node == state.me:
            self._about_me(told)
            return True
        known = state.records_table.get(node)
        if not state.records_table.lacks(node, told.version):
            if state.observes and known is not None and told.version != known.version:
                self._revive(known, told)
            return True
        same_life = known is not None and told.incarnation == known.incarnation
        if known is not None and same_life and told.sequence <= known.sequence:
            # What it signed is known here: only the standing is news, and a hint.
            record: Record | None = known.said(told.standing) if told.standing is not Standing.LEFT else None
        elif told.signed is None:
            return False
        else:
            record = state.open(told)
        new = state.records_table.news(record) if record is not None else None
        if record is not None and new is not None and not self._contradicted(record):
            self._take(new, source)
        return True

    def _revive(self, known: Record, told: Told) -> None:
        """A client calls nobody dead but for itself, so that nobody refutes it: it takes a member's word."""
        if told.standing is Standing.ALIVE and told.incarnation == known.incarnation and not known.left:
            self._take(known.said(Standing.ALIVE), told.node)

    def revive(self, node: NodeId) -> None:
        """It has just been heard by a client that took it for dead."""
        known = self._state.records_table.get(node)
        if known is not None and known.standing is not Standing.ALIVE:
            alive = Told(node=node, incarnation=known.incarnation, sequence=0, standing=Standing.ALIVE)
            self._revive(known, alive)

    def _contradicted(self, record: Record) -> bool:
        """Whether we know better; then the node gets to hear it, as only it can refute it for all."""
        state, node = self._state, record.node
        if record.standing not in (Standing.SUSPECT, Standing.DEAD):
            return False
        if state.heard(node):
            self.challenge(state.links[node], record)
            return True
        vouchers = state.vouchers(node)
        for voucher in vouchers:
            state.send(voucher, record)
        return bool(vouchers)

    def challenge(self, link: Heartbeat, record: Record) -> None:
        """Tell a node what is said about it, not too often."""
        now = self._state.now
        incarnation, at = link.challenged
        if incarnation < record.incarnation or now - at >= _CHALLENGE_S:
            link.challenged = (record.incarnation, now)
            self._state.send(link.node, record)

    def _take(self, record: Record, source: NodeId) -> None:
        state, node = self._state, record.node
        old = state.records_table.get(node)
        if old is None and not self._room():
            return
        state.records_table.put(record)
        self._asked.pop(node, None)
        state.touched.add(node)
        if old is not None or not record.gone:
            # A tombstone of somebody unknown is kept, but it is no news: it would go round for ever.
            state.outbox.tell(node, source)
        if old is None or old.gone != record.gone:
            state.restless = True
        if record.gone:
            self.gone(record)
        else:
            state.remembered.pop(node, None)
            if old is None or record.incarnation > old.incarnation:
                self._failure_detector.renewed(record)

    def gone(self, record: Record) -> None:
        state, node = self._state, record.node
        self._failure_detector.gone(node)
        state.remembered.pop(node, None)
        if record.standing is Standing.LEFT and not state.observes:
            state.dialling.end(node)
        elif node not in state.links:
            state.dialling.begin(node, state.now)

    def _room(self) -> bool:
        """Room for one more; the oldest tombstone makes it."""
        state = self._state
        if len(state.records_table) < MEMBER_KNOWN_LIMIT:
            return True
        gone = [node for node in state.records_table.nodes() if state.living(node) is None]
        if not gone:
            return False
        self.drop(min(gone, key=lambda node: state.since.get(node, 0.0)))
        return True

    def drop(self, node: NodeId) -> None:
        """Forget a tombstone; the address of one that died is still tried."""
        state = self._state
        record = state.records_table.get(node)
        state.records_table.remove(node)
        state.touched.add(node)
        if record is not None and (record.standing is Standing.DEAD or state.observes):
            self.remember(record)
        else:
            state.dialling.end(node)

    def remember(self, record: Record) -> None:
        state = self._state
        if len(state.remembered) >= MEMBER_KNOWN_LIMIT:
            oldest = min(state.remembered, key=lambda node: state.remembered[node].since)
            del state.remembered[oldest]
            state.dialling.end(oldest)
        state.remembered[record.node] = Remembered(record=record, since=state.now)
        if record.node not in state.links:
            state.dialling.begin(record.node, state.now)

    def _about_me(self, told: Told) -> None:
        state = self._state
        mine = state.own.record
        if told.signed is not None and (told.incarnation, told.sequence) > (mine.incarnation, mine.sequence):
            said = state.open(told)
            verdict = state.own.heard(said, state.now) if said is not None else RecordVerdict.FINE
        else:
            verdict = state.own.hinted(told.standing, told.incarnation, state.now)
        if verdict is RecordVerdict.REFUTED:
            state.renewed()
        elif verdict is RecordVerdict.COPIED:
            self.duplicate()

    def duplicate(self) -> None:
        if not self._duplicate:
            self._duplicate = True
            self._state.outbox.add(Duplicate(reason=COPIED_HOME))

    # -- digests --------------------------------------------------------------------------------

    def digest(self, link: Heartbeat, incarnation: int, digest: int) -> None:
        """What a ping or its answer says about the other side's ledger, and about itself."""
        state = self._state
        record = state.records_table.get(link.node)
        if record is None or record.incarnation < incarnation:
            state.outbox.ask(link.node, [link.node])
        elif record.standing is not Standing.ALIVE or record.incarnation > incarnation:
            # It is said to be gone, or has said more itself than it knows of: only it can put that right.
            self.challenge(link, record)
        if digest == state.records_table.digest:
            link.differs_since = None
        elif link.differs_since is None:
            link.differs_since = state.now
        else:
            settle_s = _SETTLE_S if state.me < link.node else _SETTLE_SECOND_S
            pause_s = max(settle_s, sync_s(len(state.records_table.ring)))
            settled = state.now - link.differs_since >= max(settle_s, MEMBER_SYNC_S)
            if settled and state.now - link.synced_at >= pause_s:
                self.sync(link)

    def sync(self, link: Heartbeat) -> None:
        link.synced_at = self._state.now
        self._state.outbox.send(link.node, self._state.records_table.compare())

    def compare(self, link: Heartbeat, message: Compare) -> None:
        if self._state.now - link.compared_at < _COMPARE_S:
            return
        link.compared_at = link.synced_at = self._state.now
        records_table = self._state.records_table
        for summary in records_table.summaries(records_table.differing(message), ENTRY_LIMIT):
            self._state.outbox.send(link.node, summary)

    def summary(self, link: Heartbeat, message: Summary) -> None:
        give, want = self._state.records_table.reply(message)
        if not message.buckets:
            want = self._not_asked_for(want)
        if self._state.observes:
            want += [record.node for record in give if record.gone]
        else:
            self._state.send(link.node, *give)
        self._state.outbox.ask(link.node, [node for node in want if node != self._state.me])

    def _not_asked_for(self, nodes: list[NodeId]) -> list[NodeId]:
        """Of announced records those that nobody was asked for a moment ago: all neighbours announce them."""
        now = self._state.now
        fresh = [node for node in nodes if not 0 <= now - self._asked.get(node, -inf) < MEMBER_ASK_AGAIN_S]
        if len(self._asked) + len(fresh) > MEMBER_KNOWN_LIMIT:
            self._asked.clear()
        self._asked.update(dict.fromkeys(fresh, now))
        return fresh

    def want(self, link: Heartbeat, message: Want) -> None:
        records = [self._state.records_table.get(node) for node in message.nodes]
        self._state.send(link.node, *(record for record in records if record is not None))
