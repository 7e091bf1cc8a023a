/* Calls a log function of the program, which takes a format and a va_list. */
#include <stdarg.h>

typedef void (*log_function) (const char *format, va_list args);

void vddk_simulator_log (log_function function, const char *format, ...);

void
vddk_simulator_log (log_function function, const char *format, ...)
{
  va_list args;

  va_start (args, format);
  function (format, args);
  va_end (args);
}
