/* blockhaul-plugin.h - plugins that answer later.
 *
 * An ordinary nbdkit plugin answers a request before its callback returns: as many threads as requests.
 * A plugin with this header takes a request, returns at once, and answers when it is done: in any order,
 * from any thread. The contract is in docs/plugins-c.md.
 *
 * SPDX-License-Identifier: MIT OR Apache-2.0
 */
#ifndef BLOCKHAUL_PLUGIN_H
#define BLOCKHAUL_PLUGIN_H

#include <stdbool.h>
#include <stdint.h>

#include <nbdkit-plugin.h>

#ifdef __cplusplus
extern "C" {
#endif

#define BLOCKHAUL_PLUGIN_MAGIC UINT64_C (0x4248504c5547494e)
#define BLOCKHAUL_PLUGIN_VERSION 1

/* What blockhaul_plugin_init answers. Zero what you do not use. Everything else (name, configuration,
 * open, close, get_size, can_*) is the ordinary plugin's; so is a kind of request that has no
 * asynchronous callback here. The callbacks are called on the server's own threads and must not block.
 * They return 0 if an answer will come (or has come already), -1 if they refuse: then
 * nbdkit_error and nbdkit_set_error say why, and no answer may follow.
 *
 * conn and reqid name the request in the answer. flush: durable before the answer.
 * buf is page-aligned memory of count bytes, lent until the answer.
 */
struct blockhaul_plugin {
  uint64_t magic;   /* BLOCKHAUL_PLUGIN_MAGIC */
  uint32_t size;    /* sizeof (struct blockhaul_plugin) */
  uint32_t version; /* BLOCKHAUL_PLUGIN_VERSION */
  const struct nbdkit_plugin *plugin;

  int (*async_pread) (void *conn, uint64_t reqid, bool flush, void *handle, void *buf,
                      uint32_t count, uint64_t offset);
  int (*async_pwrite) (void *conn, uint64_t reqid, bool flush, void *handle, const void *buf,
                       uint32_t count, uint64_t offset);
  int (*async_flush) (void *conn, uint64_t reqid, void *handle);
  int (*async_trim) (void *conn, uint64_t reqid, bool flush, void *handle, uint32_t count,
                     uint64_t offset);
  /* flags: NBDKIT_FLAG_MAY_TRIM, NBDKIT_FLAG_FAST_ZERO. */
  int (*async_zero) (void *conn, uint64_t reqid, bool flush, void *handle, uint32_t count,
                     uint64_t offset, uint32_t flags);
  /* flags: NBDKIT_FLAG_REQ_ONE. extents is lent until the answer; fill it by nbdkit_add_extent. */
  int (*async_extents) (void *conn, uint64_t reqid, void *handle, uint32_t count, uint64_t offset,
                        uint32_t flags, struct nbdkit_extents *extents);
  int (*async_cache) (void *conn, uint64_t reqid, void *handle, uint32_t count, uint64_t offset);
  /* The client has gone: nobody reads the answers to this connection's requests. They must still be
   * given, with an error if that is sooner. */
  void (*async_cancel) (void *conn, void *handle);

  /* Bytes of requests that are lent at a time, over all connections; 0: no bound but the server's. */
  uint64_t max_bytes;
};

/* The answer: done. To a read: buf is filled. All of these return 0, or -1 if there is no such request
 * (answered already, or never there), which is logged and harms nothing. */
extern int nbdkit_async_reply (void *conn, uint64_t reqid);
/* The answer to a read: count bytes at buf, which may be the memory that was lent or any other, which is
 * copied before this returns. */
extern int nbdkit_async_reply_read (void *conn, uint64_t reqid, uint32_t count, void *buf);
/* The answer: failed, for what this thread has told nbdkit_set_error and nbdkit_error since
 * its last answer. */
extern int nbdkit_async_reply_error (void *conn, uint64_t reqid);

/* The answer: failed, with this error number and text (may be NULL). */
extern int blockhaul_async_reply_error (void *conn, uint64_t reqid, int error, const char *text);
/* The answer to a read: all zeroes, which costs no payload. */
extern int blockhaul_async_reply_hole (void *conn, uint64_t reqid);
/* The bound in bytes on what is lent to this plugin, over all connections: read and set it. 0: none.
 * -1: conn is no connection. */
extern int64_t blockhaul_async_max_bytes (void *conn);
extern int blockhaul_async_set_max_bytes (void *conn, uint64_t bytes);
/* Bytes that are lent now. */
extern int64_t blockhaul_async_bytes (void *conn);

#ifdef __cplusplus
#define BLOCKHAUL_EXTERN_C extern "C"
#else
#define BLOCKHAUL_EXTERN_C
#endif

/* Put this at the end of the plugin's source, with a struct blockhaul_plugin whose .plugin points to
 * the ordinary one. */
#define BLOCKHAUL_REGISTER_PLUGIN(async, ordinary)                              \
  BLOCKHAUL_EXTERN_C const struct blockhaul_plugin *                            \
  blockhaul_plugin_init (void)                                                  \
  {                                                                             \
    (ordinary)._struct_size = sizeof (ordinary);                                \
    (ordinary)._api_version = NBDKIT_API_VERSION;                               \
    (ordinary)._thread_model = THREAD_MODEL;                                    \
    (async).magic = BLOCKHAUL_PLUGIN_MAGIC;                                     \
    (async).size = sizeof (async);                                              \
    (async).version = BLOCKHAUL_PLUGIN_VERSION;                                 \
    (async).plugin = &(ordinary);                                               \
    return &(async);                                                            \
  }

#ifdef __cplusplus
}
#endif

#endif /* BLOCKHAUL_PLUGIN_H */
