//go:build mpi

package mpi

/*
#cgo pkg-config: ompi
#cgo CFLAGS: -O3 -Wno-stringop-overflow
#include <limits.h>
#include <math.h>
#include <signal.h>
#include <stdint.h>
#include <stdlib.h>
#include <mpi.h>
#ifdef OPEN_MPI
#include <mpi-ext.h>
#define HVD_OTHER_LIBRARY "MPICH"
#else
#define HVD_OTHER_LIBRARY "Open MPI"
#endif

// MPI allows a library to wait for other ranks when it makes a persistent request for a collective. So such
// requests are made only with libraries that do not wait. HVD_PERSISTENT is the maximum number for a
// communicator, which has one at a time.
#if defined OMPI_HAVE_MPI_EXT_PCOLLREQ
#define HVD_ALLREDUCE_INIT MPIX_Allreduce_init
enum { HVD_PERSISTENT = 32 }; // Open MPI 4.1 loses some KiB of memory for each
#elif defined MPICH_VERSION && MPI_VERSION >= 4
#define HVD_ALLREDUCE_INIT MPI_Allreduce_init
enum { HVD_PERSISTENT = 1000 };
#else
enum { HVD_PERSISTENT = 0 };
#endif

// All functions are static, because empi defines global symbols.

enum { HVD_SMALL = 4096 }; // size of hvd_comm.small

// hvd_comm is a communicator with the requests of the operation that runs on it.
typedef struct {
	MPI_Comm comm;
	int size, rank;
	int64_t limit;         // maximum number of elements or bytes in one call
	MPI_Request *requests; // pending requests
	int *peers;            // the ranks of c with which they exchange data, or -1 for collectives
	int pending, room;
	int tested;            // number of requests that have completed; the next one is tested
	int done, err;         // whether all requests have completed, and the error of a test
	int *counts, *places;  // arguments of the running call, one element for each rank
	uint64_t small[HVD_SMALL / sizeof(uint64_t)]; // the buffer of small reductions
	// Arguments of the last allreduce in small, or, if left is 0, of the one with the persistent request.
	int count;
	MPI_Datatype type;
	MPI_Op op;
	MPI_Request repeat;    // the persistent request for these arguments, or MPI_REQUEST_NULL
	int left;              // how many more persistent requests may be made
} hvd_comm;

// The numbers of reductions.
enum { HVD_SUM, HVD_MIN, HVD_MAX, HVD_PRODUCT, HVD_REDUCTIONS };

// HVD_REDUCTION defines a reduction of this package, where x and y are elements of two ranks.
#define HVD_REDUCTION(name, T, result)                                    \
	static void name(void *in, void *out, int *n, MPI_Datatype *type) \
	{                                                                 \
		const T *a = in;                                          \
		T *b = out;                                               \
		(void)type;                                               \
		for (int i = 0; i < *n; i++) {                            \
			T x = a[i], y = b[i];                             \
			b[i] = result;                                    \
		}                                                         \
	}

// Sums and products of 8 and 16 bits wrap around. Those of Open MPI 4.1 saturate if the processor has AVX.
HVD_REDUCTION(hvd_sum8, uint8_t, x + y)
HVD_REDUCTION(hvd_sum16, uint16_t, x + y)
HVD_REDUCTION(hvd_product8, uint8_t, x * y)
HVD_REDUCTION(hvd_product16, uint16_t, (unsigned)x * y)
// MPICH 4.0 compares unsigned integers of 8 and 16 bits as if they were signed.
HVD_REDUCTION(hvd_min_u8, uint8_t, x < y ? x : y)
HVD_REDUCTION(hvd_min_u16, uint16_t, x < y ? x : y)
HVD_REDUCTION(hvd_max_u8, uint8_t, x > y ? x : y)
HVD_REDUCTION(hvd_max_u16, uint16_t, x > y ? x : y)
// A NaN is both the minimum and the maximum, and -0 is less than +0. MPI does not say how it compares these.
#define HVD_FIRST(before, zero) \
	y != y ? y : x != x || x before y || (x == y && (signbit(x) != 0) == zero) ? x : y
HVD_REDUCTION(hvd_min_f32, float, HVD_FIRST(<, 1))
HVD_REDUCTION(hvd_min_f64, double, HVD_FIRST(<, 1))
HVD_REDUCTION(hvd_max_f32, float, HVD_FIRST(>, 0))
HVD_REDUCTION(hvd_max_f64, double, HVD_FIRST(>, 0))

// The numbers of tensor.DType.
enum {
	HVD_U8 = 1, HVD_I8, HVD_U16, HVD_I16, HVD_I32, HVD_I64, HVD_F16, HVD_BF16, HVD_F32, HVD_F64, HVD_BOOL,
	HVD_TYPES
};

// hvd_own has the reductions of this package, and hvd_own_op their MPI_Ops. For other reductions and types,
// the reductions of the MPI library are right.
static MPI_User_function *const hvd_own[HVD_REDUCTIONS][HVD_TYPES] = {
	[HVD_SUM] = {[HVD_U8] = hvd_sum8, [HVD_I8] = hvd_sum8, [HVD_U16] = hvd_sum16, [HVD_I16] = hvd_sum16},
	[HVD_PRODUCT] = {[HVD_U8] = hvd_product8, [HVD_I8] = hvd_product8, [HVD_U16] = hvd_product16,
		[HVD_I16] = hvd_product16},
	[HVD_MIN] = {[HVD_U8] = hvd_min_u8, [HVD_BOOL] = hvd_min_u8, [HVD_U16] = hvd_min_u16,
		[HVD_F32] = hvd_min_f32, [HVD_F64] = hvd_min_f64},
	[HVD_MAX] = {[HVD_U8] = hvd_max_u8, [HVD_BOOL] = hvd_max_u8, [HVD_U16] = hvd_max_u16,
		[HVD_F32] = hvd_max_f32, [HVD_F64] = hvd_max_f64},
};
static MPI_Op hvd_own_op[HVD_REDUCTIONS][HVD_TYPES];

static int hvd_create_ops(void) {
	int err = MPI_SUCCESS;
	for (int op = 0; op < HVD_REDUCTIONS; op++)
		for (int t = 0; t < HVD_TYPES && err == MPI_SUCCESS; t++)
			if (hvd_own[op][t])
				err = MPI_Op_create(hvd_own[op][t], 1, &hvd_own_op[op][t]);
	return err;
}

// hvd_handled are the signals for which the Go runtime has handlers that must stay.
static const int hvd_handled[] = {SIGABRT, SIGBUS, SIGFPE, SIGILL, SIGSEGV};
enum { HVD_HANDLED = sizeof hvd_handled / sizeof hvd_handled[0] };

// hvd_tune sets parameters of Open MPI that neither the user nor mpirun has set. By default, Open MPI 4.1
// reduces to one rank, which then broadcasts the result, unless there are at least 4 ranks and the tensor is
// large. Rabenseifner's algorithm takes about half of the time.
static void hvd_tune(void) {
#ifdef OPEN_MPI
	setenv("OMPI_MCA_coll_libnbc_iallreduce_algorithm", "3", 0);
#endif
}

// hvd_init_thread initializes MPI. Open MPI and UCX install handlers for signals. Without the handlers of the
// Go runtime, a nil pointer would end the program without a panic.
static int hvd_init_thread(int required, int *provided) {
	struct sigaction handlers[HVD_HANDLED];
	for (int i = 0; i < HVD_HANDLED; i++)
		sigaction(hvd_handled[i], NULL, &handlers[i]);
	hvd_tune();
	int err = MPI_Init_thread(NULL, NULL, required, provided);
	for (int i = 0; i < HVD_HANDLED; i++)
		sigaction(hvd_handled[i], &handlers[i], NULL);
	return err;
}

// hvd_use_signal_stacks lets all handlers run on the stack for signals. MPICH has one for SIGUSR1, which its
// mpiexec sends to the other processes when one has ended. It runs on the stack of a goroutine otherwise,
// and calls the handler of the Go runtime, which then ends the process.
static void hvd_use_signal_stacks(void) {
	struct sigaction a;
	for (int s = 1; s < NSIG; s++) {
		if (sigaction(s, NULL, &a) || a.sa_handler == SIG_DFL || a.sa_handler == SIG_IGN ||
		    a.sa_flags & SA_ONSTACK)
			continue;
		a.sa_flags |= SA_ONSTACK;
		sigaction(s, &a, NULL);
	}
}

// hvd_init initializes MPI unless the program has done so. It reports the level of thread support, whether
// this call has initialized MPI, and whether MPI was finalized before.
static int hvd_init(int required, int *provided, int *own, int *finalized) {
	int err, initialized;
	if ((err = MPI_Finalized(finalized)) != MPI_SUCCESS || *finalized)
		return err;
	if ((err = MPI_Initialized(&initialized)) != MPI_SUCCESS)
		return err;
	*own = !initialized;
	err = initialized ? MPI_Query_thread(provided) : hvd_init_thread(required, provided);
	hvd_use_signal_stacks();
	// MPI passes some errors of other communicators to the error handler of MPI_COMM_WORLD. The default one
	// ends the process. If the program has initialized MPI, it chooses the handler.
	if (err == MPI_SUCCESS && *own)
		err = MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
	return err == MPI_SUCCESS ? hvd_create_ops() : err;
}

// hvd_wrap completes c, whose communicator was just made. Errors on the communicator are returned, and do not
// end the process.
static int hvd_wrap(hvd_comm *c) {
	int err;
	c->limit = 1 << 30;
	c->repeat = MPI_REQUEST_NULL;
	c->left = HVD_PERSISTENT;
	if ((err = MPI_Comm_set_errhandler(c->comm, MPI_ERRORS_RETURN)) != MPI_SUCCESS ||
	    (err = MPI_Comm_size(c->comm, &c->size)) != MPI_SUCCESS ||
	    (err = MPI_Comm_rank(c->comm, &c->rank)) != MPI_SUCCESS)
		return err;
	c->counts = calloc(c->size, sizeof(int));
	c->places = calloc(c->size, sizeof(int));
	return MPI_SUCCESS;
}

// hvd_world makes a communicator of the processes of parent.
static int hvd_world(hvd_comm *c, MPI_Comm parent) {
	int err = MPI_Comm_dup(parent, &c->comm);
	return err == MPI_SUCCESS ? hvd_wrap(c) : err;
}

// hvd_sub makes a communicator of some ranks of world. All of them call it, with the same tag.
static int hvd_sub(const hvd_comm *world, const int *ranks, int n, int tag, hvd_comm *c) {
	MPI_Group all, some;
	int err = MPI_Comm_group(world->comm, &all);
	if (err != MPI_SUCCESS)
		return err;
	if ((err = MPI_Group_incl(all, n, ranks, &some)) == MPI_SUCCESS) {
		err = MPI_Comm_create_group(world->comm, some, tag, &c->comm);
		MPI_Group_free(&some);
	}
	MPI_Group_free(&all);
	return err == MPI_SUCCESS ? hvd_wrap(c) : err;
}

// hvd_parent returns the communicator with a Fortran handle, or that of all processes if handle is NULL.
static MPI_Comm hvd_parent(const int32_t *handle) {
	return handle ? MPI_Comm_f2c(*handle) : MPI_COMM_WORLD;
}

// hvd_forget frees the persistent request of c.
static int hvd_forget(hvd_comm *c) {
	return c->repeat == MPI_REQUEST_NULL ? MPI_SUCCESS : MPI_Request_free(&c->repeat);
}

static int hvd_free(hvd_comm *c) {
	int err = hvd_forget(c);
	if (err != MPI_SUCCESS)
		return err; // MPI may still refer to c->small
	err = MPI_Comm_free(&c->comm);
	free(c->requests);
	free(c->peers);
	free(c->counts);
	free(c->places);
	free(c);
	return err;
}

// hvd_groups stores for each rank the lowest rank with which it can share memory.
static int hvd_groups(const hvd_comm *world, int *groups) {
	MPI_Comm host;
	int lowest = world->rank;
	int err = MPI_Comm_split_type(world->comm, MPI_COMM_TYPE_SHARED, world->rank, MPI_INFO_NULL, &host);
	if (err != MPI_SUCCESS)
		return err;
	err = MPI_Bcast(&lowest, 1, MPI_INT, 0, host);
	MPI_Comm_free(&host);
	if (err == MPI_SUCCESS)
		err = MPI_Allgather(&lowest, 1, MPI_INT, groups, 1, MPI_INT, world->comm);
	return err;
}

// hvd_request_of returns the place for the request of the next call, which exchanges data with a peer.
static MPI_Request *hvd_request_of(hvd_comm *c, int peer) {
	if (c->pending == c->room) {
		c->room = 2 * c->room + 1;
		c->requests = realloc(c->requests, c->room * sizeof(MPI_Request));
		c->peers = realloc(c->peers, c->room * sizeof(int));
		if (!c->requests || !c->peers)
			abort();
	}
	c->peers[c->pending] = peer;
	c->requests[c->pending] = MPI_REQUEST_NULL;
	return &c->requests[c->pending++];
}

// hvd_request returns the place for the request of a collective.
static MPI_Request *hvd_request(hvd_comm *c) { return hvd_request_of(c, -1); }

// Numbers of tests in one call. A test takes about as long as a call from Go to C. Between ranks that begin
// an operation at the same time, a small one completes within the tests that follow its beginning, so that
// one call begins and completes it.
enum { hvd_first_tests = 32, hvd_tests = 8 };

// hvd_test_again tests up to the given number of times whether all requests have completed. It tests one
// after the other with MPI_Test, so that the request is known that has failed. After an error it does
// nothing.
static void hvd_test_again(hvd_comm *c, int tests) {
	c->done = 0;
	while (!c->done && c->err == MPI_SUCCESS && tests-- > 0) {
		int done = 1;
		while (c->tested < c->pending && done && c->err == MPI_SUCCESS) {
			c->err = MPI_Test(&c->requests[c->tested], &done, MPI_STATUS_IGNORE);
			c->tested += done && c->err == MPI_SUCCESS;
		}
		c->done = done && c->err == MPI_SUCCESS;
	}
	if (c->done)
		c->pending = c->tested = 0;
}

static void hvd_test(uintptr_t comm) { hvd_test_again((hvd_comm *)comm, hvd_tests); }

// hvd_begun tests the requests of c, to which a call of MPI has just added some. It returns err, the error of
// that call.
static int hvd_begun(hvd_comm *c, int err) {
	if (err == MPI_SUCCESS)
		hvd_test_again(c, hvd_first_tests);
	return err;
}

// hvd_type returns the MPI type for a number of tensor.DType. 16-bit floats have none.
static MPI_Datatype hvd_type(int dtype) {
	switch (dtype) {
	case HVD_U8: case HVD_BOOL: return MPI_UINT8_T;
	case HVD_I8: return MPI_INT8_T;
	case HVD_U16: return MPI_UINT16_T;
	case HVD_I16: return MPI_INT16_T;
	case HVD_I32: return MPI_INT32_T;
	case HVD_I64: return MPI_INT64_T;
	case HVD_F32: return MPI_FLOAT;
	case HVD_F64: return MPI_DOUBLE;
	}
	return MPI_DATATYPE_NULL;
}

static MPI_Op hvd_op(int op, int dtype) {
	if (hvd_own[op][dtype])
		return hvd_own_op[op][dtype];
	switch (op) {
	case HVD_SUM: return MPI_SUM;
	case HVD_PRODUCT: return MPI_PROD;
	case HVD_MIN: return MPI_MIN;
	}
	return MPI_MAX;
}

static int64_t hvd_min(int64_t a, int64_t b) { return a < b ? a : b; }

static int64_t hvd_sum(const int64_t *counts, int n) {
	int64_t sum = 0;
	for (int i = 0; i < n; i++)
		sum += counts[i];
	return sum;
}

// hvd_iallreduce begins an allreduce. If buf is c->small and the other arguments are those of the allreduce
// before it in c->small, it starts a persistent request, which takes less time than MPI_Iallreduce. When no
// more persistent requests may be made, it keeps the last one for later allreduces with the same arguments.
// All ranks decide the same, because they make the same calls.
static int hvd_iallreduce(hvd_comm *c, void *buf, int count, MPI_Datatype type, MPI_Op op) {
	MPI_Request *request = hvd_request(c);
#ifdef HVD_ALLREDUCE_INIT
	int err = MPI_SUCCESS;
	if (buf == c->small && count == c->count && type == c->type && op == c->op) {
		if (c->repeat == MPI_REQUEST_NULL) {
			err = HVD_ALLREDUCE_INIT(MPI_IN_PLACE, buf, count, type, op, c->comm, MPI_INFO_NULL,
				&c->repeat);
			c->left--;
		}
		*request = c->repeat;
		return err == MPI_SUCCESS ? MPI_Start(request) : err;
	}
	if (buf == c->small && c->left > 0) {
		c->count = count;
		c->type = type;
		c->op = op;
		if ((err = hvd_forget(c)) != MPI_SUCCESS)
			return err;
	}
#endif
	return MPI_Iallreduce(MPI_IN_PLACE, buf, count, type, op, c->comm, request);
}

// The functions below begin operations, add the requests to the communicator, and test them. They get
// addresses as numbers, because the Go caller keeps and pins Go memory until the requests have completed.
// The address of the communicator is a number too, because cgo checks each pointer to a struct with pointers
// in each call. Counts are in elements for reductions, else in bytes. Ranks compare counts with the limit in
// the same way, because they know the same counts.

static int hvd_allreduce(uintptr_t comm, uintptr_t buf, int64_t count, int size, int dtype, int op) {
	hvd_comm *c = (hvd_comm *)comm;
	int err = MPI_SUCCESS;
	for (int64_t at = 0; at < count && err == MPI_SUCCESS; at += c->limit)
		err = hvd_iallreduce(c, (void *)(buf + at * size), hvd_min(c->limit, count - at), hvd_type(dtype),
			hvd_op(op, dtype));
	return hvd_begun(c, err);
}

static int hvd_reduce(uintptr_t comm, uintptr_t buf, int64_t count, int size, int dtype, int op, int root) {
	hvd_comm *c = (hvd_comm *)comm;
	int err = MPI_SUCCESS;
	for (int64_t at = 0; at < count && err == MPI_SUCCESS; at += c->limit) {
		void *part = (void *)(buf + at * size);
		err = MPI_Ireduce(c->rank == root ? MPI_IN_PLACE : part, part, hvd_min(c->limit, count - at),
			hvd_type(dtype), hvd_op(op, dtype), root, c->comm, hvd_request(c));
	}
	return hvd_begun(c, err);
}

// hvd_reduce_scatter leaves the result of this rank at the beginning of buf, or, if *whole is set, the result
// of every rank in its place.
static int hvd_reduce_scatter(uintptr_t comm, uintptr_t buf, const int64_t *counts, int size, int dtype,
	int op, int *whole) {
	hvd_comm *c = (hvd_comm *)comm;
	int64_t sum = hvd_sum(counts, c->size);
	*whole = sum > c->limit;
	if (*whole)
		return hvd_allreduce(comm, buf, sum, size, dtype, op);
	if (sum == 0)
		return hvd_begun(c, MPI_SUCCESS);
	for (int i = 0; i < c->size; i++)
		c->counts[i] = counts[i];
	int err = MPI_Ireduce_scatter(MPI_IN_PLACE, (void *)buf, c->counts, hvd_type(dtype), hvd_op(op, dtype),
		c->comm, hvd_request(c));
	return hvd_begun(c, err);
}

static int hvd_broadcast(uintptr_t comm, uintptr_t buf, int64_t count, int root) {
	hvd_comm *c = (hvd_comm *)comm;
	int err = MPI_SUCCESS;
	for (int64_t at = 0; at < count && err == MPI_SUCCESS; at += c->limit)
		err = MPI_Ibcast((void *)(buf + at), hvd_min(c->limit, count - at), MPI_BYTE, root, c->comm,
			hvd_request(c));
	return hvd_begun(c, err);
}

static int hvd_allgather(uintptr_t comm, uintptr_t buf, const int64_t *counts) {
	hvd_comm *c = (hvd_comm *)comm;
	int64_t sum = hvd_sum(counts, c->size), at = 0;
	int err = MPI_SUCCESS;
	if (sum == 0)
		return hvd_begun(c, err);
	for (int i = 0; i < c->size && err == MPI_SUCCESS; at += counts[i++]) {
		c->counts[i] = counts[i];
		c->places[i] = at;
		if (sum > c->limit)
			err = hvd_broadcast(comm, buf + at, counts[i], i);
	}
	if (sum <= c->limit)
		err = MPI_Iallgatherv(MPI_IN_PLACE, 0, MPI_DATATYPE_NULL, (void *)buf, c->counts, c->places,
			MPI_BYTE, c->comm, hvd_request(c));
	return hvd_begun(c, err);
}

static int hvd_and(uintptr_t comm, uintptr_t words, int count) {
	hvd_comm *c = (hvd_comm *)comm;
	return hvd_begun(c, hvd_iallreduce(c, (void *)words, count, MPI_UINT64_T, MPI_BAND));
}

// hvd_gather gathers size bytes of each rank at rank 0.
static int hvd_gather(uintptr_t comm, uintptr_t in, int size, uintptr_t out) {
	hvd_comm *c = (hvd_comm *)comm;
	int err = MPI_Igather((void *)in, size, MPI_BYTE, (void *)out, size, MPI_BYTE, 0, c->comm,
		hvd_request(c));
	return hvd_begun(c, err);
}

static int hvd_send(uintptr_t comm, uintptr_t buf, int size, int to) {
	hvd_comm *c = (hvd_comm *)comm;
	return hvd_begun(c, MPI_Isend((void *)buf, size, MPI_BYTE, to, 0, c->comm, hvd_request_of(c, to)));
}

static int hvd_receive(uintptr_t comm, uintptr_t buf, int size, int from) {
	hvd_comm *c = (hvd_comm *)comm;
	return hvd_begun(c, MPI_Irecv((void *)buf, size, MPI_BYTE, from, 0, c->comm, hvd_request_of(c, from)));
}

static int hvd_alltoall(uintptr_t comm, uintptr_t in, uintptr_t out) {
	hvd_comm *c = (hvd_comm *)comm;
	int err = MPI_Ialltoall((void *)in, 1, MPI_INT64_T, (void *)out, 1, MPI_INT64_T, c->comm,
		hvd_request(c));
	return hvd_begun(c, err);
}

// hvd_exchange sends block i of in to rank i and receives block i of out from it.
static int hvd_exchange(uintptr_t comm, uintptr_t in, const int64_t *sent, uintptr_t out,
	const int64_t *received) {
	hvd_comm *c = (hvd_comm *)comm;
	int err = MPI_SUCCESS;
	for (int i = 0; i < c->size; out += received[i++])
		for (int64_t at = 0; at < received[i] && err == MPI_SUCCESS; at += c->limit)
			err = MPI_Irecv((void *)(out + at), hvd_min(c->limit, received[i] - at), MPI_BYTE, i, 0,
				c->comm, hvd_request_of(c, i));
	for (int i = 0; i < c->size; in += sent[i++])
		for (int64_t at = 0; at < sent[i] && err == MPI_SUCCESS; at += c->limit)
			err = MPI_Isend((void *)(in + at), hvd_min(c->limit, sent[i] - at), MPI_BYTE, i, 0,
				c->comm, hvd_request_of(c, i));
	return hvd_begun(c, err);
}
*/
import "C"

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"unsafe"

	"github.com/gohvd/gohvd/internal/tensor"
	"github.com/gohvd/gohvd/internal/topo"
	"github.com/gohvd/gohvd/internal/transport"
	"github.com/gohvd/gohvd/ops"
)

// comm is a communicator. Its methods call MPI, so only the thread that may call MPI calls them. MPI uses the
// buffers of an operation until tested reports that the operation has completed. Until then the caller must
// keep and pin them.
type comm struct {
	c *C.hvd_comm
	// ranks are the ranks of the job that belong to the communicator. set is their process set, and lane its
	// lane, or transport.Control for the communicator of all ranks that the negotiation uses.
	ranks []topo.Rank
	set   topo.ProcessSetID
	lane  transport.Lane
}

// check returns the error of an MPI call, or nil.
func check(call string, code C.int) error {
	if code == C.MPI_SUCCESS {
		return nil
	}
	var text [C.MPI_MAX_ERROR_STRING]C.char
	var n C.int
	if C.MPI_Error_string(code, &text[0], &n) != C.MPI_SUCCESS {
		return fmt.Errorf("%s: MPI error %d", call, code)
	}
	// MPICH's texts have several lines.
	return fmt.Errorf("%s: %s", call, strings.Join(strings.Fields(C.GoStringN(&text[0], n)), " "))
}

// check returns the error of an MPI call on c, or nil. A collective does not tell which rank has failed.
func (c comm) check(call string, code C.int) error {
	if err := check(call, code); err != nil {
		return &ops.UnknownRankError{Ranks: c.ranks,
			Err: fmt.Errorf("%w (MPI does not tell which rank has failed)", err)}
	}
	return nil
}

// initialize initializes MPI unless the program has done so. It reports whether MPI may be called from
// several threads, one at a time, and whether it has initialized MPI.
func initialize(singleThread bool) (serialized, own bool, err error) {
	if library := libraryVersion(); strings.Contains(library, C.HVD_OTHER_LIBRARY) {
		return false, false, fmt.Errorf("gohvd was not built for %s, which another part of this process has loaded, "+
			"such as mpi4py: build both with one MPI library (docs/mpi.md)", library)
	}
	required := C.int(C.MPI_THREAD_SERIALIZED)
	if singleThread {
		required = C.MPI_THREAD_FUNNELED
	}
	var provided, mine, finalized C.int
	if err := check("MPI_Init_thread", C.hvd_init(required, &provided, &mine, &finalized)); err != nil {
		return false, false, err
	}
	if finalized != 0 {
		return false, false, ErrFinalized
	}
	if mine == 0 && provided < C.MPI_THREAD_SERIALIZED {
		return false, false, errors.New("the program has initialized MPI for one thread only: " +
			"call MPI_Init_thread with MPI_THREAD_SERIALIZED or MPI_THREAD_MULTIPLE")
	}
	return provided >= C.MPI_THREAD_SERIALIZED && !singleThread, mine != 0, nil
}

// libraryVersion returns the name and the version of the MPI library.
func libraryVersion() string {
	// The library may be another one than that of the header, with a longer text: 8192 bytes in MPICH.
	var text [max(C.MPI_MAX_LIBRARY_VERSION_STRING, 8192)]C.char
	var n C.int
	if C.MPI_Get_library_version(&text[0], &n) != C.MPI_SUCCESS {
		return "unknown MPI library"
	}
	name := C.GoStringN(&text[0], n)
	if end := strings.IndexAny(name, ",\n\x00"); end >= 0 {
		name = name[:end] // what follows says how the library was built
	}
	return strings.Join(strings.Fields(name), " ")
}

// newWorld returns a communicator of the processes of the communicator with a Fortran handle, or of all
// processes if handle is nil.
func newWorld(handle *int32) (comm, error) {
	c := newComm(nil, topo.Global)
	c.lane = transport.Control
	err := check("MPI_Comm_dup", C.hvd_world(c.c, C.hvd_parent((*C.int32_t)(handle))))
	c.ranks = topo.UpTo(c.size())
	return c, err
}

// newComm returns the communicator of a process set, which has not been made.
func newComm(ranks []topo.Rank, set topo.ProcessSetID) comm {
	return comm{(*C.hvd_comm)(C.calloc(1, C.sizeof_hvd_comm)), slices.Clone(ranks), set,
		transport.DataLane(set)}
}

// sub makes s, whose ranks are some of c. Each of them must call sub, and all must call it in the same order.
// The call blocks until they have done so.
func (c comm) sub(s comm) error {
	list := make([]C.int, len(s.ranks))
	for i, r := range s.ranks {
		list[i] = C.int(r)
	}
	return s.check("MPI_Comm_create_group", C.hvd_sub(c.c, &list[0], C.int(len(list)), C.int(s.set), s.c))
}

// free releases a communicator on which no operation runs.
func (c comm) free() error { return c.check("MPI_Comm_free", C.hvd_free(c.c)) }

// at returns the address of c for the functions that begin or test operations.
func (c comm) at() C.uintptr_t { return C.uintptr_t(uintptr(unsafe.Pointer(c.c))) }

func (c comm) rank() int { return int(c.c.rank) }
func (c comm) size() int { return int(c.c.size) }

// setLimit sets the maximum number of elements or bytes in one MPI call.
func (c comm) setLimit(limit int64) { c.c.limit = C.int64_t(limit) }

// groups returns for each rank the lowest rank with which it can share memory. All ranks must call it.
func (c comm) groups() (groups []topo.Rank, err error) {
	lowest := make([]C.int, c.size())
	err = c.check("MPI_Comm_split_type", C.hvd_groups(c.c, &lowest[0]))
	for _, r := range lowest {
		groups = append(groups, topo.Rank(r))
	}
	return groups, err
}

// small returns the memory of c for small reductions. It is C's, so it need not be pinned. An allreduce in it
// takes less time if it is repeated.
func small[T any](c comm) []T {
	var element T
	return unsafe.Slice((*T)(unsafe.Pointer(&c.c.small)), C.HVD_SMALL/unsafe.Sizeof(element))
}

// test tests whether the operation on c has completed.
func (c comm) test() { C.hvd_test(c.at()) }

// tested reports whether the operation on c had completed when it was last tested, which is also done when it
// begins. If the exchange with a peer has failed, the error is a *transport.PeerError.
func (c comm) tested() (bool, error) {
	code := c.c.err
	if code == C.MPI_SUCCESS {
		return c.c.done != 0, nil
	}
	if peer := unsafe.Slice(c.c.peers, c.c.pending)[c.c.tested]; peer >= 0 {
		return false, &transport.PeerError{Peer: c.ranks[peer], Lane: c.lane, Err: check("MPI_Test", code)}
	}
	return false, c.check("MPI_Test", code)
}

// address returns the address of a buffer, which the caller has pinned unless it is memory of C.
func address[T any](buf []T) C.uintptr_t {
	return C.uintptr_t(uintptr(unsafe.Pointer(unsafe.SliceData(buf))))
}

func int64s(s []int64) *C.int64_t { return (*C.int64_t)(unsafe.Pointer(&s[0])) }

// reductions has the numbers of the reductions in C.
var reductions = [...]C.int{tensor.Sum: C.HVD_SUM, tensor.Min: C.HVD_MIN,
	tensor.Max: C.HVD_MAX, tensor.Product: C.HVD_PRODUCT}

func (c comm) allreduce(buf []byte, dt tensor.DType, op tensor.ReduceOp) error {
	size := dt.Size()
	return c.check(allreduceCalls, C.hvd_allreduce(c.at(), address(buf), C.int64_t(len(buf)/size),
		C.int(size), C.int(dt), reductions[op]))
}

// allreduceCalls are the calls that begin an allreduce.
const allreduceCalls = "MPI_Iallreduce, MPI_Allreduce_init or MPI_Start"

// reduce begins a reduction to one rank. At the other ranks, buf is undefined afterwards.
func (c comm) reduce(buf []byte, dt tensor.DType, op tensor.ReduceOp, root int) error {
	size := dt.Size()
	return c.check("MPI_Ireduce", C.hvd_reduce(c.at(), address(buf), C.int64_t(len(buf)/size), C.int(size),
		C.int(dt), reductions[op], C.int(root)))
}

// reduceScatter begins a reducescatter of buf, in which rank i gets counts[i] elements. If the result whole
// is set, the result of this rank will be in its place, otherwise at the beginning of buf.
func (c comm) reduceScatter(buf []byte, counts []int64, dt tensor.DType, op tensor.ReduceOp) (whole bool,
	err error) {
	var w C.int
	err = c.check("MPI_Ireduce_scatter", C.hvd_reduce_scatter(c.at(), address(buf), int64s(counts),
		C.int(dt.Size()), C.int(dt), reductions[op], &w))
	return w != 0, err
}

func (c comm) broadcast(buf []byte, root int) error {
	return c.check("MPI_Ibcast", C.hvd_broadcast(c.at(), address(buf), C.int64_t(len(buf)), C.int(root)))
}

func (c comm) allgather(buf []byte, counts []int64) error {
	return c.check("MPI_Iallgatherv", C.hvd_allgather(c.at(), address(buf), int64s(counts)))
}

func (c comm) alltoall(in, out []int64) error {
	return c.check("MPI_Ialltoall", C.hvd_alltoall(c.at(), address(in), address(out)))
}

func (c comm) exchange(in []byte, sent []int64, out []byte, received []int64) error {
	return c.check("MPI_Isend or MPI_Irecv", C.hvd_exchange(c.at(), address(in), int64s(sent), address(out),
		int64s(received)))
}

// and begins to combine the words of all ranks by bitwise AND.
func (c comm) and(words []uint64) error {
	return c.check(allreduceCalls, C.hvd_and(c.at(), address(words), C.int(len(words))))
}

// gather begins to gather in, which has the same length at all ranks, in out at rank 0.
func (c comm) gather(in, out []byte) error {
	return c.check("MPI_Igather", C.hvd_gather(c.at(), address(in), C.int(len(in)), address(out)))
}

func (c comm) send(buf []byte, to int) error {
	return c.check("MPI_Isend", C.hvd_send(c.at(), address(buf), C.int(len(buf)), C.int(to)))
}

func (c comm) receive(buf []byte, from int) error {
	return c.check("MPI_Irecv", C.hvd_receive(c.at(), address(buf), C.int(len(buf)), C.int(from)))
}
