/* A disk behind a URL, read by ranges: an asynchronous plugin on an event loop (libcurl's multi interface).
 *
 *   cc -shared -fPIC -O2 -pthread -Icrates/devices/cabi/include async-curl.c -lcurl -o async-curl.so
 *   blockhaul serve 'nbdkit:./async-curl.so?url=https://example.com/disk.img&connections=32'
 *
 * One thread drives all transfers. A request becomes a transfer that receives into the memory which was
 * lent; the end of the transfer is the answer. When the client goes, its transfers are given up.
 *
 * SPDX-License-Identifier: MIT OR Apache-2.0
 */
#include <errno.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <curl/curl.h>

#define NBDKIT_API_VERSION 2
#include "blockhaul-plugin.h"

#define THREAD_MODEL NBDKIT_THREAD_MODEL_PARALLEL
#define TIMEOUT_S 60L

struct transfer {
  struct transfer *next;
  CURL *easy;
  void *conn;
  uint64_t reqid;
  char *to;
  uint32_t count, got;
  char range[48];
  char why[CURL_ERROR_SIZE];
};

/* A connection whose client has gone. */
struct gone {
  struct gone *next;
  void *conn;
};

static const char *url;
static unsigned connections = 16;
static int64_t size;

/* What the server's threads hand to the loop. */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct transfer *fresh, **fresh_end = &fresh;
static struct gone *left;
static bool stopping;

/* The loop's own. */
static CURLM *multi;
static pthread_t loop;
static bool running;
static struct transfer *active;

static struct blockhaul_plugin async_plugin;

static int
curl_config (const char *key, const char *value)
{
  if (strcmp (key, "url") == 0)
    return (url = nbdkit_strdup_intern (value)) == NULL ? -1 : 0;
  if (strcmp (key, "connections") == 0)
    return nbdkit_parse_unsigned (key, value, &connections);
  nbdkit_error ("unknown parameter '%s'", key);
  return -1;
}

static int
curl_config_complete (void)
{
  if (url == NULL) {
    nbdkit_error ("url=… is missing");
    return -1;
  }
  if (connections == 0) {
    nbdkit_error ("connections=0 would wait for ever");
    return -1;
  }
  return 0;
}

static void
set_common (CURL *easy, char *why)
{
  curl_easy_setopt (easy, CURLOPT_URL, url);
  curl_easy_setopt (easy, CURLOPT_NOSIGNAL, 1L);
  curl_easy_setopt (easy, CURLOPT_FOLLOWLOCATION, 1L);
  curl_easy_setopt (easy, CURLOPT_FAILONERROR, 1L);
  curl_easy_setopt (easy, CURLOPT_TIMEOUT, TIMEOUT_S);
  curl_easy_setopt (easy, CURLOPT_ERRORBUFFER, why);
}

/* Blocking is allowed here: nobody is served yet. */
static int
curl_get_ready (void)
{
  char why[CURL_ERROR_SIZE] = "";
  curl_off_t length = -1;
  CURLcode code;
  CURL *easy;

  curl_global_init (CURL_GLOBAL_DEFAULT);
  if ((easy = curl_easy_init ()) == NULL) {
    nbdkit_error ("curl_easy_init failed");
    return -1;
  }
  set_common (easy, why);
  curl_easy_setopt (easy, CURLOPT_NOBODY, 1L);
  code = curl_easy_perform (easy);
  if (code == CURLE_OK)
    curl_easy_getinfo (easy, CURLINFO_CONTENT_LENGTH_DOWNLOAD_T, &length);
  curl_easy_cleanup (easy);
  if (code != CURLE_OK) {
    nbdkit_error ("%s: %s", url, why[0] ? why : curl_easy_strerror (code));
    return -1;
  }
  if (length < 0) {
    nbdkit_error ("%s: the server does not tell the size", url);
    return -1;
  }
  size = length;
  return 0;
}

static size_t
receive (char *bytes, size_t one, size_t n, void *user)
{
  struct transfer *t = user;

  n *= one;
  /* More than was asked for: the server ignores ranges. The transfer fails. */
  if (n > t->count - t->got)
    return 0;
  memcpy (t->to + t->got, bytes, n);
  t->got += (uint32_t)n;
  return n;
}

static void
start (struct transfer *t)
{
  t->easy = curl_easy_init ();
  if (t->easy == NULL) {
    blockhaul_async_reply_error (t->conn, t->reqid, ENOMEM, "curl_easy_init failed");
    free (t);
    return;
  }
  set_common (t->easy, t->why);
  curl_easy_setopt (t->easy, CURLOPT_RANGE, t->range);
  curl_easy_setopt (t->easy, CURLOPT_WRITEFUNCTION, receive);
  curl_easy_setopt (t->easy, CURLOPT_WRITEDATA, t);
  curl_easy_setopt (t->easy, CURLOPT_PRIVATE, t);
  curl_multi_add_handle (multi, t->easy);
  t->next = active;
  active = t;
}

/* Takes a transfer out of libcurl, which touches its memory no more, and answers. */
static void
finish (struct transfer *t, CURLcode code, const char *why)
{
  struct transfer **p;

  for (p = &active; *p != t; p = &(*p)->next)
    ;
  *p = t->next;
  curl_multi_remove_handle (multi, t->easy);
  curl_easy_cleanup (t->easy);
  if (why == NULL && code == CURLE_WRITE_ERROR)
    why = "the server sends more than the range";
  if (why == NULL && code != CURLE_OK)
    why = t->why[0] ? t->why : curl_easy_strerror (code);
  if (why == NULL && t->got != t->count)
    why = "the server sends less than the range";
  if (why == NULL)
    nbdkit_async_reply (t->conn, t->reqid);
  else
    blockhaul_async_reply_error (t->conn, t->reqid, EIO, why);
  free (t);
}

static void
abandon (void *conn)
{
  struct transfer *t, *next;

  for (t = active; t != NULL; t = next) {
    next = t->next;
    if (conn == NULL || t->conn == conn)
      finish (t, CURLE_OK, "the client has gone");
  }
}

static void *
run (void *unused)
{
  bool last = false;

  (void)unused;
  while (!last) {
    struct transfer *t, *next;
    struct gone *g, *more;
    CURLMsg *message;
    int n;

    pthread_mutex_lock (&lock);
    t = fresh;
    fresh = NULL;
    fresh_end = &fresh;
    g = left;
    left = NULL;
    last = stopping;
    pthread_mutex_unlock (&lock);
    for (; t != NULL; t = next) {
      next = t->next;
      start (t);
    }
    for (; g != NULL; g = more) {
      more = g->next;
      abandon (g->conn);
      free (g);
    }
    curl_multi_perform (multi, &n);
    while ((message = curl_multi_info_read (multi, &n)) != NULL)
      if (message->msg == CURLMSG_DONE) {
        CURLcode code = message->data.result;

        curl_easy_getinfo (message->easy_handle, CURLINFO_PRIVATE, (char **)&t);
        finish (t, code, NULL);
      }
    /* Returns when a socket is ready, a timer is due, or somebody calls curl_multi_wakeup. */
    if (!last)
      curl_multi_poll (multi, NULL, 0, 1000, NULL);
  }
  abandon (NULL);
  return NULL;
}

static int
curl_after_fork (void)
{
  if ((multi = curl_multi_init ()) == NULL) {
    nbdkit_error ("curl_multi_init failed");
    return -1;
  }
  curl_multi_setopt (multi, CURLMOPT_MAX_TOTAL_CONNECTIONS, (long)connections);
  curl_multi_setopt (multi, CURLMOPT_MAXCONNECTS, (long)connections);
  if ((errno = pthread_create (&loop, NULL, run, NULL)) != 0) {
    nbdkit_error ("pthread_create: %m");
    return -1;
  }
  running = true;
  return 0;
}

static void
curl_cleanup (void)
{
  if (running) {
    pthread_mutex_lock (&lock);
    stopping = true;
    pthread_mutex_unlock (&lock);
    curl_multi_wakeup (multi);
    pthread_join (loop, NULL);
  }
  if (multi != NULL)
    curl_multi_cleanup (multi);
  curl_global_cleanup ();
}

static void *
curl_open (int readonly)
{
  (void)readonly;
  return NBDKIT_HANDLE_NOT_NEEDED;
}

static int64_t
curl_get_size (void *handle)
{
  (void)handle;
  return size;
}

static int
curl_can_multi_conn (void *handle)
{
  (void)handle;
  return 1;
}

static int
curl_async_pread (void *conn, uint64_t reqid, bool flush, void *handle, void *buf, uint32_t count,
                  uint64_t offset)
{
  struct transfer *t = calloc (1, sizeof *t);

  (void)flush, (void)handle;
  if (t == NULL) {
    nbdkit_error ("calloc: %m");
    return -1;
  }
  t->conn = conn;
  t->reqid = reqid;
  t->to = buf;
  t->count = count;
  snprintf (t->range, sizeof t->range, "%" PRIu64 "-%" PRIu64, offset, offset + count - 1);
  pthread_mutex_lock (&lock);
  *fresh_end = t;
  fresh_end = &t->next;
  pthread_mutex_unlock (&lock);
  curl_multi_wakeup (multi);
  return 0;
}

static void
curl_async_cancel (void *conn, void *handle)
{
  struct gone *g = malloc (sizeof *g);

  (void)handle;
  /* Without memory for it the transfers run to their end. */
  if (g == NULL)
    return;
  g->conn = conn;
  pthread_mutex_lock (&lock);
  g->next = left;
  left = g;
  pthread_mutex_unlock (&lock);
  curl_multi_wakeup (multi);
}

static struct nbdkit_plugin plugin = {
  .name = "async-curl",
  .config = curl_config,
  .config_complete = curl_config_complete,
  .magic_config_key = "url",
  .get_ready = curl_get_ready,
  .after_fork = curl_after_fork,
  .cleanup = curl_cleanup,
  .open = curl_open,
  .get_size = curl_get_size,
  .can_multi_conn = curl_can_multi_conn,
};

static struct blockhaul_plugin async_plugin = {
  .async_pread = curl_async_pread,
  .async_cancel = curl_async_cancel,
  .max_bytes = 64 << 20,
};

BLOCKHAUL_REGISTER_PLUGIN (async_plugin, plugin)
