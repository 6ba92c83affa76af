// Declarations that the stand-ins for libcuda, libcudart and libnccl share. Programs must not use them.
#ifndef STANDIN_H
#define STANDIN_H

#include <stddef.h>

// standin_violation prints what the caller did wrong and ends the process, because the real library would
// have undefined behaviour.
void standin_violation(const char *format, ...) __attribute__((format(printf, 1, 2), noreturn));

// standin_setting returns the number in a variable of the environment, or otherwise if there is none.
long standin_setting(const char *name, long otherwise);

// standin_begins kills the process if it is to die in this call of a function.
void standin_begins(const char *function);

// standin_called does the same, and counts the call.
void standin_called(const char *function);

// standin_devices returns the number of devices.
int standin_devices(void);

// standin_select makes the context of a device the current one of the thread. It returns an error code.
int standin_select(int device);

// standin_selected returns the device of the thread. It makes no context.
int standin_selected(void);

// standin_current returns the device of the thread for a call that needs a context.
int standin_current(const char *call);

// standin_lock_driver makes the calls of other threads for a device wait, until standin_unlock_driver.
void standin_lock_driver(int device);
void standin_unlock_driver(int device);

// standin_context_bytes returns the memory that the context of a device takes.
size_t standin_context_bytes(int device);

// standin_broken returns the error of a call after standin_fault, or 0.
int standin_broken(void);

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
