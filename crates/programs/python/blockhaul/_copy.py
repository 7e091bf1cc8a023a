"""Copies of whole disks, or of parts of them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from os import PathLike, fspath
from typing import Literal

from . import _blockhaul
from ._blockhaul import Copied
from ._device import Description, words


@dataclass(frozen=True, slots=True)
class Progress:
    """The counters of a copy, in bytes, and its current settings."""

    done: int
    """Bytes of the source that are done."""
    total: int
    """Bytes to copy; 0 while that is unknown."""
    data: int
    """Written as data."""
    zeroed: int
    """Zeroed on the target."""
    skipped: int
    """Already zero on the target."""
    resumed: int
    """Copied by an earlier run."""
    verified: int
    """Compared by the verification, which follows the copy."""
    connections: int
    """Connections to each side."""
    requests: int
    """Requests that all connections together may have in flight."""
    request_size: int
    """Bytes of a request."""


def copy(
    source: Description,
    target: Description,
    *,
    progress: Callable[[Progress], object] | None = None,
    interval: float = 0.1,
    connections: int | None = None,
    multi_conn: Literal["auto", "always", "advertised"] | None = None,
    requests: int | None = None,
    request_size: int | str | None = None,
    queue_size: int | str | None = None,
    sparse: int | str | None = None,
    allocated: bool = False,
    destination_is_zero: bool = False,
    trust: bool = False,
    no_extents: bool = False,
    flush: bool = False,
    discard_source: bool = False,
    direct: Literal["auto", "on", "off"] | None = None,
    synchronous: bool = False,
    verify: bool = False,
    manifest: str | PathLike[str] | None = None,
    digest: Literal["blake3", "sha256", "blksum"] | None = None,
    on_error: Literal["stop", "skip"] | None = None,
    error_map: str | PathLike[str] | None = None,
    range: tuple[int, int] | None = None,
    ranges: str | PathLike[str] | None = None,
    ranges_command: str | None = None,
    ranges_partial: bool = False,
    bitmap: str | None = None,
    bitmap_flags: int | None = None,
    since: str | PathLike[str] | None = None,
    timeout: float | str | None = None,
    min_rate: int | str | None = None,
    retries: int | None = None,
    retry_delay: float | str | None = None,
    journal: str | PathLike[str] | None = None,
    restart: bool = False,
    journal_interval: float | str | None = None,
    rate: int | str | None = None,
    iops: int | None = None,
    segment: int | str | None = None,
    source_layers: Sequence[str] = (),
    target_layers: Sequence[str] = (),
) -> Copied:
    """Copies one device to another, as ``blockhaul copy`` does, and returns what was done.

    The devices are descriptions as for ``open``; a file as target is created, or resized. ``progress`` is
    called in this thread each ``interval`` seconds, and once at the end. The other options are those of the
    command, with its defaults (``blockhaul copy --help``): sizes are numbers of bytes or texts such as
    ``"1m"``, times are seconds or texts such as ``"5s"``, ``range`` is an offset and a length,
    ``source_layers`` and ``target_layers`` are lists.

    Ctrl-C, and an exception of ``progress``, stop the copy: nothing more is started, what is in flight is
    awaited, and the exception goes on. With ``journal`` the same call then resumes the copy. After
    ``discard_source`` the journal stays, and the same call copies nothing until it is removed.

    Raises ``CopyError``, whose ``status`` is the exit status of the command: 2 invalid options, 3 a device
    cannot be opened, 4 reading failed, 5 writing failed, 6 the target is full, 7 a connection was lost,
    8 the verification found a difference.
    """
    given: dict[str, object] = {
        "connections": connections,
        "multi-conn": multi_conn,
        "requests": requests,
        "request-size": request_size,
        "queue-size": queue_size,
        "sparse": sparse,
        "allocated": allocated,
        "destination-is-zero": destination_is_zero,
        "trust": trust,
        "no-extents": no_extents,
        "flush": flush,
        "discard-source": discard_source,
        "direct": direct,
        "synchronous": synchronous,
        "verify": verify,
        "manifest": None if manifest is None else fspath(manifest),
        "digest": digest,
        "on-error": on_error,
        "error-map": None if error_map is None else fspath(error_map),
        "range": None if range is None else f"{range[0]}:{range[1]}",
        "ranges": None if ranges is None else fspath(ranges),
        "ranges-command": ranges_command,
        "ranges-partial": ranges_partial,
        "bitmap": bitmap,
        "bitmap-flags": bitmap_flags,
        "since": None if since is None else fspath(since),
        "timeout": _time(timeout),
        "min-rate": min_rate,
        "retries": retries,
        "retry-delay": _time(retry_delay),
        "journal": None if journal is None else fspath(journal),
        "restart": restart,
        "journal-interval": _time(journal_interval),
        "rate": rate,
        "iops": iops,
        "segment": segment,
    }
    options = [(name, _texts(value)) for name, value in given.items() if value is not None and value is not False]
    layers = (("source-layer", list(source_layers)), ("target-layer", list(target_layers)))
    options += [(name, texts) for name, texts in layers if texts]
    copying = _blockhaul.Copying(words(source), words(target), options)
    if progress is None:
        return copying.run(None, interval)
    report = progress

    def look() -> None:
        report(Progress(*copying.counters()))

    copied = copying.run(look, interval)
    look()
    return copied


def _time(value: float | str | None) -> str | None:
    """A time as an option; numbers are seconds."""
    return value if value is None or isinstance(value, str) else f"{round(value * 1e6)}us"


def _texts(value: object) -> list[str]:
    """The texts of an option; none for a flag."""
    return [] if value is True else [str(value)]
