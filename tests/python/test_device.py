"""Devices, connections, copies and servers of the package blockhaul, in an environment in which the wheel is
installed. `python3 -m unittest discover` in this directory runs all tests."""

import array
import asyncio
import errno
import json
import multiprocessing
import os
import pickle
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import unittest
import warnings
from pathlib import Path

import blockhaul
import blockhaul.aio

MIB = 1 << 20


class WithFolder(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)

    def disk(self, name="disk.raw", size=4 * MIB):
        path = self.folder / name
        path.write_bytes(bytes(range(256)) * (size // 256))
        return path

    def serve(self, device, **options):
        server = blockhaul.serve(device, unix=self.folder / "s", **options)
        self.addCleanup(server.stop)
        return server


class Devices(WithFolder):
    def test_a_file_is_read_and_written(self):
        path = self.disk()
        with blockhaul.open(path, "r+") as disk:
            self.assertEqual(disk.size, 4 * MIB)
            self.assertEqual(disk.pread(4, 256 + 7), bytes([7, 8, 9, 10]))
            self.assertEqual(disk.pread(0, 0), b"")
            disk.pwrite(b"written", 1)
            disk.pwrite(memoryview(array.array("B", [1, 2, 3])), 100, fua=True)
            disk.zero(512, 1024)
            disk.flush()
            self.assertEqual(disk.pread(512, 1024), bytes(512))
        content = path.read_bytes()
        self.assertEqual(content[:8], b"\0written")
        self.assertEqual(content[100:103], b"\1\2\3")

    def test_long_requests_are_carried_out_in_parts(self):
        path = self.folder / "long.raw"
        with blockhaul.open(path, "w", size=50 * MIB) as disk:
            data = os.urandom(33 * MIB + 5)
            disk.pwrite(data, 3)
            disk.pwrite(memoryview(data)[: 20 * MIB], 40 * MIB - 10 * MIB)
            whole = bytearray(50 * MIB)
            self.assertEqual(disk.pread_into(whole, 0), 50 * MIB)
            expected = bytearray(50 * MIB)
            expected[3 : 3 + len(data)] = data
            expected[30 * MIB :] = data[: 20 * MIB]
            self.assertTrue(whole == expected)
            self.assertTrue(disk.pread(50 * MIB, 0) == expected)

    def test_buffers_are_filled_in_place(self):
        with blockhaul.open(self.disk()) as disk:
            buffer = bytearray(b"x" * 20)
            self.assertEqual(disk.pread_into(memoryview(buffer)[4:8], 256), 4)
            self.assertEqual(bytes(buffer), b"xxxx\0\1\2\3" + b"x" * 12)
            with self.assertRaises((ValueError, BufferError)):
                disk.pread_into(b"readonly", 0)
            with self.assertRaises((ValueError, BufferError)):
                disk.pread_into(memoryview(buffer)[::2], 0)
            words = array.array("I", [0] * 4)
            self.assertEqual(disk.pread_into(words, 0), 16)
            self.assertEqual(words.tobytes(), bytes(range(16)))
            rows = memoryview(bytearray(64)).cast("B", (8, 8))
            disk.pread_into(rows, 64)
            self.assertEqual(rows.tobytes(), bytes(range(64, 128)))

    def test_errors_have_numbers_and_say_where(self):
        with self.assertRaises(blockhaul.Error) as caught:
            blockhaul.open(self.folder / "absent")
        self.assertEqual(caught.exception.errno, errno.ENOENT)
        self.assertIsInstance(caught.exception, OSError)
        self.assertIn("absent", str(caught.exception))
        self.assertIsInstance(caught.exception, FileNotFoundError)
        same = pickle.loads(pickle.dumps(caught.exception))
        self.assertEqual((type(same), same.args), (type(caught.exception), caught.exception.args))
        for error in (blockhaul.Error, blockhaul.CopyError):
            self.assertIs(pickle.loads(pickle.dumps(error)), error)
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
        with self.assertRaises(ConnectionRefusedError) as refused:
            blockhaul.connect(f"nbd://127.0.0.1:{port}")
        self.assertEqual(refused.exception.errno, errno.ECONNREFUSED)
        self.assertIsInstance(refused.exception, blockhaul.Error)
        (self.folder / "file").touch()
        with self.assertRaises(NotADirectoryError):
            blockhaul.open(self.folder / "file" / "disk")
        with blockhaul.open(self.disk()) as disk:
            for call in (
                lambda: disk.pread(2, 4 * MIB - 1),
                lambda: disk.pread(1 << 63, 1),
                lambda: disk.pread((1 << 64) - 1, (1 << 64) - 1),
            ):
                with self.assertRaises(blockhaul.Error) as caught:
                    call()
                self.assertEqual(caught.exception.errno, errno.EINVAL)
            with self.assertRaises(OverflowError):
                disk.pread(-1, 0)
            with self.assertRaises(blockhaul.Error) as caught:
                disk.pwrite(b"x", 0)
            self.assertEqual(caught.exception.errno, errno.EPERM)
        with self.assertRaises(blockhaul.Error) as caught:
            disk.pread(1, 0)
        self.assertEqual(caught.exception.errno, errno.EBADF)
        with self.assertRaises(blockhaul.Error):
            blockhaul.open("-")
        with self.assertRaises(blockhaul.Error):
            blockhaul.open("memory:soon")
        with self.assertRaises(ValueError):
            blockhaul.open("memory:1m", "a")

    def test_extents_cover_a_range_without_gaps(self):
        path = self.folder / "sparse.raw"
        with open(path, "wb") as file:
            file.truncate(8 * MIB)
            file.seek(2 * MIB)
            file.write(b"x" * MIB)
        found = list(blockhaul.extents(path))
        self.assertEqual([(run.offset, run.length, run.data) for run in found],
                         [(0, 2 * MIB, False), (2 * MIB, MIB, True), (3 * MIB, 5 * MIB, False)])
        self.assertTrue(found[0].hole and found[0].zero)
        part = list(blockhaul.extents(path, MIB, 2 * MIB))
        self.assertEqual([(run.offset, run.length) for run in part], [(MIB, MIB), (2 * MIB, MIB)])
        with self.assertRaises(ValueError):
            list(blockhaul.extents(path, 9 * MIB))

    def test_any_description_of_the_program_is_a_device(self):
        with blockhaul.open("pattern:1m") as disk:
            self.assertEqual(disk.pread(8, 16), (16).to_bytes(8, "big"))
        with blockhaul.open("memory:1m", "r+", layers=["offset?offset=512k"]) as disk:
            self.assertEqual(disk.size, MIB // 2)
        with blockhaul.open(["blockhaul", "serve", "memory:3m"]) as disk:
            self.assertEqual(disk.size, 3 * MIB)
        image = self.folder / "disk.qcow2"
        with blockhaul.open(f"qcow2:{image}", "w", size=64 * MIB) as disk:
            disk.pwrite(b"in an image", 5 * MIB)
        with blockhaul.open(f"qcow2:{image}") as disk:
            self.assertEqual(disk.pread(11, 5 * MIB), b"in an image")

    def test_many_threads_share_a_device(self):
        wrong = []
        with blockhaul.open(self.disk()) as disk:

            def read(first):
                for at in range(first, first + 2000):
                    if disk.pread(1, at) != bytes([at % 256]):
                        wrong.append(at)

            threads = [threading.Thread(target=read, args=(n * 999,)) for n in range(8)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        self.assertEqual(wrong, [])


class Connections(WithFolder):
    def test_an_export_has_facts(self):
        server = self.serve(self.disk(), name="disk")
        with blockhaul.connect(server.uri) as disk:
            self.assertEqual(disk.size, 4 * MIB)
            self.assertTrue(disk.can_write and disk.can_flush and disk.can_zero and disk.can_trim)
            self.assertTrue(disk.can_extents)
            self.assertEqual(disk.contexts, ["base:allocation"])
            self.assertEqual(len(disk.block_size), 3)
            self.assertEqual(disk.connection["protocol"], "newstyle-fixed")
            disk.pwrite(b"over NBD", 5)
            self.assertEqual(disk.pread(8, 5), b"over NBD")
            self.assertEqual(server.clients, 1)
        exports = blockhaul.list_exports(server.uri)
        self.assertEqual([export.name for export in exports], ["disk"])
        with blockhaul.connect(server.uri, readonly=True) as disk:
            self.assertFalse(disk.can_write)
            with self.assertRaises(blockhaul.Error):
                disk.trim(512, 0)

    def test_holes_fill_a_buffer_with_zeroes(self):
        server = self.serve("memory:20m")
        with blockhaul.connect(server.uri) as disk:
            disk.pwrite(b"x", 9 * MIB)
            buffer = bytearray(b"y" * (19 * MIB + 7))
            disk.pread_into(buffer, 0)
            expected = bytearray(19 * MIB + 7)
            expected[9 * MIB] = ord("x")
            self.assertTrue(buffer == expected)
            self.assertTrue(disk.pread(len(buffer), 0) == expected)

    def test_a_server_listens_at_a_free_port(self):
        with blockhaul.serve("pattern:1m", readonly=True) as server:
            with blockhaul.connect(server.uri) as disk:
                self.assertFalse(disk.can_write)
        with self.assertRaises(blockhaul.Error) as caught:
            blockhaul.connect(server.uri)
        self.assertIn("connect", str(caught.exception))

    def test_requests_of_a_lost_connection_fail(self):
        server = self.serve("memory:1m")
        disk = blockhaul.connect(server.uri)
        server.stop()
        with self.assertRaises(blockhaul.Error) as caught:
            disk.pread(1, 0)
        self.assertIn(caught.exception.errno, (errno.ECONNRESET, errno.ESHUTDOWN))
        disk.close()
        disk.close()
        self.assertTrue(disk.closed)

    def test_a_handle_does_not_survive_a_fork(self):
        server = self.serve(self.disk())
        with blockhaul.connect(server.uri) as disk:
            context = multiprocessing.get_context("fork")
            queue = context.SimpleQueue()

            def child():
                try:
                    disk.pread(1, 0)
                    queue.put("read")
                except blockhaul.Error as error:
                    queue.put(error.errno)
                # Workers of its own.
                with blockhaul.connect(server.uri) as again:
                    queue.put(again.pread(2, 1))

            process = context.Process(target=child)
            process.start()
            self.assertEqual(queue.get(), errno.EBADF)
            self.assertEqual(queue.get(), b"\1\2")
            process.join(20)
            self.assertEqual(process.exitcode, 0)
            # The child has not ended the connection.
            self.assertEqual(disk.pread(2, 3), b"\3\4")

    def test_ctrl_c_ends_a_wait(self):
        script = (
            "import blockhaul, threading, os, signal\n"
            # It may be ignored by whoever runs the tests.
            "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
            "disk = blockhaul.open('memory:1m', layers=['delay?read=30s'])\n"
            "threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT)).start()\n"
            "try:\n"
            "    disk.pread(1, 0)\n"
            "except KeyboardInterrupt:\n"
            "    print('interrupted', flush=True)\n"
            "    os._exit(0)\n"
        )
        run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=20)
        self.assertEqual(run.stdout, "interrupted\n", run.stderr)


    def test_ctrl_c_ends_a_wait_for_a_server_and_the_connection_goes_on(self):
        server = self.serve("pattern:1m", layers=["delay?read=1s"])
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        self.addCleanup(signal.signal, signal.SIGINT, before)
        with blockhaul.connect(server.uri) as disk:
            threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
            begun = time.monotonic()
            with self.assertRaises(KeyboardInterrupt):
                disk.pread(64 * 1024, 0)
            self.assertLess(time.monotonic() - begun, 0.9)
            self.assertEqual(disk.pread(8, 64), (64).to_bytes(8, "big"))

    def test_many_threads_share_a_connection(self):
        server = self.serve(self.disk(size=32 * MIB))
        wrong = []
        with blockhaul.connect(server.uri) as disk:

            def use(number):
                mine = (16 + number) * MIB
                for turn in range(40):
                    at = (number * 7919 + turn * 4099) % MIB
                    if disk.pread(70001, at) != (bytes(range(256)) * 275)[at % 256 :][:70001]:
                        wrong.append(("read", number, turn))
                    data = bytes([turn]) * (MIB // 2 + turn)
                    disk.pwrite(data, mine)
                    buffer = bytearray(len(data))
                    disk.pread_into(buffer, mine)
                    if buffer != data:
                        wrong.append(("write", number, turn))

            threads = [threading.Thread(target=use, args=(n,)) for n in range(6)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        self.assertEqual(wrong, [])

    def test_what_the_server_does_not_take_works_in_the_middle(self):
        server = self.serve("memory:1m", layers=["blocksize?minimum=4096&minblock=4096"])
        with blockhaul.connect(server.uri) as disk:
            self.assertEqual(disk.pread(4096, 0), bytes(4096))
            disk.pwrite(b"unaligned", 4090)
            self.assertEqual(disk.pread(9, 4090), b"unaligned")
            disk.pwrite(bytearray(b"x" * 4096), 8192)
            self.assertEqual(disk.pread(2, 8191), b"\0x")

    def test_blocking_and_awaited_requests_use_one_connection(self):
        server = self.serve("memory:1m")
        with blockhaul.connect(server.uri) as disk:
            disk.pwrite(b"before", 0)

            async def go():
                return await blockhaul.aio.Device(disk).pread(6, 0)

            self.assertEqual(asyncio.run(go()), b"before")
            self.assertEqual(disk.pread(6, 0), b"before")
            self.assertEqual(server.clients, 1)


class Memory:
    """A device of a megabyte."""

    def __init__(self):
        self.content = bytearray(MIB)
        self.flushed = 0

    def get_size(self):
        return len(self.content)

    def pread(self, buffer, offset, flags):
        if offset == 4096:
            raise OSError(errno.ENOSPC, "no such place")
        buffer[:] = self.content[offset : offset + len(buffer)]

    def pwrite(self, buffer, offset, flags):
        self.content[offset : offset + len(buffer)] = buffer

    def flush(self, flags):
        self.flushed += 1

    def extents(self, count, offset, flags):
        return [(0, MIB // 2, 0), (MIB // 2, MIB // 2, 3)]


class Objects(WithFolder):
    def setUp(self):
        super().setUp()
        # Tracebacks of the methods.
        self.raised = []
        before, sys.unraisablehook = sys.unraisablehook, lambda it: self.raised.append(it.exc_type)
        self.addCleanup(setattr, sys, "unraisablehook", before)

    def test_an_object_is_a_device(self):
        memory = Memory()
        server = self.serve(memory, threads=4)
        with blockhaul.connect(server.uri) as disk:
            self.assertEqual(disk.size, MIB)
            self.assertTrue(disk.can_write and disk.can_flush and disk.can_extents)
            disk.pwrite(b"from a client", 100)
            self.assertEqual(memory.content[100:113], b"from a client")
            self.assertEqual(disk.pread(6, 107), b"client")
            disk.zero(512, 0)
            self.assertEqual(memory.content[100:113], bytes(13))
            disk.flush()
            self.assertGreater(memory.flushed, 0)
            runs = [(run.offset, run.length, run.flags) for run in disk.extents()]
            self.assertEqual(runs, [(0, MIB // 2, 0), (MIB // 2, MIB // 2, 3)])
            with self.assertRaises(blockhaul.Error) as caught:
                disk.pread(512, 4096)
            self.assertEqual(caught.exception.errno, errno.ENOSPC)
            self.assertEqual(disk.pread(1, 0), b"\0")
        self.assertEqual(self.raised, [OSError])
        self.assertEqual(server.stop(), 0)

    def test_it_has_the_abilities_of_its_methods(self):
        class Pattern:
            def get_size(self):
                return 8192

            def pread(self, buffer, offset, flags):
                buffer[:] = b"p" * len(buffer)

        server = self.serve(Pattern())
        with blockhaul.connect(server.uri) as disk:
            self.assertFalse(disk.can_write)
            self.assertEqual(disk.pread(8192, 0), b"p" * 8192)

    def test_what_is_no_device_is_refused(self):
        class Nothing:
            pass

        class Coroutine(Memory):
            async def pread(self, buffer, offset, flags):
                pass

        with self.assertRaisesRegex(ValueError, "Nothing has no method get_size"):
            blockhaul.serve(Nothing())
        with self.assertRaisesRegex(ValueError, "threads"):
            blockhaul.serve(Memory(), threads=0)
        server = self.serve(Coroutine())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with blockhaul.connect(server.uri) as disk:
                with self.assertRaisesRegex(blockhaul.Error, "coroutine"):
                    disk.pread(1, 0)

    def test_a_server_ends_with_the_program(self):
        script = (
            "import blockhaul\n"
            "class One:\n"
            "    def get_size(self): return 512\n"
            "    def pread(self, buffer, offset, flags): pass\n"
            "server = blockhaul.serve(One())\n"
            "print(blockhaul.connect(server.uri).pread(1, 0))\n"
        )
        run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=20)
        self.assertEqual((run.stdout, run.returncode), ("b'\\x00'\n", 0), run.stderr)


class Copies(WithFolder):
    def test_a_copy_reports_what_it_has_done(self):
        source, target = self.disk(size=16 * MIB), self.folder / "copy.raw"
        seen = []
        copied = blockhaul.copy(source, target, verify=True, digest="sha256", progress=seen.append)
        self.assertEqual(source.read_bytes(), target.read_bytes())
        self.assertEqual((copied.size, copied.verified), (16 * MIB, 16 * MIB))
        self.assertEqual(copied.data + copied.zeroed + copied.skipped, 16 * MIB)
        import hashlib

        self.assertEqual(copied.digest, hashlib.sha256(source.read_bytes()).hexdigest())
        self.assertEqual((seen[-1].done, seen[-1].total), (16 * MIB, 16 * MIB))

    def test_options_are_those_of_the_command(self):
        source, target = self.disk(), self.folder / "copy.raw"
        target.write_bytes(b"y" * 4 * MIB)
        blockhaul.copy(source, target, range=(MIB, 4096), flush=True, connections=1, timeout=5.5)
        content = target.read_bytes()
        self.assertEqual(content[MIB : MIB + 4096], source.read_bytes()[:4096])
        self.assertEqual(content[:MIB] + content[MIB + 4096 :], b"y" * (4 * MIB - 4096))
        with self.assertRaises(blockhaul.CopyError) as caught:
            blockhaul.copy(source, target, connections=0)
        self.assertEqual((caught.exception.status, caught.exception.errno), (2, errno.EINVAL))
        with self.assertRaises(blockhaul.CopyError) as caught:
            blockhaul.copy(source, source)
        self.assertEqual(caught.exception.status, 2)
        with self.assertRaises(blockhaul.CopyError) as caught:
            blockhaul.copy(self.folder / "absent", target)
        self.assertEqual((caught.exception.status, caught.exception.errno), (3, errno.ENOENT))
        self.assertIsInstance(caught.exception, FileNotFoundError)

    def test_a_list_of_ranges_must_be_whole(self):
        source, target = self.disk(), self.folder / "copy.raw"
        page = {"startOffset": 0, "length": MIB, "changedArea": [{"start": 0, "length": 4096}]}
        (self.folder / "list").write_text(json.dumps(page))
        cat = f"cat {shlex.quote(str(self.folder / 'list'))}"
        wrong = [{"ranges": self.folder / "list"}, {"ranges_command": cat}, {"ranges_command": f"{cat}; exit 1"}]
        for options in wrong:
            target.write_bytes(b"y" * 4 * MIB)
            with self.assertRaises(blockhaul.CopyError) as caught:
                blockhaul.copy(source, target, **options)
            self.assertEqual(caught.exception.status, 3)
            self.assertEqual(target.read_bytes(), b"y" * 4 * MIB)
        blockhaul.copy(source, target, ranges_command=cat, ranges_partial=True)
        self.assertEqual(target.read_bytes(), source.read_bytes()[:4096] + b"y" * (4 * MIB - 4096))

    def test_an_exception_of_the_callback_stops_the_copy(self):
        def stop(_progress):
            raise RuntimeError("enough")

        target = self.folder / "slow.raw"
        begun = time.monotonic()
        with self.assertRaisesRegex(RuntimeError, "enough"):
            blockhaul.copy("pattern:1g", target, rate="1m", progress=stop)
        self.assertLess(time.monotonic() - begun, 20)
        before = target.stat().st_blocks
        time.sleep(0.3)
        self.assertEqual(target.stat().st_blocks, before, "nothing is written any more")

    def test_ctrl_c_stops_a_copy_and_its_journal_resumes_it(self):
        target, journal = self.folder / "big.raw", self.folder / "journal"
        script = (
            "import signal, sys, blockhaul\n"
            # It may be ignored by whoever runs the tests.
            "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
            "def report(now):\n"
            "    if now.done > 64 << 20: print('begun', flush=True)\n"
            "try:\n"
            "    blockhaul.copy('pattern:512m', sys.argv[1], rate='40m', journal=sys.argv[2],\n"
            "                   journal_interval=0.2, segment='4m', progress=report)\n"
            "except KeyboardInterrupt:\n"
            "    print('interrupted', flush=True)\n"
        )
        words = [sys.executable, "-c", script, str(target), str(journal)]
        process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
        self.assertEqual(process.stdout.readline(), "begun\n")
        process.send_signal(signal.SIGINT)
        self.assertIn("interrupted\n", process.stdout.read())
        self.assertEqual(process.wait(20), 0)
        process.stdout.close()
        self.assertTrue(journal.exists())
        copied = blockhaul.copy("pattern:512m", target, journal=journal, segment="4m", verify=True)
        self.assertGreater(copied.resumed, 0)


if __name__ == "__main__":
    unittest.main()
