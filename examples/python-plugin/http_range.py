"""A read-only disk over HTTP with byte ranges, as a plugin with coroutines.

blockhaul copy 'python:http_range.py?url=http://server/disk.raw' disk.raw

Each request of the disk is one request of HTTP on a connection of its own that is used again. They
wait at the same time, so that a long way costs its delay once and not for each request.
"""

import asyncio
from urllib.parse import urlsplit

API_VERSION = 2
url = None
size = 0
idle = []


def config(key, value):
    global url
    if key != "url" or urlsplit(value).scheme != "http":
        raise ValueError(f"{key}={value}: give url=http://HOST[:PORT]/PATH")
    url = urlsplit(value)


async def request(method, headers=""):
    """Makes a request; returns the connection and the headers of the answer."""
    reader, writer = idle.pop() if idle else await asyncio.open_connection(url.hostname, url.port or 80)
    writer.write(f"{method} {url.path or '/'} HTTP/1.1\r\nHost: {url.netloc}\r\n{headers}\r\n".encode())
    status, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().splitlines()
    if status.split()[1] not in ("200", "206"):
        raise OSError(f"{url.geturl()}: {status}")
    pairs = (line.split(":", 1) for line in lines if line)
    return (reader, writer), {name.lower(): value.strip() for name, value in pairs}


async def get_ready():
    global size
    if url is None:
        raise ValueError("which disk? give url=http://HOST/PATH")
    connection, headers = await request("HEAD")
    size = int(headers["content-length"])
    idle.append(connection)


def open(readonly):
    return url


def get_size(handle):
    return size


def can_multi_conn(handle):
    return True


async def pread(handle, buf, offset, flags):
    connection, headers = await request("GET", f"Range: bytes={offset}-{offset + len(buf) - 1}\r\n")
    if "content-range" not in headers or int(headers["content-length"]) != len(buf):
        raise OSError("the server answers without the range")
    buf[:] = await connection[0].readexactly(len(buf))
    idle.append(connection)
