// A stand-in for libcudart, for tests on machines without a GPU. "Device memory" is host memory that programs
// cannot read or write by its address, so that a program that does so crashes, as with a real device. A
// stream executes its work in a thread of its own, after a delay, so that missing waits show. The stand-in
// ends the process with a message if it is used wrongly: a stream, event or address that does not exist (any
// more), a copy beyond the end of an allocation, memory that is freed twice, a stream or event of another
// device than the current one, accesses to the same memory in no order (order.c).
//
// The environment selects what it pretends to be:
//
//	STANDIN_CUDA_DEVICES       number of devices (default 4)
//	STANDIN_CUDA_VERSION       version of the runtime (default 12080)
//	STANDIN_CUDA_DRIVER        version of the driver (default that of the runtime)
//	STANDIN_CUDA_CALLS         file to which the name of the function is appended, as a line, at each call of
//	                           cudaEventCreateWithFlags, cudaFree, cudaHostAlloc, cudaMemcpyAsync,
//	                           cudaMemcpyBatchAsync, cudaStreamWaitEvent and the collectives of NCCL, "priority N" at each stream with
//	                           a priority, and "unaligned copy" at each copy of a batch whose place is no
//	                           multiple of 16 bytes
//	STANDIN_CUDA_NO_DEVICE     error of cudaGetDeviceCount, instead of a number of devices
//	STANDIN_CUDA_BATCH_FAILS   number of the copy at which each cudaMemcpyBatchAsync fails
//	STANDIN_CUDA_DELAY_US      delay of each piece of work on a stream (default 200)
//	STANDIN_CUDA_HOLD          file; a stream that is made while the variable is set executes no work before the
//	                           file exists
//	STANDIN_CUDA_CAPTURE       with 1, a stream that is made is being captured, so that work on it is a violation,
//	                           and unsafe calls of threads that have not relaxed their capture mode fail; with 2,
//	                           its capture begins after the first question whether it is being captured, and a
//	                           wait for an event fails
//	STANDIN_CUDA_MEMORY_BYTES  size of the memory of each device (default 1 GiB)
//	STANDIN_CUDA_PROCESSORS    number of multiprocessors of each device (default 132)
#define _GNU_SOURCE
#include "standin.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

enum { success = 0, invalidValue = 1, outOfMemory = 2, unavailable = 46, noDevice = 100, invalidDevice = 101, notReady = 600, illegalAddress = 700, captureUnsupported = 900, captureIsolation = 905 };

int cuDriverGetVersion(int *v);

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

// ---- devices

static __thread int last; // the last error of the calling thread

static int result(int code) {
	if (code != success)
		last = code;
	return code;
}

static int broken; // whether each call fails

// standin_fault does what a kernel does that uses a wrong address: from then on, CUDA has this error in all calls of
// the process that use a device.
void standin_fault(void) { __atomic_store_n(&broken, 1, __ATOMIC_RELEASE); }

int standin_broken(void) { return __atomic_load_n(&broken, __ATOMIC_ACQUIRE) ? result(illegalAddress) : success; }

// WORKS returns the error of a call after standin_fault.
#define WORKS \
	if (standin_broken()) \
	return illegalAddress

int cudaGetDeviceCount(int *n) {
	int code = (int)standin_setting("STANDIN_CUDA_NO_DEVICE", success);
	if (code != success)
		return result(code);
	*n = standin_devices();
	return result(*n > 0 ? success : noDevice);
}

int cudaSetDevice(int device) {
	if (device < 0 || device >= standin_devices())
		return result(invalidDevice);
	return result(standin_select(device));
}

int cudaGetDevice(int *device) {
	*device = standin_selected();
	return success;
}

static int captures;             // the number of streams that are being captured
static __thread int captureMode;    // of the calling thread: 0 is global, 2 relaxed

int cudaThreadExchangeStreamCaptureMode(int *mode) {
	int before = captureMode;
	captureMode = *mode;
	*mode = before;
	return success;
}

// refused reports whether CUDA refuses an unsafe call, because another thread may be capturing a stream.
static int refused(void) { return captureMode != 2 && __atomic_load_n(&captures, __ATOMIC_ACQUIRE) > 0; }

int cudaGetLastError(void) {
	int code = last;
	last = success;
	return code;
}

const char *cudaGetErrorName(int code) {
	switch (code) {
	case success: return "cudaSuccess";
	case invalidValue: return "cudaErrorInvalidValue";
	case outOfMemory: return "cudaErrorMemoryAllocation";
	case unavailable: return "cudaErrorDevicesUnavailable";
	case noDevice: return "cudaErrorNoDevice";
	case invalidDevice: return "cudaErrorInvalidDevice";
	case notReady: return "cudaErrorNotReady";
	case illegalAddress: return "cudaErrorIllegalAddress";
	case 802: return "cudaErrorSystemNotReady";
	case captureUnsupported: return "cudaErrorStreamCaptureUnsupported";
	case captureIsolation: return "cudaErrorStreamCaptureIsolation";
	}
	return "unrecognized error code";
}

const char *cudaGetErrorString(int code) {
	switch (code) {
	case success: return "no error";
	case invalidValue: return "invalid argument";
	case outOfMemory: return "out of memory";
	case unavailable: return "CUDA-capable device(s) is/are busy or unavailable";
	case noDevice: return "no CUDA-capable device is detected";
	case invalidDevice: return "invalid device ordinal";
	case notReady: return "device not ready";
	case illegalAddress: return "an illegal memory access was encountered";
	case 802: return "system not yet initialized";
	case captureUnsupported: return "operation not permitted when stream is capturing";
	case captureIsolation: return "dependency created on uncaptured work in another stream";
	}
	return "unrecognized error code";
}

int cudaRuntimeGetVersion(int *v) {
	*v = (int)standin_setting("STANDIN_CUDA_VERSION", 12080);
	return success;
}

int cudaDeviceGetPCIBusId(char *text, int len, int device) {
	if (device < 0 || device >= standin_devices())
		return result(invalidDevice);
	snprintf(text, (size_t)len, "0000:%02X:00.0", device + 1);
	return success;
}

int cudaDeviceGetAttribute(int *value, int attribute, int device) {
	if (device < 0 || device >= standin_devices())
		return result(invalidDevice);
	if (attribute != 16) // 16: the number of multiprocessors
		return result(invalidValue);
	*value = (int)standin_setting("STANDIN_CUDA_PROCESSORS", 132);
	return success;
}

// slots is the greatest number of streams at a time, and maxAccesses that of the accesses to a block that the
// stand-in remembers.
enum { slots = 256, maxAccesses = 256 };

// clock has the number of the last piece of work of each slot that is before something. Streams that exist at
// the same time have different slots.
struct clock {
	long at[slots];
};

// ---- memory

// A block is an allocation.
struct block {
	char *address;  // the device address, which cannot be read
	char *host;     // the same memory, for the stand-in
	size_t size;
	int device;
	int fd;
	struct access *accesses;
	int numAccesses;
	struct block *next;
};

static struct block *blocks;
static size_t used[64];

static struct block *find(const void *p) {
	for (struct block *b = blocks; b; b = b->next)
		if ((const char *)p >= b->address && (const char *)p < b->address + b->size)
			return b;
	return NULL;
}

void *standin_host(const void *p, size_t n, const char *call) {
	pthread_mutex_lock(&lock);
	struct block *b = find(p);
	if (!b)
		standin_violation("%s: %p is not in an allocation", call, p);
	if (n > b->size - (size_t)((const char *)p - b->address))
		standin_violation("%s: %zu bytes at %p reach beyond the end of the allocation of %zu bytes at %p", call, n,
			p, b->size, (void *)b->address);
	char *host = b->host + ((const char *)p - b->address);
	pthread_mutex_unlock(&lock);
	return host;
}

// map allocates the memory of b. The caller holds the lock.
static int map(struct block *b) {
	b->fd = memfd_create("standin", 0);
	if (b->fd < 0 || ftruncate(b->fd, (off_t)b->size) != 0)
		return outOfMemory;
	b->address = mmap(NULL, b->size, PROT_NONE, MAP_SHARED, b->fd, 0);
	b->host = mmap(NULL, b->size, PROT_READ | PROT_WRITE, MAP_SHARED, b->fd, 0);
	if (b->address == MAP_FAILED || b->host == MAP_FAILED)
		return outOfMemory;
	b->next = blocks;
	blocks = b;
	return success;
}

static void unmap(struct block *b) {
	for (struct block **at = &blocks; *at; at = &(*at)->next)
		if (*at == b) {
			*at = b->next;
			break;
		}
	munmap(b->address, b->size);
	munmap(b->host, b->size);
	close(b->fd);
	free(b->accesses);
	free(b);
}

int cudaMalloc(void **p, size_t n) {
	WORKS;
	*p = NULL;
	if (refused())
		return result(captureUnsupported);
	if (n == 0)
		return success;
	size_t page = 4096, size = (n + page - 1) / page * page;
	int current = standin_current("cudaMalloc");
	pthread_mutex_lock(&lock);
	int code = outOfMemory;
	if (standin_context_bytes(current) + used[current] + size <= (size_t)standin_setting("STANDIN_CUDA_MEMORY_BYTES", 1L << 30)) {
		struct block *b = calloc(1, sizeof *b);
		b->size = size;
		b->device = current;
		if ((code = map(b)) == success) {
			memset(b->host, 0xa5, size); // what was there before is undefined
			used[current] += size;
			*p = b->address;
		}
	}
	pthread_mutex_unlock(&lock);
	return result(code);
}

static void synchronizeAll(int device);

int cudaFree(void *p) {
	WORKS;
	standin_called("cudaFree");
	standin_current("cudaFree");
	if (refused())
		return result(captureUnsupported);
	if (!p)
		return success;
	pthread_mutex_lock(&lock);
	struct block *b = find(p);
	if (!b || b->address != p)
		standin_violation("cudaFree: %p is not the beginning of an allocation", p);
	int device = b->device;
	pthread_mutex_unlock(&lock);
	standin_lock_driver(device);
	synchronizeAll(device);
	standin_unlock_driver(device);
	pthread_mutex_lock(&lock);
	used[device] -= b->size;
	unmap(b);
	pthread_mutex_unlock(&lock);
	return success;
}

int cudaMemGetInfo(size_t *unused, size_t *total) {
	WORKS;
	int current = standin_current("cudaMemGetInfo");
	*total = (size_t)standin_setting("STANDIN_CUDA_MEMORY_BYTES", 1L << 30);
	pthread_mutex_lock(&lock);
	*unused = *total - standin_context_bytes(current) - used[current];
	pthread_mutex_unlock(&lock);
	return success;
}

struct pointerAttributes {
	int type, device; // type 0 is memory that CUDA does not know, 2 is device memory
	void *devicePointer, *hostPointer;
};

int cudaPointerGetAttributes(struct pointerAttributes *a, const void *p) {
	memset(a, 0, sizeof *a);
	pthread_mutex_lock(&lock);
	struct block *b = find(p);
	a->device = b ? b->device : -1;
	a->type = b ? 2 : 0;
	a->devicePointer = b ? (void *)p : NULL;
	pthread_mutex_unlock(&lock);
	return success;
}

int cudaHostAlloc(void **p, size_t n, unsigned flags) {
	WORKS;
	(void)flags;
	standin_called("cudaHostAlloc");
	standin_current("cudaHostAlloc");
	if (refused())
		return result(captureUnsupported);
	*p = malloc(n);
	return result(*p ? success : outOfMemory);
}

int cudaFreeHost(void *p) {
	WORKS;
	standin_current("cudaFreeHost");
	if (refused())
		return result(captureUnsupported);
	free(p);
	return success;
}

// ---- streams

struct work {
	int (*run)(void *);
	void *arg;
	struct work *next;
};

struct stream {
	int device;
	pthread_t thread;
	pthread_mutex_t lock;
	pthread_cond_t changed;
	struct work *first, **end;
	long done, queued;
	int closing, capturing;
	int capturesLater; // whether the first question whether it is being captured begins a capture
	int isDefault;    // whether it is the default stream of its device
	useconds_t delay; // of each piece of work
	char *hold;       // the file for which its work waits, or NULL
	int slot;
	struct clock clock; // what is before the next piece of work
	struct stream *next;
};

static struct stream *streams;
static int slotTaken[slots];

static void *execute(void *arg) {
	struct stream *s = arg;
	pthread_mutex_lock(&s->lock);
	while (1) {
		while (!s->first && !s->closing)
			pthread_cond_wait(&s->changed, &s->lock);
		if (!s->first)
			break;
		struct work *w = s->first;
		pthread_mutex_unlock(&s->lock);
		if (s->delay)
			usleep(s->delay);
		while (s->hold && access(s->hold, F_OK) != 0)
			usleep(1000);
		while (w->run(w->arg))
			usleep(50);
		pthread_mutex_lock(&s->lock);
		if (!(s->first = w->next))
			s->end = &s->first;
		s->done++;
		free(w);
		pthread_cond_broadcast(&s->changed);
	}
	pthread_mutex_unlock(&s->lock);
	pthread_mutex_lock(&lock);
	for (struct stream **at = &streams; *at; at = &(*at)->next)
		if (*at == s) {
			*at = s->next;
			break;
		}
	slotTaken[s->slot] = 0;
	pthread_mutex_unlock(&lock);
	// The memory of the stream stays, because synchronizeAll may still read it.
	return NULL;
}

static struct stream *newStream(int device, int isDefault);

// checked returns the stream with a handle. 0 and 1 are the default stream of the current device, which does not
// wait for other streams, because all of them are made so that they do not wait for it.
static struct stream *checked(void *stream, const char *call) {
	int device = standin_current(call), isDefault = (uintptr_t)stream <= 1;
	if ((uintptr_t)stream == 2)
		standin_violation("%s: stream 2 is another one in each thread", call);
	pthread_mutex_lock(&lock);
	struct stream *s = streams;
	while (s && (isDefault ? !s->isDefault || s->device != device : s != stream))
		s = s->next;
	if (!s && isDefault)
		s = newStream(device, 1);
	pthread_mutex_unlock(&lock);
	if (!s || s->closing)
		standin_violation("%s: stream %p does not exist", call, stream);
	return s;
}

#include "order.c"

// newStream makes a stream. The caller holds the lock.
static struct stream *newStream(int device, int isDefault) {
	struct stream *s = calloc(1, sizeof *s);
	s->device = device;
	s->isDefault = isDefault;
	s->end = &s->first;
	long capture = standin_setting("STANDIN_CUDA_CAPTURE", 0);
	s->capturing = capture == 1;
	s->capturesLater = capture == 2;
	__atomic_add_fetch(&captures, s->capturing, __ATOMIC_ACQ_REL);
	s->delay = (useconds_t)standin_setting("STANDIN_CUDA_DELAY_US", 200);
	const char *hold = getenv("STANDIN_CUDA_HOLD");
	s->hold = hold && *hold ? strdup(hold) : NULL;
	pthread_mutex_init(&s->lock, NULL);
	pthread_cond_init(&s->changed, NULL);
	s->slot = takeSlot();
	s->next = streams;
	streams = s;
	pthread_create(&s->thread, NULL, execute, s);
	return s;
}

int cudaStreamCreateWithFlags(void **stream, unsigned flags) {
	WORKS;
	int device = standin_current("cudaStreamCreateWithFlags");
	if (flags != 1) // 1: cudaStreamNonBlocking
		standin_violation("a stream was made that waits for the default stream, and for which it waits");
	pthread_mutex_lock(&lock);
	*stream = newStream(device, 0);
	pthread_mutex_unlock(&lock);
	return success;
}

int cudaStreamCreateWithPriority(void **stream, unsigned flags, int priority) {
	char line[32];
	snprintf(line, sizeof line, "priority %d", priority);
	standin_called(line);
	return cudaStreamCreateWithFlags(stream, flags);
}

int cudaStreamIsCapturing(void *stream, int *status) {
	WORKS;
	struct stream *s = checked(stream, "cudaStreamIsCapturing");
	*status = s->capturing;
	if (s->capturesLater && !s->capturing) {
		s->capturing = 1;
		__atomic_add_fetch(&captures, 1, __ATOMIC_ACQ_REL);
	}
	return success;
}

// A capture waits for no work, and work on the stream meanwhile is a violation, because it would be a part of the graph.
int cudaStreamBeginCapture(void *stream, int mode) {
	WORKS;
	(void)mode;
	checked(stream, "cudaStreamBeginCapture")->capturing = 1;
	__atomic_add_fetch(&captures, 1, __ATOMIC_ACQ_REL);
	return success;
}

int cudaStreamEndCapture(void *stream, void **graph) {
	WORKS;
	checked(stream, "cudaStreamEndCapture")->capturing = 0;
	__atomic_sub_fetch(&captures, 1, __ATOMIC_ACQ_REL);
	*graph = NULL;
	return success;
}

int cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
	*least = 0;
	*greatest = -5;
	return success;
}

int cudaStreamDestroy(void *stream) {
	WORKS;
	struct stream *s = checked(stream, "cudaStreamDestroy");
	if (s->isDefault)
		standin_violation("cudaStreamDestroy: it is the default stream");
	pthread_mutex_lock(&s->lock);
	s->closing = 1;
	__atomic_sub_fetch(&captures, s->capturing, __ATOMIC_ACQ_REL);
	pthread_cond_broadcast(&s->changed);
	pthread_mutex_unlock(&s->lock);
	pthread_detach(s->thread); // it ends when the work of the stream has ended
	return success;
}

void standin_enqueue(void *stream, int (*run)(void *), void *arg, const char *call) {
	struct stream *s = checked(stream, call);
	int current = standin_current(call);
	if (s->device != current)
		standin_violation("%s: the stream belongs to device %d, but the current device is %d", call, s->device, current);
	if (s->capturing)
		standin_violation("%s: the stream is being captured", call);
	struct work *w = malloc(sizeof *w);
	*w = (struct work){run, arg, NULL};
	pthread_mutex_lock(&s->lock);
	*s->end = w;
	s->end = &w->next;
	s->queued++;
	pthread_cond_broadcast(&s->changed);
	pthread_mutex_unlock(&s->lock);
}

static void synchronize(struct stream *s) {
	pthread_mutex_lock(&s->lock);
	long until = s->queued;
	while (s->done < until)
		pthread_cond_wait(&s->changed, &s->lock);
	pthread_mutex_unlock(&s->lock);
	hostSees(&s->clock);
}

int cudaStreamSynchronize(void *stream) {
	WORKS;
	synchronize(checked(stream, "cudaStreamSynchronize"));
	return success;
}

int cudaStreamQuery(void *stream) {
	WORKS;
	struct stream *s = checked(stream, "cudaStreamQuery");
	pthread_mutex_lock(&s->lock);
	int idle = s->done == s->queued;
	pthread_mutex_unlock(&s->lock);
	if (idle)
		hostSees(&s->clock);
	return idle ? success : result(notReady);
}

static void synchronizeAll(int device) {
	pthread_mutex_lock(&lock);
	struct stream *s = streams;
	pthread_mutex_unlock(&lock);
	for (; s; s = s->next)
		if (s->device == device)
			synchronize(s);
}

int cudaDeviceSynchronize(void) {
	WORKS;
	synchronizeAll(standin_current("cudaDeviceSynchronize"));
	return success;
}

// ---- copies

struct copy {
	char *to;
	const char *from; // NULL if the bytes are set to value
	size_t n;
	int value;
};

static int doCopy(void *arg) {
	struct copy *c = arg;
	if (c->from)
		memmove(c->to, c->from, c->n);
	else
		memset(c->to, c->value, c->n);
	free(c);
	return 0;
}

static int isDevice(const void *p) {
	pthread_mutex_lock(&lock);
	int is = find(p) != NULL;
	pthread_mutex_unlock(&lock);
	return is;
}

static void *memory(const void *p, size_t n, const char *call) {
	return isDevice(p) ? standin_host(p, n, call) : (void *)p;
}

static struct copy *newCopy(void *to, const void *from, size_t n, int kind, const char *call) {
	int fromDevice = isDevice(from), toDevice = isDevice(to);
	if (kind != 4 && kind != 2 * fromDevice + toDevice)
		standin_violation("%s: kind %d does not fit the memory: device to read: %d, to write: %d", call, kind,
			fromDevice, toDevice);
	struct copy *c = malloc(sizeof *c);
	*c = (struct copy){memory(to, n, call), memory(from, n, call), n, 0};
	return c;
}

int cudaMemcpyAsync(void *to, const void *from, size_t n, int kind, void *stream) {
	WORKS;
	standin_called("cudaMemcpyAsync");
	if (n == 0)
		return success;
	struct copy *c = newCopy(to, from, n, kind, "cudaMemcpyAsync");
	standin_access(stream, from, n, 0, "cudaMemcpyAsync");
	standin_access(stream, to, n, 1, "cudaMemcpyAsync");
	standin_enqueue(stream, doCopy, c, "cudaMemcpyAsync");
	return success;
}

struct attributes {
	int srcAccessOrder, srcLocHint[2], dstLocHint[2];
	unsigned flags;
};

struct batch {
	struct copy **copies;
	size_t count;
};

// doBatch does the copies in the opposite order, because CUDA may do them in any order.
static int doBatch(void *arg) {
	struct batch *b = arg;
	for (size_t i = b->count; i > 0; i--)
		doCopy(b->copies[i - 1]);
	free(b->copies);
	free(b);
	return 0;
}

static int overlap(const void *a, size_t n, const void *b, size_t m) {
	return (const char *)a < (const char *)b + m && (const char *)b < (const char *)a + n;
}

// cudaMemcpyBatchAsync has one parameter more in CUDA 12 than in CUDA 13: failIdx, before the stream. So it is
// declared with a variable number of parameters, which are passed in the same way. gohvd uses it only within the
// memory of a device and with reads in the order of the stream, so anything else is a violation.
int cudaMemcpyBatchAsync(void **to, void **from, size_t *sizes, size_t count, struct attributes *attributes,
		size_t *indexes, size_t numAttributes, void *eighth, ...) {
	WORKS;
	static const char call[] = "cudaMemcpyBatchAsync";
	int runtime, driver;
	cudaRuntimeGetVersion(&runtime);
	cuDriverGetVersion(&driver);
	void *stream = eighth;
	size_t *failed = NULL;
	if (runtime < 13000) {
		va_list ninth;
		va_start(ninth, eighth);
		failed = eighth;
		stream = va_arg(ninth, void *);
		va_end(ninth);
	}
	standin_called(call);
	if (runtime < 12080 || driver < 12080)
		standin_violation("%s: runtime %d and driver %d do not have it", call, runtime, driver);
	if (checked(stream, call)->isDefault)
		standin_violation("%s: the default stream cannot have it", call);
	if (runtime < 13000 && !failed)
		standin_violation("%s: failIdx is NULL", call);
	if (count == 0)
		standin_violation("%s: there are no copies", call);
	if (numAttributes == 0 || numAttributes > count)
		standin_violation("%s: %zu attributes for %zu copies", call, numAttributes, count);
	for (size_t i = 0; i < numAttributes; i++) {
		if (i == 0 ? indexes[0] != 0 : indexes[i] <= indexes[i - 1] || indexes[i] >= count)
			standin_violation("%s: attributes %zu are for the copies from %zu", call, i, indexes[i]);
		if (attributes[i].srcAccessOrder != 1)
			standin_violation("%s: srcAccessOrder is %d, want 1", call, attributes[i].srcAccessOrder);
		if (attributes[i].flags != 0)
			standin_violation("%s: flags are %u, want 0", call, attributes[i].flags);
	}
	for (size_t i = 0; i < count; i++) {
		if (sizes[i] == 0)
			standin_violation("%s: copy %zu has no bytes", call, i);
		for (size_t j = 0; j < count; j++)
			if (overlap(to[i], sizes[i], from[j], sizes[j]) || (j != i && overlap(to[i], sizes[i], to[j], sizes[j])))
				standin_violation("%s: copy %zu writes what copy %zu uses", call, i, j);
		standin_host(to[i], sizes[i], call);
		standin_host(from[i], sizes[i], call);
	}
	size_t fails = (size_t)standin_setting("STANDIN_CUDA_BATCH_FAILS", -1);
	if (fails < count) {
		if (failed)
			*failed = fails;
		return result(invalidValue);
	}
	struct batch *b = malloc(sizeof *b);
	*b = (struct batch){calloc(count, sizeof *b->copies), count};
	for (size_t i = 0; i < count; i++) {
		if (((uintptr_t)to[i] | (uintptr_t)from[i]) % 16 != 0)
			standin_called("unaligned copy");
		b->copies[i] = newCopy(to[i], from[i], sizes[i], 4, call);
		standin_access(stream, from[i], sizes[i], 0, call);
		standin_access(stream, to[i], sizes[i], 1, call);
	}
	standin_enqueue(stream, doBatch, b, call);
	return success;
}

int cudaMemcpy(void *to, const void *from, size_t n, int kind) {
	WORKS;
	standin_current("cudaMemcpy");
	if (n > 0)
		doCopy(newCopy(to, from, n, kind, "cudaMemcpy"));
	return success;
}

int cudaMemsetAsync(void *p, int value, size_t n, void *stream) {
	WORKS;
	if (n == 0)
		return success;
	struct copy *c = malloc(sizeof *c);
	*c = (struct copy){standin_host(p, n, "cudaMemsetAsync"), NULL, n, value};
	standin_access(stream, p, n, 1, "cudaMemsetAsync");
	standin_enqueue(stream, doCopy, c, "cudaMemsetAsync");
	return success;
}

// ---- events

struct state {
	long recorded, completed;
};

struct event {
	struct state *state;
	int device;
	struct clock clock; // of the last record
	struct event *next;
};

static struct event *events;

static struct event *checkedEvent(void *event, const char *call) {
	standin_current(call);
	pthread_mutex_lock(&lock);
	struct event *e = events;
	while (e && e != event)
		e = e->next;
	pthread_mutex_unlock(&lock);
	if (!e)
		standin_violation("%s: event %p does not exist", call, event);
	return e;
}

int cudaEventCreateWithFlags(void **event, unsigned flags) {
	WORKS;
	(void)flags;
	standin_called("cudaEventCreateWithFlags");
	struct event *e = calloc(1, sizeof *e);
	e->state = calloc(1, sizeof *e->state);
	e->device = standin_current("cudaEventCreateWithFlags");
	pthread_mutex_lock(&lock);
	e->next = events;
	events = e;
	pthread_mutex_unlock(&lock);
	*event = e;
	return success;
}

int cudaEventDestroy(void *event) {
	WORKS;
	struct event *e = checkedEvent(event, "cudaEventDestroy");
	pthread_mutex_lock(&lock);
	for (struct event **at = &events; *at; at = &(*at)->next)
		if (*at == e) {
			*at = e->next;
			break;
		}
	pthread_mutex_unlock(&lock);
	// The state stays, because work on a stream may still refer to it.
	free(e);
	return success;
}

struct mark {
	struct state *state;
	long number;
};

static int complete(void *arg) {
	struct mark *m = arg;
	long before = __atomic_load_n(&m->state->completed, __ATOMIC_ACQUIRE);
	while (before < m->number && !__atomic_compare_exchange_n(&m->state->completed, &before, m->number, 0,
			__ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE))
		;
	free(m);
	return 0;
}

static int await(void *arg) {
	struct mark *m = arg;
	if (__atomic_load_n(&m->state->completed, __ATOMIC_ACQUIRE) < m->number)
		return 1;
	free(m);
	return 0;
}

int cudaEventRecord(void *event, void *stream) {
	WORKS;
	struct event *e = checkedEvent(event, "cudaEventRecord");
	struct stream *s = checked(stream, "cudaEventRecord");
	if (e->device != s->device)
		standin_violation("cudaEventRecord: the event belongs to device %d, and the stream to device %d", e->device,
			s->device);
	pthread_mutex_lock(&lock);
	merge(&s->clock, &hostKnows);
	e->clock = s->clock;
	pthread_mutex_unlock(&lock);
	struct mark *m = malloc(sizeof *m);
	*m = (struct mark){e->state, __atomic_add_fetch(&e->state->recorded, 1, __ATOMIC_ACQ_REL)};
	standin_enqueue(stream, complete, m, "cudaEventRecord");
	return success;
}

int cudaStreamWaitEvent(void *stream, void *event, unsigned flags) {
	WORKS;
	standin_called("cudaStreamWaitEvent");
	(void)flags;
	struct event *e = checkedEvent(event, "cudaStreamWaitEvent");
	struct stream *s = checked(stream, "cudaStreamWaitEvent");
	if (s->capturesLater && s->capturing)
		return result(captureIsolation);
	pthread_mutex_lock(&lock);
	merge(&s->clock, &e->clock);
	pthread_mutex_unlock(&lock);
	struct mark *m = malloc(sizeof *m);
	*m = (struct mark){e->state, __atomic_load_n(&e->state->recorded, __ATOMIC_ACQUIRE)};
	standin_enqueue(stream, await, m, "cudaStreamWaitEvent");
	return success;
}

static int ended(struct event *e) {
	if (__atomic_load_n(&e->state->completed, __ATOMIC_ACQUIRE) <
			__atomic_load_n(&e->state->recorded, __ATOMIC_ACQUIRE))
		return 0;
	hostSees(&e->clock);
	return 1;
}

int cudaEventQuery(void *event) {
	standin_begins("cudaEventQuery");
	WORKS;
	struct event *e = checkedEvent(event, "cudaEventQuery");
	if (refused())
		return result(captureUnsupported);
	return ended(e) ? success : result(notReady);
}

int cudaEventSynchronize(void *event) {
	WORKS;
	struct event *e = checkedEvent(event, "cudaEventSynchronize");
	while (!ended(e))
		usleep(50);
	return success;
}

