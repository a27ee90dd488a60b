"""Requests at their times, or one after the other's answer. Times are the event loop's, counted from the start."""

import asyncio
from collections.abc import Sequence

from minillm.api.load.send import Call, Sender
from minillm.bench.load import Arrival


async def open_loop(arrivals: Sequence[Arrival], send: Sender) -> list[Call]:
    """Sends each request when it is due, however many are open, and waits for all: calls in the order of `arrivals`.

    As users do who do not know of each other. `Call.late` says how far behind its own plan the generator was.
    """
    start = asyncio.get_running_loop().time()

    async def one(arrival: Arrival) -> Call:
        await _until(start + arrival.at)
        return await send(arrival, start)

    return await _all([one(arrival) for arrival in arrivals])


async def closed_loop(arrivals: Sequence[Arrival], send: Sender, users: int = 1) -> list[Call]:
    """Each of `users` sends the next request when it is due *and* the one before has been answered.

    Such a generator slows down with the server, and what it would have sent meanwhile is missing from what it measures.
    It is here to be compared with.
    """
    start, coming = asyncio.get_running_loop().time(), iter(list(enumerate(arrivals)))
    calls: dict[int, Call] = {}

    async def user() -> None:
        for number, arrival in coming:
            await _until(start + arrival.at)
            calls[number] = await send(arrival, start)

    await _all([user() for _ in range(users)])
    return [calls[number] for number in range(len(arrivals))]


async def _until(when: float) -> None:
    await asyncio.sleep(max(0.0, when - asyncio.get_running_loop().time()))


async def _all(coroutines: list) -> list:
    """All results. If one raises, or this is cancelled, the others are ended before that goes on."""
    tasks = [asyncio.ensure_future(each) for each in coroutines]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
