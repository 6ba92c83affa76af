// A stand-in for libnccl, for tests on machines without a GPU. It moves the "device memory" of the stand-in
// for libcudart through shared memory of the host, in the order of the streams. Ranks may be processes, or
// threads of one process. It ends the process with a message if it is used wrongly: a communicator that was
// destroyed or aborted or is used by two threads at once, a group that does not end, ranks whose operations
// differ, a message whose receiver expects another size. Like a kernel, an operation occupies multiprocessors of
// its device from its beginning to its end, and does not begin before enough of them are free.
//
// Communicators must be blocking: NCCL starts a thread for each launch of one that is not. Up to NCCL 2.21,
// ncclCommAbort waits for the work of all communicators on the device, and until then no other thread can call
// CUDA for the device.
//
// The environment selects what it pretends to be and which fault occurs:
//
//	STANDIN_NCCL_VERSION      version (default 22304)
//	STANDIN_NCCL_FAULT        KIND:RANK:N, at the N-th operation of a communicator at this rank (N from 1):
//	                          async  the operation does not complete, and an asynchronous error is reported
//	                          late   the same, but the communicator does not report it to the first questions
//	                          hang   the operation does not complete
//	                          slow   the operation goes on until a second after ncclCommAbort, and then writes
//	                          refuse the call returns ncclInternalError
//	                          init   (without N) the rank does not answer during initialization, which ends with
//	                          an error
//	STANDIN_NCCL_INIT_SECONDS how long initialization waits for the other ranks (default 60, with init 8)
//	STANDIN_NCCL_FOLDER       folder of the files that the ranks of a communicator map until all have joined. If a
//	                          rank dies before, the file is left (default /tmp)
//	NCCL_HOSTID               ranks with different values do not share a host, so that they may share a device
//
// With -DSTANDIN_OLD the library has only the functions of NCCL 2.7.
#define _GNU_SOURCE
#include "standin.h"

#include <fcntl.h>
#include <math.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <time.h>
#include <unistd.h>

int cudaGetDevice(int *device);
int cudaSetDevice(int device);
int cudaDeviceGetPCIBusId(char *text, int len, int device);
int cudaDeviceGetAttribute(int *value, int attribute, int device);
int cudaPointerGetAttributes(void *attributes, const void *p);

enum { success = 0, cudaError = 1, systemError = 2, internalError = 3, invalidArgument = 4, invalidUsage = 5, remoteError = 6, inProgress = 7 };
enum { maxRanks = 16, maxDevices = 16, defaultBlocks = 32, window = 64 << 10, letter = 16 << 10 };
enum { sum, prod, max, min, avg, numOps };
enum { int8, uint8, int32, uint32, int64, uint64, float16, float32, float64, bfloat16, numTypes };
enum { opAllReduce = 1, opReduce, opBroadcast, opAllGather, opReduceScatter };

struct uniqueId {
	char bytes[128];
};

// What the ranks of a communicator share.
struct mailbox {
	long sent, received; // numbers of letters
	size_t size, total;  // of the letter, of the message
	char letter[letter];
};

struct member {
	int joined, device, left;
	char host[64], bus[32];
	long arrived;
	long call[5]; // kind, count, type, reduction, root of the operation in progress
	char window[window];
};

struct region {
	int aborted;
	struct member members[maxRanks];
	struct mailbox mail[maxRanks][maxRanks]; // [from][to]
};

struct comm {
	struct region *region;
	char path[4096]; // of the region
	int rank, n, device;
	int blocks; // how many multiprocessors an operation occupies
	int busy, aborting, async;
	int grouped;       // whether operations wait for the end of a group
	double abortedAt;  // the time of ncclCommAbort
	long arrived; // how often this rank has arrived at a barrier
	long operations;
	int questions; // how many questions are left until an error is reported, or 0
	double factors[64]; // of PreMulSum
	int made[64], numFactors;
	struct comm *next;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct comm *comms;
static __thread char detail[256];
static __thread int depth;       // of nested groups
static int occupied[maxDevices]; // the multiprocessors of each device that operations of this process occupy
static int launched[maxDevices]; // the operations of this process on each device that have not ended

static size_t sizeOf(int type) {
	static const size_t sizes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2};
	return sizes[type];
}

static int fails(int code, const char *text) {
	snprintf(detail, sizeof detail, "%s", text);
	return code;
}

static void pause_(void) { usleep(50); }

static double now(void) {
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

// checked returns the communicator if it exists and no other thread uses it.
static struct comm *checked(void *comm, const char *call) {
	pthread_mutex_lock(&lock);
	struct comm *c = comms;
	while (c && c != comm)
		c = c->next;
	pthread_mutex_unlock(&lock);
	if (!c)
		standin_violation("%s: communicator %p does not exist, or no longer", call, comm);
	return c;
}

static struct comm *enter(void *comm, const char *call) {
	struct comm *c = checked(comm, call);
	if (__atomic_exchange_n(&c->busy, 1, __ATOMIC_ACQUIRE))
		standin_violation("%s: another thread is using the communicator", call);
	if (c->aborting)
		standin_violation("%s: the communicator was aborted", call);
	return c;
}

static int leave(struct comm *c, int code) {
	__atomic_store_n(&c->busy, 0, __ATOMIC_RELEASE);
	return code;
}

// faulty reports whether the environment asks for this fault at this rank.
static int faulty(struct comm *c, const char *kind, long n) {
	const char *text = getenv("STANDIN_NCCL_FAULT");
	char name[16];
	int rank;
	long at = 0;
	return text && sscanf(text, "%15[^:]:%d:%ld", name, &rank, &at) >= 2 && strcmp(name, kind) == 0 &&
		rank == c->rank && at == n;
}

// ---- version, errors, ids

int ncclGetVersion(int *v) {
	const char *text = getenv("STANDIN_NCCL_VERSION");
	*v = text && *text ? atoi(text) : 22304;
	return success;
}

const char *ncclGetErrorString(int code) {
	switch (code) {
	case success: return "no error";
	case cudaError: return "unhandled cuda error (run with NCCL_DEBUG=INFO for details)";
	case systemError: return "unhandled system error";
	case internalError: return "internal error";
	case invalidArgument: return "invalid argument";
	case invalidUsage: return "invalid usage";
	case remoteError: return "remote process exited or there was a network error";
	}
	return "unknown result code";
}

int ncclGetUniqueId(struct uniqueId *id) {
	memset(id, 0, sizeof *id);
	uint64_t number;
	if (getrandom(&number, sizeof number, 0) != sizeof number)
		return systemError;
	snprintf(id->bytes, sizeof id->bytes, "standin-nccl-%016llx", (unsigned long long)number);
	return success;
}

// ---- communicators

static int openRegion(struct comm *c) {
	int fd = open(c->path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
	if (fd < 0 || ftruncate(fd, sizeof(struct region)) != 0)
		return fails(systemError, "opening the file of shared memory failed");
	c->region = mmap(NULL, sizeof(struct region), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	close(fd);
	return c->region == MAP_FAILED ? fails(systemError, "mapping the file of shared memory failed") : success;
}

// meet waits until all ranks have joined, and checks them.
static int meet(struct comm *c) {
	const char *fault = getenv("STANDIN_NCCL_FAULT");
	long limit = fault && strncmp(fault, "init:", 5) == 0 ? 8 : 60;
	double end = now() + (double)standin_setting("STANDIN_NCCL_INIT_SECONDS", limit);
	while (faulty(c, "init", 0) && now() < end)
		pause_();
	struct member *me = &c->region->members[c->rank];
	if (__atomic_load_n(&me->joined, __ATOMIC_ACQUIRE))
		return fails(invalidUsage, "the rank has already checked in");
	const char *host = getenv("NCCL_HOSTID");
	snprintf(me->host, sizeof me->host, "%s", host ? host : "");
	cudaDeviceGetPCIBusId(me->bus, sizeof me->bus, c->device);
	if (!faulty(c, "init", 0))
		__atomic_store_n(&me->joined, 1, __ATOMIC_RELEASE);
	for (int r = 0; r < c->n; r++)
		while (!__atomic_load_n(&c->region->members[r].joined, __ATOMIC_ACQUIRE)) {
			if (now() >= end) {
				unlink(c->path);
				return fails(systemError, "a rank has not checked in");
			}
			pause_();
		}
	unlink(c->path);
	for (int r = 0; r < c->n; r++) {
		struct member *other = &c->region->members[r];
		if (r != c->rank && strcmp(other->bus, me->bus) == 0 && strcmp(other->host, me->host) == 0)
			return fails(invalidUsage, "Duplicate GPU detected");
	}
	return success;
}

static int newComm(void **comm, int n, const char *name, int rank, struct comm **made) {
	if (n < 1 || n > maxRanks || rank < 0 || rank >= n)
		return fails(invalidArgument, "invalid number of ranks or rank");
	struct comm *c = calloc(1, sizeof *c);
	const char *folder = getenv("STANDIN_NCCL_FOLDER");
	snprintf(c->path, sizeof c->path, "%s/%s", folder && *folder ? folder : "/tmp", name);
	c->rank = rank;
	c->n = n;
	c->blocks = defaultBlocks;
	cudaGetDevice(&c->device);
	int code = openRegion(c);
	if (code != success) {
		free(c);
		return code;
	}
	pthread_mutex_lock(&lock);
	c->next = comms;
	comms = c;
	pthread_mutex_unlock(&lock);
	*comm = *made = c;
	return success;
}

// switchTo makes a device the current one of the thread, unless it is, and returns the one before. So NCCL makes
// the context of device 0 if it ends a communicator of another device in a thread without a context.
static int switchTo(int device) {
	int before;
	cudaGetDevice(&before);
	if (before != device)
		cudaSetDevice(device);
	return before;
}

static void forget(struct comm *c) {
	pthread_mutex_lock(&lock);
	for (struct comm **at = &comms; *at; at = &(*at)->next)
		if (*at == c) {
			*at = c->next;
			break;
		}
	pthread_mutex_unlock(&lock);
	// The memory stays, because work on a stream may still refer to it.
}

int ncclCommInitRank(void **comm, int n, struct uniqueId id, int rank) {
	struct comm *c = NULL;
	int code = newComm(comm, n, id.bytes, rank, &c);
	if (code == success && c && (code = meet(c)) != success) {
		*comm = NULL;
		forget(c);
	}
	return code;
}

#ifndef STANDIN_OLD

struct config {
	size_t size;
	unsigned magic, version;
	int blocking;
	int clusterSize, minBlocks, maxBlocks; // as in NCCL 2.17
	const char *network;
};

int ncclCommInitRankConfig(void **comm, int n, struct uniqueId id, int rank, struct config *config) {
	standin_begins("ncclCommInitRankConfig");
	if (config->magic != 0xcafebeef)
		return fails(invalidArgument, "the configuration is not initialized");
	if (config->blocking != 1)
		standin_violation("ncclCommInitRankConfig: each launch of a nonblocking communicator starts a thread");
	if (config->version >= 21700 && (config->size < sizeof *config || config->maxBlocks < 1))
		return fails(invalidArgument, "the configuration is too short or maxCTAs is not positive");
	int code = ncclCommInitRank(comm, n, id, rank);
	if (code == success && config->version >= 21700 && config->maxBlocks < defaultBlocks)
		((struct comm *)*comm)->blocks = config->maxBlocks;
	const char *blocking = getenv("NCCL_COMM_BLOCKING"); // it overrides the configuration
	return code == success && blocking && !strcmp(blocking, "0") ? inProgress : code;
}

const char *ncclGetLastError(void *comm) {
	(void)comm;
	return detail;
}

#endif

// left reports whether all ranks have called ncclCommDestroy.
static int left(struct comm *c) {
	for (int r = 0; r < c->n; r++)
		if (!__atomic_load_n(&c->region->members[r].left, __ATOMIC_ACQUIRE))
			return 0;
	return 1;
}

int ncclCommGetAsyncError(void *comm, int *code) {
	struct comm *c = checked(comm, "ncclCommGetAsyncError");
	if (c->grouped && depth > 0)
		standin_violation("ncclCommGetAsyncError: operations of the communicator wait for ncclGroupEnd");
	if (c->questions > 0 && --c->questions == 0)
		__atomic_store_n(&c->async, remoteError, __ATOMIC_RELEASE);
	*code = __atomic_load_n(&c->async, __ATOMIC_ACQUIRE);
	if (*code == success && c->n > 1 && __atomic_load_n(&c->region->aborted, __ATOMIC_ACQUIRE))
		*code = remoteError;
	return success;
}

int ncclCommCount(void *comm, int *n) {
	*n = checked(comm, "ncclCommCount")->n;
	return success;
}

int ncclCommUserRank(void *comm, int *rank) {
	*rank = checked(comm, "ncclCommUserRank")->rank;
	return success;
}

int ncclCommCuDevice(void *comm, int *device) {
	*device = checked(comm, "ncclCommCuDevice")->device;
	return success;
}

int ncclCommDestroy(void *comm) {
	struct comm *c = enter(comm, "ncclCommDestroy");
	int before = switchTo(c->device);
	__atomic_store_n(&c->region->members[c->rank].left, 1, __ATOMIC_RELEASE);
	while (!left(c) && !__atomic_load_n(&c->region->aborted, __ATOMIC_ACQUIRE))
		pause_();
	forget(c);
	switchTo(before);
	return success;
}

static int isIdle(int device) {
	pthread_mutex_lock(&lock);
	int idle = launched[device] == 0;
	pthread_mutex_unlock(&lock);
	return idle;
}

int ncclCommAbort(void *comm) {
	standin_begins("ncclCommAbort");
	struct comm *c = checked(comm, "ncclCommAbort");
	int before = switchTo(c->device);
	c->abortedAt = now();
	if (__atomic_exchange_n(&c->aborting, 1, __ATOMIC_ACQ_REL))
		standin_violation("ncclCommAbort: the communicator was aborted before");
	__atomic_store_n(&c->region->aborted, 1, __ATOMIC_RELEASE);
	int version;
	ncclGetVersion(&version);
	if (version < 22200) {
		standin_lock_driver(c->device);
		while (!isIdle(c->device))
			pause_();
		standin_unlock_driver(c->device);
	}
	forget(c);
	switchTo(before);
	return success; // its work on the device may go on for a while
}

// ---- arithmetic

static double fromHalf(uint16_t h) {
	int exponent = h >> 10 & 31, mantissa = h & 1023;
	double v = exponent == 31 ? (mantissa ? NAN : INFINITY)
		: exponent ? ldexp(1024 + mantissa, exponent - 25) : ldexp(mantissa, -24);
	return h >> 15 ? -v : v;
}

static uint16_t toHalf(double v) {
	uint16_t sign = signbit(v) ? 0x8000 : 0;
	v = fabs(v);
	if (isnan(v))
		return 0x7e00;
	if (v >= 65520)
		return sign | 0x7c00;
	if (v < ldexp(1, -14))
		return sign | (uint16_t)nearbyint(ldexp(v, 24));
	int exponent;
	double m = frexp(v, &exponent); // v = m * 2^exponent with m in [0.5, 1)
	uint16_t mantissa = (uint16_t)nearbyint(ldexp(m, 11));
	return sign | (uint16_t)(((exponent + 13) << 10) + mantissa);
}

static double fromBfloat(uint16_t b) {
	uint32_t bits = (uint32_t)b << 16;
	float f;
	memcpy(&f, &bits, 4);
	return f;
}

static uint16_t toBfloat(double v) {
	float f = (float)v;
	uint32_t bits;
	memcpy(&bits, &f, 4);
	if (isnan(v))
		return 0x7fc0;
	return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

static double loadFloat(int type, const char *p) {
	uint16_t h;
	float f;
	double d;
	switch (type) {
	case float16: memcpy(&h, p, 2); return fromHalf(h);
	case bfloat16: memcpy(&h, p, 2); return fromBfloat(h);
	case float32: memcpy(&f, p, 4); return f;
	}
	memcpy(&d, p, 8);
	return d;
}

static void storeFloat(int type, char *p, double v) {
	uint16_t h;
	float f = (float)v;
	switch (type) {
	case float16: h = toHalf(v); memcpy(p, &h, 2); return;
	case bfloat16: h = toBfloat(v); memcpy(p, &h, 2); return;
	case float32: memcpy(p, &f, 4); return;
	}
	memcpy(p, &v, 8);
}

static int isFloat(int type) { return type == float16 || type == float32 || type == float64 || type == bfloat16; }

static int isSigned(int type) { return type == int8 || type == int32 || type == int64; }

static uint64_t loadInt(int type, const char *p) {
	uint64_t v = 0;
	memcpy(&v, p, sizeOf(type));
	if (type == int8)
		return (uint64_t)(int64_t)(int8_t)v;
	if (type == int32)
		return (uint64_t)(int64_t)(int32_t)v;
	return v;
}

static double combineFloats(int op, double a, double b) {
	switch (op) {
	case prod: return a * b;
	case max: return isnan(a) || isnan(b) ? NAN : fmax(a, b);
	case min: return isnan(a) || isnan(b) ? NAN : fmin(a, b);
	}
	return a + b;
}

static uint64_t combineInts(int type, int op, uint64_t a, uint64_t b) {
	int less = isSigned(type) ? (int64_t)a < (int64_t)b : a < b;
	switch (op) {
	case prod: return a * b;
	case max: return less ? b : a;
	case min: return less ? a : b;
	}
	return a + b;
}

// reduce stores element i, reduced over the windows of all ranks, at p.
static void reduceElement(struct comm *c, int type, int op, size_t i, char *p) {
	size_t size = sizeOf(type);
	if (isFloat(type)) {
		double v = loadFloat(type, c->region->members[0].window + i * size);
		for (int r = 1; r < c->n; r++)
			v = combineFloats(op, v, loadFloat(type, c->region->members[r].window + i * size));
		storeFloat(type, p, v); // an average was divided before, as NCCL does
		return;
	}
	uint64_t v = loadInt(type, c->region->members[0].window + i * size);
	for (int r = 1; r < c->n; r++)
		v = combineInts(type, op, v, loadInt(type, c->region->members[r].window + i * size));
	memcpy(p, &v, size);
	if (op != avg)
		return;
	v = loadInt(type, p); // the sum is a number of the type
	v = isSigned(type) ? (uint64_t)((int64_t)v / c->n) : v / (uint64_t)c->n;
	memcpy(p, &v, size);
}

// multiply multiplies n elements by a factor.
static void multiply(int type, char *p, size_t n, double factor) {
	for (size_t i = 0; i < n; i++, p += sizeOf(type)) {
		if (isFloat(type)) {
			storeFloat(type, p, loadFloat(type, p) * factor);
		} else {
			uint64_t v = loadInt(type, p) * (uint64_t)(int64_t)factor;
			memcpy(p, &v, sizeOf(type));
		}
	}
}

// ---- multiprocessors

// blocksOf returns the multiprocessors of an operation. For one rank NCCL copies, without a kernel.
static int blocksOf(struct comm *c) { return c->n == 1 ? 0 : c->blocks; }

// occupy begins an operation if enough multiprocessors are free, and reports whether it has begun.
static int occupy(struct comm *c, int *begun) {
	if (*begun)
		return 1;
	int all = 0;
	cudaDeviceGetAttribute(&all, 16, c->device);
	pthread_mutex_lock(&lock);
	if (occupied[c->device] + blocksOf(c) <= all) {
		occupied[c->device] += blocksOf(c);
		*begun = 1;
	}
	pthread_mutex_unlock(&lock);
	return *begun;
}

// launch enqueues an operation, whose end vacate records.
static void launch(struct comm *c, void *stream, int (*run)(void *), void *arg, const char *call) {
	pthread_mutex_lock(&lock);
	launched[c->device]++;
	pthread_mutex_unlock(&lock);
	standin_enqueue(stream, run, arg, call);
}

static void vacate(struct comm *c, int begun) {
	pthread_mutex_lock(&lock);
	if (begun)
		occupied[c->device] -= blocksOf(c);
	launched[c->device]--;
	pthread_mutex_unlock(&lock);
}

// ---- collectives

struct collective {
	struct comm *comm;
	const char *in;
	char *out;
	long call[5]; // kind, count, type, reduction, root
	double factor;
	size_t done, chunk; // elements
	int stage;
	int begun, stuck, slow;
};

static size_t inputElements(struct collective *k) {
	return (size_t)k->call[1] * (k->call[0] == opReduceScatter ? (size_t)k->comm->n : 1);
}

static int arrived(struct comm *c) {
	for (int r = 0; r < c->n; r++)
		if (__atomic_load_n(&c->region->members[r].arrived, __ATOMIC_ACQUIRE) < c->arrived)
			return 0;
	return 1;
}

static void arrive(struct comm *c) {
	__atomic_store_n(&c->region->members[c->rank].arrived, ++c->arrived, __ATOMIC_RELEASE);
}

static void compareCalls(struct collective *k) {
	struct comm *c = k->comm;
	for (int r = 0; r < c->n; r++) {
		long *other = c->region->members[r].call;
		if (memcmp(other, k->call, sizeof k->call) != 0)
			standin_violation("rank %d runs operation %ld with count %ld, type %ld, reduction %ld, root %ld, but rank %d "
				"runs %ld, %ld, %ld, %ld, %ld", c->rank, k->call[0], k->call[1], k->call[2], k->call[3], k->call[4], r,
				other[0], other[1], other[2], other[3], other[4]);
	}
}

static void offer(struct collective *k) {
	struct comm *c = k->comm;
	struct member *me = &c->region->members[c->rank];
	int type = (int)k->call[2];
	size_t size = sizeOf(type), left = inputElements(k) - k->done;
	k->chunk = left < window / size ? left : window / size;
	memcpy(me->call, k->call, sizeof me->call);
	if (k->call[0] == opBroadcast && k->call[4] != c->rank)
		return;
	memcpy(me->window, k->in + k->done * size, k->chunk * size);
	if (k->factor != 1)
		multiply(type, me->window, k->chunk, k->factor);
}

static void take(struct collective *k) {
	struct comm *c = k->comm;
	int type = (int)k->call[2], op = (int)k->call[3];
	size_t size = sizeOf(type), count = (size_t)k->call[1];
	switch (k->call[0]) {
	case opBroadcast:
		memcpy(k->out + k->done * size, c->region->members[k->call[4]].window, k->chunk * size);
		return;
	case opAllGather:
		for (int r = 0; r < c->n; r++)
			memcpy(k->out + ((size_t)r * count + k->done) * size, c->region->members[r].window, k->chunk * size);
		return;
	case opReduce:
		if (k->call[4] != c->rank)
			return;
	}
	for (size_t i = 0; i < k->chunk; i++) {
		size_t at = k->done + i;
		if (k->call[0] == opReduceScatter) {
			if (at / count != (size_t)c->rank)
				continue;
			at %= count;
		}
		reduceElement(c, type, op, i, k->out + at * size);
	}
}

static int runCollective(void *arg) {
	struct collective *k = arg;
	struct comm *c = k->comm;
	if (__atomic_load_n(&c->aborting, __ATOMIC_ACQUIRE)) {
		if (k->slow && now() < c->abortedAt + 1)
			return 1;
		if (k->slow)
			memset(k->out, 0x5a, (size_t)k->call[1] * sizeOf((int)k->call[2]));
		vacate(c, k->begun);
		free(k);
		return 0;
	}
	if (!occupy(c, &k->begun) || k->stuck)
		return 1;
	while (1) {
		switch (k->stage) {
		case 0:
			offer(k);
			arrive(c);
			k->stage = 1;
			// fall through
		case 1:
			if (!arrived(c))
				return 1;
			compareCalls(k);
			take(k);
			arrive(c);
			k->stage = 2;
			// fall through
		case 2:
			if (!arrived(c))
				return 1;
			k->stage = 0;
			if ((k->done += k->chunk) == inputElements(k)) {
				vacate(c, k->begun);
				free(k);
				return 0;
			}
		}
	}
}

// ---- messages and groups

struct message {
	int sends, peer;
	char *data;
	size_t size, done;
	struct message *next;
};

struct exchange {
	struct comm *comm;
	void *stream;
	struct message *first, **end;
	int begun, stuck;
	struct exchange *next;
};

// deferred is a collective that waits for the end of the group.
struct deferred {
	struct comm *comm;
	void *stream, *collective;
	struct deferred *next;
};

static __thread struct exchange *queued; // the messages of the group of this thread
static __thread struct deferred *deferred, *lastDeferred;

// move moves the next letter of m, if that is possible. It reports whether m has ended.
static int move(struct comm *c, struct message *m) {
	struct mailbox *box = m->sends ? &c->region->mail[c->rank][m->peer] : &c->region->mail[m->peer][c->rank];
	long sent = __atomic_load_n(&box->sent, __ATOMIC_ACQUIRE);
	long received = __atomic_load_n(&box->received, __ATOMIC_ACQUIRE);
	if (m->sends && sent == received) {
		size_t left = m->size - m->done;
		box->total = m->size;
		box->size = left < letter ? left : letter;
		memcpy(box->letter, m->data + m->done, box->size);
		m->done += box->size;
		__atomic_store_n(&box->sent, sent + 1, __ATOMIC_RELEASE);
		return m->done == m->size;
	}
	if (!m->sends && sent > received) {
		if (box->total != m->size)
			standin_violation("rank %d receives %zu bytes from rank %d, which sends %zu", c->rank, m->size, m->peer,
				box->total);
		memcpy(m->data + m->done, box->letter, box->size);
		m->done += box->size;
		__atomic_store_n(&box->received, received + 1, __ATOMIC_RELEASE);
		return m->done == m->size;
	}
	return 0;
}

static int runExchange(void *arg) {
	struct exchange *x = arg;
	int aborted = __atomic_load_n(&x->comm->aborting, __ATOMIC_ACQUIRE);
	if (!aborted && (!occupy(x->comm, &x->begun) || x->stuck))
		return 1;
	// The first message to or from each peer moves; the others follow in order.
	char sent[maxRanks] = {0}, received[maxRanks] = {0};
	for (struct message **at = &x->first; *at;) {
		struct message *m = *at;
		char *waits = m->sends ? &sent[m->peer] : &received[m->peer];
		if (aborted || (!*waits && move(x->comm, m))) {
			*at = m->next;
			free(m);
			continue;
		}
		*waits = 1;
		at = &m->next;
	}
	if (x->first)
		return 1;
	vacate(x->comm, x->begun);
	free(x);
	return 0;
}

int ncclGroupStart(void) {
	depth++;
	return success;
}

int ncclGroupEnd(void) {
	if (depth == 0)
		standin_violation("ncclGroupEnd without ncclGroupStart");
	if (--depth > 0)
		return success;
	while (deferred) {
		struct deferred *d = deferred;
		deferred = d->next;
		d->comm->grouped = 0;
		launch(d->comm, d->stream, runCollective, d->collective, "ncclGroupEnd");
		free(d);
	}
	while (queued) {
		struct exchange *x = queued;
		queued = x->next;
		x->comm->grouped = 0;
		launch(x->comm, x->stream, runExchange, x, "ncclGroupEnd");
	}
	return success;
}

// use returns the memory behind n bytes that an operation reads or writes.
static void *use(struct comm *c, void *stream, const void *p, size_t n, int writes, const char *call) {
	struct { int type, device; void *devicePointer, *hostPointer; } a;
	cudaPointerGetAttributes(&a, p);
	if (a.device >= 0 && a.device != c->device)
		standin_violation("%s: the memory is on device %d, and the communicator on device %d", call, a.device, c->device);
	standin_access(stream, p, n, writes, call);
	return standin_host(p, n, call);
}

// begin counts an operation and injects faults. It returns an error code.
static int begin(struct comm *c, int *stuck) {
	if (standin_broken())
		return fails(cudaError, "Cuda failure 'an illegal memory access was encountered'");
	long n = ++c->operations;
	*stuck = faulty(c, "hang", n) || faulty(c, "async", n) || faulty(c, "late", n) || faulty(c, "slow", n);
	if (faulty(c, "late", n))
		c->questions = 20;
	if (faulty(c, "async", n))
		__atomic_store_n(&c->async, remoteError, __ATOMIC_RELEASE);
	return faulty(c, "refuse", n) ? fails(internalError, "the test asked for this error") : success;
}

static int message(const void *data, size_t n, int type, int peer, int sends, void *comm, void *stream,
		const char *call) {
	struct comm *c = enter(comm, call);
	if (peer < 0 || peer >= c->n || type < 0 || type >= numTypes)
		return leave(c, fails(invalidArgument, "invalid peer or type"));
	if (n == 0)
		return leave(c, success);
	struct exchange **at = &queued;
	while (*at && ((*at)->comm != c || (*at)->stream != stream))
		at = &(*at)->next;
	if (!*at) {
		*at = calloc(1, sizeof **at);
		(*at)->comm = c;
		(*at)->stream = stream;
		(*at)->end = &(*at)->first;
		int code = begin(c, &(*at)->stuck);
		if (code != success) {
			free(*at);
			*at = NULL;
			return leave(c, code);
		}
	}
	struct message *m = calloc(1, sizeof *m);
	m->sends = sends;
	m->peer = peer;
	m->size = n * sizeOf(type);
	m->data = use(c, stream, data, m->size, !sends, call);
	*(*at)->end = m;
	(*at)->end = &m->next;
	c->grouped = 1;
	leave(c, success);
	if (depth == 0) {
		ncclGroupStart();
		return ncclGroupEnd();
	}
	return success;
}

int ncclSend(const void *data, size_t n, int type, int peer, void *comm, void *stream) {
	return message(data, n, type, peer, 1, comm, stream, "ncclSend");
}

int ncclRecv(void *data, size_t n, int type, int peer, void *comm, void *stream) {
	return message(data, n, type, peer, 0, comm, stream, "ncclRecv");
}

static int collective(int kind, const void *in, void *out, size_t n, int type, int op, int root, void *comm,
		void *stream, const char *call) {
	standin_called(call);
	struct comm *c = enter(comm, call);
	if (type < 0 || type >= numTypes || root < 0 || root >= c->n)
		return leave(c, fails(invalidArgument, "invalid type or root"));
	double factor = 1;
	if (op >= numOps) {
		int i = op - numOps;
		if (i >= c->numFactors || !c->made[i])
			standin_violation("%s: reduction %d does not exist", call, op);
		factor = c->factors[i];
		op = numOps; // the factors may differ between ranks
	} else if (op == avg && isFloat(type)) {
		char rounded[8];
		storeFloat(type, rounded, 1.0 / c->n);
		factor = loadFloat(type, rounded);
	}
	if (n == 0)
		return leave(c, success);
	struct collective *k = calloc(1, sizeof *k);
	int code = begin(c, &k->stuck);
	k->slow = faulty(c, "slow", c->operations);
	if (code != success) {
		free(k);
		return leave(c, code);
	}
	size_t bytes = n * sizeOf(type), all = bytes * (size_t)c->n;
	if (kind != opBroadcast || root == c->rank)
		k->in = use(c, stream, in, kind == opReduceScatter ? all : bytes, 0, call);
	if (kind != opReduce || root == c->rank)
		k->out = use(c, stream, out, kind == opAllGather ? all : bytes, 1, call);
	k->comm = c;
	k->factor = factor;
	long values[] = {kind, (long)n, type, op, root};
	memcpy(k->call, values, sizeof values);
	if (depth > 0) {
		struct deferred *d = malloc(sizeof *d);
		*d = (struct deferred){c, stream, k, NULL};
		if (deferred)
			lastDeferred->next = d;
		else
			deferred = d;
		lastDeferred = d;
		c->grouped = 1;
	} else {
		launch(c, stream, runCollective, k, call);
	}
	return leave(c, success);
}

int ncclAllReduce(const void *in, void *out, size_t n, int type, int op, void *comm, void *stream) {
	return collective(opAllReduce, in, out, n, type, op, 0, comm, stream, "ncclAllReduce");
}

int ncclReduce(const void *in, void *out, size_t n, int type, int op, int root, void *comm, void *stream) {
	return collective(opReduce, in, out, n, type, op, root, comm, stream, "ncclReduce");
}

int ncclBroadcast(const void *in, void *out, size_t n, int type, int root, void *comm, void *stream) {
	return collective(opBroadcast, in, out, n, type, 0, root, comm, stream, "ncclBroadcast");
}

int ncclAllGather(const void *in, void *out, size_t n, int type, void *comm, void *stream) {
	return collective(opAllGather, in, out, n, type, 0, 0, comm, stream, "ncclAllGather");
}

int ncclReduceScatter(const void *in, void *out, size_t n, int type, int op, void *comm, void *stream) {
	return collective(opReduceScatter, in, out, n, type, op, 0, comm, stream, "ncclReduceScatter");
}

#ifndef STANDIN_OLD

// ---- reductions with a factor

int ncclRedOpCreatePreMulSum(int *op, void *scalar, int type, int residence, void *comm) {
	struct comm *c = enter(comm, "ncclRedOpCreatePreMulSum");
	if (residence != 1)
		return leave(c, fails(invalidArgument, "the stand-in reads factors only from host memory"));
	int i = 0;
	while (i < c->numFactors && c->made[i])
		i++;
	if (i == (int)(sizeof c->made / sizeof c->made[0]))
		standin_violation("ncclRedOpCreatePreMulSum: too many reductions were not destroyed");
	if (i == c->numFactors)
		c->numFactors++;
	c->made[i] = 1;
	c->factors[i] = isFloat(type) ? loadFloat(type, scalar) : (double)(int64_t)loadInt(type, scalar);
	*op = numOps + i;
	return leave(c, success);
}

int ncclRedOpDestroy(int op, void *comm) {
	struct comm *c = enter(comm, "ncclRedOpDestroy");
	int i = op - numOps;
	if (i < 0 || i >= c->numFactors || !c->made[i])
		standin_violation("ncclRedOpDestroy: reduction %d does not exist", op);
	c->made[i] = 0;
	return leave(c, success);
}

#endif
