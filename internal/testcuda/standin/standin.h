// Declarations that the stand-ins for libcudart and libnccl share. Programs must not use them.
#ifndef STANDIN_H
#define STANDIN_H

#include <stddef.h>

// standin_violation prints what the caller did wrong and ends the process, because the real library would
// have undefined behaviour.
void standin_violation(const char *format, ...) __attribute__((format(printf, 1, 2), noreturn));

// standin_host returns the memory behind n bytes at the device address p. It is a violation if these bytes
// are not in one live allocation.
void *standin_host(const void *p, size_t n, const char *call);

// standin_enqueue runs work(arg) on the stream, after all that was enqueued before. If work returns something
// other than 0, it is run again a little later.
void standin_enqueue(void *stream, int (*work)(void *), void *arg, const char *call);

// standin_access says that the next work on the stream reads or writes n bytes at the device address p. It is a
// violation if work on another stream uses them too and nothing puts one before the other. Addresses of the
// host are ignored.
void standin_access(void *stream, const void *p, size_t n, int writes, const char *call);

#endif
