"""How ledgers become equal: news are passed on, and digests show what was missed."""

from __future__ import annotations

from mesh_llm.defaults import MEMBER_KNOWN_LIMIT, MEMBER_SYNC_S
from mesh_llm.errors import Forged
from mesh_llm.membership.effects import Disconnect, Duplicate
from mesh_llm.membership.failure_detector import Judge
from mesh_llm.membership.heartbeat import Link
from mesh_llm.membership.member import Standing
from mesh_llm.membership.messages import ENTRY_LIMIT, Compare, Summary, Update, Want
from mesh_llm.membership.own_record import COPIED_HOME, Verdict
from mesh_llm.membership.record import Record, Told
from mesh_llm.membership.view_state import Remembered, Scene
from mesh_llm.types import NodeId

_SETTLE_S = 1.5
"""That digests may differ while news are on their way; the lower id then asks first."""
_SETTLE_SECOND_S = 4.0
_CHALLENGE_S = 0.5
_COMPARE_S = 0.5
"""Between two comparisons that we answer."""


class Gossip:
    def __init__(self, scene: Scene, judge: Judge) -> None:
        self._scene = scene
        self._judge = judge
        self._duplicate = False

    # -- records --------------------------------------------------------------------------------

    def update(self, link: Link, message: Update) -> None:
        """Read what is news, believe what its node has signed, and ask for what was only hinted at."""
        asked: list[NodeId] = []
        try:
            for told in message.records:
                if not self.merge(told, link.node):
                    asked.append(told.node)
        except Forged as error:
            # Whoever passes something on has verified it, or made it up.
            self._scene.outbox.add(Disconnect(node=link.node, reason=error.message))
        if link.node in self._scene.links:
            self._scene.outbox.ask(link.node, asked)

    def merge(self, told: Told, source: NodeId) -> bool:
        """Take what is news in it; False where the record itself is needed to tell."""
        scene, node = self._scene, told.node
        if node == scene.me:
            self._about_me(told)
            return True
        known = scene.ledger.get(node)
        if not scene.ledger.lacks(node, told.version):
            if scene.observes and known is not None and told.version != known.version:
                self._revive(known, told)
            return True
        same_life = known is not None and told.incarnation == known.incarnation
        if known is not None and same_life and told.sequence <= known.sequence:
            # What it signed is known here: only the standing is news, and a hint.
            record: Record | None = known.said(told.standing) if told.standing is not Standing.LEFT else None
        elif told.signed is None:
            return False
        else:
            record = scene.open(told)
        new = scene.ledger.news(record) if record is not None else None
        if record is not None and new is not None and not self._contradicted(record):
            self._take(new, source)
        return True

    def _revive(self, known: Record, told: Told) -> None:
        """A client calls nobody dead but for itself, so that nobody refutes it: it takes a member's word."""
        if told.standing is Standing.ALIVE and told.incarnation == known.incarnation and not known.left:
            self._take(known.said(Standing.ALIVE), told.node)

    def revive(self, node: NodeId) -> None:
        """It has just been heard by a client that took it for dead."""
        known = self._scene.ledger.get(node)
        if known is not None and known.standing is not Standing.ALIVE:
            alive = Told(node=node, incarnation=known.incarnation, sequence=0, standing=Standing.ALIVE)
            self._revive(known, alive)

    def _contradicted(self, record: Record) -> bool:
        """Whether we know better; then the node gets to hear it, as only it can refute it for all."""
        scene, node = self._scene, record.node
        if record.standing not in (Standing.SUSPECT, Standing.DEAD):
            return False
        if scene.heard(node):
            self.challenge(scene.links[node], record)
            return True
        vouchers = scene.vouchers(node)
        for voucher in vouchers:
            scene.send(voucher, record)
        return bool(vouchers)

    def challenge(self, link: Link, record: Record) -> None:
        """Tell a node what is said about it, not too often."""
        now = self._scene.now
        incarnation, at = link.challenged
        if incarnation < record.incarnation or now - at >= _CHALLENGE_S:
            link.challenged = (record.incarnation, now)
            self._scene.send(link.node, record)

    def _take(self, record: Record, source: NodeId) -> None:
        scene, node = self._scene, record.node
        old = scene.ledger.get(node)
        if old is None and not self._room():
            return
        scene.ledger.put(record)
        scene.touched.add(node)
        if old is not None or not record.gone:
            # A tombstone of somebody unknown is kept, but it is no news: it would go round for ever.
            scene.outbox.tell(node, source)
        if old is None or old.gone != record.gone:
            scene.restless = True
        if record.gone:
            self.gone(record)
        else:
            scene.remembered.pop(node, None)
            if old is None or record.incarnation > old.incarnation:
                self._judge.renewed(record)

    def gone(self, record: Record) -> None:
        scene, node = self._scene, record.node
        self._judge.gone(node)
        scene.remembered.pop(node, None)
        if record.standing is Standing.LEFT and not scene.observes:
            scene.dialling.end(node)
        elif node not in scene.links:
            scene.dialling.begin(node, scene.now)

    def _room(self) -> bool:
        """Room for one more; the oldest tombstone makes it."""
        scene = self._scene
        if len(scene.ledger) < MEMBER_KNOWN_LIMIT:
            return True
        gone = [node for node in scene.ledger.nodes() if scene.living(node) is None]
        if not gone:
            return False
        self.drop(min(gone, key=lambda node: scene.since.get(node, 0.0)))
        return True

    def drop(self, node: NodeId) -> None:
        """Forget a tombstone; the address of one that died is still tried."""
        scene = self._scene
        record = scene.ledger.get(node)
        scene.ledger.remove(node)
        scene.touched.add(node)
        if record is not None and (record.standing is Standing.DEAD or scene.observes):
            self.remember(record)
        else:
            scene.dialling.end(node)

    def remember(self, record: Record) -> None:
        scene = self._scene
        if len(scene.remembered) >= MEMBER_KNOWN_LIMIT:
            oldest = min(scene.remembered, key=lambda node: scene.remembered[node].since)
            del scene.remembered[oldest]
            scene.dialling.end(oldest)
        scene.remembered[record.node] = Remembered(record=record, since=scene.now)
        if record.node not in scene.links:
            scene.dialling.begin(record.node, scene.now)

    def _about_me(self, told: Told) -> None:
        scene = self._scene
        mine = scene.own.record
        if told.signed is not None and (told.incarnation, told.sequence) > (mine.incarnation, mine.sequence):
            said = scene.open(told)
            verdict = scene.own.heard(said, scene.now) if said is not None else Verdict.FINE
        else:
            verdict = scene.own.hinted(told.standing, told.incarnation, scene.now)
        if verdict is Verdict.REFUTED:
            scene.renewed()
        elif verdict is Verdict.COPIED:
            self.duplicate()

    def duplicate(self) -> None:
        if not self._duplicate:
            self._duplicate = True
            self._scene.outbox.add(Duplicate(reason=COPIED_HOME))

    # -- digests --------------------------------------------------------------------------------

    def digest(self, link: Link, incarnation: int, digest: int) -> None:
        """What a ping or its answer says about the other side's ledger, and about itself."""
        scene = self._scene
        record = scene.ledger.get(link.node)
        if record is None or record.incarnation < incarnation:
            scene.outbox.ask(link.node, [link.node])
        elif record.standing is not Standing.ALIVE or record.incarnation > incarnation:
            # It is said to be gone, or has said more itself than it knows of: only it can put that right.
            self.challenge(link, record)
        if digest == scene.ledger.digest:
            link.differs_since = None
        elif link.differs_since is None:
            link.differs_since = scene.now
        else:
            settle_s = _SETTLE_S if scene.me < link.node else _SETTLE_SECOND_S
            if scene.now - max(link.differs_since, link.synced_at) >= max(settle_s, MEMBER_SYNC_S):
                self.sync(link)

    def sync(self, link: Link) -> None:
        link.synced_at = self._scene.now
        self._scene.outbox.send(link.node, self._scene.ledger.compare())

    def compare(self, link: Link, message: Compare) -> None:
        if self._scene.now - link.compared_at < _COMPARE_S:
            return
        link.compared_at = link.synced_at = self._scene.now
        ledger = self._scene.ledger
        for summary in ledger.summaries(ledger.differing(message), ENTRY_LIMIT):
            self._scene.outbox.send(link.node, summary)

    def summary(self, link: Link, message: Summary) -> None:
        give, want = self._scene.ledger.reply(message)
        if self._scene.observes:
            want += [record.node for record in give if record.gone]
        else:
            self._scene.send(link.node, *give)
        self._scene.outbox.ask(link.node, [node for node in want if node != self._scene.me])

    def want(self, link: Link, message: Want) -> None:
        records = [self._scene.ledger.get(node) for node in message.nodes]
        self._scene.send(link.node, *(record for record in records if record is not None))
