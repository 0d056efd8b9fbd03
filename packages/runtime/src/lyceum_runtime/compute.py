"""Where the work of requests runs: threads of the runtime's own, of which a bounded number computes at a time.

A function that takes one request and gives one answer runs on one of `workers` shared threads. Every other request has
a thread of its own, so that a generator stays on one (torch's modes and joblib's settings belong to a thread), and
takes one of `workers` slots only while it computes: a stream whose reader is slow, or an upload whose sender is, gives
its slot to others while it waits. A lane bounds how many requests may be inside at once; what comes on top is refused,
never queued without end.
"""

import asyncio
import contextlib
import contextvars
import functools
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from queue import Empty, SimpleQueue
from typing import Any, Generic, TypeVar

from lyceum_runtime.errors import ResourceExhausted

T = TypeVar("T")

QUEUED_MESSAGES = 16
"""Messages of a stream that wait on either side of the thread."""

_POLL_SECONDS = 0.1
_GATHER_SECONDS = 0.002  # for which a busy server gathers work before it wakes a thread
_BUSY = 8  # requests inside


def stopped() -> Exception:
    """A new `lyceum_base.Stopped`. Imported only when needed, since it brings NumPy, 11 MB of an idle server."""
    from lyceum_base.checkpoint import Stopped

    return Stopped()


class Stop:
    """Whether one request's work should end: its caller left, its deadline passed, or the server stops.

    The event loop sets it; any thread may ask.
    """

    def __init__(self, seconds: float | None = None, *, waiter: bool = False) -> None:
        self.waiter = waiter
        """The request only waits for other work and loses nothing by ending."""
        self._deadline = None if seconds is None else time.monotonic() + seconds
        self._set = False
        self._callbacks: list[Callable[[], object]] = []

    def __call__(self) -> bool:
        return self._set or self.expired()

    def expired(self) -> bool:
        """Whether the deadline has passed."""
        return self._deadline is not None and time.monotonic() >= self._deadline

    def set(self) -> None:
        """Ask the work to end and wake it if it waits for a message."""
        self._set = True
        for callback in self._callbacks:
            callback()

    def on_set(self, callback: Callable[[], object]) -> None:
        """Call `callback` at `set`."""
        self._callbacks.append(callback)
        if self._set:
            callback()


class Slot:
    """One request's right to compute. Used by its thread only."""

    def __init__(self, free: "SimpleQueue[None] | None", stop: Stop) -> None:
        self._free = free
        self._stop = stop
        self._held = False

    def take(self) -> None:
        """Waits for a free slot.

        Raises:
            Stopped: the request ended while it waited.
        """
        if self._free is not None and not self._held:
            while True:
                try:
                    self._free.get(timeout=_POLL_SECONDS)
                    break
                except Empty:
                    if self._stop():
                        raise stopped() from None
            self._held = True

    def give(self) -> None:
        """Returns the slot if it is held."""
        if self._free is not None and self._held:
            self._held = False
            self._free.put(None)


class _Threads:
    """Threads for plain functions. One works off what has come together, and the others join it when it is held up:
    with small functions a second thread only contends for the interpreter, and each wake-up costs as much as a call.

    Used by the event loop only.
    """

    def __init__(self, name: str, count: int) -> None:
        self._waiting: deque[Callable[[], None]] = deque()
        self._wakes: SimpleQueue[bool] = SimpleQueue()  # True: look for work, False: end
        self._idle = deque(range(count))  # appended and popped atomically, so a count that needs no lock
        self._name = name
        self._threads: list[threading.Thread] = []
        self._count = count
        self._timer: asyncio.TimerHandle | None = None

    def submit(self, work: Callable[[], None], *, busy: bool) -> None:
        """Runs `work` on a thread. On a busy server a thread is woken for several at once."""
        self._waiting.append(work)
        if len(self._idle) == self._count and not busy:
            self._wake()
        elif self._timer is None:
            self._look_again()

    def cancel(self, work: Callable[[], None]) -> bool:
        """Whether `work` had not begun, and never will."""
        try:
            self._waiting.remove(work)
        except ValueError:
            return False
        return True

    def _look_again(self) -> None:
        head = self._waiting[0] if self._waiting else None
        self._timer = asyncio.get_running_loop().call_later(_GATHER_SECONDS, self._join, head)

    def _join(self, head: Callable[[], None] | None) -> None:
        self._timer = None
        if not self._waiting:
            return
        if len(self._idle) == self._count:
            self._wake()
        elif self._waiting[0] is head:  # nothing has been begun since
            for _ in range(min(len(self._idle), len(self._waiting))):
                self._wake()
        self._look_again()

    def _wake(self) -> None:
        self._idle.pop()
        if len(self._threads) < self._count - len(self._idle):
            thread = threading.Thread(target=self._work, name=f"{self._name}_{len(self._threads)}", daemon=True)
            self._threads.append(thread)
            thread.start()
        self._wakes.put(True)

    def _work(self) -> None:
        while self._wakes.get():
            while self._waiting:
                try:
                    work = self._waiting.popleft()
                except IndexError:
                    break
                work()
                del work
            self._idle.append(0)

    def close(self) -> None:
        """Starts nothing more."""
        self._waiting.clear()
        for _ in self._threads:
            self._wakes.put(False)


class Lane:
    """A bounded number of requests, the threads they run on, and the slots in which they compute.

    With `workers` None waiting is all that the work does: it needs no slot, and a thread of its own. Used by the event
    loop only.
    """

    def __init__(self, name: str, *, workers: int | None, limit: int) -> None:
        self.limit = limit
        self.pending = 0
        self._free: SimpleQueue[None] | None = None
        if workers is not None:
            self._free = SimpleQueue()  # a counting semaphore in C
            for _ in range(workers):
                self._free.put(None)
        self._own = ThreadPoolExecutor(limit, thread_name_prefix=f"lyceum-{name}")
        self._shared = None if workers is None else _Threads(f"lyceum-{name}-shared", workers)
        self._ended: deque[tuple[asyncio.Future[Any], Any, Exception | None]] = deque()
        self._told = False  # the loop knows that something has ended

    def submit(self, work: Callable[[], T], stop: Stop, *, shared: bool = False) -> "asyncio.Future[T]":
        """Runs `work` on a thread, in the caller's context. It counts as pending until the thread is done with it.

        Raises:
            ResourceExhausted: the lane is full; with RetryInfo.
        """
        self.enter()
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        context = contextvars.copy_context()

        def run() -> None:
            result, failure = None, None
            try:
                result = context.run(work)
            except Exception as error:
                failure = error
            self._end(loop, future, result, failure)

        cancel: Callable[[], bool]
        if shared and self._shared is not None:
            self._shared.submit(run, busy=self.pending > _BUSY)
            cancel = functools.partial(self._shared.cancel, run)
        else:
            cancel = self._own.submit(run).cancel

        def drop() -> None:
            if not future.done() and cancel():
                self.leave()
                _settle(future, None, stopped())

        stop.on_set(drop)
        if not shared:
            # Nobody waits any more once a stream's caller has left; asyncio would then report its error as never
            # retrieved.
            future.add_done_callback(_retrieve)
        return future

    def enter(self) -> None:
        """Counts one more request as pending, until `leave`.

        Raises:
            ResourceExhausted: the lane is full; with RetryInfo.
        """
        if self.pending >= self.limit:
            raise ResourceExhausted(
                f"{self.pending} requests are running or waiting, the most this server takes (LYCEUM_MAX_PENDING)",
                retry_after_seconds=1.0,
            )
        self.pending += 1

    def leave(self) -> None:
        """The end of what `enter` began."""
        self.pending -= 1

    def _end(
        self, loop: asyncio.AbstractEventLoop, future: "asyncio.Future[Any]", result: Any, failure: Exception | None
    ) -> None:
        """Takes an outcome to the event loop. One wake-up brings all that have come together: each costs a system
        call, in which the thread loses the interpreter to the loop.
        """
        self._ended.append((future, result, failure))
        if not self._told:
            self._told = True
            with contextlib.suppress(RuntimeError):  # the loop is closed: work that was left behind
                loop.call_soon_threadsafe(self._settle_ended)

    def _settle_ended(self) -> None:
        self._told = False  # before the queue is read: what comes later tells again
        while self._ended:
            self.leave()
            _settle(*self._ended.popleft())

    def slot(self, stop: Stop) -> Slot:
        """The slot of one request."""
        return Slot(self._free, stop)

    def close(self) -> None:
        """Starts nothing more. A thread that is inside a computation that does not poll runs on."""
        self._own.shutdown(wait=False, cancel_futures=True)
        if self._shared is not None:
            self._shared.close()


def _settle(future: "asyncio.Future[Any]", result: Any, failure: Exception | None) -> None:
    if future.done():  # its caller has left
        return
    if failure is None:
        future.set_result(result)
    else:
        future.set_exception(failure)


def _retrieve(future: "asyncio.Future[Any]") -> None:
    if not future.cancelled():
        future.exception()


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

    async def fill(self, messages: AsyncIterator[T], complete: Callable[[], Awaitable[None]]) -> None:
        """Passes on all messages, then the end once `complete()` has returned. Runs on the loop."""
        async for message in messages:
            await self._room.acquire()
            self._queue.put((True, message))
        await complete()
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
