/* A disk in memory that cannot zero, and says when it is opened and closed: for tests/tests/defects.rs. */
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define NBDKIT_API_VERSION 2
#include <nbdkit-plugin.h>

#if defined(CONNECTIONS)
#define THREAD_MODEL NBDKIT_THREAD_MODEL_SERIALIZE_CONNECTIONS
#elif defined(REQUESTS)
#define THREAD_MODEL NBDKIT_THREAD_MODEL_SERIALIZE_ALL_REQUESTS
#else
#define THREAD_MODEL NBDKIT_THREAD_MODEL_PARALLEL
#endif

#define SIZE (160 << 20)

static char disk[SIZE];
static char *path;

static void
say (const char *what)
{
  int fd;

  if (path == NULL)
    return;
  fd = open (path, O_WRONLY | O_CREAT | O_APPEND, 0600);
  if (fd >= 0) {
    if (write (fd, what, strlen (what)) < 0)
      nbdkit_error ("cannot write");
    close (fd);
  }
}

static int
defects_config (const char *key, const char *value)
{
  path = nbdkit_absolute_path (value);
  return path == NULL ? -1 : 0;
}

static void *
defects_open (int readonly)
{
  say ("open\n");
  return disk;
}

static void
defects_close (void *handle)
{
  say ("close\n");
}

static int64_t
defects_get_size (void *handle)
{
  return SIZE;
}

static int
defects_pread (void *handle, void *buf, uint32_t count, uint64_t at, uint32_t flags)
{
  memcpy (buf, disk + at, count);
  return 0;
}

static int
defects_pwrite (void *handle, const void *buf, uint32_t count, uint64_t at, uint32_t flags)
{
  memcpy (disk + at, buf, count);
  return 0;
}

static int
defects_zero (void *handle, uint32_t count, uint64_t at, uint32_t flags)
{
  nbdkit_set_error (EOPNOTSUPP);
  return -1;
}

static struct nbdkit_plugin plugin = {
  .name = "defects",
  .config = defects_config,
  .open = defects_open,
  .close = defects_close,
  .get_size = defects_get_size,
  .pread = defects_pread,
  .pwrite = defects_pwrite,
  .zero = defects_zero,
};

NBDKIT_REGISTER_PLUGIN (plugin)
