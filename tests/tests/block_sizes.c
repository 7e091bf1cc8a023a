/* A plugin that tells block sizes, and writes down what it gets. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define NBDKIT_API_VERSION 2
#include <nbdkit-plugin.h>

#define THREAD_MODEL NBDKIT_THREAD_MODEL_SERIALIZE_ALL_REQUESTS

static FILE *notes;

static int
sizes_config (const char *key, const char *value)
{
  notes = strcmp (key, "notes") == 0 ? fopen (value, "a") : NULL;
  return notes != NULL ? 0 : -1;
}

static void *
sizes_open (int readonly)
{
  return &notes;
}

static int64_t
sizes_get_size (void *handle)
{
  return 128 << 20;
}

static int
sizes_block_size (void *handle, uint32_t *minimum, uint32_t *preferred, uint32_t *maximum)
{
  *minimum = 512;
  *preferred = 4096;
  *maximum = 131072;
  return 0;
}

static int
note (const char *what, uint32_t count, uint64_t offset)
{
  fprintf (notes, "%s %u %llu\n", what, count, (unsigned long long)offset);
  return fflush (notes);
}

static int
sizes_pread (void *handle, void *buf, uint32_t count, uint64_t offset, uint32_t flags)
{
  memset (buf, 0, count);
  return note ("pread", count, offset);
}

static int
sizes_pwrite (void *handle, const void *buf, uint32_t count, uint64_t offset, uint32_t flags)
{
  return note ("pwrite", count, offset);
}

static int
sizes_trim (void *handle, uint32_t count, uint64_t offset, uint32_t flags)
{
  return note ("trim", count, offset);
}

static int
sizes_zero (void *handle, uint32_t count, uint64_t offset, uint32_t flags)
{
  return note ("zero", count, offset);
}

static int
sizes_cache (void *handle, uint32_t count, uint64_t offset, uint32_t flags)
{
  return note ("cache", count, offset);
}

static struct nbdkit_plugin plugin = {
  .name = "sizes",
  .config = sizes_config,
  .open = sizes_open,
  .get_size = sizes_get_size,
  .block_size = sizes_block_size,
  .pread = sizes_pread,
  .pwrite = sizes_pwrite,
  .trim = sizes_trim,
  .zero = sizes_zero,
  .cache = sizes_cache,
};

NBDKIT_REGISTER_PLUGIN (plugin)
