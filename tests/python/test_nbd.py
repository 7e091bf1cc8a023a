"""The interface of libnbd's module."""

import errno
import select
import tempfile
import unittest
from pathlib import Path

import blockhaul
import blockhaul.nbd as nbd

MIB = 1 << 20


class Compatible(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.socket = str(Path(folder.name) / "s")
        server = blockhaul.serve("memory:4m", unix=self.socket)
        self.addCleanup(server.stop)
        self.uri = server.uri

    def handle(self):
        handle = nbd.NBD()
        handle.add_meta_context(nbd.CONTEXT_BASE_ALLOCATION)
        handle.connect_unix(self.socket)
        return handle

    def test_synchronous_requests(self):
        handle = self.handle()
        self.assertEqual(handle.get_size(), 4 * MIB)
        self.assertFalse(handle.is_read_only())
        handle.pwrite(b"x" * 512, 512, nbd.CMD_FLAG_FUA)
        found = handle.pread(1024, 0)
        self.assertIsInstance(found, bytearray)
        self.assertEqual(found, bytes(512) + b"x" * 512)
        handle.zero(512, 512)
        handle.flush()
        entries = []

        def extent(context, offset, runs, error):
            self.assertEqual((context, offset, error.value), (nbd.CONTEXT_BASE_ALLOCATION, 0, 0))
            entries.extend(runs)

        handle.block_status(4 * MIB, 0, extent)
        self.assertEqual(sum(entries[::2]), 4 * MIB)
        entries.clear()
        handle.block_status_64(4 * MIB, 0, extent)
        self.assertEqual(sum(length for length, _ in entries), 4 * MIB)
        handle.shutdown()
        self.assertTrue(handle.aio_is_closed())

    def test_asynchronous_requests(self):
        handle = self.handle()
        cookies = []
        for number in range(64):
            data = nbd.Buffer.from_bytearray(bytes([number]) * 4096)
            cookies.append(handle.aio_pwrite(data, number * 4096))
        while cookies:
            cookies = [cookie for cookie in cookies if not handle.aio_command_completed(cookie)]
            if cookies:
                handle.poll(-1)
        done = []
        buffers = [nbd.Buffer(4096) for _ in range(64)]

        def completion(error):
            done.append(error.value)
            return 1

        for number, buffer in enumerate(buffers):
            handle.aio_pread(buffer, number * 4096, completion)
        while len(done) < 64:
            handle.poll(-1)
        self.assertEqual(done, [0] * 64)
        for number, buffer in enumerate(buffers):
            self.assertEqual(buffer.to_bytearray(), bytes([number]) * 4096)
        self.assertEqual(handle.aio_in_flight(), 0)

    def test_only_poll_takes_answers(self):
        handle = self.handle()
        cookie = handle.aio_pwrite(nbd.Buffer(512), 0)
        readable, _, _ = select.select([handle.aio_get_fd()], [], [], 60)
        self.assertEqual(readable, [handle.aio_get_fd()])
        # What a question took, a later poll(-1) would wait for.
        self.assertEqual(handle.aio_peek_command_completed(), 0)
        self.assertFalse(handle.aio_command_completed(cookie))
        self.assertEqual(handle.poll(-1), 1)
        self.assertEqual(handle.aio_peek_command_completed(), cookie)
        self.assertTrue(handle.aio_command_completed(cookie))

    def test_statistics(self):
        def figures(handle):
            sent = handle.stats_bytes_sent(), handle.stats_chunks_sent()
            return *sent, handle.stats_bytes_received(), handle.stats_chunks_received()

        def moved(handle, call):
            before = figures(handle)
            call()
            return tuple(now - then for now, then in zip(figures(handle), before))

        handle = nbd.NBD()
        handle.set_request_extended_headers(False)
        handle.set_request_structured_replies(False)
        self.assertEqual(figures(handle), (0, 0, 0, 0))
        handle.connect_unix(self.socket)
        self.assertGreater(min(figures(handle)), 0)

        def use(handle):
            # Headers of requests have 28 bytes, simple replies 16.
            self.assertEqual(moved(handle, handle.flush), (28, 1, 16, 1))
            self.assertEqual(moved(handle, lambda: handle.pread(512, 0)), (28, 1, 528, 1))
            self.assertEqual(moved(handle, lambda: handle.pwrite(bytes(512), 0)), (540, 1, 16, 1))

        use(handle)
        cookie = handle.aio_flush()
        while not handle.aio_command_completed(cookie):
            handle.poll(-1)
        # A worker has the connection now.
        use(handle)
        sent = handle.stats_chunks_sent()
        handle.shutdown()
        self.assertEqual(handle.stats_chunks_sent(), sent + 1)

    def test_errors(self):
        handle = nbd.NBD()
        with self.assertRaises(nbd.Error) as caught:
            handle.get_size()
        self.assertEqual(caught.exception.errnum, errno.EINVAL)
        with self.assertRaises(nbd.Error) as caught:
            handle.connect_unix("/nonexistent")
        self.assertEqual(caught.exception.errno, "ENOENT")
        handle = self.handle()
        with self.assertRaises(nbd.Error) as caught:
            handle.pread(4096, 4 * MIB)
        self.assertEqual(caught.exception.errnum, errno.EINVAL)
        handle.close()
        with self.assertRaises(nbd.ClosedHandle):
            handle.get_size()

    def test_a_command_serves_its_standard_streams(self):
        handle = nbd.NBD()
        handle.connect_command([blockhaul.program(), "serve", "--single", "pattern:1m"])
        self.assertEqual(handle.pread(8, 8), (8).to_bytes(8, "big"))
        self.assertGreater(handle.get_subprocess_pid(), 1)
        handle.close()
        handle = nbd.NBD()
        handle.connect_systemd_socket_activation([blockhaul.program(), "serve", "pattern:1m"])
        self.assertEqual(handle.pread(8, 8), (8).to_bytes(8, "big"))
        handle.close()

    def test_a_plugin_cannot_use_standard_streams_that_are_a_client(self):
        script = Path(self.socket).with_name("disk.py")
        script.write_text(
            "import nbdkit, os\n"
            "print('for nobody', flush=True)\n"
            "os.write(1, b'neither')\n"
            "assert os.read(0, 1) == b'' and not nbdkit.stdio_safe()\n"
            "API_VERSION = 2\n"
            "def open(readonly): return 1\n"
            "def get_size(handle): return 4096\n"
            "def pread(handle, buf, offset, flags): buf[:] = b'x' * len(buf)\n"
        )
        handle = nbd.NBD()
        handle.connect_command([blockhaul.program(), "serve", "--single", f"python:{script}"])
        self.assertEqual(handle.pread(4, 0), b"xxxx")
        handle.close()

    def test_options_before_an_export_is_opened(self):
        handle = nbd.NBD()
        handle.set_opt_mode(True)
        handle.connect_uri(self.uri)
        self.assertTrue(handle.aio_is_negotiating())
        names = []
        self.assertEqual(handle.opt_list(lambda name, _description: names.append(name)), 1)
        self.assertEqual(names, [""])
        self.assertEqual(handle.get_protocol(), "newstyle-fixed")
        self.assertTrue(handle.get_structured_replies_negotiated())
        contexts = []
        self.assertEqual(handle.opt_list_meta_context(contexts.append), 1)
        self.assertEqual(contexts, [nbd.CONTEXT_BASE_ALLOCATION])
        self.assertFalse(handle.can_meta_context(nbd.CONTEXT_BASE_ALLOCATION))
        self.assertEqual(handle.opt_set_meta_context_queries(["x:y"], contexts.append), 0)
        wanted = ["x:y", nbd.CONTEXT_BASE_ALLOCATION]
        self.assertEqual(handle.opt_set_meta_context_queries(wanted, contexts.append), 1)
        self.assertTrue(handle.can_meta_context(nbd.CONTEXT_BASE_ALLOCATION))
        with self.assertRaises(nbd.Error):
            handle.opt_list_meta_context_queries(["no namespace"], contexts.append)
        handle.set_request_meta_context(False)
        handle.opt_go()
        self.assertEqual(handle.get_size(), 4 * MIB)
        self.assertTrue(handle.can_meta_context(nbd.CONTEXT_BASE_ALLOCATION))
        with self.assertRaises(nbd.Error):
            handle.opt_set_meta_context(contexts.append)

    def test_contexts_need_structured_replies(self):
        handle = nbd.NBD()
        handle.set_opt_mode(True)
        handle.set_request_structured_replies(False)
        handle.connect_uri(self.uri)
        handle.add_meta_context(nbd.CONTEXT_BASE_ALLOCATION)
        self.assertFalse(handle.get_structured_replies_negotiated())
        with self.assertRaises(nbd.Error):
            handle.opt_set_meta_context(print)
        self.assertTrue(handle.opt_structured_reply())
        self.assertTrue(handle.get_structured_replies_negotiated())
        self.assertEqual(handle.opt_set_meta_context(lambda _name: None), 1)
        handle.opt_abort()
        self.assertTrue(handle.aio_is_closed())


if __name__ == "__main__":
    unittest.main()
