//! libnbd's shell asks for each part of the protocol by itself.

use super::*;

/// Runs lines of Python with libnbd: `h` is a handle that is not connected yet, `uri` the address.
#[track_caller]
fn nbdsh(server: &PeerServer, script: &str) {
    let Some(nbdsh) = PeerProgram::require("nbdsh") else { return };
    let mut command = nbdsh.command();
    let begin = "import os, errno\nuri = os.environ['TEST_URI']";
    command.env("TEST_URI", server.uri("")).args(["-c", begin, "-c", script]);
    done(&mut command);
}

#[test]
fn libnbd_negotiates_everything() {
    let scratch = ScratchDir::new().unwrap();
    let server = serve(&scratch, "s", &["-e", "disk", "--description", "a disk", "memory:1M"]);
    nbdsh(
        &server,
        r#"
h.add_meta_context("base:allocation")
h.add_meta_context("x-unknown:context")
h.set_full_info(True)
h.set_export_name("disk")
h.connect_uri(uri.replace("///", "///disk"))
assert h.get_protocol() == "newstyle-fixed"
assert h.get_structured_replies_negotiated()
assert h.get_extended_headers_negotiated()
assert h.can_meta_context("base:allocation")
assert not h.can_meta_context("x-unknown:context")
assert h.get_export_description() == "a disk"
assert h.get_canonical_export_name() == "disk"
assert h.get_size() == 1 << 20
for can in ["cache", "df", "flush", "fua", "multi_conn", "trim", "zero", "block_status_payload"]:
    assert getattr(h, "can_" + can)(), can
assert not h.is_read_only() and not h.is_rotational()
assert h.get_block_size(nbd.SIZE_MINIMUM) == 1
assert h.get_block_size(nbd.SIZE_PREFERRED) == 4096
assert h.get_block_size(nbd.SIZE_MAXIMUM) == 32 << 20
h.shutdown()

o = nbd.NBD()
o.set_opt_mode(True)
o.connect_uri(uri)
names = []
o.opt_list(lambda name, description: names.append((name, description)))
assert names == [("disk", "a disk")], names
o.set_export_name("no such disk")
try:
    o.opt_info()
    assert False, "an export that is not there was found"
except nbd.Error as error:
    assert error.errno == "ENOENT", error
# The connection goes on after an error.
o.set_export_name("disk")
contexts = []
o.opt_list_meta_context(contexts.append)
assert contexts == ["base:allocation"], contexts
o.opt_go()
assert o.pread(3, 0) == b"\0\0\0"
o.shutdown()

o = nbd.NBD()
o.set_opt_mode(True)
o.connect_uri(uri)
o.opt_abort()

for structured, extended in [(False, False), (True, False), (True, True)]:
    p = nbd.NBD()
    p.set_request_structured_replies(structured)
    p.set_request_extended_headers(extended)
    p.add_meta_context("base:allocation")
    p.connect_uri(uri)
    assert p.get_structured_replies_negotiated() == structured
    assert p.get_extended_headers_negotiated() == extended
    assert p.can_meta_context("base:allocation") == structured
    p.pwrite(b"abc" * 1000, 4321, nbd.CMD_FLAG_FUA)
    assert p.pread(3000, 4321) == b"abc" * 1000
    p.shutdown()

# Without any flag of the handshake: no fixed newstyle, no NO_ZEROES.
for flags in [0, nbd.HANDSHAKE_FLAG_FIXED_NEWSTYLE, nbd.HANDSHAKE_FLAG_NO_ZEROES]:
    p = nbd.NBD()
    p.set_handshake_flags(flags)
    p.connect_uri(uri)
    assert p.pread(3, 4321) == b"abc", flags
    p.shutdown()
"#,
    );
}

#[test]
fn libnbd_reads_chunks_holes_and_whole_fragments() {
    let scratch = ScratchDir::new().unwrap();
    let image = scratch.file("image");
    let file = fs::File::create(&image).unwrap();
    file.set_len(4 << 20).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&file, &[7; 1 << 20], 1 << 20).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&file, &[8; 100_000], 3 << 20).unwrap();
    let server = serve(&scratch, "s", &[text(&image)]);
    nbdsh(
        &server,
        r#"
expected = bytes(1 << 20) + b"\7" * (1 << 20) + bytes(1 << 20) + b"\10" * 100000
expected += bytes((4 << 20) - len(expected))
for extended in [False, True]:
    h = nbd.NBD()
    h.set_request_extended_headers(extended)
    h.connect_uri(uri)
    for flags in [0, nbd.CMD_FLAG_DF]:
        for at, length in [(0, 4 << 20), (1000000, 200001), (3 << 20, 100000), (4194303, 1)]:
            seen, chunks = bytearray(length), []
            def chunk(data, offset, status, error):
                assert status in (nbd.READ_DATA, nbd.READ_HOLE), status
                if status == nbd.READ_DATA:
                    seen[offset - at:offset - at + len(data)] = data
                else:
                    assert not any(data)
                chunks.append((offset, len(data)))
            data = h.pread_structured(length, at, chunk, flags)
            assert data == expected[at:at + length], (at, length)
            assert seen == data, (at, length)
            chunks.sort()
            end = at
            for offset, size in chunks:
                assert offset == end and size > 0, chunks
                end += size
            assert end == at + length, chunks
            assert not flags or len(chunks) == 1, chunks
    h.shutdown()
"#,
    );
}

#[test]
fn libnbd_asks_for_the_status_of_blocks() {
    let scratch = ScratchDir::new().unwrap();
    let huge = serve(&scratch, "z", &["zero:100T"]);
    nbdsh(
        &huge,
        r#"
h.add_meta_context("base:allocation")
h.connect_uri(uri)
extents = []
def got(context, offset, entries, error):
    assert context == "base:allocation" and error.value == 0
    extents.extend(entries)
h.block_status_64(100 << 40, 0, got)
assert sum(length for length, flags in extents) == 100 << 40, extents
assert len(extents) == 1, "one extent of 64 bits: %r" % extents
assert extents[0][1] & nbd.STATE_ZERO
"#,
    );
    let memory = serve(&scratch, "m", &["memory:16G"]);
    nbdsh(
        &memory,
        r#"
h.add_meta_context("base:allocation")
h.connect_uri(uri)
h.pwrite(b"x" * 65536, 8 << 30)
def status(at, length, flags=0):
    extents = []
    def got(context, offset, entries, error):
        assert offset == at
        extents.extend(entries)
    h.block_status_64(length, at, got, flags)
    return extents
extents = status(0, 16 << 30)
at, data = 0, []
for length, flags in extents:
    if not flags & nbd.STATE_ZERO:
        data.append((at, length))
    at += length
assert at == 16 << 30, extents
assert data == [(8 << 30, 65536)], extents
one = status(100, 1 << 33, nbd.CMD_FLAG_REQ_ONE)
assert len(one) == 1 and 0 < one[0][0] <= 1 << 33, one
# Only the contexts in the request's payload are told of.
seen = []
def filtered(context, offset, entries, error):
    seen.append(context)
h.block_status_filter(1 << 20, 0, ["base:allocation"], filtered)
assert seen == ["base:allocation"], seen
# None at all is an error, as on QEMU's server, and not the connection's end.
try:
    h.block_status_filter(1 << 20, 0, [], filtered)
    assert False, "no context was asked for"
except nbd.Error as error:
    assert error.errno == "EINVAL", error
# One request zeroes more than 32 bits can tell.
h.pwrite(b"y" * 4096, 5 << 30)
h.zero((15 << 30), 0)
assert not any(h.pread(65536, 8 << 30)) and not any(h.pread(4096, 5 << 30))
h.pwrite(b"y" * 4096, 5 << 30)
h.trim((15 << 30), 0)
assert all(flags & nbd.STATE_ZERO for _, flags in status(0, 16 << 30))
h.shutdown()
# The old form takes several requests.
h = nbd.NBD()
h.set_request_extended_headers(False)
h.add_meta_context("base:allocation")
h.connect_uri(uri)
pairs = []
h.block_status(0xfffff000, 0, lambda context, offset, entries, error: pairs.extend(entries))
assert sum(pairs[::2]) > 0 and all(flags & nbd.STATE_ZERO for flags in pairs[1::2]), pairs
"#,
    );
}

#[test]
fn libnbd_writes_zeroes_and_gets_errors() {
    let scratch = ScratchDir::new().unwrap();
    let file = scratch.file("file");
    let sealed = scratch.file("sealed");
    for path in [&file, &sealed] {
        garbage(path, 4 << 20).unwrap();
    }
    let server = serve(&scratch, "s", &[text(&file)]);
    nbdsh(
        &server,
        r#"
h.add_meta_context("base:allocation")
h.connect_uri(uri)
size = 4 << 20
def fails(number, call, *args):
    try:
        call(*args)
    except nbd.Error as error:
        assert error.errno == number, "%s instead of %s" % (error, number)
        return
    assert False, "no %s" % number
h.zero(1 << 20, 0, nbd.CMD_FLAG_NO_HOLE | nbd.CMD_FLAG_FUA)
assert not any(h.pread(1 << 20, 0))
h.zero(1 << 20, 1 << 20, nbd.CMD_FLAG_FUA)
assert not any(h.pread(1 << 20, 1 << 20))
if h.can_fast_zero():
    h.pwrite(b"z" * 8192, 1 << 20)
    try:
        h.zero(8192, 1 << 20, nbd.CMD_FLAG_FAST_ZERO)
        assert not any(h.pread(8192, 1 << 20))
    except nbd.Error as error:
        assert error.errno == "ENOTSUP", error
h.trim(1 << 20, 2 << 20, nbd.CMD_FLAG_FUA)
assert not any(h.pread(1 << 20, 2 << 20))
# Up to odd offsets only what was named is zeroed.
h.zero(12345, (3 << 20) + 1)
data = h.pread(12347, 3 << 20)
assert data == b"\xa5" + bytes(12345) + b"\xa5"
h.cache(1 << 20, 0)
h.flush()
h.set_strict_mode(0)
fails("EINVAL", h.pread, 2, size - 1)
fails("EINVAL", h.pread, 1, 1 << 63)
fails("ENOSPC", h.pwrite, b"xx", size - 1)
fails("ENOSPC", h.zero, 2, size - 1)
fails("EINVAL", h.pread, 1, 0, 1 << 14)
# After errors the connection is as good as before.
assert h.pread(1, 3 << 20) == b"\xa5"
h.shutdown()
"#,
    );
    // NO_HOLE keeps the first MiB's place, and two were freed.
    let stored = image::space(&file).unwrap().allocated >> 10;
    assert!((2048 - 64..=2048).contains(&stored), "{stored} KiB are stored");
    let sealed = serve(&scratch, "r", &["-r", text(&sealed)]);
    nbdsh(
        &sealed,
        r#"
h.connect_uri(uri)
assert h.is_read_only() and not h.can_trim() and not h.can_zero()
h.set_strict_mode(0)
for call in [(h.pwrite, b"x" * 5000, 0), (h.zero, 5000, 0), (h.trim, 5000, 0)]:
    try:
        call[0](*call[1:])
        assert False, "a write to a read-only export"
    except nbd.Error as error:
        assert error.errno == "EPERM", error
assert h.pread(5000, 0) == b"\xa5" * 5000
h.shutdown()
"#,
    );
}

/// The protocol's chapter on error values: beyond the end, reads and trims are invalid, and only
/// writes find no space. nbdkit and QEMU answer so, too.
#[test]
fn trims_beyond_the_end_are_invalid() {
    let scratch = ScratchDir::new().unwrap();
    let server = serve(&scratch, "s", &["memory:1M"]);
    nbdsh(
        &server,
        r#"
h.connect_uri(uri)
h.set_strict_mode(0)
try:
    h.trim(2, (1 << 20) - 1)
    assert False, "a trim beyond the end"
except nbd.Error as error:
    assert error.errno == "EINVAL", error
"#,
    );
}

#[test]
fn libnbd_has_many_requests_in_flight() {
    let scratch = ScratchDir::new().unwrap();
    // Longer than this client may be held up between its first request and its last.
    let layer = ["--layer", "delay?read=5s"];
    let server = serve(&scratch, "s", &[&layer[..], &["memory:64M"]].concat());
    nbdsh(
        &server,
        r#"
import time
h.connect_uri(uri)
for n in range(64):
    h.aio_pwrite(nbd.Buffer.from_bytearray(bytearray([n + 1]) * 65536), n << 20)
while h.aio_in_flight() > 0:
    h.poll(-1)
order = []
def done(what):
    def callback(error):
        assert error.value == 0, error
        order.append(what)
        return 1
    return callback
begun = time.monotonic()
buffers = [nbd.Buffer(65536) for n in range(64)]
for n, buffer in enumerate(buffers):
    h.aio_pread(buffer, n << 20, done("read"))
# Sent last, answered first.
h.aio_pwrite(nbd.Buffer.from_bytearray(bytearray(b"w")), (1 << 20) - 1, done("write"))
while h.aio_in_flight() > 0:
    h.poll(-1)
assert order[0] == "write" and order.count("read") == 64, order
for n, buffer in enumerate(buffers):
    assert buffer.to_bytearray() == bytearray([n + 1]) * 65536, n
# They waited side by side.
assert time.monotonic() - begun < 100
h.shutdown()
"#,
    );
}
