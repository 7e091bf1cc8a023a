"""A server in this process."""

import os
from collections.abc import Sequence
from types import TracebackType
from typing import Protocol, Self
from weakref import WeakSet

from . import _blockhaul
from ._device import Description, words


class Object(Protocol):
    """A device in Python: the callbacks of a plugin as methods, without the handle.

    ``pwrite(buffer, offset, flags)``, ``flush(flags)``, ``trim(count, offset, flags)``, ``zero(count, offset,
    flags)``, ``cache(count, offset, flags)``, ``extents(count, offset, flags)`` and ``block_size()`` are
    offered to clients if they exist. An exception fails the request with its ``errno``, or EIO.
    """

    def get_size(self) -> int:
        """Size in bytes. Asked for once."""
        ...

    def pread(self, buffer: memoryview, offset: int, flags: int, /) -> object:
        """Fills a buffer. What it does not fill reads as zeroes."""
        ...


#: Servers that are stopped at the end of the program.
_started: "WeakSet[Server]" = WeakSet()


def stop_all() -> None:
    """Stops what still runs, at the end of the program."""
    for server in list(_started):
        server.stop()


def forget_all() -> None:
    """Forgets the servers of the parent, in a child."""
    _started.clear()


class Server:
    """A running server. It stops at ``stop()``, and at the end of a ``with`` block."""

    def __init__(self, serving: _blockhaul.Serving) -> None:
        self._serving = serving
        _started.add(self)

    @property
    def uri(self) -> str:
        """The NBD URI at which clients reach it."""
        return self._serving.uri

    @property
    def clients(self) -> int:
        """Number of connected clients."""
        return self._serving.clients

    def stop(self) -> int:
        """Finishes the requests in progress, disconnects clients and closes the device.

        Returns the number of requests that the device did not finish in time. Does nothing if the server has
        stopped.
        """
        return self._serving.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()


def serve(
    device: Description | Object,
    *,
    unix: str | os.PathLike[str] | None = None,
    tcp: tuple[str, int] | None = None,
    name: str = "",
    readonly: bool = False,
    layers: Sequence[str] = (),
    threads: int = 1,
) -> Server:
    """Serves a device over NBD, in threads of this process, until ``Server.stop``.

    ``device`` and ``layers`` are as for ``open``; or ``device`` is an object of a class with the methods of
    ``Object``, which up to ``threads`` threads call at a time. The server listens on the Unix socket ``unix``, or at
    ``tcp``, an address and a port; without either, at a free port of 127.0.0.1. A plugin
    is ``python:script.py``, which runs in a process of its own. For TLS, limits and everything else that a
    server may need, start the command ``blockhaul serve`` (``program()``).

    Raises ``Error``: as ``open``; EADDRINUSE or EACCES if the server cannot listen.
    """
    if unix is not None and tcp is not None:
        raise ValueError("give unix or tcp, not both")
    address = None
    if unix is None:
        host, port = tcp if tcp is not None else ("127.0.0.1", 0)
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    path = None if unix is None else os.fspath(unix)
    described: list[str] = []
    own: Object | None = None
    if isinstance(device, (str, os.PathLike, Sequence)):
        described = words(device)
    else:
        own = device
    serving = _blockhaul.Serving(
        described,
        layers=list(layers),
        readonly=readonly,
        name=name,
        unix=path,
        tcp=address,
        object=own,
        threads=threads,
    )
    return Server(serving)
