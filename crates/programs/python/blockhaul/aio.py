"""Devices for asyncio.

    import asyncio, blockhaul.aio

    async def main():
        async with await blockhaul.aio.connect("nbd://localhost/disk") as disk:
            first, second = await asyncio.gather(disk.pread(4096, 0), disk.pread(4096, 1 << 20))

Requests of any number of tasks are in flight at the same time. A cancelled task does not wait any more; a
write that it has started may still happen.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self
from weakref import WeakKeyDictionary

from . import _blockhaul, _copy, _device
from ._blockhaul import Copied
from ._device import Description, Extent

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["Device", "connect", "copy", "open"]

#: What has results for each loop.
_of_loop: "WeakKeyDictionary[asyncio.AbstractEventLoop, _blockhaul.Completions]" = WeakKeyDictionary()


def _completions(loop: asyncio.AbstractEventLoop) -> _blockhaul.Completions:
    """What delivers results to a loop; made on first use."""
    found = _of_loop.get(loop)
    if found is None:
        found = _blockhaul.Completions()
        loop.add_reader(found.fileno(), found.deliver)
        _of_loop[loop] = found
    return found


class _Line:
    """A connection whose requests the thread of a loop sends and receives itself."""

    __slots__ = ("completions", "loop", "timeout", "timer", "unsent", "watch", "waiting")

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        watch: _blockhaul.Watch,
        completions: _blockhaul.Completions,
        timeout: float,
    ) -> None:
        self.loop, self.watch, self.completions = loop, watch, completions
        self.timeout = timeout
        self.timer: asyncio.TimerHandle | None = None
        #: Requests are to be sent at the end of this turn of the loop.
        self.unsent = False
        #: The socket takes no more for now.
        self.waiting = False
        loop.add_reader(watch.fileno(), self.readable)

    def started(self, queued: bool) -> None:
        """A request was made; ``queued``: it must be sent."""
        if queued and not self.unsent:
            self.unsent = True
            self.loop.call_soon(self.send)
        if self.timer is None and self.timeout:
            self.timer = self.loop.call_later(self.timeout, self.look)

    def send(self) -> None:
        """Sends requests, or waits until the socket takes them."""
        self.unsent = False
        unsent = self.watch.send(self.completions)
        if unsent != self.waiting:
            self.waiting = unsent
            if unsent:
                self.loop.add_writer(self.watch.fileno(), self.send)
            else:
                self.loop.remove_writer(self.watch.fileno())

    def readable(self) -> None:
        """Receives replies."""
        if not self.watch.collect(self.completions):
            self.forget()

    def look(self) -> None:
        """Ends the connection if the server sends nothing for too long."""
        left = self.watch.patience(self.completions)
        self.timer = None if left is None else self.loop.call_later(left, self.look)

    def forget(self) -> None:
        """Lets the loop forget the socket."""
        self.loop.remove_reader(self.watch.fileno())
        if self.waiting:
            self.waiting = False
            self.loop.remove_writer(self.watch.fileno())


class Device:
    """An open device whose methods are coroutines. The methods are those of ``blockhaul.Device``, which is
    its attribute ``device``; sizes and abilities are there."""

    def __init__(self, device: _device.Device) -> None:
        self.device = device
        self._loop: asyncio.AbstractEventLoop | None = None
        self._completions: _blockhaul.Completions | None = None
        self._line: _Line | None = None

    def _begin(self) -> "tuple[_blockhaul.Completions, asyncio.Future[Any]]":
        """A future for a request, and what brings its result."""
        loop = asyncio.get_running_loop()
        completions = self._completions
        if completions is None or loop is not self._loop:
            completions = _completions(loop)
            self._loop, self._completions = loop, completions
            if self._line is not None:
                # Workers serve any number of loops.
                self._line = None
                self.device.leave_loop()
        return completions, loop.create_future()

    def _started(self, queued: bool) -> None:
        """A request was made."""
        if self._line is not None:
            self._line.started(queued)

    def _use_loop(self, timeout: float) -> None:
        """Lets this thread send and receive, if it can."""
        loop = asyncio.get_running_loop()
        watch = self.device.use_loop()
        if watch is None:
            self.device.use_workers()
            return
        self._loop, self._completions = loop, _completions(loop)
        self._line = _Line(loop, watch, self._completions, timeout)

    @property
    def size(self) -> int:
        """Size in bytes."""
        return self.device.size

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Closes the device, after the requests in flight."""
        await asyncio.to_thread(self.device.close)

    async def pread(self, count: int, offset: int) -> bytes:
        """Reads ``count`` bytes at ``offset``."""
        completions, future = self._begin()
        self._started(self.device.start_pread(completions, future, count, offset))
        return await future  # type: ignore[no-any-return]

    async def pread_into(self, buffer: "Buffer", offset: int) -> int:
        """Fills a buffer from ``offset``, and returns its length. It must not be used or resized meanwhile."""
        completions, future = self._begin()
        self._started(self.device.start_pread_into(completions, future, buffer, offset))
        return await future  # type: ignore[no-any-return]

    async def pwrite(self, data: "Buffer", offset: int, *, fua: bool = False) -> None:
        """Writes a buffer at ``offset``; with ``fua`` it is durable on return."""
        completions, future = self._begin()
        self._started(self.device.start_pwrite(completions, future, data, offset, fua=fua))
        await future

    async def zero(
        self,
        count: int,
        offset: int,
        *,
        fua: bool = False,
        allocate: bool = False,
        fast: bool = False,
    ) -> None:
        """Makes a range read as zeroes; ``allocate`` keeps its storage, ``fast`` fails rather than write."""
        completions, future = self._begin()
        queued = self.device.start_zero(
            completions, future, count, offset, fua=fua, allocate=allocate, fast=fast
        )
        self._started(queued)
        await future

    async def trim(self, count: int, offset: int, *, fua: bool = False) -> None:
        """Discards a range; what it reads as afterwards is undefined."""
        completions, future = self._begin()
        self._started(self.device.start_trim(completions, future, count, offset, fua=fua))
        await future

    async def flush(self) -> None:
        """Makes completed writes durable."""
        completions, future = self._begin()
        self._started(self.device.start_flush(completions, future))
        await future

    async def cache(self, count: int, offset: int) -> None:
        """Announces that a range will be read."""
        completions, future = self._begin()
        self._started(self.device.start_cache(completions, future, count, offset))
        await future

    async def block_status(
        self, count: int, offset: int, contexts: list[str] | None = None, *, one: bool = False
    ) -> dict[str, list[tuple[int, int]]]:
        """The runs of a range, or of its beginning, for each context: length in bytes and flags."""
        completions, future = self._begin()
        queued = self.device.start_block_status(
            completions, future, count, offset, contexts, one=one
        )
        self._started(queued)
        return await future  # type: ignore[no-any-return]

    async def extents(
        self, offset: int = 0, length: int | None = None, *, context: str = "base:allocation"
    ) -> AsyncIterator[Extent]:
        """The extents of a range in one context, in order and without gaps; adjacent ones may be equal."""
        end = self.size if length is None else offset + length
        if offset < 0 or not offset <= end <= self.size:
            raise ValueError(f"the range is not within the {self.size} bytes of the device")
        at = offset
        while at < end:
            found = await self.block_status(min(end - at, 1 << 30), at, [context])
            for size, flags in found[context]:
                yield Extent(at, size, flags)
                at += size


async def connect(uri: str, **options: Any) -> Device:
    """Connects to an export of an NBD server. The arguments are those of ``blockhaul.connect``.

    Without TLS, the thread of this loop sends and receives. A use from another loop or thread, and a request
    that the server does not take as it is, let workers do so from then on.
    """
    device = Device(await asyncio.to_thread(_device.connect, uri, **options))
    device._use_loop(options.get("timeout", 60.0))
    return device


async def open(device: Description, mode: str = "r", **options: Any) -> Device:
    """Opens any device. The arguments are those of ``blockhaul.open``."""
    return Device(await asyncio.to_thread(_device.open, device, mode, **options))


async def copy(
    source: Description,
    target: Description,
    *,
    progress: Callable[[_copy.Progress], object] | None = None,
    **options: Any,
) -> Copied:
    """Copies one device to another, in a thread. The arguments are those of ``blockhaul.copy``.

    ``progress`` is called in that thread. A cancelled task stops the copy and waits for what is in flight.
    """
    cancelled = False

    def look(now: _copy.Progress) -> None:
        if cancelled:
            raise asyncio.CancelledError
        if progress is not None:
            progress(now)

    work = asyncio.ensure_future(
        asyncio.to_thread(_copy.copy, source, target, progress=look, **options)
    )
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        cancelled = True
        await asyncio.wait([work])
        # Its own exception is this one, or one that nobody asked for any more.
        work.cancelled() or work.exception()
        raise
