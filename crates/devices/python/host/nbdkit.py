"""The module `nbdkit` for plugins: the functions and constants of nbdkit's module of that name
(nbdkit-python-plugin(3)).

The parsers and constants work everywhere. The functions about the client and the server work in
callbacks only, where blockhaul runs the plugin; elsewhere they raise RuntimeError.
"""

import contextvars
import os
import sys
import time

THREAD_MODEL_SERIALIZE_CONNECTIONS = 0
THREAD_MODEL_SERIALIZE_ALL_REQUESTS = 1
THREAD_MODEL_SERIALIZE_REQUESTS = 2
THREAD_MODEL_PARALLEL = 3

FLAG_MAY_TRIM = 1
FLAG_FUA = 2
FLAG_REQ_ONE = 4
FLAG_FAST_ZERO = 8

FUA_NONE = 0
FUA_EMULATE = 1
FUA_NATIVE = 2

CACHE_NONE = 0
CACHE_EMULATE = 1
CACHE_NATIVE = 2

EXTENT_HOLE = 1
EXTENT_ZERO = 2

# The call in progress: [connection, error number]. Set by the host.
_CALL = contextvars.ContextVar("nbdkit")
# The host that runs the plugin; none elsewhere.
_host = None

_UNITS = {"": 0, "b": 0, "k": 10, "m": 20, "g": 30, "t": 40, "p": 50, "e": 60}
_INT64_MAX = (1 << 63) - 1


def set_error(err):
    """Sets the error number (`errno`) that the client gets if the callback fails."""
    call = _CALL.get(None)
    if call is not None:
        call[1] = int(err)


def debug(message):
    """Logs a line, if the server logs details (--verbose)."""
    _running("debug").debug(str(message))


def shutdown():
    """Asks the server to stop. Returns at once."""
    _running("shutdown").shutdown()


def disconnect(force):
    """Disconnects the client of this callback: at once, or with `force` false when its requests are
    answered."""
    _running("disconnect").disconnect(_connection("disconnect"), bool(force))


def export_name():
    """The name of the export that the client asked for."""
    name = _connection("export_name").get("export")
    if name is None:
        raise RuntimeError("nbdkit.export_name: the client has not named an export yet")
    return name


def is_tls():
    """Whether the client's connection is encrypted."""
    return bool(_connection("is_tls").get("tls"))


def peer_name():
    """The client's address as text: `192.0.2.1:40000`, `unix`."""
    return _peer("name")


def peer_pid():
    """The client's process ID. For clients on Unix sockets."""
    return _peer("pid")


def peer_uid():
    """The client's user ID. For clients on Unix sockets."""
    return _peer("uid")


def peer_gid():
    """The client's group ID. For clients on Unix sockets."""
    return _peer("gid")


def peer_security_context():
    """The client's security context (SELinux, AppArmor). For clients on Unix sockets."""
    return _peer("label")


def peer_tls_dn():
    """The distinguished name in the client's certificate; empty without a certificate."""
    return _connection("peer_tls_dn").get("subject") or ""


def peer_tls_issuer_dn():
    """The distinguished name of the issuer of the client's certificate; empty without a
    certificate."""
    return _connection("peer_tls_issuer_dn").get("issuer") or ""


def stdio_safe():
    """Whether the plugin may use standard input and output: until the server serves clients."""
    return _host is not None and _host.stdio_safe


def nanosleep(sec, nsec):
    """Sleeps for this many seconds and nanoseconds."""
    if sec < 0 or nsec < 0:
        raise ValueError(f"nbdkit.nanosleep: {sec} s and {nsec} ns: a time is not negative")
    time.sleep(sec + nsec / 1e9)


def _check_text(name, text):
    if not isinstance(text, str):
        raise TypeError(f"nbdkit.{name}: a str is needed, not {type(text).__name__}")


def parse_size(text):
    """The size in bytes that a text gives: a number with b, k, m, g, t, p, e (base 1024, either
    case; also KiB, MiB, …) or s (sectors of 512 bytes). Raises ValueError for any other text, and for
    more than 2^63 - 1."""
    _check_text("parse_size", text)
    digits = len(text) - len(text.lstrip("0123456789"))
    number, unit = text[:digits], text[digits:].lower()
    if len(unit) == 3 and unit.endswith("ib"):
        unit = unit[0]
    if not number or not (unit == "s" or unit in _UNITS):
        raise ValueError(f"nbdkit.parse_size: {text!r} is not a size")
    size = int(number) * 512 if unit == "s" else int(number) << _UNITS[unit]
    if size > _INT64_MAX:
        raise ValueError(f"nbdkit.parse_size: {text!r} is more than 2^63 - 1 bytes")
    return size


def parse_delay(what, text):
    """The time that a text gives, as (seconds, nanoseconds): a number of seconds, or with ms, us or
    μs, ns. `what` is the parameter's name, for the message of the ValueError."""
    _check_text("parse_delay", text)
    for unit, exponent in (("ms", 3), ("us", 6), ("\u03bcs", 6), ("\u00b5s", 6), ("ns", 9), ("s", 0), ("", 0)):
        if text.endswith(unit):
            break
    number = text[: len(text) - len(unit)]
    whole, _, fraction = number.partition(".")
    plain = (whole + fraction).isascii() and (whole + fraction).isdigit()
    if not plain or (exponent and "." in number):
        raise ValueError(f"{what}: {text!r} is not a time such as 2, 1.5 or 100ms")
    nanoseconds = int(whole or 0) * 10 ** (9 - exponent)
    if fraction:
        nanoseconds += int(fraction[:9].ljust(9, "0"))
    sec, nsec = divmod(nanoseconds, 10**9)
    if sec > 0x7FFFFFFF:
        raise ValueError(f"{what}: {text!r} is too long")
    return sec, nsec


def parse_probability(what, text):
    """The share that a text gives, as a float: `0.3`, `30%`, `3:10`, `3/10`. `what` is the
    parameter's name, for the message of the ValueError."""
    _check_text("parse_probability", text)
    wrong = ValueError(f"{what}: {text!r} is not a probability such as 0.3, 30% or 3:10")
    above, below = (text[:-1], "100") if text.endswith("%") else (text, "1")
    for sign in ":/":
        if sign in text:
            above, below = text.split(sign, 1)
    try:
        above, below = float(above), float(below)
    except ValueError:
        raise wrong from None
    if above == 0.0 and below == 0.0:
        return 0.0
    if not (above >= 0.0 and 0.0 < below < float("inf") and above < float("inf")):
        raise wrong
    return above / below


def read_password(value):
    """The password that a parameter gives, as bytes: the value itself, `+FILE` the first line of a
    file, `-FD` that of an open file descriptor, `-` what the user types."""
    _check_text("read_password", value)
    if value == "-":
        return _ask_password()
    if value.startswith("-"):
        fd = int(value[1:])
        if fd <= 2:
            raise ValueError(f"nbdkit.read_password: {value}: a descriptor from 3 on is needed")
        with open(fd, "rb") as file:
            return file.readline().rstrip(b"\n")
    if value.startswith("+"):
        with open(value[1:], "rb") as file:
            return file.readline().rstrip(b"\n")
    return value.encode()


def _ask_password():
    import getpass

    if not stdio_safe() or not os.isatty(0):
        raise ValueError("nbdkit.read_password: standard input is not a terminal")
    return getpass.getpass("password: ", sys.stderr).encode()


def _running(name):
    if _host is None:
        raise RuntimeError(f"nbdkit.{name}: no server runs this plugin")
    return _host


def _connection(name):
    call = _CALL.get(None)
    if call is None or call[0] is None:
        raise RuntimeError(f"nbdkit.{name}: not in a callback of a connection")
    return call[0]


def _peer(key):
    value = _connection("peer_" + key).get("peer_" + key)
    if value is None:
        raise RuntimeError(f"nbdkit.peer_{key}: not known of this client")
    return value
