"""Devices, and what they are opened with."""

import os
import sys
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import NamedTuple, Self, TypeAlias
from urllib.parse import quote
from weakref import WeakSet

from . import _blockhaul

#: A device as on the command line, or the words of a command that serves it, as between ``[`` and ``]``.
Description: TypeAlias = str | os.PathLike[str] | Sequence[str]

#: Bytes of a range that is asked for its extents at a time.
_STEP = 1 << 30


def words(device: Description) -> list[str]:
    """The words that describe a device."""
    if isinstance(device, str):
        return [device]
    if isinstance(device, os.PathLike):
        path = os.fspath(device)
        # A colon in a path is not a scheme.
        return [path if os.path.isabs(path) else os.path.join(".", path)]
    inner = [os.fspath(word) for word in device]
    return ["[", *inner, "]"] if inner[:1] != ["["] else inner


class Extent(NamedTuple):
    """A run of bytes in one state."""

    offset: int
    """Where it begins, in bytes."""
    length: int
    """Its length in bytes, not 0."""
    flags: int
    """Its state; the meaning depends on the context."""

    @property
    def hole(self) -> bool:
        """In the context base:allocation: it occupies no storage."""
        return bool(self.flags & 1)

    @property
    def zero(self) -> bool:
        """In the context base:allocation: it reads as zeroes."""
        return bool(self.flags & 2)

    @property
    def data(self) -> bool:
        """In the context base:allocation: it may have other bytes than zero."""
        return not self.flags & 2


class Export(NamedTuple):
    """An export of a server."""

    name: str
    description: str
    """A text for users; may be empty."""


#: Devices that are closed at the end of the program.
_opened: "WeakSet[Device]" = WeakSet()


def close_all() -> None:
    """Closes what is still open, at the end of the program: layers may hold data that must be written."""
    for device in list(_opened):
        try:
            device.close()
        except _blockhaul.Error as error:
            print(f"blockhaul: {device.name}: {error}", file=sys.stderr)


def forget_all() -> None:
    """Forgets the devices of the parent, in a child."""
    _opened.clear()


class Device(_blockhaul.Handle):
    """An open device: a disk, a file, an export of a server, or any other.

    It is closed by ``close()``, and at the end of a ``with`` block. It belongs to the process that opened
    it: in a forked child its methods raise ``Error`` (EBADF).
    """

    def __init__(self, *words: object, **options: object) -> None:
        _opened.add(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        state = " closed" if self.closed else ""
        return f"<blockhaul.Device {self.name!r} of {self.size} bytes{state}>"

    @property
    def can_write(self) -> bool:
        """Whether it can be written."""
        return self.can("write")

    @property
    def can_flush(self) -> bool:
        """Whether a flush makes a difference."""
        return self.can("flush")

    @property
    def can_fua(self) -> bool:
        """Whether writes with ``fua`` are possible; it may be a flush after the write."""
        return self.can("fua")

    @property
    def can_trim(self) -> bool:
        """Whether ranges can be discarded."""
        return self.can("trim")

    @property
    def can_zero(self) -> bool:
        """Whether ranges can be zeroed; it may be done by writing zeroes."""
        return self.can("zero")

    @property
    def can_fast_zero(self) -> bool:
        """Whether zeroing fails at once where it would be no faster than writing."""
        return self.can("fast_zero")

    @property
    def can_cache(self) -> bool:
        """Whether ranges can be prefetched."""
        return self.can("cache")

    @property
    def can_extents(self) -> bool:
        """Whether the device itself knows its extents. If not, everything is reported as data."""
        return self.can("extents", emulated=False)

    @property
    def can_multi_conn(self) -> bool:
        """Whether a flush covers what other connections to the same storage have written."""
        return self.can("multi_conn")

    def extents(
        self,
        offset: int = 0,
        length: int | None = None,
        *,
        context: str = "base:allocation",
    ) -> Iterator[Extent]:
        """The extents of a range in one context, in order and without gaps; adjacent ones differ.

        ``length`` is up to the end of the device by default. They are asked for while the iterator is used.
        """
        end = self.size if length is None else offset + length
        if offset < 0 or not offset <= end <= self.size:
            raise ValueError(f"the range is not within the {self.size} bytes of the device")
        at, last = offset, None
        while at < end:
            found = self.block_status(min(end - at, _STEP), at, [context])
            for size, flags in found[context]:
                if last is not None and last.flags == flags:
                    last = Extent(last.offset, last.length + size, flags)
                else:
                    if last is not None:
                        yield last
                    last = Extent(at, size, flags)
                at += size
        if last is not None:
            yield last


def with_tls(
    uri: str,
    certificates: str | os.PathLike[str] | None,
    psk_file: str | os.PathLike[str] | None,
    hostname: str | None,
    username: str | None,
    verify_peer: bool | None,
) -> str:
    """The URI with these parameters."""
    texts = {
        "tls-certificates": None if certificates is None else os.fspath(certificates),
        "tls-psk-file": None if psk_file is None else os.fspath(psk_file),
        "tls-hostname": hostname,
        "tls-username": username,
        "tls-verify-peer": None if verify_peer is None else str(verify_peer).lower(),
    }
    added = [f"{key}={quote(text, safe='/')}" for key, text in texts.items() if text is not None]
    if not added:
        return uri
    return uri + ("&" if "?" in uri else "?") + "&".join(added)


def connect(
    uri: str,
    *,
    readonly: bool = False,
    contexts: Sequence[str] = (),
    timeout: float = 60.0,
    tls_certificates: str | os.PathLike[str] | None = None,
    tls_psk_file: str | os.PathLike[str] | None = None,
    tls_hostname: str | None = None,
    tls_username: str | None = None,
    tls_verify_peer: bool | None = None,
) -> Device:
    """Connects to an export of an NBD server.

    ``uri`` is an NBD URI: ``nbd://host:port/export``, ``nbds://`` with TLS,
    ``nbd+unix:///export?socket=path`` and the others of ``blockhaul help nbd``. ``contexts`` are metadata
    contexts to ask for besides base:allocation; ``Device.contexts`` has those that the server granted. The
    connection is dropped after ``timeout`` seconds without a byte while requests are in flight (0: never).
    ``tls_*`` are parameters of the URI: a directory of certificates, a file of pre-shared keys, the name
    that the certificate must have, the user, and whether the certificate is checked.

    Raises ``Error``: ENOENT if there is no such server, host or export, EACCES if access was refused,
    EINVAL for an invalid URI, ETIMEDOUT.
    """
    full = with_tls(
        uri, tls_certificates, tls_psk_file, tls_hostname, tls_username, tls_verify_peer
    )
    mode = "r" if readonly else "r+"
    return Device([full], mode=mode, contexts=list(contexts), timeout=timeout, uri=True)


def open(
    device: Description,
    mode: str = "r",
    *,
    size: int = 0,
    layers: Sequence[str] = (),
    contexts: Sequence[str] = (),
    timeout: float = 60.0,
) -> Device:
    """Opens any device that the command blockhaul takes.

    ``device`` is written as on its command line (``blockhaul help devices``): a path, ``memory:1G``,
    ``qcow2:disk.qcow2``, a URI and others; or a list with the words of a command that serves the device by
    socket activation, as ``["qemu-nbd", "-f", "vmdk", "disk.vmdk"]``. ``mode`` is ``"r"`` to read, ``"r+"``
    to read and write, ``"w"`` to create a file or image of ``size`` bytes, or to empty and resize an existing
    one. ``layers`` are written as for ``--layer``, the first is the innermost. ``contexts`` and ``timeout`` are
    as for ``connect``.

    Raises ``Error``: ENOENT if it does not exist, EACCES if access was refused, EINVAL if it is not a
    device.
    """
    return Device(
        words(device),
        mode=mode,
        size=size,
        layers=list(layers),
        contexts=list(contexts),
        timeout=timeout,
    )


def extents(
    device: Description | Device,
    offset: int = 0,
    length: int | None = None,
    *,
    context: str = "base:allocation",
) -> Iterator[Extent]:
    """The extents of a device, as ``Device.extents``; a description is opened for reading first."""
    if isinstance(device, Device):
        yield from device.extents(offset, length, context=context)
        return
    own = () if context == "base:allocation" else (context,)
    with open(device, contexts=own) as opened:
        yield from opened.extents(offset, length, context=context)


def list_exports(uri: str, *, timeout: float = 60.0) -> list[Export]:
    """The exports that the server of an NBD URI lists. The name of an export in the URI does not matter.

    Raises ``Error``: as ``connect``; EACCES or EOPNOTSUPP if the server refuses to list them.
    """
    return [Export(*entry) for entry in _blockhaul.list_exports([uri], timeout=timeout)]
