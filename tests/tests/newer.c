/* A filter of a newer nbdkit than the header's (-DFILTER, -DRELEASE="1.48.1"), which opens the plugin for no
 * connection in particular with -DSHARED, and a plugin that calls the functions that came since (-DPLUGIN).
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#ifdef FILTER

/* A function of the header returns a const structure. */
#pragma GCC diagnostic ignored "-Wignored-qualifiers"
#include <nbdkit-filter.h>

static int below = -1;

static int
newer_thread_model (int next_thread_model)
{
  below = next_thread_model;
  return NBDKIT_THREAD_MODEL_SERIALIZE_REQUESTS;
}

static void
newer_dump_plugin (void)
{
  printf ("newer_below=%d\n", below);
}

/* A longer range than 32 bits can say. */
static int
newer_extents (nbdkit_next *next, void *handle, uint32_t count, uint64_t offset,
               uint32_t flags, struct nbdkit_extents *extents, int *err)
{
  int (*aligned) (nbdkit_next *, uint64_t, uint64_t, uint32_t, uint32_t, struct nbdkit_extents *,
                  int *) = (void *) nbdkit_extents_aligned;

  return aligned (next, count + ((uint64_t) 1 << 32), offset, flags & ~NBDKIT_FLAG_REQ_ONE, 4096,
                  extents, err);
}

#ifdef SHARED
static void *
newer_open (nbdkit_next_open *next, nbdkit_context *context, int readonly, const char *name, int tls)
{
  nbdkit_next *shared = nbdkit_next_context_open (nbdkit_context_get_backend (context), readonly, name, 1);

  if (shared == NULL)
    return NULL;
  nbdkit_context_set_next (context, shared);
  return NBDKIT_HANDLE_NOT_NEEDED;
}
#endif

static struct nbdkit_filter filter = {
  .name = "newer",
#ifdef SHARED
  .open = newer_open,
#endif
  .dump_plugin = newer_dump_plugin,
  .extents = newer_extents,
};

struct nbdkit_filter *filter_init (void);

struct nbdkit_filter *
filter_init (void)
{
  filter._api_version = 6;
  filter._version = RELEASE;
  /* Not of the type in the header. */
  filter.thread_model = (void *) newer_thread_model;
  return &filter;
}

#else

#define NBDKIT_API_VERSION 2
#include <nbdkit-plugin.h>

#define THREAD_MODEL NBDKIT_THREAD_MODEL_PARALLEL

extern void nbdkit_debug_hexdump (const void *, size_t, const char *, uint64_t);
extern void nbdkit_debug_hexdiff (const void *, const void *, size_t, const char *, uint64_t);
extern const char *nbdkit_name (void);
extern const char *nbdkit_timestamp (void);

static int
newer_get_ready (void)
{
  nbdkit_debug_hexdump ("0123456789abcdef!", 17, "dump ", 0x100);
  nbdkit_debug_hexdiff ("0123", "0x23", 4, NULL, 2);
  nbdkit_debug ("name %s", nbdkit_name () ? nbdkit_name () : "(none)");
  nbdkit_debug ("time %s", nbdkit_timestamp ());
  return 0;
}

static void *
newer_open (int readonly)
{
  return &newer_get_ready;
}

static int64_t
newer_get_size (void *handle)
{
  return 512;
}

static int
newer_pread (void *handle, void *buf, uint32_t count, uint64_t offset, uint32_t flags)
{
  memset (buf, 0, count);
  return 0;
}

static struct nbdkit_plugin plugin = {
  .name = "newer",
  .get_ready = newer_get_ready,
  .open = newer_open,
  .get_size = newer_get_size,
  .pread = newer_pread,
};

NBDKIT_REGISTER_PLUGIN (plugin)

#endif
