/* A disk in memory whose requests take a while: an asynchronous plugin.
 *
 *   cc -shared -fPIC -O2 -pthread -I/usr/include -Icrates/devices/cabi/include async-memory.c -o async-memory.so
 *   blockhaul serve 'nbdkit:./async-memory.so?size=1G&delay=64ms&memory=128M'
 *
 * Requests wait in a queue until they are due; two threads answer them. However many are in flight, there
 * are no more threads.
 *
 * SPDX-License-Identifier: MIT OR Apache-2.0
 */
#define _GNU_SOURCE
#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

#define NBDKIT_API_VERSION 2
#include "blockhaul-plugin.h"

#define THREAD_MODEL NBDKIT_THREAD_MODEL_PARALLEL
#define THREADS 2

struct request {
  void *conn;
  uint64_t reqid;
  uint64_t due; /* nanoseconds */
  void *to;
  const void *from;
  uint32_t count;
};

static char *disk;
static int64_t size = 1 << 30;
static uint64_t delay = 64 * 1000 * 1000;
static int64_t memory = 128 << 20;

/* A ring: all requests take equally long, so the first in is the first due. */
static struct request *ring;
static size_t ring_size, ring_head, ring_count;
static bool stopping;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t work;
static pthread_t threads[THREADS];

static struct blockhaul_plugin async_plugin;

static uint64_t
now (void)
{
  struct timespec t;

  clock_gettime (CLOCK_MONOTONIC, &t);
  return (uint64_t)t.tv_sec * 1000000000 + (uint64_t)t.tv_nsec;
}

static int
memory_config (const char *key, const char *value)
{
  unsigned sec, nsec;

  if (strcmp (key, "size") == 0)
    return (size = nbdkit_parse_size (value)) < 0 ? -1 : 0;
  if (strcmp (key, "memory") == 0) {
    if ((memory = nbdkit_parse_size (value)) < 0)
      return -1;
    async_plugin.max_bytes = (uint64_t)memory;
    return 0;
  }
  if (strcmp (key, "delay") == 0) {
    if (nbdkit_parse_delay (key, value, &sec, &nsec) == -1)
      return -1;
    delay = (uint64_t)sec * 1000000000 + nsec;
    return 0;
  }
  nbdkit_error ("unknown parameter '%s'", key);
  return -1;
}

static int
memory_get_ready (void)
{
  disk = mmap (NULL, (size_t)size, PROT_READ | PROT_WRITE,
               MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (disk == MAP_FAILED) {
    nbdkit_error ("mmap: %m");
    return -1;
  }
  return 0;
}

static void *
serve (void *unused)
{
  struct request r;

  (void)unused;
  pthread_mutex_lock (&lock);
  for (;;) {
    while (ring_count == 0 && !stopping)
      pthread_cond_wait (&work, &lock);
    if (ring_count == 0)
      break;
    r = ring[ring_head];
    if (!stopping && r.due > now ()) {
      struct timespec t = { (time_t)(r.due / 1000000000), (long)(r.due % 1000000000) };

      pthread_cond_timedwait (&work, &lock, &t);
      continue;
    }
    ring_head = (ring_head + 1) % ring_size;
    ring_count--;
    pthread_mutex_unlock (&lock);
    if (r.to != NULL)
      memcpy (r.to, r.from, r.count);
    nbdkit_async_reply (r.conn, r.reqid);
    pthread_mutex_lock (&lock);
  }
  pthread_mutex_unlock (&lock);
  return NULL;
}

static int
memory_after_fork (void)
{
  pthread_condattr_t attr;
  int i;

  pthread_condattr_init (&attr);
  pthread_condattr_setclock (&attr, CLOCK_MONOTONIC);
  pthread_cond_init (&work, &attr);
  for (i = 0; i < THREADS; i++)
    if ((errno = pthread_create (&threads[i], NULL, serve, NULL)) != 0) {
      nbdkit_error ("pthread_create: %m");
      return -1;
    }
  return 0;
}

static void
memory_cleanup (void)
{
  int i;

  pthread_mutex_lock (&lock);
  stopping = true;
  pthread_cond_broadcast (&work);
  pthread_mutex_unlock (&lock);
  for (i = 0; i < THREADS; i++)
    pthread_join (threads[i], NULL);
}

static void *
memory_open (int readonly)
{
  (void)readonly;
  return NBDKIT_HANDLE_NOT_NEEDED;
}

static int64_t
memory_get_size (void *handle)
{
  (void)handle;
  return size;
}

static int
later (void *conn, uint64_t reqid, void *to, const void *from, uint32_t count)
{
  pthread_mutex_lock (&lock);
  if (ring_count == ring_size) {
    size_t larger = ring_size > 0 ? 2 * ring_size : 1024, i;
    struct request *copy = malloc (larger * sizeof *copy);

    if (copy == NULL) {
      pthread_mutex_unlock (&lock);
      nbdkit_error ("malloc: %m");
      return -1;
    }
    for (i = 0; i < ring_count; i++)
      copy[i] = ring[(ring_head + i) % ring_size];
    free (ring);
    ring = copy;
    ring_size = larger;
    ring_head = 0;
  }
  ring[(ring_head + ring_count++) % ring_size] =
    (struct request) { conn, reqid, now () + delay, to, from, count };
  if (ring_count == 1)
    pthread_cond_signal (&work);
  pthread_mutex_unlock (&lock);
  return 0;
}

static int
memory_async_pread (void *conn, uint64_t reqid, bool flush, void *handle, void *buf,
                    uint32_t count, uint64_t offset)
{
  (void)flush, (void)handle;
  return later (conn, reqid, buf, disk + offset, count);
}

static int
memory_async_pwrite (void *conn, uint64_t reqid, bool flush, void *handle, const void *buf,
                     uint32_t count, uint64_t offset)
{
  (void)flush, (void)handle;
  return later (conn, reqid, disk + offset, buf, count);
}

static int
memory_async_flush (void *conn, uint64_t reqid, void *handle)
{
  (void)handle;
  return later (conn, reqid, NULL, NULL, 0);
}

static int
memory_can_multi_conn (void *handle)
{
  (void)handle;
  return 1;
}

static struct nbdkit_plugin plugin = {
  .name = "async-memory",
  .config = memory_config,
  .get_ready = memory_get_ready,
  .after_fork = memory_after_fork,
  .cleanup = memory_cleanup,
  .open = memory_open,
  .get_size = memory_get_size,
  .can_multi_conn = memory_can_multi_conn,
};

static struct blockhaul_plugin async_plugin = {
  .async_pread = memory_async_pread,
  .async_pwrite = memory_async_pwrite,
  .async_flush = memory_async_flush,
  .max_bytes = 128 << 20,
};

BLOCKHAUL_REGISTER_PLUGIN (async_plugin, plugin)
