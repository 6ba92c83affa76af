// A program that uses the stand-ins wrongly in the way that its argument says. Each way must end the process.
#include <pthread.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct uniqueId {
	char bytes[128];
};
struct config {
	size_t size;
	unsigned magic, version;
	int blocking;
};

struct attributes {
	int srcAccessOrder, srcLocHint[2], dstLocHint[2];
	unsigned flags;
};

int cudaSetDevice(int);
int cudaMalloc(void **, size_t);
int cudaFree(void *);
int cudaMemcpyAsync(void *, const void *, size_t, int, void *);
int cudaMemsetAsync(void *, int, size_t, void *);
int cudaMemcpyBatchAsync(void **, void **, size_t *, size_t, struct attributes *, size_t *, size_t, size_t *,
	void *);
int cudaStreamCreateWithFlags(void **, unsigned);
int cudaStreamDestroy(void *);
int cudaStreamSynchronize(void *);
int cudaStreamWaitEvent(void *, void *, unsigned);
int cudaEventCreateWithFlags(void **, unsigned);
int cudaEventRecord(void *, void *);
int cudaEventSynchronize(void *);
int cudaEventDestroy(void *);
int ncclGetUniqueId(struct uniqueId *);
int ncclCommInitRank(void **, int, struct uniqueId, int);
int ncclCommInitRankConfig(void **, int, struct uniqueId, int, struct config *);
int ncclCommAbort(void *);
int ncclCommDestroy(void *);
int ncclCommGetAsyncError(void *, int *);
int ncclGroupStart(void);
int ncclGroupEnd(void);
int ncclAllReduce(const void *, void *, size_t, int, int, void *, void *);
int ncclSend(const void *, size_t, int, int, void *, void *);
int ncclRedOpDestroy(int, void *);

enum { bytes = 4096, float32 = 7, sum = 0, defaultKind = 4 };

static void *stream, *other, *event, *buffer, *comm;
static char host[bytes];

static void reduce(void *on) { ncclAllReduce(buffer, buffer, bytes / 4, float32, sum, comm, on); }

// use calls the communicator until the process ends.
static void *use(void *unused) {
	(void)unused;
	void *mine;
	cudaMalloc(&mine, bytes);
	for (int i = 0; i < 10000000; i++)
		ncclAllReduce(mine, mine, 1, float32, sum, comm, stream);
	return NULL;
}

// A correct batch of two copies, which a test spoils.
static char *to[2], *from[2];
static size_t sizes[2] = {16, 16}, indexes[2] = {0, 1}, failed;
static struct attributes order[2] = {{.srcAccessOrder = 1}, {.srcAccessOrder = 1}};

static void batch(size_t count, size_t numAttributes, void *on) {
	cudaMemcpyBatchAsync((void **)to, (void **)from, sizes, count, order, indexes, numAttributes, &failed, on);
}

static void misuse(const char *way) {
	int code;
	for (int i = 0; i < 2; i++) {
		to[i] = (char *)buffer + 16 * i;
		from[i] = to[i] + 1024;
	}
	if (strcmp(way, "nothing") == 0) {
		cudaMemsetAsync(buffer, 0, bytes, stream);
		reduce(stream);
		cudaEventRecord(event, stream);
		cudaStreamWaitEvent(other, event, 0);
		cudaMemcpyAsync(host, buffer, bytes, defaultKind, other);
		cudaEventRecord(event, other);
		cudaStreamWaitEvent(NULL, event, 0);
		cudaMemsetAsync(buffer, 0, bytes, NULL);
		cudaStreamSynchronize(NULL);
		cudaMemsetAsync(buffer, 0, bytes, stream);
		batch(2, 2, stream);
		batch(1, 1, stream);
		ncclCommDestroy(comm);
		cudaStreamDestroy(stream);
		cudaEventDestroy(event);
		cudaFree(buffer);
	} else if (strcmp(way, "memory freed twice") == 0) {
		cudaFree(buffer);
		cudaFree(buffer);
	} else if (strcmp(way, "memory that was freed") == 0) {
		cudaFree(buffer);
		reduce(stream);
	} else if (strcmp(way, "beyond the end") == 0) {
		cudaMemcpyAsync(host, (char *)buffer + 1, bytes, defaultKind, stream);
	} else if (strcmp(way, "wrong kind of copy") == 0) {
		cudaMemcpyAsync(buffer, host, bytes, 2, stream);
	} else if (strcmp(way, "stream destroyed twice") == 0) {
		cudaStreamDestroy(stream);
		cudaStreamDestroy(stream);
	} else if (strcmp(way, "event destroyed twice") == 0) {
		cudaEventDestroy(event);
		cudaEventDestroy(event);
	} else if (strcmp(way, "wrong current device") == 0) {
		cudaSetDevice(1);
		cudaMemsetAsync(buffer, 0, bytes, stream);
	} else if (strcmp(way, "event of another device") == 0) {
		cudaSetDevice(1);
		cudaEventCreateWithFlags(&event, 2);
		cudaSetDevice(0);
		cudaEventRecord(event, stream);
	} else if (strcmp(way, "memory of another device") == 0) {
		cudaSetDevice(1);
		cudaMalloc(&buffer, bytes);
		cudaSetDevice(0);
		reduce(stream);
	} else if (strcmp(way, "no order of copies") == 0) {
		cudaMemsetAsync(buffer, 0, bytes, stream);
		cudaMemcpyAsync(host, buffer, bytes, defaultKind, other);
	} else if (strcmp(way, "no order with a batch") == 0) {
		batch(2, 1, stream);
		cudaMemsetAsync(from[1], 0, 1, other);
	} else if (strcmp(way, "no order with the default stream") == 0) {
		cudaMemsetAsync(buffer, 0, bytes, NULL);
		reduce(stream);
	} else if (strcmp(way, "stream that waits for the default stream") == 0) {
		cudaStreamCreateWithFlags(&stream, 0);
	} else if (strcmp(way, "stream of each thread") == 0) {
		cudaMemsetAsync(buffer, 0, bytes, (void *)2);
	} else if (strcmp(way, "default stream destroyed") == 0) {
		cudaStreamDestroy(NULL);
	} else if (strcmp(way, "batch on the default stream") == 0) {
		batch(2, 1, NULL);
	} else if (strcmp(way, "empty batch") == 0) {
		batch(0, 1, stream);
	} else if (strcmp(way, "batch without attributes") == 0) {
		batch(2, 0, stream);
	} else if (strcmp(way, "attributes for later copies") == 0) {
		indexes[0] = 1;
		batch(2, 1, stream);
	} else if (strcmp(way, "attributes without an order") == 0) {
		order[0].srcAccessOrder = 0;
		batch(2, 1, stream);
	} else if (strcmp(way, "copy without bytes") == 0) {
		sizes[1] = 0;
		batch(2, 1, stream);
	} else if (strcmp(way, "copies to the same place") == 0) {
		to[1] = to[0] + 15;
		batch(2, 1, stream);
	} else if (strcmp(way, "copy of a copy") == 0) {
		from[1] = to[0];
		batch(2, 1, stream);
	} else if (strcmp(way, "batch with memory that was freed") == 0) {
		cudaFree(buffer);
		batch(2, 1, stream);
	} else if (strcmp(way, "batch of an old runtime") == 0) {
		setenv("STANDIN_CUDA_VERSION", "12060", 1);
		batch(2, 1, stream);
	} else if (strcmp(way, "batch as in CUDA 12") == 0) {
		setenv("STANDIN_CUDA_VERSION", "13000", 1);
		batch(2, 1, stream);
	} else if (strcmp(way, "no order with an operation") == 0) {
		reduce(stream);
		cudaMemcpyAsync(host, buffer, bytes, defaultKind, other);
	} else if (strcmp(way, "event before the work") == 0) {
		cudaEventRecord(event, stream);
		reduce(stream);
		cudaEventSynchronize(event);
		cudaMemsetAsync(buffer, 0, bytes, other);
	} else if (strcmp(way, "group without end") == 0) {
		ncclGroupStart();
		reduce(stream);
		ncclCommGetAsyncError(comm, &code);
	} else if (strcmp(way, "messages without end") == 0) {
		ncclGroupStart();
		ncclSend(buffer, 1, float32, 0, comm, stream);
		ncclCommGetAsyncError(comm, &code);
	} else if (strcmp(way, "end without group") == 0) {
		ncclGroupEnd();
	} else if (strcmp(way, "use after abort") == 0) {
		ncclCommAbort(comm);
		reduce(stream);
	} else if (strcmp(way, "aborted twice") == 0) {
		ncclCommAbort(comm);
		ncclCommAbort(comm);
	} else if (strcmp(way, "destroyed twice") == 0) {
		ncclCommDestroy(comm);
		ncclCommDestroy(comm);
	} else if (strcmp(way, "nonblocking") == 0) {
		struct uniqueId id;
		struct config c = {sizeof c, 0xcafebeef, 21400, 0};
		ncclGetUniqueId(&id);
		ncclCommInitRankConfig(&comm, 1, id, 0, &c);
	} else if (strcmp(way, "two threads") == 0) {
		pthread_t thread;
		pthread_create(&thread, NULL, use, NULL);
		use(NULL);
	} else if (strcmp(way, "reduction that does not exist") == 0) {
		ncclRedOpDestroy(7, comm);
	}
}

int main(int argc, char **argv) {
	struct uniqueId id;
	cudaStreamCreateWithFlags(&stream, 1);
	cudaStreamCreateWithFlags(&other, 1);
	cudaEventCreateWithFlags(&event, 2);
	cudaMalloc(&buffer, bytes);
	ncclGetUniqueId(&id);
	if (argc != 2 || ncclCommInitRank(&comm, 1, id, 0) != 0)
		return 2;
	misuse(argv[1]);
	return 0;
}
