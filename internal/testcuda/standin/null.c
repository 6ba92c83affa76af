// A stand-in for libcudart and libnccl with which everything has ended at once. Nothing is checked or copied. It
// costs no time, so what a program costs with it is the program's own.
#include <stddef.h>
#include <stdlib.h>

static char thing; // a stream, an event and a communicator

int cudaGetDeviceCount(int *n) { return *n = 1, 0; }
int cudaSetDevice(int device) { return (void)device, 0; }
int cudaGetLastError(void) { return 0; }
const char *cudaGetErrorName(int code) { return (void)code, ""; }
const char *cudaGetErrorString(int code) { return (void)code, ""; }
int cudaRuntimeGetVersion(int *v) { return *v = 12080, 0; }
int cuDriverGetVersion(int *v) { return *v = 12080, 0; }
int cudaDeviceGetAttribute(int *v, int what, int device) { return (void)what, (void)device, *v = 132, 0; }
int cudaMemGetInfo(size_t *unused, size_t *total) { return *unused = *total = 1 << 30, 0; }
int cudaMalloc(void **p, size_t n) { return *p = malloc(n), 0; }
int cudaFree(void *p) { return free(p), 0; }
int cudaHostAlloc(void **p, size_t n, unsigned flags) { return (void)flags, *p = malloc(n), 0; }
int cudaFreeHost(void *p) { return free(p), 0; }
int cudaMemcpyAsync(void) { return 0; }
int cudaMemcpyBatchAsync(void) { return 0; }
int cudaMemsetAsync(void) { return 0; }
int cudaDeviceGetStreamPriorityRange(int *least, int *greatest) { return *least = *greatest = 0; }
int cudaStreamCreateWithPriority(void **s, unsigned flags, int p) { return (void)flags, (void)p, *s = &thing, 0; }
int cudaStreamCreateWithFlags(void **s, unsigned flags) { return (void)flags, *s = &thing, 0; }
int cudaStreamDestroy(void) { return 0; }
int cudaStreamSynchronize(void) { return 0; }
int cudaStreamWaitEvent(void) { return 0; }
int cudaStreamIsCapturing(void *s, int *status) { return (void)s, *status = 0; }
int cudaThreadExchangeStreamCaptureMode(int *mode) { return *mode = 0; }
int cudaEventCreateWithFlags(void **e, unsigned flags) { return (void)flags, *e = &thing, 0; }
int cudaEventRecord(void) { return 0; }
int cudaEventQuery(void) { return 0; }
int cudaEventDestroy(void) { return 0; }
int cuDevicePrimaryCtxRetain(void **c, int device) { return (void)device, *c = &thing, 0; }
int cuCtxPushCurrent_v2(void) { return 0; }
int cuCtxPopCurrent_v2(void **c) { return *c = &thing, 0; }

int ncclGetVersion(int *v) { return *v = 22304, 0; }
int ncclGetUniqueId(void) { return 0; }
const char *ncclGetErrorString(int code) { return (void)code, ""; }
const char *ncclGetLastError(void *comm) { return (void)comm, ""; }
int ncclCommInitRankConfig(void **comm) { return *comm = &thing, 0; }
int ncclCommDestroy(void) { return 0; }
int ncclCommAbort(void) { return 0; }
int ncclCommGetAsyncError(void *comm, int *code) { return (void)comm, *code = 0; }
int ncclGroupStart(void) { return 0; }
int ncclGroupEnd(void) { return 0; }
int ncclAllReduce(void) { return 0; }
int ncclReduce(void) { return 0; }
int ncclBroadcast(void) { return 0; }
int ncclAllGather(void) { return 0; }
int ncclReduceScatter(void) { return 0; }
int ncclSend(void) { return 0; }
int ncclRecv(void) { return 0; }
int ncclRedOpCreatePreMulSum(int *op) { return *op = 5, 0; }
int ncclRedOpDestroy(void) { return 0; }
