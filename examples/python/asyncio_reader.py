#!/usr/bin/env python3
"""Reads a disk with many requests in flight, and prints its SHA-256 digest.

    asyncio_reader.py URI
"""

import asyncio
import hashlib
import sys

import blockhaul.aio

STEP = 256 << 10
IN_FLIGHT = 32


async def main(uri):
    digest = hashlib.sha256()
    async with await blockhaul.aio.connect(uri, readonly=True) as disk:
        pending = []
        for at in range(0, disk.size, STEP):
            length = min(STEP, disk.size - at)
            pending.append(asyncio.create_task(disk.pread(length, at)))
            if len(pending) == IN_FLIGHT:
                digest.update(await pending.pop(0))
        for task in pending:
            digest.update(await task)
    print(f"{digest.hexdigest()}  {uri}")


if len(sys.argv) != 2:
    sys.exit("usage: asyncio_reader.py URI")
asyncio.run(main(sys.argv[1]))
