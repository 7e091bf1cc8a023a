/* A plugin that does what plugins should not, as mode=NAME says. */
#define _GNU_SOURCE
#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#define NBDKIT_API_VERSION 2
#include "blockhaul-plugin.h"

#define THREAD_MODEL NBDKIT_THREAD_MODEL_PARALLEL

static const char *mode = "";
/* A file that is made when what came too late has been closed. */
static const char *closed;
static int preconnected;

static int
is (const char *name)
{
  return strcmp (mode, name) == 0;
}

static int
bad_config (const char *key, const char *value)
{
  if (strcmp (key, "closed") == 0)
    closed = value;
  else
    mode = value;
  return 0;
}

/* As who closes what it has inherited, but also what the server has opened since. */
static void
close_sockets (void)
{
  int fd;

  for (fd = 3; fd < 1024; fd++) {
    int listens = 0;
    socklen_t len = sizeof listens;

    if (getsockopt (fd, SOL_SOCKET, SO_ACCEPTCONN, &listens, &len) == 0 && !listens)
      close (fd);
  }
}

static void *
bad_open (int readonly)
{
  static int handle;

  (void)readonly;
  if (is ("hang-open") && strcmp (nbdkit_export_name (), "hang") == 0)
    pause ();
  if (is ("null-open"))
    return NULL;
  if (is ("close-sockets"))
    close_sockets ();
  if (is ("open-error")) {
    nbdkit_error ("the cupboard is bare");
    return NULL;
  }
  return &handle;
}

static int64_t
bad_get_size (void *handle)
{
  (void)handle;
  if (is ("hang-size") && strcmp (nbdkit_export_name (), "hang") == 0)
    pause ();
  return is ("size-odd") ? -5 : 65536;
}

/* Only for a while: the handle that comes too late is closed. */
static int
bad_can_extents (void *handle)
{
  (void)handle;
  if (is ("hang-can") && strcmp (nbdkit_export_name (), "hang") == 0)
    sleep (8);
  return 1;
}

static void
bad_close (void *handle)
{
  (void)handle;
  if (is ("hang-close"))
    for (;;)
      pause ();
  if (is ("hang-can")) {
    nbdkit_error ("closed '%s'", nbdkit_export_name ());
    if (closed != NULL && strcmp (nbdkit_export_name (), "hang") == 0)
      fclose (fopen (closed, "w"));
  }
}

static int
bad_list_exports (int readonly, int is_tls, struct nbdkit_exports *exports)
{
  (void)readonly, (void)is_tls;
  if (is ("hang-list"))
    pause ();
  return nbdkit_add_export (exports, "", NULL);
}

static int
bad_preconnect (int readonly)
{
  (void)readonly;
  if (is ("hang-preconnect") && !preconnected++)
    pause ();
  return 0;
}

static int
bad_block_size (void *handle, uint32_t *minimum, uint32_t *preferred, uint32_t *maximum)
{
  (void)handle;
  *minimum = is ("block-odd") ? 3 : 1;
  *preferred = 4096;
  *maximum = is ("block-odd") ? 8192 : 0xffffffff;
  return 0;
}

static int
bad_extents (void *handle, uint32_t count, uint64_t offset, uint32_t flags,
             struct nbdkit_extents *extents)
{
  (void)handle, (void)flags;
  return is ("extents-none") ? 0 : nbdkit_add_extent (extents, offset, count, 0);
}

static int
bad_pread (void *handle, void *buf, uint32_t count, uint64_t offset, uint32_t flags)
{
  volatile int *nowhere = NULL;

  (void)handle, (void)flags;
  memset (buf, 'r', count);
  if (is ("read-error")) {
    nbdkit_set_error (EIO);
    nbdkit_error ("the disk is on fire");
    return -1;
  }
  if (is ("read-shut")) {
    nbdkit_set_error (ESHUTDOWN);
    nbdkit_error ("the office is closed");
    return -1;
  }
  if (is ("read-odd"))
    return 7;
  if (is ("hang") && offset == 0)
    sleep (8);
  if (is ("hang-ever") && offset == 0)
    for (;;)
      pause ();
  if (is ("segv"))
    *nowhere = 1;
  if (is ("abort"))
    abort ();
  return 0;
}

#ifdef ASYNC
struct answer { void *conn; uint64_t reqid; void *buf; uint32_t count; };
static struct answer kept;

static void *
answer_later (void *closure)
{
  struct answer a = *(struct answer *)closure;

  free (closure);
  if (is ("async-late"))
    sleep (8);
  else
    usleep (2000);
  if (is ("async-error")) {
    nbdkit_set_error (EIO);
    nbdkit_error ("later than you think");
    nbdkit_async_reply_error (a.conn, a.reqid);
    return NULL;
  }
  memset (a.buf, 'r', a.count);
  nbdkit_async_reply_read (a.conn, a.reqid, a.count, a.buf);
  if (is ("async-double")) {
    nbdkit_async_reply (a.conn, a.reqid);
    nbdkit_async_reply_error (a.conn, a.reqid);
    nbdkit_async_reply ((char *)a.conn + 12345, a.reqid);
    nbdkit_async_reply (a.conn, a.reqid + 99);
    nbdkit_async_reply (NULL, 0);
  }
  return NULL;
}

/* Every request is answered by all of these threads; the fastest wins. */
#define RACERS 3
#define RACES 65536
static struct { struct answer queue[RACES]; unsigned head, tail; } racers[RACERS];
static pthread_mutex_t racing = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t started = PTHREAD_COND_INITIALIZER;
static pthread_t race_threads[RACERS];
static bool over;

static void *
race (void *closure)
{
  size_t me = (size_t)closure;
  unsigned seed = (unsigned)me;

  pthread_mutex_lock (&racing);
  for (;;) {
    struct answer a;

    while (racers[me].head == racers[me].tail && !over)
      pthread_cond_wait (&started, &racing);
    if (racers[me].head == racers[me].tail)
      break;
    a = racers[me].queue[racers[me].tail++ % RACES];
    pthread_mutex_unlock (&racing);
    if (rand_r (&seed) % 64 == 0)
      usleep (rand_r (&seed) % 5000);
    if (rand_r (&seed) % 2)
      nbdkit_async_reply (a.conn, a.reqid);
    else
      blockhaul_async_reply_error (a.conn, a.reqid, EIO, "raced");
    pthread_mutex_lock (&racing);
  }
  pthread_mutex_unlock (&racing);
  return NULL;
}

static int
bad_after_fork (void)
{
  size_t i;

  for (i = 0; is ("async-race") && i < RACERS; i++)
    if (pthread_create (&race_threads[i], NULL, race, (void *)i) != 0)
      return -1;
  return 0;
}

static void
bad_cleanup (void)
{
  size_t i;

  pthread_mutex_lock (&racing);
  over = true;
  pthread_cond_broadcast (&started);
  pthread_mutex_unlock (&racing);
  for (i = 0; is ("async-race") && i < RACERS; i++)
    pthread_join (race_threads[i], NULL);
}

static int
bad_async_pread (void *conn, uint64_t reqid, bool flush, void *handle, void *buf, uint32_t count,
                 uint64_t offset)
{
  struct answer *a;
  pthread_t thread;

  (void)flush, (void)handle;
  if (is ("async-short"))
    return nbdkit_async_reply_read (conn, reqid, 100, buf), 0;
  if (is ("async-refuse")) {
    nbdkit_error ("no time for this");
    return -1;
  }
  if (is ("async-race")) {
    size_t i;

    pthread_mutex_lock (&racing);
    for (i = 0; i < RACERS; i++) {
      if (racers[i].head - racers[i].tail == RACES)
        abort ();
      racers[i].queue[racers[i].head++ % RACES] = (struct answer) { conn, reqid, buf, count };
    }
    pthread_cond_broadcast (&started);
    pthread_mutex_unlock (&racing);
    return 0;
  }
  if (is ("async-cancel")) {
    kept = (struct answer) { conn, reqid, buf, count };
    return 0;
  }
  if (is ("async-late") && offset != 0) {
    memset (buf, 'r', count);
    return nbdkit_async_reply (conn, reqid);
  }
  a = malloc (sizeof *a);
  if (a == NULL)
    abort ();
  *a = (struct answer) { conn, reqid, buf, count };
  if (pthread_create (&thread, NULL, answer_later, a) != 0)
    abort ();
  pthread_detach (thread);
  return 0;
}

static void
bad_async_cancel (void *conn, void *handle)
{
  (void)handle;
  if (kept.conn == conn) {
    nbdkit_error ("cancelled");
    blockhaul_async_reply_error (kept.conn, kept.reqid, ESHUTDOWN, "cancelled");
  }
}

#endif

static struct nbdkit_plugin plugin = {
  .name = "misbehaving",
  .config = bad_config,
  .magic_config_key = "mode",
  .preconnect = bad_preconnect,
  .list_exports = bad_list_exports,
  .open = bad_open,
  .close = bad_close,
  .get_size = bad_get_size,
  .block_size = bad_block_size,
  .can_extents = bad_can_extents,
  .extents = bad_extents,
  .pread = bad_pread,
  .errno_is_preserved = 1,
#ifdef ASYNC
  .after_fork = bad_after_fork,
  .cleanup = bad_cleanup,
#endif
};

#ifdef ASYNC
static struct blockhaul_plugin later = {
  .async_pread = bad_async_pread,
  .async_cancel = bad_async_cancel,
  .max_bytes = 8 << 20,
};

BLOCKHAUL_REGISTER_PLUGIN (later, plugin)
#else
NBDKIT_REGISTER_PLUGIN (plugin)
#endif
