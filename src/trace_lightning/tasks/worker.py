"""A reward worker: a process that scores what it is sent, until its pipe closes.

    pool -> worker    the rewards, once; then (job id, reward index, samples, first row, time limit)
    worker -> pool    None when ready; then (job id, outcomes), or (job id, message) for what is no reward

It imports neither torch nor this package's other layers, so that a replacement for a hung worker is there in a moment.
An `async` reward has a worker of its own, which awaits many jobs at once. Ctrl-C reaches the parent alone.
"""

from __future__ import annotations

import asyncio
import pickle
from multiprocessing.connection import Connection
from typing import Any

from trace_lightning.tasks.base import RewardFn
from trace_lightning.tasks.calls import Outcome, call, call_async, failed
from trace_lightning.tasks.process import parent_lives

Job = tuple[int, int, list[Any], int, float]


def main(descriptor: int, lifeline: int, asynchronous: bool) -> None:
    """Serve the pool at the other end of `descriptor`, for as long as that of `lifeline` is open."""
    if not parent_lives(lifeline):
        return
    connection = Connection(descriptor)
    try:
        rewards: list[RewardFn] = pickle.loads(connection.recv_bytes())
        for reward in rewards:
            reward.prepare()
    except Exception as error:  # an import of the user's that fails here; the pool raises it with this traceback
        connection.send(failed(error, 1)[0])
        return
    connection.send(None)
    if asynchronous:
        asyncio.run(_serve_async(connection, rewards))
    else:
        _serve(connection, rewards)


def _serve(connection: Connection, rewards: list[RewardFn]) -> None:
    while (job := _receive(connection)) is not None:
        number, index, samples, first_row, _ = job
        reply: list[Outcome] | str
        try:
            reply = call(rewards[index], samples, first_row)
        except ValueError as error:
            reply = str(error)
        connection.send((number, reply))


async def _serve_async(connection: Connection, rewards: list[RewardFn]) -> None:
    loop, ended, tasks = asyncio.get_running_loop(), asyncio.Event(), set()

    async def run(job: Job) -> None:
        number, index, samples, first_row, time_limit = job
        reply: list[Outcome] | str
        try:
            reply = await call_async(rewards[index], samples[0], first_row, time_limit)
        except ValueError as error:
            reply = str(error)
        connection.send((number, reply))

    def readable() -> None:
        job = _receive(connection)
        if job is None:
            ended.set()
            return
        task = loop.create_task(run(job))
        tasks.add(task)  # the loop itself holds tasks weakly
        task.add_done_callback(tasks.discard)

    loop.add_reader(connection.fileno(), readable)
    await ended.wait()


def _receive(connection: Connection) -> Job | None:
    try:
        job: Job = pickle.loads(connection.recv_bytes())
    except EOFError:
        return None
    return job
