/* A plugin whose disk tells who reads it. */
#define _GNU_SOURCE
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

#define NBDKIT_API_VERSION 2
#include <nbdkit-plugin.h>

#define THREAD_MODEL NBDKIT_THREAD_MODEL_PARALLEL

static char *
told (char *name)
{
  return name != NULL ? name : strdup ("(none)");
}

static void *
who_open (int readonly)
{
  struct sockaddr_storage address;
  socklen_t len = sizeof address;
  char *subject = told (nbdkit_peer_tls_dn ());
  char *issuer = told (nbdkit_peer_tls_issuer_dn ());
  char *label = told (nbdkit_peer_security_context ());
  char *text = calloc (1, 4096);

  memset (&address, 0, sizeof address);
  if (nbdkit_peer_name ((struct sockaddr *)&address, &len) == -1)
    address.ss_family = AF_UNSPEC;
  snprintf (text, 4096,
            "export=%s\ntls=%d\nsubject=%s\nissuer=%s\nunix=%d\npid=%ld\nuid=%ld\ngid=%ld\nreadonly=%d\n",
            nbdkit_export_name (), nbdkit_is_tls (), subject, issuer,
            address.ss_family == AF_UNIX, (long)nbdkit_peer_pid (), (long)nbdkit_peer_uid (),
            (long)nbdkit_peer_gid (), readonly);
  free (subject);
  free (issuer);
  free (label);
  return text;
}

static void
who_close (void *handle)
{
  free (handle);
}

static int64_t
who_get_size (void *handle)
{
  return 4096;
}

static int
who_pread (void *handle, void *buf, uint32_t count, uint64_t offset, uint32_t flags)
{
  memcpy (buf, (char *)handle + offset, count);
  return 0;
}

static struct nbdkit_plugin plugin = {
  .name = "who",
  .open = who_open,
  .close = who_close,
  .get_size = who_get_size,
  .pread = who_pread,
};

NBDKIT_REGISTER_PLUGIN (plugin)
