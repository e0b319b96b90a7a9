"""Many views in a simulated world: they converge, nobody flaps, and no ghost stays."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import replace

import pytest

from mesh_llm.lab.simulate.signing import node_id
from mesh_llm.lab.simulate.world import World, facts
from mesh_llm.membership.member import Standing
from mesh_llm.membership.outbox import MEMBER_MESSAGE_BYTES
from mesh_llm.membership.own_record import COPIED_HOME
from tests.support.sampling import sampled

SEEDS = [1, 2, 3]


@pytest.fixture(autouse=True)
def _no_collector() -> Iterator[None]:
    # A million live objects: looking for cycles among them takes longer than the simulation.
    gc.disable()
    yield
    gc.enable()
    gc.collect()


def a_mesh(count: int, **world: float) -> World:
    """Nodes 0 … count − 1 that joined through node 0."""
    made = World(**world)  # type: ignore[arg-type]
    for key in range(count):
        made.start(key)
    for key in range(1, count):
        made.link(0, key)
    made.run_until(made.agreed, within_s=60)
    return made


def a_warm_mesh(count: int, **world: float) -> World:
    made = World(**world)  # type: ignore[arg-type]
    for key in range(count):
        made.start(key)
    made.warm()
    made.run(2)
    assert made.agreed()
    return made


def known_as(world: World, subject: object, standing: Standing) -> bool:
    return all(world.standing(host.key, subject) is standing for host in world.up)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("count", [3, 10])
def test_a_small_mesh_connects_everybody(count: int, seed: int) -> None:
    world = a_mesh(count, seed=seed)
    world.run(5)
    assert world.degrees() == [count - 1] * count
    assert {turn.standing for turn in world.turns} == {Standing.ALIVE}


def test_an_idle_mesh_of_three_says_little() -> None:
    world = a_mesh(3)
    world.run(5)
    before = world.scales.bytes_to.copy()
    world.run(60)
    rates = [(world.scales.bytes_to[pair] - before[pair]) / 60 for pair in before]
    assert len(rates) == 6
    assert max(rates) < 250


def test_facts_reach_everybody_once_they_change() -> None:
    world = a_mesh(10)
    host = world.hosts[4]
    changed = facts(4, lent_bytes=7)
    world.perform(host, host.view.publish(changed, world.now))
    took_s = world.run_until(world.agreed, within_s=2, step_s=0.05)
    seen = [other.view.member(host.id) for other in world.up]
    assert [member.facts for member in seen if member] == [changed] * 10
    assert took_s < 0.5


@pytest.mark.parametrize("seed", sampled(range(10), 0, 1))
@pytest.mark.parametrize("count", [2, 3, 10])
def test_a_killed_member_is_known_within_three_seconds(count: int, seed: int) -> None:
    world = a_mesh(count, seed=seed)
    world.run(3 + seed / 10)
    world.crash(1)
    killed_at = world.now
    world.run_until(lambda: known_as(world, 1, Standing.DEAD), within_s=4, step_s=0.01)
    assert max(turn.at for turn in world.turns_to(Standing.DEAD)) - killed_at <= 3.0
    world.run(30)
    assert {turn.subject for turn in world.turns_to(Standing.DEAD)} == {node_id(1)}
    assert world.agreed()


@pytest.mark.parametrize("seed", SEEDS)
def test_a_closed_connection_is_known_at_once(seed: int) -> None:
    world = a_mesh(3, seed=seed)
    world.run(3)
    world.crash(1, closes=True)
    world.run(0.05)
    assert known_as(world, 1, Standing.SUSPECT)
    world.run(1.0)
    assert known_as(world, 1, Standing.DEAD)


@pytest.mark.parametrize("seed", SEEDS)
def test_one_broken_connection_kills_nobody(seed: int) -> None:
    world = a_mesh(3, seed=seed)
    world.run(5)
    world.network.block(1, 2)
    world.disconnect(1, 2)
    world.run(30)
    assert world.turns_to(Standing.DEAD) == []
    member = world.hosts[1].view.member(node_id(2))
    assert member is not None
    assert (member.standing, member.connected, member.via) == (Standing.ALIVE, False, (node_id(0),))
    world.network.unblock(1, 2)
    world.run(60)
    member = world.hosts[1].view.member(node_id(2))
    assert member is not None
    assert (member.connected, member.via) == (True, ())


@pytest.mark.parametrize("seed", SEEDS)
def test_a_silent_path_is_no_death_while_others_hear(seed: int) -> None:
    world = a_mesh(4, seed=seed)
    world.run(5)
    world.network.block(1, 2)
    world.run(30)
    assert world.turns_to(Standing.DEAD) == []
    assert world.agreed()


@pytest.mark.parametrize("seed", SEEDS)
def test_members_behind_nats_that_never_meet(seed: int) -> None:
    world = World(seed=seed)
    for key in range(6):
        world.start(key)
    for one in range(1, 6):
        for other in range(one):
            if other != 0:
                world.network.block(one, other)
    for key in range(1, 6):
        world.link(0, key)
    world.run_until(world.agreed, within_s=20)
    world.run(120)
    assert world.agreed()
    assert world.turns_to(Standing.DEAD) == world.turns_to(Standing.SUSPECT) == []
    member = world.hosts[3].view.member(node_id(5))
    assert member is not None
    assert member.via == (node_id(0),)
    # And it dies as any other.
    world.crash(5)
    killed_at = world.now
    world.run_until(lambda: known_as(world, 5, Standing.DEAD), within_s=4, step_s=0.05)
    assert world.now - killed_at <= 3.2


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("count", "loss"), [(3, 0.1), (10, 0.1), (10, 0.3)])
def test_lost_messages_kill_nobody(count: int, loss: float, seed: int) -> None:
    world = a_mesh(count, seed=seed, loss=loss)
    world.run(60)
    assert world.turns_to(Standing.DEAD) == []
    world.loss = 0.0
    world.run_until(world.agreed, within_s=15)


@pytest.mark.parametrize("seed", SEEDS)
def test_slow_lines_kill_nobody(seed: int) -> None:
    world = a_mesh(5, seed=seed, delay_s=0.3, jitter_s=0.3)
    world.run(60)
    assert world.agreed()
    assert world.turns_to(Standing.DEAD) == world.turns_to(Standing.SUSPECT) == []
    member = world.hosts[0].view.member(node_id(1))
    assert member is not None
    assert member.rtt_s == pytest.approx(0.9, abs=0.25)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_partition_turns_once_and_heals_once(seed: int) -> None:
    world = a_mesh(10, seed=seed)
    left, right = range(4), range(4, 10)
    world.network.part(left, right)
    world.run(60)
    assert world.agreed(left)
    assert world.agreed(right)
    assert len(world.turns_to(Standing.DEAD)) == 2 * len(left) * len(right)
    healed_at = world.now
    world.network.heal()
    took_s = world.run_until(world.agreed, within_s=60)
    assert took_s < 45
    world.run(30)
    assert world.agreed()
    assert world.turns_to(Standing.DEAD, since=healed_at) == []
    back = world.turns_to(Standing.ALIVE, since=healed_at)
    assert len(back) == 2 * len(left) * len(right)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_leave_is_known_at_once_and_without_suspicion(seed: int) -> None:
    world = a_mesh(5, seed=seed)
    world.run(3)
    world.leave(2)
    world.run(0.05)
    assert all(world.standing(host.key, 2) is Standing.LEFT for host in world.up)
    world.run(30)
    assert world.turns_to(Standing.SUSPECT) == world.turns_to(Standing.DEAD) == []
    assert world.agreed()
    # It comes back as it went: by a connection.
    world.start(2, know=world.hosts[0].view.records)
    world.run_until(world.agreed, within_s=10)


@pytest.mark.parametrize("seed", range(6))
def test_restarts_in_any_order(seed: int) -> None:
    world = a_mesh(6, seed=seed)
    for _ in range(12):
        key = world.random.randrange(6)
        kept = world.hosts[key].view.records
        world.crash(key, closes=world.random.random() < 0.5)
        world.run(world.random.choice([0.05, 0.5, 1.5, 4.0]))
        world.start(key, know=kept)
        world.run(world.random.choice([0.05, 0.5, 2.0]))
    world.run_until(world.agreed, within_s=30)
    settled_at = world.now
    world.run(30)
    assert world.agreed()
    assert [turn for turn in world.turns if turn.at > settled_at + 1] == []


def test_a_whole_mesh_restarts_from_what_it_remembers() -> None:
    world = a_mesh(10)
    kept = world.hosts[0].view.records
    for key in range(10):
        world.crash(key)
    world.run(5)
    for key in range(10):
        world.start(key, know=kept)
        world.run(0.3)
    world.run_until(world.agreed, within_s=10)
    assert world.turns_to(Standing.DEAD) == []


def test_a_restart_with_a_clock_set_back_is_believed() -> None:
    world = a_mesh(4)
    world.crash(3)
    world.run(5)
    world.start(3, know=world.hosts[0].view.records, incarnation=5)
    world.run_until(world.agreed, within_s=10)
    assert world.hosts[3].duplicates == []
    member = world.hosts[0].view.member(node_id(3))
    assert member is not None
    assert member.incarnation > 1_000_000


@pytest.mark.parametrize("seed", SEEDS)
def test_a_sleeper_wakes_among_friends(seed: int) -> None:
    world = a_mesh(5, seed=seed)
    world.run(3)
    world.sleep(2, 60)
    world.run(5)
    others = [host for host in world.up if host.key != 2]
    assert all(world.standing(host.key, 2) is Standing.DEAD for host in others)
    world.run(54.9)
    woken_at = world.now
    world.run_until(world.agreed, within_s=15)
    world.run(30)
    assert world.agreed()
    assert world.turns_to(Standing.DEAD, since=woken_at) == []


def test_all_sleep_and_wake() -> None:
    world = a_mesh(3)
    world.run(3)
    for key in range(3):
        world.sleep(key, 60)
    world.run(90)
    assert world.agreed()
    assert world.turns_to(Standing.DEAD) == []


@pytest.mark.parametrize("seed", SEEDS)
def test_a_copied_home_is_found_and_the_original_stays(seed: int) -> None:
    world = a_mesh(4, seed=seed)
    world.run(5)
    copy = world.start("copy", id=node_id(2), know=world.hosts[2].view.records)
    took_s = world.run_until(lambda: bool(copy.duplicates), within_s=30)
    assert copy.duplicates == [COPIED_HOME]
    assert world.hosts[2].duplicates == []
    world.crash("copy", closes=True)
    world.run_until(world.agreed, within_s=30)
    assert took_s < 30


def test_no_ghost_comes_back_from_old_gossip() -> None:
    world = a_mesh(5)
    world.run(2)
    world.network.part([0, 1], [2, 3, 4])
    # On the other side nobody hears of this death, nor of this leave.
    world.crash(0)
    world.leave(4)
    world.run(30)
    world.network.heal()
    world.run_until(lambda: world.agreed([1, 2, 3]), within_s=60)
    world.run(60)
    assert world.agreed([1, 2, 3])


@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(2, 8))])
def test_a_hundred_nodes_with_loss_and_a_partition(seed: int) -> None:
    world = a_warm_mesh(100, seed=seed, loss=0.1, weigh_every=11)
    world.run(10)
    assert world.turns_to(Standing.DEAD) == []
    world.loss = 0.0
    left, right = range(37), range(37, 100)
    world.network.part(left, right)
    world.run_until(lambda: world.agreed(left) and world.agreed(right), within_s=60)
    world.run(10)
    world.network.heal()
    world.run_until(world.agreed, within_s=60, step_s=1)
    healed_at = world.now
    world.run(15)
    assert world.agreed()
    assert world.turns_to(Standing.DEAD, since=healed_at) == []
    assert world.scales.largest_bytes <= MEMBER_MESSAGE_BYTES


@pytest.mark.full
def test_a_hundred_join_through_one() -> None:
    world = World(weigh_every=11)
    for key in range(100):
        world.start(key)
        if key:
            world.link(key, world.random.randrange(key))
        world.run(0.1)
    world.run_until(world.agreed, within_s=30)
    assert world.turns_to(Standing.DEAD) == []
    world.run(35)
    assert max(world.degrees()) <= 24
    assert world.scales.largest_bytes <= MEMBER_MESSAGE_BYTES


def test_a_large_mesh_lets_go_of_connections_without_suspicion() -> None:
    world = a_warm_mesh(40, weigh_every=11)
    for key in range(1, 40):
        world.link(0, key)
    world.run(60)
    assert len(world.hosts[0].peers) <= 24
    assert world.turns_to(Standing.SUSPECT) == world.turns_to(Standing.DEAD) == []


def test_partners_are_connected_in_a_large_mesh() -> None:
    world = a_warm_mesh(40, weigh_every=11)
    host = world.hosts[0]
    far = next(other for other in world.up if other.key not in host.peers and other is not host)
    world.perform(host, host.view.set_partners([far.id]))
    world.run(2)
    assert far.key in host.peers
    world.run(60)
    assert far.key in host.peers


@pytest.mark.full
def test_a_thousand_nodes() -> None:
    world = a_warm_mesh(1000, tick_s=0.5, weigh_every=97)
    assert max(world.degrees()) <= 28
    before, begun = sum(world.scales.bytes_to.values()), world.now
    world.run(3)
    rate = (sum(world.scales.bytes_to.values()) - before) / (world.now - begun) / sum(world.degrees())
    assert rate < 2000
    world.loss = 0.05
    neighbours = sorted(world.hosts[7].peers, key=str)
    restarting = {key: world.hosts[key].view.records for key in (10, 11, 12)}
    world.crash(7)
    world.leave(8)
    world.crash(9, closes=True)
    for key in restarting:
        world.crash(key, closes=key == 11)
    killed_at = world.now
    world.run(0.5)
    # Two are back at once, one after it was called dead.
    for key in (10, 11):
        world.start(key, know=restarting[key])
    world.run(2.7)
    # One that lost the news, and what it asked for after a hint, hears of it by the next comparison.
    world.run_until(
        lambda: {world.standing(key, 7) for key in neighbours} <= {Standing.DEAD, None}, within_s=5
    )
    world.start(12, know=restarting[12])
    world.run(2)
    world.loss = 0.0
    world.run_until(world.agreed, within_s=5, step_s=1)
    assert world.standing(500, 8) is Standing.LEFT
    assert world.standing(500, 9) is Standing.DEAD
    dead = {turn.subject for turn in world.turns_to(Standing.DEAD)}
    # Of one whose connections closed some may have heard of its return only after the time to refute.
    assert {node_id(key) for key in (7, 9, 12)} <= dead <= {node_id(key) for key in (7, 9, 11, 12)}
    assert world.now - killed_at < 16
    assert world.scales.largest_bytes <= MEMBER_MESSAGE_BYTES


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_thousand_nodes_part_and_heal() -> None:
    world = a_warm_mesh(1000, tick_s=0.5, weigh_every=997)
    left, right = range(400), range(400, 1000)
    world.network.part(left, right)
    world.run_until(lambda: world.agreed(left) and world.agreed(right), within_s=120, step_s=2)
    world.network.heal()
    world.run_until(world.agreed, within_s=120, step_s=2)
    assert world.scales.largest_bytes <= MEMBER_MESSAGE_BYTES


@pytest.mark.long
@pytest.mark.parametrize("seed", range(10))
def test_a_long_rough_life(seed: int) -> None:
    world = a_mesh(12, seed=seed, loss=0.05)
    for _ in range(30):
        key = world.random.randrange(12)
        match world.random.randrange(4):
            case 0:
                world.crash(key, closes=world.random.random() < 0.5)
                world.run(world.random.random() * 6)
                world.start(key, know=world.hosts[(key + 1) % 12].view.records)
            case 1:
                world.network.part(range(key), range(key, 12))
                world.run(world.random.random() * 20)
                world.network.heal()
            case 2:
                world.sleep(key, world.random.random() * 30)
            case 3:
                host = world.hosts[key]
                world.perform(host, host.view.publish(replace(facts(key), reason=str(world.now)), world.now))
        world.run(world.random.random() * 5)
    world.loss = 0.0
    world.run_until(world.agreed, within_s=120)


def test_in_a_large_mesh_a_change_costs_each_node_little_more_than_its_record() -> None:
    world = a_warm_mesh(40)
    world.run(2)
    idle = sum(world.scales.bytes_of.values())
    world.run(2)
    idle = sum(world.scales.bytes_of.values()) - idle
    host = world.hosts[4]
    changed = facts(4, reason="x" * 2000)
    world.perform(host, host.view.publish(changed, world.now))
    before = world.scales.bytes_of.copy()
    world.run(2)
    spent = world.scales.bytes_of - before
    assert world.agreed()
    assert spent["Update"] < 40 * 2 * 2500
    assert sum(spent.values()) - idle < 40 * 3 * 2500
