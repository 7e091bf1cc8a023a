/* The functions of nbdkit's interface that take a variable number of arguments: they format, and hand
 * the text to Rust. Plugins use %m, so errno reaches the formatting as it was, and is left as it was.
 * And nbdkit_shutdown, which must know who calls it.
 */
#define _GNU_SOURCE 1
#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

enum { SAID_ERROR = 0, SAID_DEBUG = 1 };

extern void cabi_said (int level, const char *text);
extern int cabi_debugging (void);
extern const char *cabi_intern (const char *text);
extern void cabi_shutdown (const void *caller);

void nbdkit_verror (const char *format, va_list args);
void nbdkit_error (const char *format, ...);
void nbdkit_vdebug (const char *format, va_list args);
void nbdkit_debug (const char *format, ...);
const char *nbdkit_vprintf_intern (const char *format, va_list args);
const char *nbdkit_printf_intern (const char *format, ...);
void nbdkit_shutdown (void);

static void
say (int level, const char *format, va_list args)
{
  int saved = errno;
  char *text = NULL;

  if (vasprintf (&text, format, args) >= 0) {
    cabi_said (level, text);
    free (text);
  }
  else
    cabi_said (level, format);
  errno = saved;
}

void
nbdkit_verror (const char *format, va_list args)
{
  say (SAID_ERROR, format, args);
}

void
nbdkit_error (const char *format, ...)
{
  va_list args;

  va_start (args, format);
  say (SAID_ERROR, format, args);
  va_end (args);
}

void
nbdkit_vdebug (const char *format, va_list args)
{
  if (cabi_debugging ())
    say (SAID_DEBUG, format, args);
}

void
nbdkit_debug (const char *format, ...)
{
  va_list args;

  if (!cabi_debugging ())
    return;
  va_start (args, format);
  say (SAID_DEBUG, format, args);
  va_end (args);
}

const char *
nbdkit_vprintf_intern (const char *format, va_list args)
{
  char *text = NULL;
  const char *interned;

  if (vasprintf (&text, format, args) < 0) {
    nbdkit_error ("vasprintf: %m");
    return NULL;
  }
  interned = cabi_intern (text);
  free (text);
  return interned;
}

const char *
nbdkit_printf_intern (const char *format, ...)
{
  va_list args;
  const char *interned;

  va_start (args, format);
  interned = nbdkit_vprintf_intern (format, args);
  va_end (args);
  return interned;
}

void
nbdkit_shutdown (void)
{
  cabi_shutdown (__builtin_return_address (0));
}
