"""The interface of libnbd's Python module, for scripts that were written for it.

    import blockhaul.nbd as nbd

What is covered is listed in docs/python.md. Methods that are not covered are absent.
"""

import ctypes
import errno as _errno
import os
import select
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar
from urllib.parse import quote

from . import _blockhaul
from ._blockhaul import __version__
from ._device import Device, with_tls

if TYPE_CHECKING:
    from typing_extensions import Buffer as _Bytes

_P = ParamSpec("_P")
_T = TypeVar("_T")

TLS_DISABLE, TLS_ALLOW, TLS_REQUIRE = range(3)
SIZE_MINIMUM, SIZE_PREFERRED, SIZE_MAXIMUM, SIZE_PAYLOAD = range(4)
CMD_FLAG_FUA, CMD_FLAG_NO_HOLE, CMD_FLAG_DF, CMD_FLAG_REQ_ONE = 1, 2, 4, 8
CMD_FLAG_FAST_ZERO, CMD_FLAG_PAYLOAD_LEN, CMD_FLAG_MASK = 16, 32, 63
HANDSHAKE_FLAG_FIXED_NEWSTYLE, HANDSHAKE_FLAG_NO_ZEROES, HANDSHAKE_FLAG_MASK = 1, 2, 3
STRICT_COMMANDS, STRICT_FLAGS, STRICT_BOUNDS, STRICT_ZERO_SIZE = 1, 2, 4, 8
STRICT_ALIGN, STRICT_PAYLOAD, STRICT_AUTO_FLAG, STRICT_MASK = 16, 32, 64, 127
ALLOW_TRANSPORT_TCP, ALLOW_TRANSPORT_UNIX, ALLOW_TRANSPORT_VSOCK = 1, 2, 4
ALLOW_TRANSPORT_SSH, ALLOW_TRANSPORT_MASK = 8, 15
SHUTDOWN_ABANDON_PENDING = SHUTDOWN_MASK = 0x10000
AIO_DIRECTION_READ, AIO_DIRECTION_WRITE, AIO_DIRECTION_BOTH = 1, 2, 3
READ_DATA, READ_HOLE, READ_ERROR = 1, 2, 3
NAMESPACE_BASE, NAMESPACE_QEMU = "base:", "qemu:"
CONTEXT_BASE_ALLOCATION = "base:allocation"
CONTEXT_QEMU_DIRTY_BITMAP = "qemu:dirty-bitmap:"
CONTEXT_QEMU_ALLOCATION_DEPTH = "qemu:allocation-depth"
STATE_HOLE, STATE_ZERO, STATE_DIRTY = 1, 2, 1

#: Flags of an export that no ability of a device stands for.
_FLAG_READ_ONLY, _FLAG_DF, _FLAG_PAYLOAD = 1 << 1, 1 << 7, 1 << 12
#: Longest read or write in bytes, as libnbd limits it.
_LARGEST = 64 << 20


class Error(Exception):
    """A call has failed. ``errnum`` is an error number, 0 if there is none; ``errno`` its name."""

    def __init__(self, string: str, errnum: int = 0) -> None:
        super().__init__(string, errnum)

    @property
    def string(self) -> str:
        """What failed, and why."""
        return str(self.args[0])

    @property
    def errnum(self) -> int:
        """The error number; 0 if there is none."""
        return int(self.args[1])

    @property
    def errno(self) -> str | None:
        """The name of the error number, if it has one."""
        return _errno.errorcode.get(self.errnum)

    def __str__(self) -> str:
        return f"{self.string} ({self.errno})" if self.errno else self.string


class ClosedHandle(ValueError):
    """A method was called on a handle after ``close``."""


def _of(error: OSError) -> Error:
    """The exception of this module for one of ours."""
    return Error(error.strerror or str(error), error.errno or 0)


def _called(method: Callable[_P, _T]) -> Callable[_P, _T]:
    """A method that raises the exceptions of this module."""

    def call(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        try:
            return method(*args, **kwargs)
        except _blockhaul.Error as error:
            raise _of(error) from None

    call.__doc__ = method.__doc__
    call.__name__ = method.__name__
    return call


@contextmanager
def nbd() -> Iterator["NBD"]:
    """A handle that is closed at the end of a ``with`` block."""
    handle = NBD()
    try:
        yield handle
    finally:
        handle.close()


class Buffer:
    """A buffer for asynchronous reads and writes."""

    def __init__(self, len: int) -> None:
        if len < 0:
            raise RuntimeError("a buffer has a length of 0 or more")
        self._bytes: Any = bytearray(len)

    @classmethod
    def from_buffer(cls, buf: "_Bytes") -> "Buffer":
        """A buffer that shares the memory of ``buf``."""
        memoryview(buf).release()
        new = cls(0)
        new._bytes = buf
        return new

    @classmethod
    def from_bytearray(cls, ba: Any) -> "Buffer":
        """A buffer with a copy of ``ba``."""
        return cls.from_buffer(bytearray(ba))

    def to_buffer(self) -> Any:
        """The memory of the buffer itself."""
        return self._bytes

    def to_bytearray(self) -> bytearray:
        """A copy of the contents."""
        return bytearray(self._bytes)

    def size(self) -> int:
        """Length in bytes."""
        return len(self)

    def __len__(self) -> int:
        return len(self._bytes)

    def is_zero(self, offset: int = 0, size: int = -1) -> bool:
        """Whether ``size`` bytes from ``offset`` on are zero; -1: up to the end."""
        if offset < 0 or offset > len(self):
            raise IndexError("the offset is outside of the buffer")
        end = len(self) if size == -1 else offset + size
        if size < -1 or end > len(self):
            raise IndexError("the size exceeds the buffer")
        return not any(memoryview(self._bytes)[offset:end])


def _fails(call: Callable[..., Any], *args: Any, error: ctypes.c_int) -> tuple[int, Any]:
    """Calls a function of the script, which fails the request by an exception: the number is then that which it
    has left in ``error``, or EPROTO. Returns the number, 0 for success, and what it has returned."""
    try:
        return 0, call(*args, error)
    except Exception:
        return error.value or _errno.EPROTO, None


class _Command:
    """A request in flight: what results are given to."""

    def __init__(self, completion: Callable[[Any], Any] | None, held: Any) -> None:
        self.completion = completion
        self.held = held
        self.on_result: Callable[[Any], int] | None = None
        self.finished = False
        self.retired = False
        self.error: Error | None = None

    def done(self) -> bool:
        return self.finished

    def set_result(self, value: Any) -> None:
        number = 0 if self.on_result is None else self.on_result(value)
        if number:
            self.error = Error("a callback has failed the command", number)
        self._finish(number)

    def set_exception(self, error: BaseException) -> None:
        self.error = _of(error) if isinstance(error, OSError) else Error(str(error), _errno.EIO)
        self._finish(self.error.errnum)

    def _finish(self, number: int) -> None:
        self.finished, self.held = True, None
        if self.completion is None:
            return
        failed, returned = _fails(self.completion, error=ctypes.c_int(number))
        # 1: the script does not ask for this request any more.
        self.retired = returned == 1
        if failed:
            self.error = Error("a callback has failed the command", failed)


class NBD:
    """A handle: settings, then a connection."""

    _count = 0

    def __init__(self) -> None:
        NBD._count += 1
        self._closed = False
        self._device: Device | None = None
        self._info: Device | None = None
        self._dead = False
        self._place: tuple[list[str], bool] | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._commands: dict[int, _Command] = {}
        self._cookie = 0
        self._completions: _blockhaul.Completions | None = None
        self._debug: tuple[bool, Callable[[str, str], Any] | None] = (False, None)
        self._private: Any = None
        self._wanted_contexts: list[str] = []
        # Those that opt_set_meta_context has selected.
        self._chosen: list[str] | None = None
        self._greeting: tuple[str, bool, bool] | None = None
        self._settings: dict[str, Any] = {
            "handle_name": f"nbd{NBD._count}",
            "export_name": "",
            "full_info": False,
            "tls": TLS_DISABLE,
            "tls_certificates": None,
            "tls_verify_peer": True,
            "tls_username": None,
            "tls_hostname": "",
            "tls_psk_file": None,
            "request_extended_headers": True,
            "request_structured_replies": True,
            "request_meta_context": True,
            "request_block_size": True,
            "pread_initialize": True,
            "handshake_flags": HANDSHAKE_FLAG_MASK,
            "strict_mode": STRICT_MASK,
            "opt_mode": False,
            "uri_allow_transports": ALLOW_TRANSPORT_MASK,
            "uri_allow_tls": TLS_ALLOW,
            "uri_allow_local_file": False,
            "socket_activation_name": "",
        }

    def __getattribute__(self, name: str) -> Any:
        if not name.startswith("_") and object.__getattribute__(self, "_closed"):
            raise ClosedHandle(f"{name}: the handle is closed")
        return object.__getattribute__(self, name)

    # Settings.

    def _set(self, name: str, value: Any, *, before_connect: bool = True) -> None:
        if before_connect and self._device is not None:
            raise Error(f"set_{name}: the handle is connected", _errno.EINVAL)
        self._settings[name] = value

    def set_handle_name(self, handle_name: str) -> None:
        """Names the handle for messages."""
        self._set("handle_name", handle_name, before_connect=False)

    def get_handle_name(self) -> str:
        """The name of the handle."""
        return str(self._settings["handle_name"])

    def set_private_data(self, private_data: Any) -> Any:
        """Keeps a value; returns the one before."""
        before, self._private = self._private, private_data
        return before

    def get_private_data(self) -> Any:
        """The value of set_private_data."""
        return self._private

    def set_debug(self, debug: bool) -> None:
        """Turns messages on or off. There are few: of opening and closing."""
        self._debug = (bool(debug), self._debug[1])

    def get_debug(self) -> bool:
        """Whether messages are on."""
        return self._debug[0]

    def set_debug_callback(self, debug: Callable[[str, str], Any]) -> None:
        """Sends messages to a function."""
        self._debug = (self._debug[0], debug)

    def clear_debug_callback(self) -> None:
        """Sends messages to standard error again."""
        self._debug = (self._debug[0], None)

    def _say(self, context: str, text: str) -> None:
        on, callback = self._debug
        if not on:
            return
        if callback is not None:
            callback(context, text)
        else:
            os.write(2, f"blockhaul: {self._settings['handle_name']}: {context}: {text}\n".encode())

    def set_export_name(self, export_name: str) -> None:
        """Chooses the export; the empty name is the server's default."""
        if len(export_name.encode()) > 4096:
            raise Error("set_export_name: the name is too long", _errno.ENAMETOOLONG)
        if export_name != self._settings["export_name"]:
            self._info = self._chosen = None
        self._set("export_name", export_name)

    def get_export_name(self) -> str:
        """The name of the export that is or will be opened."""
        return str(self._settings["export_name"])

    def set_full_info(self, request: bool) -> None:
        """Asks for the name and the description of the export."""
        self._set("full_info", bool(request))

    def get_full_info(self) -> bool:
        """The value of set_full_info."""
        return bool(self._settings["full_info"])

    def set_tls(self, tls: int) -> None:
        """Whether TLS is used: TLS_DISABLE or TLS_REQUIRE. TLS_ALLOW is TLS_DISABLE here."""
        if tls not in (TLS_DISABLE, TLS_ALLOW, TLS_REQUIRE):
            raise Error("set_tls: unknown value", _errno.EINVAL)
        self._set("tls", tls)

    def get_tls(self) -> int:
        """The value of set_tls."""
        return int(self._settings["tls"])

    def set_tls_certificates(self, dir: str) -> None:
        """The directory of certificates."""
        self._set("tls_certificates", os.fspath(dir))

    def set_tls_verify_peer(self, verify: bool) -> None:
        """Whether the server's certificate is checked."""
        self._set("tls_verify_peer", bool(verify))

    def get_tls_verify_peer(self) -> bool:
        """The value of set_tls_verify_peer."""
        return bool(self._settings["tls_verify_peer"])

    def set_tls_username(self, username: str) -> None:
        """The user of a pre-shared key."""
        self._set("tls_username", username)

    def get_tls_username(self) -> str:
        """The value of set_tls_username, or the user of this process."""
        return self._settings["tls_username"] or os.environ.get("LOGNAME", "")

    def set_tls_hostname(self, hostname: str) -> None:
        """The name that the server's certificate must have."""
        self._set("tls_hostname", hostname)

    def get_tls_hostname(self) -> str:
        """The value of set_tls_hostname."""
        return str(self._settings["tls_hostname"])

    def set_tls_psk_file(self, filename: str) -> None:
        """The file of pre-shared keys."""
        self._set("tls_psk_file", os.fspath(filename))

    def set_request_extended_headers(self, request: bool) -> None:
        """Whether extended headers are asked for."""
        self._set("request_extended_headers", bool(request))

    def get_request_extended_headers(self) -> bool:
        """The value of set_request_extended_headers."""
        return bool(self._settings["request_extended_headers"])

    def set_request_structured_replies(self, request: bool) -> None:
        """Whether structured replies are asked for."""
        self._set("request_structured_replies", bool(request))

    def get_request_structured_replies(self) -> bool:
        """The value of set_request_structured_replies."""
        return bool(self._settings["request_structured_replies"])

    def set_request_meta_context(self, request: bool) -> None:
        """Whether metadata contexts are asked for."""
        self._set("request_meta_context", bool(request))

    def get_request_meta_context(self) -> bool:
        """The value of set_request_meta_context."""
        return bool(self._settings["request_meta_context"])

    def set_request_block_size(self, request: bool) -> None:
        """Has no effect: block sizes are always asked for."""
        self._set("request_block_size", bool(request))

    def get_request_block_size(self) -> bool:
        """The value of set_request_block_size."""
        return bool(self._settings["request_block_size"])

    def set_pread_initialize(self, request: bool) -> None:
        """Has no effect: no buffer has old contents."""
        self._set("pread_initialize", bool(request), before_connect=False)

    def get_pread_initialize(self) -> bool:
        """The value of set_pread_initialize."""
        return bool(self._settings["pread_initialize"])

    def set_handshake_flags(self, flags: int) -> None:
        """Has no effect: both flags are always used where the server has them."""
        if flags & ~HANDSHAKE_FLAG_MASK:
            raise Error("set_handshake_flags: unknown flags", _errno.EINVAL)
        self._set("handshake_flags", flags)

    def get_handshake_flags(self) -> int:
        """The value of set_handshake_flags."""
        return int(self._settings["handshake_flags"])

    def set_strict_mode(self, flags: int) -> None:
        """Which requests are refused before they are sent. Only STRICT_COMMANDS and STRICT_ZERO_SIZE change
        anything: what is outside of the device is always refused, and what is not aligned always works."""
        self._set("strict_mode", flags & STRICT_MASK, before_connect=False)

    def get_strict_mode(self) -> int:
        """The value of set_strict_mode."""
        return int(self._settings["strict_mode"])

    def set_opt_mode(self, enable: bool) -> None:
        """Whether connecting stops before an export is opened, for opt_list, opt_info, opt_go, opt_abort."""
        self._set("opt_mode", bool(enable))

    def get_opt_mode(self) -> bool:
        """The value of set_opt_mode."""
        return bool(self._settings["opt_mode"])

    def add_meta_context(self, name: str) -> None:
        """Asks for one more context when the export is opened."""
        if self._device is not None:
            raise Error("add_meta_context: the handle is connected", _errno.EINVAL)
        self._wanted_contexts.append(name)

    def get_nr_meta_contexts(self) -> int:
        """The number of contexts that were added."""
        return len(self._wanted_contexts)

    def get_meta_context(self, i: int) -> str:
        """A context that was added, by its number from 0."""
        if not 0 <= i < len(self._wanted_contexts):
            raise Error("get_meta_context: no such context", _errno.EINVAL)
        return self._wanted_contexts[i]

    def clear_meta_contexts(self) -> None:
        """Forgets the contexts that were added."""
        self._wanted_contexts = []

    def set_uri_allow_transports(self, mask: int) -> None:
        """Which transports a URI may have."""
        self._set("uri_allow_transports", mask & ALLOW_TRANSPORT_MASK)

    def set_uri_allow_tls(self, tls: int) -> None:
        """Whether a URI may, or must, have TLS."""
        self._set("uri_allow_tls", tls)

    def set_uri_allow_local_file(self, allow: bool) -> None:
        """Whether a URI may name local files (of keys)."""
        self._set("uri_allow_local_file", bool(allow))

    def set_socket_activation_name(self, socket_name: str) -> None:
        """Has no effect."""
        self._set("socket_activation_name", socket_name)

    def get_socket_activation_name(self) -> str:
        """The value of set_socket_activation_name."""
        return str(self._settings["socket_activation_name"])

    # Connecting.

    @_called
    def connect_uri(self, uri: str) -> None:
        """Connects to an NBD URI. It decides about the export and TLS."""
        self._check_uri(uri)
        settings = self._settings
        full = with_tls(
            uri,
            None,
            None,
            settings["tls_hostname"] or None,
            None,
            None if settings["tls_verify_peer"] or "tls-verify-peer" in uri else False,
        ) if uri.startswith("nbds") else uri
        path = uri.split("://", 1)[-1].split("?", 1)[0]
        name = path.split("/", 1)[1] if "/" in path else ""
        if name:
            from urllib.parse import unquote

            settings["export_name"] = unquote(name.removeprefix("/"))
        self._begin([full], False)

    def _check_uri(self, uri: str) -> None:
        settings = self._settings
        scheme = uri.split(":", 1)[0]
        transport = {"unix": ALLOW_TRANSPORT_UNIX, "vsock": ALLOW_TRANSPORT_VSOCK}
        transport["ssh"] = ALLOW_TRANSPORT_SSH
        _, _, kind = scheme.partition("+")
        if not settings["uri_allow_transports"] & transport.get(kind, ALLOW_TRANSPORT_TCP):
            raise Error(f"connect_uri: {scheme}: the transport is not allowed", _errno.EPERM)
        secure = scheme.startswith("nbds")
        allowed = settings["uri_allow_tls"]
        if (secure and allowed == TLS_DISABLE) or (not secure and allowed == TLS_REQUIRE):
            raise Error(f"connect_uri: {scheme}: TLS settings do not allow it", _errno.EPERM)
        if "tls-psk-file=" in uri and not settings["uri_allow_local_file"]:
            text = "connect_uri: a local file is not allowed: call set_uri_allow_local_file"
            raise Error(text, _errno.EPERM)

    def _uri(self, authority: str, query: str, transport: str = "") -> str:
        """A URI of the export with the settings of TLS."""
        settings = self._settings
        secure = settings["tls"] == TLS_REQUIRE
        name = quote(settings["export_name"], safe="")
        uri = f"{'nbds' if secure else 'nbd'}{transport}://{authority}/{name}{query}"
        if not secure:
            return uri
        return with_tls(
            uri,
            settings["tls_certificates"],
            settings["tls_psk_file"],
            settings["tls_hostname"] or None,
            settings["tls_username"],
            None if settings["tls_verify_peer"] else False,
        )

    @_called
    def connect_unix(self, unixsocket: str) -> None:
        """Connects to a Unix socket."""
        self._named = ("", f"?socket={quote(os.fspath(unixsocket), safe='/')}", "+unix")
        self._begin([self._uri(*self._named)], False)

    @_called
    def connect_tcp(self, hostname: str, port: str) -> None:
        """Connects to a host; ``port`` is a number or the name of a service."""
        import socket

        number = int(port) if str(port).isdigit() else socket.getservbyname(port, "tcp")
        host = f"[{hostname}]" if ":" in hostname else quote(hostname)
        self._named = (f"{host}:{number}", "", "")
        self._begin([self._uri(*self._named)], False)

    @_called
    def connect_vsock(self, cid: int, port: int) -> None:
        """Connects to a socket of a virtual machine."""
        self._named = (f"{cid}:{port}", "", "+vsock")
        self._begin([self._uri(*self._named)], False)

    @_called
    def connect_command(self, argv: Sequence[str]) -> None:
        """Starts a command that serves on its standard input and output."""
        self._begin(list(argv), True)

    @_called
    def connect_systemd_socket_activation(self, argv: Sequence[str]) -> None:
        """Starts a command that serves a socket that it is given (systemd socket activation)."""
        self._check_created()
        self._activated(list(argv))

    def _activated(self, argv: list[str]) -> None:
        import socket
        import subprocess

        self._folder = tempfile.TemporaryDirectory(prefix="blockhaul-")
        path = os.path.join(self._folder.name, "s")
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind(path)
            listener.listen(4)
            script = 'exec 3<&0 </dev/null; LISTEN_PID=$$ LISTEN_FDS=1 exec "$@"'
            words = ["/bin/sh", "-c", script, "sh", *argv]
            self._server = subprocess.Popen(words, stdin=listener.fileno())
        self._named = ("", f"?socket={quote(path, safe='/')}", "+unix")
        self._begin([self._uri(*self._named)], False)

    def _check_created(self) -> None:
        if self._device is not None or self._dead or self._place is not None:
            raise Error("the handle was connected before", _errno.EINVAL)

    def _begin(self, words: list[str], command: bool) -> None:
        self._check_created()
        self._place = (words, command)
        if not self._settings["opt_mode"]:
            try:
                self._go()
            except _blockhaul.Error:
                self._dead = True
                raise

    def _go(self) -> None:
        self._say("connect", f"connecting to {' '.join(self._where()[0])}")
        self._device = self._connect()

    def _where(self) -> tuple[list[str], bool]:
        """What to connect to, with the current name of the export."""
        if self._place is None:
            raise Error("the handle is not connecting", _errno.EINVAL)
        named: tuple[str, str, str] | None = getattr(self, "_named", None)
        words, command = self._place
        return ([self._uri(*named)] if named is not None else words, command)

    def _connect(self) -> Device:
        words, command = self._where()
        settings = self._settings
        contexts = self._wanted_contexts if settings["request_meta_context"] else self._chosen or []
        return Device(
            words,
            mode="r+",
            contexts=[name for name in contexts if name != CONTEXT_BASE_ALLOCATION],
            timeout=0.0,
            uri=not command,
            export=settings["export_name"] if command else None,
            structured=settings["request_structured_replies"],
            extended=settings["request_extended_headers"],
            allocation=CONTEXT_BASE_ALLOCATION in contexts,
        )

    @_called
    def opt_go(self) -> None:
        """Opens the export."""
        self._check_negotiating()
        self._info = None
        self._go()

    def opt_abort(self) -> None:
        """Ends without opening an export."""
        self._check_negotiating()
        self._dead, self._place = True, None

    @_called
    def opt_list(self, list: Callable[[str, str], Any]) -> int:
        """Calls a function with the name and description of each export; returns their number."""
        self._check_negotiating()
        words, command = self._where()
        found = _blockhaul.list_exports(words, command=command)
        for name, description in found:
            list(name, description)
        return len(found)

    @_called
    def opt_info(self) -> None:
        """Asks about the export without opening it: it is opened on a connection of its own here."""
        self._check_negotiating()
        self._info = None
        if self._settings["request_meta_context"]:
            self._chosen = None
        found = self._connect()
        # Its facts remain.
        found.close()
        self._info = found

    @_called
    def opt_structured_reply(self) -> bool:
        """Asks for structured replies; whether the server has them."""
        self._check_negotiating()
        self._settings["request_structured_replies"] = True
        self._greeting = None
        return self._greeted()[2]

    def opt_list_meta_context(self, context: Callable[[str], Any]) -> int:
        """Calls a function with each context that matches those of add_meta_context; returns their number."""
        return self.opt_list_meta_context_queries(self._wanted_contexts, context)

    @_called
    def opt_list_meta_context_queries(
        self, queries: Sequence[str], context: Callable[[str], Any]
    ) -> int:
        """Calls a function with each context that matches; all without queries. Returns their number."""
        return self._contexts(queries, context, False)

    def opt_set_meta_context(self, context: Callable[[str], Any]) -> int:
        """Selects the contexts of add_meta_context, and calls a function with each; returns their number."""
        return self.opt_set_meta_context_queries(self._wanted_contexts, context)

    @_called
    def opt_set_meta_context_queries(
        self, queries: Sequence[str], context: Callable[[str], Any]
    ) -> int:
        """Selects contexts, and calls a function with each; returns their number. opt_go selects anew, unless
        set_request_meta_context is off."""
        self._check_negotiating()
        if not self._greeted()[2]:
            raise Error("contexts need structured replies: call opt_structured_reply", _errno.EINVAL)
        return self._contexts(queries, context, True)

    def _contexts(
        self, queries: Sequence[str], context: Callable[[str], Any], select: bool
    ) -> int:
        self._check_negotiating()
        words, command = self._where()
        export = self._settings["export_name"] if command else None
        found = _blockhaul.list_contexts(words, list(queries), select=select, export=export)
        if select:
            self._chosen = found
        for name in found:
            context(name)
        return len(found)

    def _greeted(self) -> tuple[str, bool, bool]:
        """What the server negotiates before an export is opened: asked for once, on a connection of its own."""
        if self._greeting is None:
            words, command = self._where()
            structured = self._settings["request_structured_replies"]
            self._greeting = _blockhaul.greet(words, command=command, structured=structured)
        return self._greeting

    def _is_greeting(self) -> bool:
        return self.aio_is_negotiating() and self._info is None

    def _check_negotiating(self) -> None:
        if self._place is None or self._device is not None:
            raise Error("the handle is not negotiating: call set_opt_mode and connect", _errno.EINVAL)

    # The connection.

    def _open(self) -> Device:
        if self._device is None:
            state = "closed" if self._dead else "not connected"
            raise Error(f"the handle is {state}", _errno.ENOTCONN if self._dead else _errno.EINVAL)
        return self._device

    def _known(self) -> Device:
        known = self._info if self._device is None else self._device
        if known is None:
            raise Error("no export is open", _errno.EINVAL)
        return known

    def _negotiated(self) -> dict[str, Any]:
        return self._known().connection or {}

    def get_size(self) -> int:
        """Size of the export in bytes."""
        return self._known().size

    def get_block_size(self, size_type: int) -> int:
        """A block size in bytes; 0 if the server has not sent them."""
        sizes = self._negotiated()["block_sizes"]
        if size_type == SIZE_PAYLOAD:
            largest = sizes[2] if sizes else 32 << 20
            return min(max(int(largest), 1 << 20), 32 << 20)
        return int(sizes[size_type]) if sizes else 0

    @_called
    def get_protocol(self) -> str:
        """The protocol of the handshake."""
        if self._is_greeting():
            return self._greeted()[0]
        return str(self._negotiated()["protocol"])

    @_called
    def get_tls_negotiated(self) -> bool:
        """Whether TLS is in use."""
        if self._is_greeting():
            return self._greeted()[1]
        return bool(self._negotiated()["tls"])

    @_called
    def get_structured_replies_negotiated(self) -> bool:
        """Whether structured replies are in use."""
        if self._is_greeting():
            return self._greeted()[2]
        return bool(self._negotiated()["structured_replies"])

    def get_extended_headers_negotiated(self) -> bool:
        """Whether extended headers are in use."""
        return bool(self._negotiated()["extended_headers"])

    def get_canonical_export_name(self) -> str:
        """The name by which the server knows the export."""
        return self._text("name")

    def get_export_description(self) -> str:
        """The server's description of the export."""
        return self._text("description")

    def _text(self, what: str) -> str:
        found = self._negotiated()[what]
        if found is None or not self._settings["full_info"]:
            raise Error(f"the server has not sent a {what}: call set_full_info", _errno.ENOTSUP)
        return str(found)

    def _flag(self, flag: int) -> bool:
        return bool(self._negotiated()["flags"] & flag)

    def _can(self, name: str) -> bool:
        return self._known().can(name, emulated=False)

    def is_read_only(self) -> bool:
        """Whether the export cannot be written."""
        return self._flag(_FLAG_READ_ONLY)

    def is_rotational(self) -> bool:
        """Whether the server says that it is a rotating disk."""
        return self._known().rotational

    def can_flush(self) -> bool:
        """Whether the server has flush."""
        return self._can("flush")

    def can_fua(self) -> bool:
        """Whether the server has FUA."""
        return self._can("fua")

    def can_trim(self) -> bool:
        """Whether the server has trim."""
        return self._can("trim")

    def can_zero(self) -> bool:
        """Whether the server has zero requests."""
        return self._can("zero")

    def can_fast_zero(self) -> bool:
        """Whether the server has fast zero requests."""
        return self._can("fast_zero")

    def can_cache(self) -> bool:
        """Whether the server has cache requests."""
        return self._can("cache")

    def can_multi_conn(self) -> bool:
        """Whether the server promises that connections are consistent."""
        return self._can("multi_conn")

    def can_df(self) -> bool:
        """Whether the server has CMD_FLAG_DF."""
        return self._flag(_FLAG_DF)

    def can_block_status_payload(self) -> bool:
        """Whether the server answers for some of the contexts only."""
        return self._flag(_FLAG_PAYLOAD)

    def can_meta_context(self, metacontext: str) -> bool:
        """Whether a context was negotiated."""
        if self._device is None and self._chosen is not None:
            return metacontext in self._chosen
        if self._is_greeting() and not self._wanted_contexts:
            return False
        known = self._negotiated()
        if self._device is None and not self._settings["request_meta_context"]:
            raise Error("no context was asked for", _errno.EINVAL)
        return metacontext in known["contexts"]

    # Requests.

    def _strict(self, ability: str, count: int) -> None:
        strict = self._settings["strict_mode"]
        if strict & STRICT_COMMANDS and not self._known().can(ability, emulated=False):
            raise Error(f"the server does not support {ability}", _errno.EINVAL)
        if strict & STRICT_ZERO_SIZE and count == 0:
            raise Error("the count is 0", _errno.EINVAL)

    def _sized(self, count: int) -> None:
        if count > _LARGEST:
            raise Error("the request is longer than 64 MiB", _errno.ERANGE)
        if self._settings["strict_mode"] & STRICT_ZERO_SIZE and count == 0:
            raise Error("the count is 0", _errno.EINVAL)

    @_called
    def pread(self, count: int, offset: int, flags: int = 0) -> bytearray:
        """Reads ``count`` bytes at ``offset``."""
        device = self._open()
        self._sized(count)
        buffer = bytearray(count)
        device.pread_into(buffer, offset)
        return buffer

    @_called
    def pread_structured(
        self, count: int, offset: int, chunk: Callable[..., Any], flags: int = 0
    ) -> bytearray:
        """Reads, and calls a function with what was read, here as one chunk."""
        buffer = self.pread(count, offset)
        number = _chunk(chunk, buffer, offset)
        if number:
            raise Error("the callback has failed the read", number)
        return buffer

    @_called
    def pwrite(self, buf: "_Bytes", offset: int, flags: int = 0) -> None:
        """Writes a buffer at ``offset``."""
        device = self._open()
        self._strict("write", 1)
        self._sized(memoryview(buf).nbytes)
        device.pwrite(buf, offset, fua=bool(flags & CMD_FLAG_FUA))

    @_called
    def flush(self, flags: int = 0) -> None:
        """Makes completed writes durable."""
        device = self._open()
        self._strict("flush", 1)
        device.flush()

    @_called
    def trim(self, count: int, offset: int, flags: int = 0) -> None:
        """Discards a range."""
        device = self._open()
        self._strict("trim", count)
        device.trim(count, offset, fua=bool(flags & CMD_FLAG_FUA))

    @_called
    def cache(self, count: int, offset: int, flags: int = 0) -> None:
        """Prefetches a range."""
        device = self._open()
        self._strict("cache", count)
        device.cache(count, offset)

    @_called
    def zero(self, count: int, offset: int, flags: int = 0) -> None:
        """Makes a range read as zeroes."""
        device = self._open()
        self._strict("zero", count)
        device.zero(
            count,
            offset,
            fua=bool(flags & CMD_FLAG_FUA),
            allocate=bool(flags & CMD_FLAG_NO_HOLE),
            fast=bool(flags & CMD_FLAG_FAST_ZERO),
        )

    @_called
    def block_status(
        self, count: int, offset: int, extent: Callable[..., Any], flags: int = 0
    ) -> None:
        """Calls a function for each context with a flat list of lengths and flags."""
        self._tell(self._status(count, offset, flags), offset, extent, _flat)

    @_called
    def block_status_64(
        self, count: int, offset: int, extent64: Callable[..., Any], flags: int = 0
    ) -> None:
        """Calls a function for each context with a list of pairs of length and flags."""
        self._tell(self._status(count, offset, flags), offset, extent64, _pairs)

    @_called
    def block_status_filter(
        self,
        count: int,
        offset: int,
        contexts: Sequence[str],
        extent64: Callable[..., Any],
        flags: int = 0,
    ) -> None:
        """block_status_64 of some of the contexts."""
        found = self._status(count, offset, flags, list(contexts))
        self._tell(found, offset, extent64, _pairs)

    def _status(
        self, count: int, offset: int, flags: int, contexts: list[str] | None = None
    ) -> dict[str, list[tuple[int, int]]]:
        device = self._open()
        self._check_contexts()
        return device.block_status(count, offset, contexts, one=bool(flags & CMD_FLAG_REQ_ONE))

    def _check_contexts(self) -> None:
        if not self._negotiated()["contexts"]:
            raise Error("no metadata context was negotiated", _errno.ENOTSUP)

    def _tell(
        self,
        found: dict[str, list[tuple[int, int]]],
        offset: int,
        extent: Callable[..., Any],
        form: Callable[[list[tuple[int, int]]], Any],
    ) -> None:
        number = _extents(found, offset, extent, form)
        if number:
            raise Error("the callback has failed the command", number)

    # Asynchronous requests.

    def _queue(self) -> _blockhaul.Completions:
        if self._completions is None:
            self._completions = _blockhaul.Completions()
        return self._completions

    def _issue(
        self,
        start: Callable[..., object],
        *args: Any,
        completion: Any,
        result: Callable[[Any], int] | None = None,
        held: Any = None,
        **flags: Any,
    ) -> int:
        command = _Command(completion, held)
        command.on_result = result
        start(self._queue(), command, *args, **flags)
        self._cookie += 1
        self._commands[self._cookie] = command
        return self._cookie

    @_called
    def aio_pread(
        self, buf: Any, offset: int, completion: Callable[[Any], Any] | None = None, flags: int = 0
    ) -> int:
        """Starts a read into a buffer; returns a cookie."""
        memory = _memory(buf)
        if memoryview(memory).readonly:
            raise BufferError("the buffer is read-only")
        self._sized(len(memory))
        start = self._open().start_pread_into
        return self._issue(start, memory, offset, completion=completion)

    @_called
    def aio_pread_structured(
        self,
        buf: Any,
        offset: int,
        chunk: Callable[..., Any],
        completion: Callable[[Any], Any] | None = None,
        flags: int = 0,
    ) -> int:
        """Starts pread_structured into a buffer; returns a cookie."""
        memory = _memory(buf)
        self._sized(len(memory))
        start = self._open().start_pread_into

        def result(_length: int) -> int:
            return _chunk(chunk, memory, offset)

        return self._issue(start, memory, offset, completion=completion, result=result)

    @_called
    def aio_pwrite(
        self, buf: Any, offset: int, completion: Callable[[Any], Any] | None = None, flags: int = 0
    ) -> int:
        """Starts a write of a buffer, which is copied; returns a cookie."""
        device = self._open()
        self._strict("write", 1)
        memory = _memory(buf)
        self._sized(len(memory))
        fua = bool(flags & CMD_FLAG_FUA)
        # It is copied already; a script may rely on it that it cannot be resized.
        held = memoryview(memory)
        start = device.start_pwrite
        return self._issue(start, memory, offset, completion=completion, held=held, fua=fua)

    @_called
    def aio_flush(self, completion: Callable[[Any], Any] | None = None, flags: int = 0) -> int:
        """Starts a flush; returns a cookie."""
        device = self._open()
        self._strict("flush", 1)
        return self._issue(device.start_flush, completion=completion)

    @_called
    def aio_trim(
        self,
        count: int,
        offset: int,
        completion: Callable[[Any], Any] | None = None,
        flags: int = 0,
    ) -> int:
        """Starts to discard a range; returns a cookie."""
        device = self._open()
        self._strict("trim", count)
        fua = bool(flags & CMD_FLAG_FUA)
        return self._issue(device.start_trim, count, offset, completion=completion, fua=fua)

    @_called
    def aio_cache(
        self,
        count: int,
        offset: int,
        completion: Callable[[Any], Any] | None = None,
        flags: int = 0,
    ) -> int:
        """Starts to prefetch a range; returns a cookie."""
        device = self._open()
        self._strict("cache", count)
        return self._issue(device.start_cache, count, offset, completion=completion)

    @_called
    def aio_zero(
        self,
        count: int,
        offset: int,
        completion: Callable[[Any], Any] | None = None,
        flags: int = 0,
    ) -> int:
        """Starts to zero a range; returns a cookie."""
        device = self._open()
        self._strict("zero", count)
        return self._issue(
            device.start_zero,
            count,
            offset,
            completion=completion,
            fua=bool(flags & CMD_FLAG_FUA),
            allocate=bool(flags & CMD_FLAG_NO_HOLE),
            fast=bool(flags & CMD_FLAG_FAST_ZERO),
        )

    @_called
    def aio_block_status(
        self,
        count: int,
        offset: int,
        extent: Callable[..., Any],
        completion: Callable[[Any], Any] | None = None,
        flags: int = 0,
    ) -> int:
        """Starts block_status; returns a cookie."""
        return self._start_status(count, offset, (extent, _flat), completion, flags)

    @_called
    def aio_block_status_64(
        self,
        count: int,
        offset: int,
        extent64: Callable[..., Any],
        completion: Callable[[Any], Any] | None = None,
        flags: int = 0,
    ) -> int:
        """Starts block_status_64; returns a cookie."""
        return self._start_status(count, offset, (extent64, _pairs), completion, flags)

    def _start_status(
        self, count: int, offset: int, tell: tuple[Any, Any], completion: Any, flags: int
    ) -> int:
        device = self._open()
        self._check_contexts()
        extent, form = tell

        def result(found: dict[str, list[tuple[int, int]]]) -> int:
            return _extents(found, offset, extent, form)

        one = bool(flags & CMD_FLAG_REQ_ONE)
        start = device.start_block_status
        return self._issue(
            start, count, offset, None, completion=completion, result=result, one=one
        )

    def poll(self, timeout: int) -> int:
        """Waits up to ``timeout`` milliseconds (-1: without limit) for an answer; 1 if there is one."""
        queue = self._queue()
        poller = select.poll()
        poller.register(queue.fileno(), select.POLLIN)
        if not poller.poll(None if timeout < 0 else timeout):
            return 0
        self.aio_notify_read()
        return 1

    def aio_get_fd(self) -> int:
        """A descriptor that is readable when there are answers."""
        self._open()
        return self._queue().fileno()

    def aio_get_direction(self) -> int:
        """What to wait for on aio_get_fd: always to read."""
        return AIO_DIRECTION_READ

    def aio_notify_read(self) -> None:
        """Takes the answers that are there, and calls their functions."""
        self._queue().deliver()
        for cookie, command in list(self._commands.items()):
            if command.retired:
                del self._commands[cookie]

    def aio_notify_write(self) -> None:
        """Does nothing: requests are sent by threads."""

    def aio_command_completed(self, cookie: int) -> bool:
        """Whether an answer was taken; the cookie is then not valid any more.

        Takes no answer itself, like libnbd: a script that asks for several cookies and then calls ``poll`` would
        wait for ever for an answer that came in between.
        """
        command = self._commands.get(cookie)
        if command is None:
            raise Error("no such command is in flight", _errno.EINVAL)
        if not command.finished:
            return False
        del self._commands[cookie]
        if command.error is not None:
            raise command.error
        return True

    def aio_peek_command_completed(self) -> int:
        """The cookie of a request whose answer was taken; 0 if there is none."""
        if not self._commands:
            raise Error("no command is in flight", _errno.EINVAL)
        done = (cookie for cookie, command in self._commands.items() if command.finished)
        return next(done, 0)

    def aio_in_flight(self) -> int:
        """Number of requests without an answer."""
        return sum(not command.finished for command in self._commands.values())

    def aio_is_created(self) -> bool:
        """Whether nothing was connected yet."""
        return self._place is None and not self._dead

    def aio_is_connecting(self) -> bool:
        """Always false: connecting waits."""
        return False

    def aio_is_negotiating(self) -> bool:
        """Whether opt_go or opt_abort can be called."""
        return self._place is not None and self._device is None and not self._dead

    def aio_is_ready(self) -> bool:
        """Whether requests can be made."""
        return self._device is not None and not self._dead

    def aio_is_processing(self) -> bool:
        """Always false: requests are processed by threads."""
        return False

    def aio_is_dead(self) -> bool:
        """Whether connecting has failed."""
        return self._dead and self._place is not None and self._device is None

    def aio_is_closed(self) -> bool:
        """Whether the connection has ended."""
        return self._dead and not self.aio_is_dead()

    def connection_state(self) -> str:
        """The state of the handle for messages."""
        if self.aio_is_created():
            return "START"
        return "READY" if self.aio_is_ready() else "CLOSED"

    @_called
    def shutdown(self, flags: int = 0) -> None:
        """Waits for requests in flight and disconnects."""
        device = self._open()
        while self.aio_in_flight() and not flags & SHUTDOWN_ABANDON_PENDING:
            self.poll(-1)
        self._say("shutdown", "disconnecting")
        device.close()
        self._dead = True

    def close(self) -> None:
        """Closes the handle. Its methods raise ClosedHandle afterwards."""
        self._say("close", "closing handle")
        self._end()
        self._closed = True

    def _end(self) -> None:
        if self._device is not None:
            self._device.close()
        server = getattr(self, "_server", None)
        if server is not None:
            server.terminate()
            server.wait()
        if self._folder is not None:
            self._folder.cleanup()

    def __del__(self) -> None:
        if not self._closed:
            self._end()

    def get_subprocess_pid(self) -> int:
        """Process ID of the command that was started."""
        server = getattr(self, "_server", None)
        pid = server.pid if server is not None else self._known().pid
        if pid is None:
            raise Error("no command was started", _errno.ESRCH)
        return int(pid)

    def kill_subprocess(self, signum: int) -> None:
        """Sends a signal to the command that was started; 0 is SIGTERM."""
        os.kill(self.get_subprocess_pid(), signum or 15)

    # Statistics.

    def _traffic(self, index: int) -> int:
        known = self._info if self._device is None else self._device
        found = None if known is None else known.traffic
        return 0 if found is None else found[index]

    def stats_bytes_sent(self) -> int:
        """Bytes sent by the connection of the open export, with its handshake."""
        return self._traffic(0)

    def stats_chunks_sent(self) -> int:
        """Messages sent."""
        return self._traffic(1)

    def stats_bytes_received(self) -> int:
        """Bytes received, with the handshake."""
        return self._traffic(2)

    def stats_chunks_received(self) -> int:
        """Messages received: replies, or their chunks."""
        return self._traffic(3)

    def get_package_name(self) -> str:
        """The name of this package."""
        return "blockhaul"

    def get_version(self) -> str:
        """The version of this package."""
        return __version__

    def supports_tls(self) -> bool:
        """True."""
        return True

    def supports_uri(self) -> bool:
        """True."""
        return True

    def supports_vsock(self) -> bool:
        """True."""
        return True

    def get_uri(self) -> str:
        """The URI of the connection."""
        words, command = self._where()
        if command:
            raise Error("the connection has no URI", _errno.ENOTSUP)
        return words[0]

    def is_uri(self, uri: str) -> bool:
        """Whether a text looks like an NBD URI."""
        scheme, colon, _ = uri.partition("://")
        return bool(colon) and scheme in (
            "nbd", "nbds", "nbd+unix", "nbds+unix", "nbd+vsock", "nbds+vsock", "nbd+ssh", "nbds+ssh"
        )


def _memory(buf: Any) -> Any:
    """The memory of a buffer of this module, or of any other."""
    return buf._bytes if isinstance(buf, Buffer) else buf


def _chunk(chunk: Callable[..., Any], memory: Any, offset: int) -> int:
    """Calls a function with what was read; returns the number of its error."""
    view = memoryview(memory).toreadonly()
    return _fails(chunk, view, offset, READ_DATA, error=ctypes.c_int(0))[0]


def _extents(
    found: dict[str, list[tuple[int, int]]],
    offset: int,
    extent: Callable[..., Any],
    form: Callable[[list[tuple[int, int]]], Any],
) -> int:
    """Calls a function with the extents of each context; returns the number of the first error."""
    first = 0
    for context, runs in found.items():
        number, _ = _fails(extent, context, offset, form(runs), error=ctypes.c_int(0))
        first = first or number
    return first


def _flat(runs: list[tuple[int, int]]) -> list[int]:
    """Runs as a flat list of 32-bit lengths and flags."""
    flat: list[int] = []
    for length, flags in runs:
        if length >= 1 << 32:
            return [*flat, 0xFFFF0000, flags]
        flat += [length, flags]
    return flat


def _pairs(runs: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Runs as they are."""
    return runs
