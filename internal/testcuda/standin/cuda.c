// A stand-in for libcuda, the library of the driver, with what gohvd calls of it: the contexts of devices. The
// stand-in for libcudart uses the context that is current in the calling thread. A thread without one gets that
// of device 0, or of the device that it has passed to cudaSetDevice, which makes it, as in CUDA 12.
//
// The environment selects what it pretends to be; cudart.c has more:
//
//	STANDIN_CUDA_CALLS          also gets a line "context N" when this process makes the context of device N
//	STANDIN_CUDA_CONTEXT_BYTES  memory of its device that a context takes (default 0)
//	STANDIN_CUDA_KILL           FUNCTION:N; the process kills itself in its Nth call of a function of those that
//	                            STANDIN_CUDA_CALLS counts, or of cudaEventQuery, ncclCommInitRankConfig and
//	                            ncclCommAbort
//	STANDIN_CUDA_EXCLUSIVE      folder; only one process at a time may have a context of each device, as in the
//	                            compute mode EXCLUSIVE_PROCESS
#define _GNU_SOURCE
#include "standin.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <unistd.h>

enum { success = 0, invalidValue = 1, unavailable = 46, invalidDevice = 101, invalidContext = 201 };
enum { maxDevices = 64, maxDepth = 16 };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

// The context of a device is the address of its element.
static struct {
	int made, retained;
} primary[maxDevices];

static pthread_mutex_t driver[maxDevices] = {[0 ... maxDevices - 1] = PTHREAD_MUTEX_INITIALIZER};

static __thread void *stack[maxDepth]; // of the contexts of the calling thread
static __thread int depth;

void standin_violation(const char *format, ...) {
	va_list args;
	va_start(args, format);
	fprintf(stderr, "stand-in: violation: ");
	vfprintf(stderr, format, args);
	fprintf(stderr, "\n");
	va_end(args);
	abort();
}

long standin_setting(const char *name, long otherwise) {
	const char *text = getenv(name);
	return text && *text ? atol(text) : otherwise;
}

void standin_begins(const char *function) {
	static int calls;
	const char *at = getenv("STANDIN_CUDA_KILL");
	size_t n = strlen(function);
	if (at && strncmp(at, function, n) == 0 && at[n] == ':' &&
			__atomic_add_fetch(&calls, 1, __ATOMIC_RELAXED) == atoi(at + n + 1))
		raise(SIGKILL);
}

void standin_called(const char *function) {
	standin_begins(function);
	const char *path = getenv("STANDIN_CUDA_CALLS");
	if (!path || !*path)
		return;
	int fd = open(path, O_WRONLY | O_APPEND | O_CREAT, 0600);
	if (fd < 0 || dprintf(fd, "%s\n", function) < 0)
		standin_violation("%s: %s", path, strerror(errno));
	close(fd);
}

int standin_devices(void) { return (int)standin_setting("STANDIN_CUDA_DEVICES", 4); }

// numberOf returns the device of a context, or -1.
static int numberOf(void *context) {
	for (int i = 0; i < maxDevices; i++)
		if (context == &primary[i])
			return i;
	return -1;
}

// make makes the context of a device, unless there is one. The caller holds the lock.
static int make(int device) {
	if (primary[device].made)
		return success;
	const char *folder = getenv("STANDIN_CUDA_EXCLUSIVE");
	if (folder && *folder) {
		char path[4096];
		snprintf(path, sizeof path, "%s/device%d", folder, device);
		int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
		if (fd < 0)
			standin_violation("%s: %s", path, strerror(errno));
		if (flock(fd, LOCK_EX | LOCK_NB) != 0) {
			close(fd);
			return unavailable;
		}
	}
	primary[device].made = 1;
	char line[32];
	snprintf(line, sizeof line, "context %d", device);
	standin_called(line);
	return success;
}

int standin_select(int device) {
	pthread_mutex_lock(&lock);
	int code = make(device);
	pthread_mutex_unlock(&lock);
	if (code == success)
		stack[depth ? depth - 1 : depth++] = &primary[device];
	return code;
}

int standin_selected(void) { return depth ? numberOf(stack[depth - 1]) : 0; }

int standin_current(const char *call) {
	if (!depth && standin_select(0) != success)
		standin_violation("%s: the thread has no context, and another process has the only one of device 0", call);
	int device = numberOf(stack[depth - 1]);
	standin_lock_driver(device); // waits for the call of another thread that has locked it
	standin_unlock_driver(device);
	return device;
}

void standin_lock_driver(int device) { pthread_mutex_lock(&driver[device]); }

void standin_unlock_driver(int device) { pthread_mutex_unlock(&driver[device]); }

size_t standin_context_bytes(int device) {
	return primary[device].made ? (size_t)standin_setting("STANDIN_CUDA_CONTEXT_BYTES", 0) : 0;
}

int cuDriverGetVersion(int *v) {
	*v = (int)standin_setting("STANDIN_CUDA_DRIVER", standin_setting("STANDIN_CUDA_VERSION", 12080));
	return success;
}

int cuDevicePrimaryCtxRetain(void **context, int device) {
	if (device < 0 || device >= standin_devices())
		return invalidDevice;
	pthread_mutex_lock(&lock);
	int code = make(device);
	if (code == success) {
		primary[device].retained++;
		*context = &primary[device];
	}
	pthread_mutex_unlock(&lock);
	return code;
}

int cuCtxPushCurrent_v2(void *context) {
	int device = numberOf(context);
	if (device < 0 || !primary[device].retained)
		return invalidContext;
	if (depth == maxDepth)
		standin_violation("cuCtxPushCurrent: the thread has pushed %d contexts", depth);
	stack[depth++] = context;
	return success;
}

int cuCtxPopCurrent_v2(void **context) {
	if (!depth)
		return invalidContext;
	*context = stack[--depth];
	return success;
}
