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


class Device:
    """An open device whose methods are coroutines. The methods are those of ``blockhaul.Device``, which is
    its attribute ``device``; sizes and abilities are there."""

    def __init__(self, device: _device.Device) -> None:
        self.device = device
        self._loop: asyncio.AbstractEventLoop | None = None
        self._completions: _blockhaul.Completions | None = None

    def _begin(self) -> "tuple[_blockhaul.Completions, asyncio.Future[Any]]":
        """A future for a request, and what brings its result."""
        loop = asyncio.get_running_loop()
        completions = self._completions
        if completions is None or loop is not self._loop:
            completions = _completions(loop)
            self._loop, self._completions = loop, completions
        return completions, loop.create_future()

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
        self.device.start_pread(completions, future, count, offset)
        return await future  # type: ignore[no-any-return]

    async def pread_into(self, buffer: "Buffer", offset: int) -> int:
        """Fills a buffer from ``offset``, and returns its length. It must not be used or resized meanwhile."""
        completions, future = self._begin()
        self.device.start_pread_into(completions, future, buffer, offset)
        return await future  # type: ignore[no-any-return]

    async def pwrite(self, data: "Buffer", offset: int, *, fua: bool = False) -> None:
        """Writes a buffer at ``offset``; with ``fua`` it is durable on return."""
        completions, future = self._begin()
        self.device.start_pwrite(completions, future, data, offset, fua=fua)
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
        self.device.start_zero(
            completions, future, count, offset, fua=fua, allocate=allocate, fast=fast
        )
        await future

    async def trim(self, count: int, offset: int, *, fua: bool = False) -> None:
        """Discards a range; what it reads as afterwards is undefined."""
        completions, future = self._begin()
        self.device.start_trim(completions, future, count, offset, fua=fua)
        await future

    async def flush(self) -> None:
        """Makes completed writes durable."""
        completions, future = self._begin()
        self.device.start_flush(completions, future)
        await future

    async def cache(self, count: int, offset: int) -> None:
        """Announces that a range will be read."""
        completions, future = self._begin()
        self.device.start_cache(completions, future, count, offset)
        await future

    async def block_status(
        self, count: int, offset: int, contexts: list[str] | None = None, *, one: bool = False
    ) -> dict[str, list[tuple[int, int]]]:
        """The runs of a range, or of its beginning, for each context: length in bytes and flags."""
        completions, future = self._begin()
        self.device.start_block_status(completions, future, count, offset, contexts, one=one)
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


def _connect(uri: str, **options: Any) -> _device.Device:
    """A connection whose requests no thread waits for."""
    device = _device.connect(uri, **options)
    device.use_workers()
    return device


async def connect(uri: str, **options: Any) -> Device:
    """Connects to an export of an NBD server. The arguments are those of ``blockhaul.connect``."""
    return Device(await asyncio.to_thread(_connect, uri, **options))


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
