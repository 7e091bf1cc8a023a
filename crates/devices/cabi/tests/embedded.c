/* A plugin for tests/embedded.rs: a read at 512 asks for the end of the server in the callback, one at 1024 on a
 * thread of the plugin's own, after the callback has returned. */
#include <pthread.h>
#include <string.h>
#include <unistd.h>

#define NBDKIT_API_VERSION 2
#include <nbdkit-plugin.h>

#define THREAD_MODEL NBDKIT_THREAD_MODEL_PARALLEL

static void *
asks (void *unused)
{
  usleep (20000);
  nbdkit_shutdown ();
  return NULL;
}

static void *
embedded_open (int readonly)
{
  return NBDKIT_HANDLE_NOT_NEEDED;
}

static int64_t
embedded_get_size (void *handle)
{
  return 4096;
}

static int
embedded_pread (void *handle, void *buf, uint32_t count, uint64_t offset, uint32_t flags)
{
  pthread_t thread;

  memset (buf, 'x', count);
  if (offset == 512)
    nbdkit_shutdown ();
  if (offset == 1024) {
    if (pthread_create (&thread, NULL, asks, NULL) != 0)
      return -1;
    pthread_detach (thread);
  }
  return 0;
}

static struct nbdkit_plugin plugin = {
  .name = NAME,
  .open = embedded_open,
  .get_size = embedded_get_size,
  .pread = embedded_pread,
};

NBDKIT_REGISTER_PLUGIN (plugin)
