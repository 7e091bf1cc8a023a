# What the tests of scripts do to a disk, through nbdsh; prints what it sees.
import errno, hashlib, os

def attempt(work):
    try:
        return work()
    except nbd.Error as error:
        return error.errno

def extents(length, flags=0):
    found = []
    h.block_status(length, 0, lambda *answer: found.append(list(answer[:3])), flags)
    return found

h.add_meta_context("base:allocation")
h.connect_uri(os.environ["uri"])
print(h.get_size(), h.is_read_only(), h.can_flush(), h.can_trim(), h.can_zero(), h.can_fast_zero())
print(h.can_fua(), h.can_cache(), h.can_multi_conn(), h.is_rotational())
print([h.get_block_size(which) for which in range(3)])
h.pwrite(b"a" * 1000 + b"b" * 8000, 4096)
h.pwrite(b"c" * 512, 8192, nbd.CMD_FLAG_FUA)
print(attempt(lambda: h.pwrite(b"x" * 10, 65536)))
h.zero(4096, 6000)
h.zero(100, 131072)
h.zero(4096, 200000, nbd.CMD_FLAG_NO_HOLE | nbd.CMD_FLAG_FUA)
print(attempt(lambda: h.zero(4096, 131072, nbd.CMD_FLAG_FAST_ZERO)))
h.trim(4096, 12288)
h.trim(4096, 16384, nbd.CMD_FLAG_FUA)
h.cache(4096, 0)
h.flush()
print(hashlib.sha256(h.pread(h.get_size(), 0)).hexdigest())
print(extents(h.get_size()), extents(300000, nbd.CMD_FLAG_REQ_ONE))
h.shutdown()
