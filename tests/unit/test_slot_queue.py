"""Turns: nobody loses one, nobody gets two, nobody is starved."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

import pytest

from mesh_llm.gateway.slot_queue import QueueFull, SlotQueue, SlotWaitExpired

WITHIN_S = 10.0


class Crowd:
    """Requests of several clients, one task each; `order` is who got a turn, in order."""

    def __init__(self, turns: SlotQueue) -> None:
        self.turns = turns
        self.order: list[str] = []
        self.ends: dict[str, asyncio.Event] = {}
        self.tasks: dict[str, asyncio.Task[None]] = {}

    async def ask(self, name: str, *, client: str | None = None, resumed: bool = False) -> None:
        """`name` is the request's: `client`, `client.number` or `client.its own name.number`.

        A client `node/client` comes from another node.
        """
        self.ends[name] = asyncio.Event()
        self.tasks[name] = asyncio.create_task(
            self._one(name, client or name.split(".")[0], resumed=resumed), name=name
        )
        await settle()

    async def _one(self, name: str, client: str, *, resumed: bool) -> None:
        own = ".".join(name.split(".")[1:-1])
        account, _, client = client.rpartition("/")
        async with self.turns.take(client, account=account, name=own, resumed=resumed):
            self.order.append(name)
            await self.ends[name].wait()

    async def end(self, name: str) -> None:
        assert name in self.order, f"{name} has no turn yet"
        self.ends[name].set()
        await self.tasks[name]
        await settle()

    async def leave(self, name: str) -> None:
        self.tasks[name].cancel()
        await asyncio.wait((self.tasks[name],))
        await settle()

    async def play_out(self) -> list[str]:
        """End turns in the order in which they were given, until nobody waits."""
        for name in self.order:
            if not self.tasks[name].done():
                await self.end(name)
        return self.order


async def settle() -> None:
    """Let every task go on as far as it can."""
    for _ in range(5):
        await asyncio.sleep(0)


async def test_as_many_as_slots_at_once() -> None:
    crowd = Crowd(SlotQueue(2))
    for name in ("a", "b", "c", "d"):
        await crowd.ask(name)
    assert crowd.order == ["a", "b"]
    assert (crowd.turns.taken, crowd.turns.waiting) == (2, 2)
    await crowd.end("b")
    assert crowd.order == ["a", "b", "c"]
    assert await crowd.play_out() == ["a", "b", "c", "d"]
    assert (crowd.turns.taken, crowd.turns.waiting) == (0, 0)


@pytest.mark.parametrize("slots", [1, 4])
async def test_the_only_request_of_a_client_is_next(slots: int) -> None:
    crowd = Crowd(SlotQueue(slots))
    for number in range(60):
        await crowd.ask(f"many.{number}")
    await crowd.ask("one")
    await crowd.end("many.0")
    assert crowd.order[slots:] == ["one"]
    order = await crowd.play_out()
    assert [name for name in order if name != "one"] == [f"many.{number}" for number in range(60)]


async def test_round_robin_between_clients() -> None:
    crowd = Crowd(SlotQueue(1))
    await crowd.ask("x")
    for client in "abc":
        for number in range(3):
            await crowd.ask(f"{client}.{number}")
    order = await crowd.play_out()
    assert order[1:] == [f"{client}.{number}" for number in range(3) for client in "abc"]


async def test_a_heavy_client_gets_its_share_beside_those_who_ask_one_by_one() -> None:
    """Whoever comes back after each answer is not new each time."""
    crowd = Crowd(SlotQueue(1))
    for number in range(30):
        await crowd.ask(f"heavy.{number}")
    for client in "abc":
        await crowd.ask(f"{client}.0")
    for step in range(40):
        name = crowd.order[step]
        await crowd.end(name)
        client, count = name.split(".")
        if client != "heavy":
            await crowd.ask(f"{client}.{int(count) + 1}")
    counts = Counter(name.split(".")[0] for name in crowd.order)
    assert all(9 <= counts[client] <= 12 for client in ("heavy", "a", "b", "c")), counts


async def test_who_holds_most_waits_longest() -> None:
    crowd = Crowd(SlotQueue(4))
    for number in range(8):
        await crowd.ask(f"a.{number}")
    for number in range(4):
        await crowd.ask(f"b.{number}")
    for number in range(4):
        await crowd.end(f"a.{number}")
    held = Counter(name.split(".")[0] for name in crowd.order[4:])
    assert held == {"a": 2, "b": 2}


async def test_names_divide_the_turns_of_their_client_and_of_nobody_else() -> None:
    crowd = Crowd(SlotQueue(1))
    await crowd.ask("x")
    for number in range(6):
        await crowd.ask(f"many.name{number}.0")
    for number in range(3):
        await crowd.ask(f"one.{number}")
    order = await crowd.play_out()
    assert [name.split(".")[0] for name in order[1:7]] == ["many", "one"] * 3
    assert order[7:] == ["many.name3.0", "many.name4.0", "many.name5.0"]


async def test_between_the_names_of_a_client_as_between_clients() -> None:
    crowd = Crowd(SlotQueue(1))
    for number in range(4):
        await crowd.ask(f"a.heavy.{number}")
    await crowd.ask("a.light.0")
    await crowd.ask("a.0")
    assert (await crowd.play_out())[1:] == ["a.light.0", "a.0", "a.heavy.1", "a.heavy.2", "a.heavy.3"]


async def test_the_name_that_holds_most_waits_longest() -> None:
    crowd = Crowd(SlotQueue(4))
    for number in range(8):
        await crowd.ask(f"a.heavy.{number}")
    for number in range(4):
        await crowd.ask(f"a.light.{number}")
    for number in range(4):
        await crowd.end(f"a.heavy.{number}")
    assert Counter(name.split(".")[1] for name in crowd.order[4:]) == {"heavy": 2, "light": 2}


async def test_names_find_no_more_room_than_their_client() -> None:
    crowd = Crowd(SlotQueue(1, per_client=2))
    for name in ("x", "a.p.0", "a.q.0"):
        await crowd.ask(name)
    with pytest.raises(QueueFull):
        async with crowd.turns.take("a", name="r"):
            pass
    await crowd.leave("a.p.0")
    await crowd.ask("a.r.0")
    assert await crowd.play_out() == ["x", "a.q.0", "a.r.0"]


async def test_between_nodes_before_between_their_clients() -> None:
    crowd = Crowd(SlotQueue(1))
    await crowd.ask("x")
    for number in range(4):
        await crowd.ask(f"node/client{number}.0")
    for number in range(2):
        await crowd.ask(f"other/only.{number}")
    await crowd.ask("here.0")
    order = await crowd.play_out()
    assert order[1:] == [
        "node/client0.0",
        "other/only.0",
        "here.0",
        "node/client1.0",
        "other/only.1",
        "node/client2.0",
        "node/client3.0",
    ]


async def test_the_node_that_holds_most_waits_longest() -> None:
    crowd = Crowd(SlotQueue(4))
    for number in range(8):
        await crowd.ask(f"node/client{number}.0")
    for number in range(4):
        await crowd.ask(f"here{number}.0")
    for number in range(4):
        await crowd.end(f"node/client{number}.0")
    assert Counter(name[:4] for name in crowd.order[4:]) == {"node": 2, "here": 2}


async def test_clients_of_the_same_name_on_two_nodes_are_two() -> None:
    crowd = Crowd(SlotQueue(1, per_client=1))
    for name in ("x", "one/a", "two/a", "a"):
        await crowd.ask(name)
    assert crowd.turns.waiting == 3
    assert await crowd.play_out() == ["x", "one/a", "two/a", "a"]


async def test_full_per_account() -> None:
    crowd = Crowd(SlotQueue(1, per_account=2))
    for name in ("x", "node/a", "node/b"):
        await crowd.ask(name)
    with pytest.raises(QueueFull):
        async with crowd.turns.take("c", account="node"):
            pass
    await crowd.ask("c")
    await crowd.ask("other/c")
    assert await crowd.play_out() == ["x", "node/a", "other/c", "c", "node/b"]


async def test_resumed_before_everybody() -> None:
    crowd = Crowd(SlotQueue(2))
    for name in ("x", "y", "a", "b"):
        await crowd.ask(name)
    await crowd.ask("c", resumed=True)
    await crowd.ask("d", resumed=True)
    assert (await crowd.play_out())[2:] == ["c", "d", "a", "b"]


async def test_endless_resumed_ones_starve_nobody() -> None:
    crowd = Crowd(SlotQueue(2))
    for name in ("x", "y", "a"):
        await crowd.ask(name)
    for number in range(9):
        await crowd.ask(f"r.{number}", resumed=True)
    assert (await crowd.play_out()).index("a") == 4


@pytest.mark.parametrize("slots", [1, 4])
async def test_an_account_that_calls_all_its_requests_resumed_gets_its_share(slots: int) -> None:
    """And little more: its word is taken as often as an engine may have been lost."""
    crowd = Crowd(SlotQueue(slots, limit=1000))
    for number in range(128):
        await crowd.ask(f"liar/{number // 64}.{number}", resumed=True)
    for account in "abc":
        for number in range(128):
            await crowd.ask(f"{account}/{number // 64}.{number}")
    for step in range(50 * slots):
        await crowd.end(crowd.order[step])
    counts = Counter(name[0] for name in crowd.order)
    assert counts["l"] <= 1.5 * min(counts[account] for account in "abc"), counts
    for name in crowd.tasks:
        await crowd.leave(name)


async def test_after_a_loss_answers_of_all_accounts_go_on_before_new_ones_begin() -> None:
    crowd = Crowd(SlotQueue(2))
    for name in ("x", "y", "new/a", "node/a.0", "here"):
        await crowd.ask(name)
    for name in ("node/b.0", "node/b.1", "other/c"):
        await crowd.ask(name, resumed=True)
    order = await crowd.play_out()
    assert order[2:] == ["node/b.0", "other/c", "node/b.1", "new/a", "here", "node/a.0"]


async def test_resumed_are_let_in_when_the_queue_is_full() -> None:
    crowd = Crowd(SlotQueue(1, limit=1))
    for name in ("x", "a"):
        await crowd.ask(name)
    with pytest.raises(QueueFull):
        async with crowd.turns.take("b"):
            pass
    await crowd.ask("c", resumed=True)
    assert await crowd.play_out() == ["x", "c", "a"]


async def test_full_in_all_and_per_client() -> None:
    crowd = Crowd(SlotQueue(1, limit=4, per_client=2))
    for name in ("x", "a.0", "a.1"):
        await crowd.ask(name)
    with pytest.raises(QueueFull):
        async with crowd.turns.take("a"):
            pass
    for name in ("b", "c"):
        await crowd.ask(name)
    with pytest.raises(QueueFull):
        async with crowd.turns.take("d"):
            pass
    assert (crowd.turns.taken, crowd.turns.waiting) == (1, 4)
    await crowd.leave("b")
    await crowd.ask("d")
    assert await crowd.play_out() == ["x", "a.0", "c", "d", "a.1"]


async def test_late() -> None:
    turns = SlotQueue(1, wait_s=0.01)
    async with turns.take("a"):
        with pytest.raises(SlotWaitExpired):
            async with turns.take("b"):
                pass
        assert (turns.taken, turns.waiting) == (1, 0)
    assert turns.taken == 0


async def test_who_has_less_time_than_the_queue_gives() -> None:
    turns = SlotQueue(1)
    async with turns.take("a"):
        with pytest.raises(SlotWaitExpired, match=r"has waited 0\.01 s for a slot"):
            async with turns.take("b", resumed=True, within_s=0.01):
                pass
        assert (turns.taken, turns.waiting) == (1, 0)


async def test_every_wait_is_told_once_however_it_ends() -> None:
    turns = SlotQueue(1, per_client=2, wait_s=30.0)
    waits_s: list[float] = []
    turns.on_wait = waits_s.append
    crowd = Crowd(turns)
    for name in ("x.0", "x.1", "x.2", "b"):
        await crowd.ask(name)
    assert waits_s == [0.0]
    with pytest.raises(QueueFull):
        async with turns.take("x"):
            pass
    assert waits_s == [0.0]  # what was never in the queue has not waited
    await crowd.leave("x.2")
    with pytest.raises(SlotWaitExpired):
        async with turns.take("c", within_s=0.05):
            pass
    assert len(waits_s) == 3
    assert waits_s[2] >= 0.04
    await crowd.play_out()
    assert len(waits_s) == 5
    # As long as the late one waited, and longer.
    assert min(waits_s[3:]) >= waits_s[2]


async def test_cancelled_in_the_moment_of_being_granted() -> None:
    crowd = Crowd(SlotQueue(1))
    for name in ("x", "a", "b"):
        await crowd.ask(name)
    crowd.ends["x"].set()
    while crowd.turns.waiting == 2:
        await asyncio.sleep(0)
    # The turn is a's, and a does not know it yet.
    assert crowd.order == ["x"]
    await crowd.leave("a")
    assert crowd.order == ["x", "b"]
    assert await crowd.play_out() == ["x", "b"]
    assert (crowd.turns.taken, crowd.turns.waiting) == (0, 0)


async def test_cancelled_just_before_being_granted() -> None:
    crowd = Crowd(SlotQueue(1))
    for name in ("x", "a", "b"):
        await crowd.ask(name)
    # Its task has not run since: it is still among those who wait.
    crowd.tasks["a"].cancel()
    crowd.ends["x"].set()
    await asyncio.wait((crowd.tasks["a"], crowd.tasks["x"]))
    await settle()
    assert crowd.order == ["x", "b"]
    assert await crowd.play_out() == ["x", "b"]
    assert (crowd.turns.taken, crowd.turns.waiting) == (0, 0)


async def test_resize() -> None:
    crowd = Crowd(SlotQueue(1))
    for name in ("a", "b", "c", "d"):
        await crowd.ask(name)
    crowd.turns.resize(3)
    await settle()
    assert crowd.order == ["a", "b", "c"]
    crowd.turns.resize(1)
    await crowd.end("a")
    await crowd.end("b")
    assert crowd.order == ["a", "b", "c"]
    await crowd.end("c")
    assert crowd.order == ["a", "b", "c", "d"]
    await crowd.play_out()
    assert (crowd.turns.taken, crowd.turns.waiting) == (0, 0)


async def test_retry_after_grows_with_the_queue_and_has_bounds() -> None:
    crowd = Crowd(SlotQueue(1, limit=1000, per_client=1000))
    assert crowd.turns.retry_after_s == 1
    await crowd.ask("x")
    estimates = []
    for number in range(20):
        await crowd.ask(f"a.{number}")
        estimates.append(crowd.turns.retry_after_s)
    assert estimates[:3] == [5, 10, 15]
    assert estimates[-1] == 60
    # Turns that take no time make it shorter.
    for name in crowd.order:
        if crowd.turns.waiting > 10:
            await crowd.end(name)
    assert 1 <= crowd.turns.retry_after_s < estimates[10]
    await crowd.play_out()


@pytest.mark.parametrize("seed", range(40))
async def test_no_turn_is_lost_or_doubled(seed: int) -> None:
    """Random arrivals, ends, departures, sizes: never more than slots, and none idle while one waits."""
    dice = random.Random(seed)
    slots = dice.randint(1, 5)
    turns = SlotQueue(slots, limit=12, per_client=5, wait_s=WITHIN_S)
    inside: Counter[str] = Counter()
    finished: Counter[str] = Counter()
    biggest = slots

    async def one(client: str, *, resumed: bool, steps: int) -> None:
        try:
            async with turns.take(
                client, account=dice.choice(("", "n")), name=dice.choice(("", "p")), resumed=resumed
            ):
                inside[client] += 1
                try:
                    assert inside.total() <= biggest
                    for _ in range(steps):
                        await asyncio.sleep(0)
                    if dice.random() < 0.1:
                        raise RuntimeError("the block may end in any way")
                finally:
                    inside[client] -= 1
            finished["done"] += 1
        except (QueueFull, RuntimeError) as end:
            finished[type(end).__name__] += 1

    tasks: list[asyncio.Task[None]] = []
    for _ in range(400):
        match dice.randrange(10):
            case 0 | 1 | 2 | 3:
                client, resumed, steps = dice.choice("abcdef"), dice.random() < 0.1, dice.randint(0, 6)
                tasks.append(asyncio.create_task(one(client, resumed=resumed, steps=steps)))
            case 4 | 5 if tasks:
                dice.choice(tasks).cancel()
            case 6 if dice.random() < 0.2:
                slots = dice.randint(1, 5)
                biggest = max(slots, turns.taken, biggest)
                turns.resize(slots)
            case _:
                await asyncio.sleep(0)
        assert turns.waiting <= 24
        assert turns.waiting == 0 or turns.taken >= slots
    async with asyncio.timeout(WITHIN_S):
        await asyncio.wait(tasks)
    assert all(task.cancelled() or task.exception() is None for task in tasks)
    assert finished["done"] > 20
    assert (turns.taken, turns.waiting, inside.total()) == (0, 0, 0)
    # All slots work.
    async with asyncio.timeout(WITHIN_S):
        for _ in range(slots):
            await turns.take("z").__aenter__()
    assert turns.taken == slots
