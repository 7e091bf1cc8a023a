#!/usr/bin/env python3
"""Reads a second with the package blockhaul and with libnbd's Python module, next to each other.

    PYTHONPATH=... python3 bench/python-client.py --blockhaul target/release/blockhaul

Each round runs every client once, in a process of its own, against one server with a file of random bytes
in --folder (default /dev/shm). The table has medians of the rates, the ratio to libnbd's blocking pread within
rounds, and the client's processor time for a read, which depends less on what else the machine does. Clients whose
module is missing are left out.
"""

import argparse
import asyncio
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

DISK = 256 << 20
SIZES = {"4 KiB": 4096, "1 MiB": 1 << 20}
CLIENTS = {
    "libnbd pread": "nbd",
    "libnbd aio_pread": "nbd",
    "blockhaul pread": "blockhaul",
    "blockhaul pread_into": "blockhaul",
    "blockhaul.nbd pread": "blockhaul.nbd",
    "blockhaul.aio pread": "blockhaul.aio",
}


def depth(size: int) -> int:
    """Requests in flight at a time, where more than one can be."""
    return 64 if size < 65536 else 8


def repeated(read, size: int, seconds: float) -> float:
    """Calls a second of a function that waits."""
    count, at, begun = 0, 0, time.perf_counter()
    while time.perf_counter() - begun < seconds:
        for _ in range(50 if size < 65536 else 4):
            read(size, at)
            at = (at + size) % DISK
            count += 1
    return count / (time.perf_counter() - begun)


def libnbd_aio(socket: str, size: int, seconds: float) -> float:
    import nbd

    handle = nbd.NBD()
    handle.connect_unix(socket)
    buffers = [nbd.Buffer(size) for _ in range(depth(size))]
    free, count, at = list(range(len(buffers))), 0, 0

    def completion(number):
        def done(_error):
            nonlocal count
            count += 1
            free.append(number)
            return 1

        return done

    functions = [completion(number) for number in free]
    begun = time.perf_counter()
    while time.perf_counter() - begun < seconds:
        while free:
            number = free.pop()
            handle.aio_pread(buffers[number], at, functions[number])
            at = (at + size) % DISK
        handle.poll(-1)
    return count / (time.perf_counter() - begun)


async def blockhaul_aio(socket: str, size: int, seconds: float) -> float:
    import blockhaul.aio

    count, at = 0, 0
    async with await blockhaul.aio.connect(f"nbd+unix:///?socket={socket}") as disk:
        begun = time.perf_counter()

        async def one():
            nonlocal count, at
            while time.perf_counter() - begun < seconds:
                here, at = at, (at + size) % DISK
                await disk.pread(size, here)
                count += 1

        await asyncio.gather(*(one() for _ in range(depth(size))))
        return count / (time.perf_counter() - begun)


def measure(client: str, socket: str, size: int, seconds: float) -> float:
    """Reads a second of one client."""
    match client:
        case "libnbd aio_pread":
            return libnbd_aio(socket, size, seconds)
        case "blockhaul.aio pread":
            return asyncio.run(blockhaul_aio(socket, size, seconds))
        case "libnbd pread" | "blockhaul.nbd pread":
            if client.startswith("libnbd"):
                import nbd
            else:
                import blockhaul.nbd as nbd
            handle = nbd.NBD()
            handle.connect_unix(socket)
            return repeated(handle.pread, size, seconds)
    import blockhaul

    with blockhaul.connect(f"nbd+unix:///?socket={socket}") as disk:
        if client == "blockhaul pread":
            return repeated(disk.pread, size, seconds)
        buffer = bytearray(size)
        return repeated(lambda _size, at: disk.pread_into(buffer, at), size, seconds)


def is_there(module: str) -> bool:
    return subprocess.run([sys.executable, "-c", f"import {module}"], capture_output=True).returncode == 0


def rounds(arguments, socket: str) -> None:
    clients = [client for client, module in CLIENTS.items() if is_there(module)]
    print(f"medians of {arguments.rounds} rounds of {arguments.seconds} s")
    for name, size in SIZES.items():
        rates = {client: [] for client in clients}
        times = {client: [] for client in clients}
        for _ in range(arguments.rounds):
            for client in clients:
                words = [sys.executable, __file__, "--measure", client, socket, str(size)]
                words += ["--seconds", str(arguments.seconds)]
                run = subprocess.run(words, capture_output=True, text=True, check=True)
                rate, spent = run.stdout.split()
                rates[client].append(float(rate))
                times[client].append(float(spent))
        for client, found in rates.items():
            base = rates.get("libnbd pread", found)
            ratio = statistics.median(rate / other for rate, other in zip(found, base))
            spent = statistics.median(times[client]) * 1e6
            print(f"{name}  {client:22}{statistics.median(found):10.0f}/s{ratio:8.2f}{spent:10.1f} us")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--blockhaul", default="blockhaul", help="the program [default: %(default)s]")
    parser.add_argument("--folder", default="/dev/shm", help="for the file [default: %(default)s]")
    parser.add_argument("--rounds", type=int, default=5, help="[default: %(default)s]")
    parser.add_argument("--seconds", type=float, default=2, help="of a run [default: %(default)s]")
    parser.add_argument("--measure", nargs=3, metavar=("CLIENT", "SOCKET", "SIZE"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        client, socket, size = arguments.measure
        begun = time.process_time()
        rate = measure(client, socket, int(size), arguments.seconds)
        print(rate, (time.process_time() - begun) / (rate * arguments.seconds))
        return
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        disk, socket = Path(folder, "disk.raw"), Path(folder, "socket")
        disk.write_bytes(os.urandom(DISK))
        words = [arguments.blockhaul, "serve", "-f", "-r", "-U", str(socket), str(disk)]
        server = subprocess.Popen(words, stderr=subprocess.DEVNULL)
        try:
            while not socket.exists() and server.poll() is None:
                time.sleep(0.05)
            rounds(arguments, str(socket))
        finally:
            server.terminate()
            server.wait()


if __name__ == "__main__":
    main()
