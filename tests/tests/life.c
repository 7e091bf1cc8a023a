/* A plugin that notes each of its callbacks, the handle it is for and the thread it runs on: for
 * tests/tests/plugins_life.rs. What a read at 512 * N does depends on reads=WHAT: it fails with the number N,
 * or waits for others for patience=MILLISECONDS. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define NBDKIT_API_VERSION 2
#include <nbdkit-plugin.h>

#ifndef MODEL
#define MODEL NBDKIT_THREAD_MODEL_PARALLEL
#endif
#define THREAD_MODEL MODEL

#define SIZE (256 * 512)

struct handle { int number; int inside; };

static int notes = -1;
static const char *reads = "";
/* Milliseconds. */
static int patience;
static int handles, inside;
/* As many reads as were wanted have met: nobody waits any more. */
static bool met;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

/* A line of one write: callback, handle (0: none), thread, and what there is to add. */
static void
note (const char *callback, const struct handle *handle, const char *more)
{
  char line[256];
  int len = snprintf (line, sizeof line, "%s %d %d %s\n", callback, handle ? handle->number : 0,
                      (int)gettid (), more);

  if (notes >= 0 && write (notes, line, (size_t)len) != len)
    abort ();
}

static void
life_load (void)
{
  const char *path = getenv ("NOTES");

  if (path != NULL)
    notes = open (path, O_WRONLY | O_CREAT | O_APPEND, 0600);
  note ("load", NULL, "");
}

static void life_unload (void) { note ("unload", NULL, ""); }
static void life_cleanup (void) { note ("cleanup", NULL, ""); }

static int
life_config (const char *key, const char *value)
{
  char more[128];

  snprintf (more, sizeof more, "%s=%s", key, value);
  note ("config", NULL, more);
  if (strcmp (key, "reads") == 0)
    reads = value;
  if (strcmp (key, "patience") == 0)
    patience = atoi (value);
  return 0;
}

static int life_config_complete (void) { note ("config_complete", NULL, ""); return 0; }
static int life_get_ready (void) { note ("get_ready", NULL, ""); return 0; }
static int life_after_fork (void) { note ("after_fork", NULL, ""); return 0; }

static int
life_thread_model (void)
{
  note ("thread_model", NULL, "");
  return MODEL;
}

static int
life_preconnect (int readonly)
{
  note ("preconnect", NULL, readonly ? "readonly" : "");
  return 0;
}

static const char *
life_default_export (int readonly, int is_tls)
{
  (void)readonly, (void)is_tls;
  note ("default_export", NULL, "");
  return "usual";
}

static int
life_list_exports (int readonly, int is_tls, struct nbdkit_exports *exports)
{
  (void)readonly, (void)is_tls;
  note ("list_exports", NULL, "");
  return nbdkit_add_export (exports, "usual", "the usual one");
}

static void *
life_open (int readonly)
{
  struct handle *handle = calloc (1, sizeof *handle);

  if (handle == NULL)
    abort ();
  pthread_mutex_lock (&lock);
  handle->number = ++handles;
  pthread_mutex_unlock (&lock);
  note ("open", handle, readonly ? "readonly" : nbdkit_export_name ());
  return handle;
}

static void life_close (void *handle) { note ("close", handle, ""); free (handle); }
static int64_t life_get_size (void *handle) { note ("get_size", handle, ""); return SIZE; }

#define ASKED(question, answer)                                                                      \
  static int life_##question (void *handle) { note (#question, handle, ""); return answer; }
ASKED (can_write, 1)
ASKED (can_flush, 1)
ASKED (is_rotational, 0)
ASKED (can_trim, 1)
ASKED (can_zero, 1)
ASKED (can_fast_zero, 1)
ASKED (can_fua, NBDKIT_FUA_EMULATE)
ASKED (can_multi_conn, 1)
ASKED (can_extents, 1)
ASKED (can_cache, NBDKIT_CACHE_EMULATE)

static const char *
life_export_description (void *handle)
{
  note ("export_description", handle, "");
  return "described";
}

static int
life_block_size (void *handle, uint32_t *minimum, uint32_t *preferred, uint32_t *maximum)
{
  note ("block_size", handle, "");
  *minimum = 1;
  *preferred = 4096;
  *maximum = 0xffffffff;
  return 0;
}

/* Waits until `wanted` reads are going on, here or anywhere; the most there were. */
static int
meet (int *counter, int wanted)
{
  int most = 0, i;

  pthread_mutex_lock (&lock);
  ++*counter;
  for (i = 0; i < patience; i++) {
    if (*counter > most)
      most = *counter;
    if (most >= wanted)
      met = true;
    if (met)
      break;
    pthread_mutex_unlock (&lock);
    usleep (1000);
    pthread_mutex_lock (&lock);
  }
  pthread_mutex_unlock (&lock);
  /* The others shall see it, too. */
  usleep (20000);
  pthread_mutex_lock (&lock);
  --*counter;
  pthread_mutex_unlock (&lock);
  return most;
}

static int
life_pread (void *p, void *buf, uint32_t count, uint64_t offset, uint32_t flags)
{
  struct handle *handle = p;
  int number = (int)(offset / 512);
  char more[64] = "";

  (void)flags;
  memset (buf, 'r', count);
  /* How many are in a read: of this handle, of all. */
  if (strcmp (reads, "meet-own") == 0)
    snprintf (more, sizeof more, "%d", meet (&handle->inside, 2));
  if (strcmp (reads, "meet-any") == 0)
    snprintf (more, sizeof more, "%d", meet (&inside, 2));
  note ("pread", handle, more);
  if (strcmp (reads, "set-error") == 0 && number > 0) {
    nbdkit_set_error (number);
    /* Not looked at: another one was set. */
    errno = EPERM;
    return -1;
  }
  if (strcmp (reads, "errno") == 0 && number > 0) {
    errno = number;
    return -1;
  }
  return 0;
}

static int
life_pwrite (void *handle, const void *buf, uint32_t count, uint64_t offset, uint32_t flags)
{
  (void)buf, (void)count, (void)offset;
  note ("pwrite", handle, flags & NBDKIT_FLAG_FUA ? "fua" : "");
  return 0;
}

static int
life_flush (void *handle, uint32_t flags)
{
  (void)flags;
  note ("flush", handle, "");
  return 0;
}

static int
life_trim (void *handle, uint32_t count, uint64_t offset, uint32_t flags)
{
  (void)count, (void)offset, (void)flags;
  note ("trim", handle, "");
  return 0;
}

/* Where errors are wanted, one whose number is the offset's, as with reads. */
static int
life_zero (void *handle, uint32_t count, uint64_t offset, uint32_t flags)
{
  (void)count;
  note ("zero", handle, flags & NBDKIT_FLAG_MAY_TRIM ? "may-trim" : "");
  if (strcmp (reads, "set-error") == 0 && offset > 0) {
    nbdkit_set_error ((int)(offset / 512));
    return -1;
  }
  return 0;
}

static int
life_extents (void *handle, uint32_t count, uint64_t offset, uint32_t flags,
              struct nbdkit_extents *extents)
{
  (void)flags;
  note ("extents", handle, "");
  return nbdkit_add_extent (extents, offset, count, 0);
}

static struct nbdkit_plugin plugin = {
  .name = "life",
  .load = life_load,
  .unload = life_unload,
  .config = life_config,
  .config_complete = life_config_complete,
  .magic_config_key = "magic",
  .thread_model = life_thread_model,
  .get_ready = life_get_ready,
  .after_fork = life_after_fork,
  .preconnect = life_preconnect,
  .list_exports = life_list_exports,
  .default_export = life_default_export,
  .open = life_open,
  .close = life_close,
  .get_size = life_get_size,
  .export_description = life_export_description,
  .block_size = life_block_size,
  .can_write = life_can_write,
  .can_flush = life_can_flush,
  .is_rotational = life_is_rotational,
  .can_trim = life_can_trim,
  .can_zero = life_can_zero,
  .can_fast_zero = life_can_fast_zero,
  .can_fua = life_can_fua,
  .can_multi_conn = life_can_multi_conn,
  .can_extents = life_can_extents,
  .can_cache = life_can_cache,
  .pread = life_pread,
  .pwrite = life_pwrite,
  .flush = life_flush,
  .trim = life_trim,
  .zero = life_zero,
  .extents = life_extents,
  .cleanup = life_cleanup,
#ifdef PRESERVED
  .errno_is_preserved = 1,
#endif
};

NBDKIT_REGISTER_PLUGIN (plugin)
