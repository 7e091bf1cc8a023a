"""What the extension module has."""

import builtins
import os
from asyncio import Future
from collections.abc import Callable, Sequence
from typing import Any, final

from typing_extensions import Buffer, disjoint_base

__all__ = [
    "BrokenPipeError",
    "Completions",
    "ConnectionAbortedError",
    "ConnectionRefusedError",
    "ConnectionResetError",
    "Copied",
    "CopyBrokenPipeError",
    "CopyConnectionAbortedError",
    "CopyConnectionRefusedError",
    "CopyConnectionResetError",
    "CopyError",
    "CopyFileExistsError",
    "CopyFileNotFoundError",
    "CopyIsADirectoryError",
    "CopyNotADirectoryError",
    "CopyPermissionError",
    "CopyTimeoutError",
    "Copying",
    "Error",
    "FileExistsError",
    "FileNotFoundError",
    "Handle",
    "IsADirectoryError",
    "NotADirectoryError",
    "PermissionError",
    "Serving",
    "TimeoutError",
    "Watch",
    "__version__",
    "after_fork",
    "greet",
    "list_contexts",
    "list_exports",
    "set_program",
    "shut_down",
]

class Error(OSError):
    """A request, a connection or a device has failed. ``errno`` is an error number, and ``strerror`` says
    what failed, where and why."""

class CopyError(Error):
    """A copy has failed."""

    status: int
    """The exit status that ``blockhaul copy`` has in this case."""

class BrokenPipeError(Error, builtins.BrokenPipeError): ...
class ConnectionAbortedError(Error, builtins.ConnectionAbortedError): ...
class ConnectionRefusedError(Error, builtins.ConnectionRefusedError): ...
class ConnectionResetError(Error, builtins.ConnectionResetError): ...
class FileExistsError(Error, builtins.FileExistsError): ...
class FileNotFoundError(Error, builtins.FileNotFoundError): ...
class IsADirectoryError(Error, builtins.IsADirectoryError): ...
class NotADirectoryError(Error, builtins.NotADirectoryError): ...
class PermissionError(Error, builtins.PermissionError): ...
class TimeoutError(Error, builtins.TimeoutError): ...
class CopyBrokenPipeError(CopyError, builtins.BrokenPipeError): ...
class CopyConnectionAbortedError(CopyError, builtins.ConnectionAbortedError): ...
class CopyConnectionRefusedError(CopyError, builtins.ConnectionRefusedError): ...
class CopyConnectionResetError(CopyError, builtins.ConnectionResetError): ...
class CopyFileExistsError(CopyError, builtins.FileExistsError): ...
class CopyFileNotFoundError(CopyError, builtins.FileNotFoundError): ...
class CopyIsADirectoryError(CopyError, builtins.IsADirectoryError): ...
class CopyNotADirectoryError(CopyError, builtins.NotADirectoryError): ...
class CopyPermissionError(CopyError, builtins.PermissionError): ...
class CopyTimeoutError(CopyError, builtins.TimeoutError): ...

@final
class Completions:
    def __new__(cls) -> Completions: ...
    def fileno(self) -> int: ...
    def deliver(self) -> None: ...

@final
class Watch:
    def fileno(self) -> int: ...
    def collect(self, completions: Completions) -> bool: ...
    def send(self, completions: Completions) -> bool: ...
    def patience(self, completions: Completions) -> float | None: ...

@disjoint_base
class Handle:
    def __new__(
        cls,
        words: Sequence[str],
        *,
        mode: str = "r",
        size: int = 0,
        layers: Sequence[str] = ...,
        contexts: Sequence[str] = ...,
        timeout: float = 60.0,
        uri: bool = False,
        structured: bool = True,
        extended: bool = True,
        allocation: bool = True,
        export: str | None = None,
    ) -> Handle: ...
    def close(self) -> None:
        """Closes the device, after the requests in flight. What was written through ``open`` is flushed first.
        Does nothing if it is closed."""
    def use_workers(self) -> None:
        """Lets workers carry out requests from here on, also those that a thread waits for."""
    def use_loop(self) -> Watch | None:
        """Lets the thread of an event loop carry out requests from here on, those of ``start_…``; returns what
        the loop must watch. ``None``: workers carry them out."""
    def leave_loop(self) -> None:
        """Lets workers carry out what a loop did, after the requests in flight. Does not wait for them."""
    @property
    def closed(self) -> bool:
        """Whether it is closed."""
    @property
    def pid(self) -> int | None:
        """Process ID of the command that serves it; ``None`` if it was not opened as one."""
    @property
    def size(self) -> int:
        """Size in bytes."""
    @property
    def name(self) -> str:
        """The device as it was named, without secrets."""
    @property
    def description(self) -> str:
        """What the server or the device says about its contents; may be empty."""
    @property
    def block_size(self) -> tuple[int, int, int]:
        """Minimum, preferred and maximum block size in bytes. Requests of any length and offset work."""
    @property
    def contexts(self) -> list[str]:
        """Names of the metadata contexts that can be asked for."""
    @property
    def rotational(self) -> bool:
        """Whether the storage says that it is a rotating disk."""
    @property
    def connection(self) -> dict[str, Any] | None:
        """What the handshake with the server has led to; ``None`` for a device that is not a URI."""
    @property
    def traffic(self) -> tuple[int, int, int, int] | None:
        """What the connection has sent and received: bytes and messages sent, bytes and messages received.
        ``None`` for a device that is not a URI."""
    def can(self, name: str, *, emulated: bool = True) -> bool:
        """Abilities: those of the device itself, or with those that are emulated."""
    def pread(self, count: int, offset: int) -> bytes:
        """Reads ``count`` bytes at ``offset``."""
    def pread_into(self, buffer: Buffer, offset: int) -> int:
        """Fills a buffer from ``offset``; returns its length in bytes."""
    def pwrite(self, data: Buffer, offset: int, *, fua: bool = False) -> None:
        """Writes a buffer at ``offset``; with ``fua`` it is durable on return."""
    def zero(
        self,
        count: int,
        offset: int,
        *,
        fua: bool = False,
        allocate: bool = False,
        fast: bool = False,
    ) -> None:
        """Makes ``count`` bytes at ``offset`` read as zeroes."""
    def trim(self, count: int, offset: int, *, fua: bool = False) -> None:
        """Discards ``count`` bytes at ``offset``; what they read as afterwards is undefined."""
    def flush(self) -> None:
        """Makes completed writes durable."""
    def cache(self, count: int, offset: int) -> None:
        """Announces that ``count`` bytes at ``offset`` will be read."""
    def block_status(
        self, count: int, offset: int, contexts: list[str] | None = None, *, one: bool = False
    ) -> dict[str, list[tuple[int, int]]]:
        """The state of ``count`` bytes at ``offset``, or of a part of them: for each context its runs, as
        length in bytes and flags."""
    def start_pread(
        self, completions: Completions, future: Future[Any], count: int, offset: int
    ) -> bool: ...
    def start_pread_into(
        self, completions: Completions, future: Future[Any], buffer: Buffer, offset: int
    ) -> bool: ...
    def start_pwrite(
        self,
        completions: Completions,
        future: Future[Any],
        data: Buffer,
        offset: int,
        *,
        fua: bool = False,
    ) -> bool: ...
    def start_zero(
        self,
        completions: Completions,
        future: Future[Any],
        count: int,
        offset: int,
        *,
        fua: bool = False,
        allocate: bool = False,
        fast: bool = False,
    ) -> bool: ...
    def start_trim(
        self,
        completions: Completions,
        future: Future[Any],
        count: int,
        offset: int,
        *,
        fua: bool = False,
    ) -> bool: ...
    def start_flush(self, completions: Completions, future: Future[Any]) -> bool: ...
    def start_cache(
        self, completions: Completions, future: Future[Any], count: int, offset: int
    ) -> bool: ...
    def start_block_status(
        self,
        completions: Completions,
        future: Future[Any],
        count: int,
        offset: int,
        contexts: list[str] | None = None,
        *,
        one: bool = False,
    ) -> bool: ...

@final
class Copied:
    """The result of a copy."""

    @property
    def size(self) -> int:
        """Bytes to copy."""
    @property
    def data(self) -> int:
        """Bytes written as data."""
    @property
    def zeroed(self) -> int:
        """Bytes zeroed on the target."""
    @property
    def skipped(self) -> int:
        """Bytes that were already zero on the target."""
    @property
    def resumed(self) -> int:
        """Bytes that an earlier run had copied."""
    @property
    def discarded(self) -> int:
        """Bytes discarded at the source."""
    @property
    def verified(self) -> int:
        """Bytes that the verification compared."""
    @property
    def connections(self) -> int:
        """Connections used, to each side."""
    @property
    def elapsed(self) -> float:
        """Elapsed time in seconds."""
    @property
    def digest(self) -> str | None:
        """The digest in hexadecimal, if it was asked for."""
    @property
    def warnings(self) -> list[str]:
        """Warnings."""
    @property
    def retries(self) -> int:
        """Requests and connections that had to be repeated."""
    @property
    def text(self) -> str:
        """One line about all this."""

@final
class Copying:
    def __new__(
        cls, source: Sequence[str], target: Sequence[str], options: Sequence[tuple[str, Sequence[str]]]
    ) -> Copying: ...
    def run(self, look: Callable[[], object] | None, interval: float) -> Copied: ...
    def cancel(self) -> None: ...
    def counters(self) -> tuple[int, int, int, int, int, int, int, int, int, int]: ...

@final
class Serving:
    def __new__(
        cls,
        words: Sequence[str],
        *,
        layers: Sequence[str] = ...,
        readonly: bool = False,
        name: str = ...,
        unix: str | os.PathLike[str] | None = None,
        tcp: str | None = None,
        object: Any = None,
        threads: int = 1,
    ) -> Serving: ...
    @property
    def uri(self) -> str: ...
    @property
    def clients(self) -> int: ...
    def stop(self) -> int: ...

def list_exports(
    words: Sequence[str], *, command: bool = False, timeout: float = 60.0
) -> list[tuple[str, str]]: ...
def list_contexts(
    words: Sequence[str],
    queries: Sequence[str],
    *,
    select: bool = False,
    export: str | None = None,
    timeout: float = 60.0,
) -> list[str]: ...
def greet(
    words: Sequence[str], *, command: bool = False, structured: bool = True, timeout: float = 60.0
) -> tuple[str, bool, bool]: ...
def after_fork() -> None: ...
def shut_down() -> None: ...
def set_program(path: str | os.PathLike[str]) -> None: ...

__version__: str
