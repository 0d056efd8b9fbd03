"""Where the work of requests runs: threads of the runtime's own, of which a bounded number computes at a time.

Each request has a thread, so that a generator stays on one (torch's modes and joblib's settings belong to a thread),
and takes one of `workers` slots only while it computes: a stream whose reader is slow, or an upload whose sender is,
gives its slot to others while it waits. A lane bounds how many requests may be inside at once; what comes on top is
refused, never queued without end.
"""

import asyncio
import contextvars
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

from lyceum_runtime.errors import ResourceExhausted

T = TypeVar("T")

QUEUED_MESSAGES = 16
"""Messages of a stream that wait on either side of the thread."""

_POLL_SECONDS = 0.1


def stopped() -> Exception:
    """A new `lyceum_base.Stopped`. Imported only when needed, since it brings NumPy, 11 MB of an idle server."""
    from lyceum_base.checkpoint import Stopped

    return Stopped()


class Stop:
    """Whether one request's work should end: its caller left, its deadline passed, or the server stops."""

    def __init__(self, seconds: float | None = None, *, waiter: bool = False) -> None:
        self.waiter = waiter
        """The request only waits for other work and loses nothing by ending."""
        self._deadline = None if seconds is None else time.monotonic() + seconds
        self._event = threading.Event()
        self._callbacks: list[Callable[[], object]] = []

    def __call__(self) -> bool:
        return self._event.is_set() or self.expired()

    def expired(self) -> bool:
        """Whether the deadline has passed."""
        return self._deadline is not None and time.monotonic() >= self._deadline

    def set(self) -> None:
        """Ask the work to end and wake it if it waits for a message."""
        self._event.set()
        for callback in self._callbacks:
            callback()

    def on_set(self, callback: Callable[[], object]) -> None:
        """Call `callback` at `set`."""
        self._callbacks.append(callback)
        if self._event.is_set():
            callback()


class Slot:
    """One request's right to compute. Used by its thread only."""

    def __init__(self, free: threading.Semaphore | None, stop: Stop) -> None:
        self._free = free
        self._stop = stop
        self._held = False

    def take(self) -> None:
        """Waits for a free slot.

        Raises:
            Stopped: the request ended while it waited.
        """
        if self._free is not None and not self._held:
            while not self._free.acquire(timeout=_POLL_SECONDS):
                if self._stop():
                    raise stopped()
            self._held = True

    def give(self) -> None:
        """Returns the slot if it is held."""
        if self._free is not None and self._held:
            self._held = False
            self._free.release()


class Lane:
    """A bounded number of requests, the threads they run on, and the slots in which they compute.

    With `workers` None waiting is all that the work does, and it needs no slot.
    """

    def __init__(self, name: str, *, workers: int | None, limit: int) -> None:
        self.limit = limit
        self.pending = 0
        self._free = None if workers is None else threading.Semaphore(workers)
        self._lock = threading.Lock()
        self._executor = ThreadPoolExecutor(limit, thread_name_prefix=f"lyceum-{name}")

    def submit(self, work: Callable[[], T]) -> "asyncio.Future[T]":
        """Runs `work` on a thread, in the caller's context. It counts as pending until the thread is done with it.

        Raises:
            ResourceExhausted: the lane is full; with RetryInfo.
        """
        with self._lock:
            if self.pending >= self.limit:
                raise ResourceExhausted(
                    f"{self.pending} requests are running or waiting, the most this server takes (LYCEUM_MAX_PENDING)",
                    retry_after_seconds=1.0,
                )
            self.pending += 1
        future: Future[T] = self._executor.submit(contextvars.copy_context().run, work)
        future.add_done_callback(lambda _: self._leave())
        wrapped = asyncio.wrap_future(future)
        # Nobody waits any more once the caller has left; asyncio would then report the error as never retrieved.
        wrapped.add_done_callback(lambda done: done.cancelled() or done.exception())
        return wrapped

    def _leave(self) -> None:
        with self._lock:
            self.pending -= 1

    def slot(self, stop: Stop) -> Slot:
        """The slot of one request."""
        return Slot(self._free, stop)

    def close(self) -> None:
        """Starts nothing more. A thread that is inside a computation that does not poll runs on."""
        self._executor.shutdown(wait=False, cancel_futures=True)


class Inbox(Generic[T]):
    """Messages from the event loop to a thread: at most `QUEUED_MESSAGES` wait."""

    def __init__(self, slot: Slot, stop: Stop) -> None:
        self._loop = asyncio.get_running_loop()
        self._room = asyncio.Semaphore(QUEUED_MESSAGES)
        self._queue: SimpleQueue[tuple[bool, T | None]] = SimpleQueue()
        self._slot = slot
        self._stop = stop
        stop.on_set(self._end)

    def _end(self) -> None:
        self._queue.put((False, None))

    async def fill(self, messages: AsyncIterator[T]) -> None:
        """Passes on all messages, then the end. Runs on the loop until the sender half-closes."""
        async for message in messages:
            await self._room.acquire()
            self._queue.put((True, message))
        self._end()

    def __iter__(self) -> Iterator[T]:
        """The messages, for the thread; it holds no slot while it waits for one.

        Raises:
            Stopped: the request ended before its sender did.
        """
        while True:
            if self._queue.empty():
                self._slot.give()
                item = self._queue.get()
                self._slot.take()
            else:
                item = self._queue.get()
            more, message = item
            if self._stop():
                raise stopped()
            if not more:
                return
            self._loop.call_soon_threadsafe(self._room.release)
            yield message  # type: ignore[misc]


class Outbox(Generic[T]):
    """Messages from a thread to the event loop: at most `QUEUED_MESSAGES` wait."""

    def __init__(self, slot: Slot, stop: Stop) -> None:
        self._loop = asyncio.get_running_loop()
        self._room = threading.Semaphore(QUEUED_MESSAGES)
        self._queue: asyncio.Queue[T] = asyncio.Queue()
        self._slot = slot
        self._stop = stop
        stop.on_set(self._room.release)

    def put(self, message: T) -> None:
        """Sends one message, for the thread; it holds no slot while it waits for room.

        Raises:
            Stopped: the request ended.
        """
        if not self._room.acquire(blocking=False):
            self._slot.give()
            self._room.acquire()
            self._slot.take()
        if self._stop():
            raise stopped()
        self._loop.call_soon_threadsafe(self._queue.put_nowait, message)

    async def drain(self, work: "asyncio.Future[Any]") -> AsyncIterator[T]:
        """The messages in order, until `work` is over; then whatever error it ended with."""
        ended = object()
        work.add_done_callback(lambda _: self._queue.put_nowait(ended))  # type: ignore[arg-type]
        while (message := await self._queue.get()) is not ended:
            yield message
            self._room.release()
        work.result()
