// An asynchronous plugin in C++ with every callback: for tests/tests/plugins_every.rs. One thread of its own
// answers, the last request first. Each callback is noted with its arguments.
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fcntl.h>
#include <pthread.h>
#include <unistd.h>

#define NBDKIT_API_VERSION 2
#include <blockhaul-plugin.h>

#define THREAD_MODEL NBDKIT_THREAD_MODEL_PARALLEL

// Behind what is kept there are zeroes, and nothing that is written.
static const uint64_t SIZE = UINT64_C (6) << 30;
static const uint64_t KEPT = 16 << 20;
static char disk[KEPT];

// What the plugin is told to do wrong.
static const char *wrong = "";
static int notes = -1;

enum kind { READ, WRITE, FLUSH, TRIM, ZERO, EXTENTS, CACHE };

struct job {
  kind what;
  void *conn;
  uint64_t id;
  void *to;
  const void *from;
  uint64_t at;
  uint32_t count, flags;
  struct nbdkit_extents *extents;
  job *next;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t work = PTHREAD_COND_INITIALIZER;
static pthread_t thread;
static job *jobs;
static bool over;
static uint64_t most;

static void
note (const char *what, uint32_t count = 0, uint64_t at = 0, int flags = 0)
{
  char line[128];
  int len = snprintf (line, sizeof line, "%s %u %llu %d\n", what, count, (unsigned long long)at, flags);

  if (notes >= 0 && write (notes, line, (size_t)len) != len)
    abort ();
}

static bool is (const char *what) { return strcmp (wrong, what) == 0; }

// How many bytes of a range are kept.
static uint64_t kept (const job *j) { return j->at >= KEPT ? 0 : j->count < KEPT - j->at ? j->count : KEPT - j->at; }

static void
answer (job *j)
{
  switch (j->what) {
  case READ:
    // What it says belongs to the request that it answers next, and to no other.
    if (is ("stale") && j->at > 0) {
      nbdkit_async_reply_error (j->conn, j->id);
      return;
    }
    if (is ("stale")) {
      nbdkit_set_error (ENOSPC);
      nbdkit_error ("about another request");
    }
    if (is ("late")) {
      usleep (300000);
      note ("answered");
    }
    if (kept (j) == 0) {
      blockhaul_async_reply_hole (j->conn, j->id);
      return;
    }
    memset (j->to, 0, j->count);
    memcpy (j->to, disk + j->at, kept (j));
    break;
  case WRITE:
    if (is ("write-as-read")) {
      nbdkit_async_reply_read (j->conn, j->id, j->count, (void *)j->from);
      return;
    }
    if (is ("write-as-hole")) {
      blockhaul_async_reply_hole (j->conn, j->id);
      return;
    }
    if (kept (j) > 0)
      memcpy (disk + j->at, j->from, kept (j));
    break;
  case ZERO:
    if ((j->flags & NBDKIT_FLAG_FAST_ZERO) || is ("no-zero")) {
      blockhaul_async_reply_error (j->conn, j->id, EOPNOTSUPP, nullptr);
      return;
    }
    if (kept (j) > 0)
      memset (disk + j->at, 0, kept (j));
    break;
  case EXTENTS:
    if (is ("no-extents"))
      break;
    if (j->at < KEPT)
      nbdkit_add_extent (j->extents, j->at, KEPT - j->at, 0);
    nbdkit_add_extent (j->extents, j->at < KEPT ? KEPT : j->at, SIZE, NBDKIT_EXTENT_HOLE | NBDKIT_EXTENT_ZERO);
    break;
  case FLUSH:
  case TRIM:
  case CACHE:
    break;
  }
  nbdkit_async_reply (j->conn, j->id);
}

static void *
serve (void *)
{
  pthread_mutex_lock (&lock);
  for (;;) {
    while (jobs == nullptr && !over)
      pthread_cond_wait (&work, &lock);
    if (jobs == nullptr)
      break;
    pthread_mutex_unlock (&lock);
    // Some more may come, which are answered before it.
    usleep (2000);
    pthread_mutex_lock (&lock);
    job *j = jobs;
    jobs = j->next;
    pthread_mutex_unlock (&lock);
    answer (j);
    delete j;
    pthread_mutex_lock (&lock);
  }
  pthread_mutex_unlock (&lock);
  return nullptr;
}

static int
later (const job &j)
{
  const void *memory = j.to != nullptr ? j.to : j.from;
  int64_t bytes = blockhaul_async_bytes (j.conn), limit = blockhaul_async_max_bytes (j.conn);

  if (memory != nullptr && (uintptr_t)memory % 4096 != 0) {
    nbdkit_error ("memory at %p is not page-aligned", memory);
    return -1;
  }
  if (limit > 0 && bytes > limit && bytes > (int64_t)j.count) {
    nbdkit_error ("%lld bytes are lent where %lld may be", (long long)bytes, (long long)limit);
    return -1;
  }
  pthread_mutex_lock (&lock);
  if (bytes > (int64_t)most)
    most = (uint64_t)bytes;
  job *added = new job (j);
  added->next = jobs;
  jobs = added;
  pthread_cond_signal (&work);
  pthread_mutex_unlock (&lock);
  return 0;
}

static int
every_async_pread (void *conn, uint64_t id, bool, void *, void *buf, uint32_t count, uint64_t at)
{
  note ("pread", count, at);
  if (is ("throw"))
    throw 1;
  if (is ("end-of-thread"))
    pthread_exit (nullptr);
  if (is ("exit"))
    exit (5);
  job j = {};
  j.what = READ, j.conn = conn, j.id = id, j.to = buf, j.count = count, j.at = at;
  return later (j);
}

static int
every_async_pwrite (void *conn, uint64_t id, bool flush, void *, const void *buf, uint32_t count, uint64_t at)
{
  note ("pwrite", count, at, flush);
  // A third of what was asked for at first.
  if (is ("change-bound") && blockhaul_async_set_max_bytes (conn, 1 << 20) == -1)
    return -1;
  job j = {};
  j.what = WRITE, j.conn = conn, j.id = id, j.from = buf, j.count = count, j.at = at;
  return later (j);
}

static int
every_async_flush (void *conn, uint64_t id, void *)
{
  note ("flush");
  job j = {};
  j.what = FLUSH, j.conn = conn, j.id = id;
  return later (j);
}

static int
every_async_trim (void *conn, uint64_t id, bool flush, void *, uint32_t count, uint64_t at)
{
  note ("trim", count, at, flush);
  job j = {};
  j.what = TRIM, j.conn = conn, j.id = id, j.count = count, j.at = at;
  return later (j);
}

static int
every_async_zero (void *conn, uint64_t id, bool flush, void *, uint32_t count, uint64_t at, uint32_t flags)
{
  note ("zero", count, at, (int)flags | (flush ? NBDKIT_FLAG_FUA : 0));
  job j = {};
  j.what = ZERO, j.conn = conn, j.id = id, j.count = count, j.at = at, j.flags = flags;
  return later (j);
}

static int
every_async_extents (void *conn, uint64_t id, void *, uint32_t count, uint64_t at, uint32_t flags,
                     struct nbdkit_extents *extents)
{
  note ("extents", count, at, (int)flags);
  job j = {};
  j.what = EXTENTS, j.conn = conn, j.id = id, j.count = count, j.at = at, j.extents = extents;
  return later (j);
}

static int
every_async_cache (void *conn, uint64_t id, void *, uint32_t count, uint64_t at)
{
  note ("cache", count, at);
  job j = {};
  j.what = CACHE, j.conn = conn, j.id = id, j.count = count, j.at = at;
  return later (j);
}

static int
every_config (const char *key, const char *value)
{
  if (strcmp (key, "wrong") == 0)
    wrong = value;
  else
    notes = open (value, O_WRONLY | O_CREAT | O_APPEND, 0600);
  return 0;
}

static int every_after_fork () { return pthread_create (&thread, nullptr, serve, nullptr) == 0 ? 0 : -1; }

static void
every_cleanup ()
{
  pthread_mutex_lock (&lock);
  over = true;
  pthread_cond_signal (&work);
  pthread_mutex_unlock (&lock);
  pthread_join (thread, nullptr);
  note ("most", 0, most);
}

static void *every_open (int) { return disk; }
static void every_close (void *) { note ("close"); }
static int64_t every_get_size (void *) { return (int64_t)SIZE; }
static int every_can_fast_zero (void *) { return 1; }

static struct nbdkit_plugin plugin;
static struct blockhaul_plugin async;

// What C++ has no designated initialisers for.
static struct set_up {
  set_up ()
  {
    plugin.name = "every";
    plugin.config = every_config;
    plugin.after_fork = every_after_fork;
    plugin.cleanup = every_cleanup;
    plugin.open = every_open;
    plugin.close = every_close;
    plugin.get_size = every_get_size;
    plugin.can_fast_zero = every_can_fast_zero;
    async.async_pread = every_async_pread;
    async.async_pwrite = every_async_pwrite;
    async.async_flush = every_async_flush;
    async.async_trim = every_async_trim;
    async.async_zero = every_async_zero;
    async.async_extents = every_async_extents;
    async.async_cache = every_async_cache;
    async.max_bytes = 3 << 20;
  }
} set_up;

BLOCKHAUL_REGISTER_PLUGIN (async, plugin)
