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

_UNITS = {"": 0, "b": 0, "s": 9, "k": 10, "m": 20, "g": 30, "t": 40, "p": 50, "e": 60}
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
    """The size in bytes that a text gives: a number, decimal or hexadecimal after `0x`, with b, k, m,
    g, t, p, e (base 1024, either case; also KiB, MiB, …) or s (sectors of 512 bytes). `_` may separate
    digits, and the number from a unit of one letter. Raises ValueError for any other text, and for more
    than 2^63 - 1."""
    _check_text("parse_size", text)
    wrong = ValueError(f"nbdkit.parse_size: {text!r} is not a size")
    base, digits = (16, text[2:]) if text[:2] in ("0x", "0X") else (10, text)
    letters = "0123456789abcdefABCDEF" if base == 16 else "0123456789"
    number, separator, unit = digits.rpartition("_")
    if not separator or len(unit) != 1 or unit.lower() not in _UNITS:
        number = digits[: len(digits) - len(digits.lstrip(letters + "_"))]
        unit = digits[len(number) :]
    unit = unit.lower()
    if len(unit) == 3 and unit.endswith("ib"):
        unit = unit[0]
    groups = number.split("_")
    if unit not in _UNITS or not all(group and not group.strip(letters) for group in groups):
        raise wrong
    size = int("".join(groups), base) << _UNITS[unit]
    if size > _INT64_MAX:
        raise ValueError(f"nbdkit.parse_size: {text!r} is more than 2^63 - 1 bytes")
    return size


def parse_bool(text):
    """Whether a text says yes (on, yes, true, their first letters, 1) or no. Raises ValueError for any
    other text."""
    _check_text("parse_bool", text)
    if text.lower() in ("on", "yes", "y", "true", "t", "1"):
        return True
    if text.lower() in ("off", "no", "n", "false", "f", "0"):
        return False
    raise ValueError(f"nbdkit.parse_bool: {text!r} is not on or off")


def name():
    """The name of the server: none here."""
    return None


def timestamp():
    """The time now in UTC, for messages: `2026-01-01 12:00:00.000333`."""
    seconds, nanoseconds = divmod(time.time_ns(), 10**9)
    clock = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(seconds))
    return f"{clock}.{nanoseconds // 1000:06}"


def debug_hexdump(buf, prefix=None, start=0):
    """Logs the bytes of a buffer, if the server logs details. `start` is the offset of the first."""
    for line in _dump(buf, start, range(len(buf))):
        debug(f"{prefix or ''}{line}")


def debug_hexdiff(buf1, buf2, prefix=None, start=0):
    """Logs two buffers of one length, if the server logs details: `-` and `+` precede lines that
    differ, the latter with the bytes that do."""
    if len(buf1) != len(buf2):
        raise ValueError("nbdkit.debug_hexdiff: the buffers differ in length")
    other = {index for index in range(len(buf1)) if buf1[index] != buf2[index]}
    old, new = _dump(buf1, start, range(len(buf1))), _dump(buf2, start, other)
    for before, after in zip(old, new):
        if not after.partition(":")[2].partition("|")[0].strip():
            debug(f"{prefix or ''} {before}")
        else:
            debug(f"{prefix or ''}-{before}")
            debug(f"{prefix or ''}+{after}")


def _dump(buf, start, shown):
    """The lines of a dump: 16 bytes from a multiple of 16 on; bytes that are not in `shown` are left
    blank."""
    for line in range(start // 16, (start + len(buf) + 15) // 16):
        places = [line * 16 + place - start for place in range(16)]
        found = [buf[index] if index in shown else None for index in places]
        hexes = ["  " if byte is None else f"{byte:02x}" for byte in found]
        text = "".join(" " if b is None else chr(b) if 32 <= b < 127 else "." for b in found)
        yield f"{line * 16:08x}: {' '.join(hexes[:8])}  {' '.join(hexes[8:])}  |{text}|"


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
