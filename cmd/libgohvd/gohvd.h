/* gohvd: collective communication for data-parallel training. This is the interface of libgohvd.so, which runs
 * the engine of one rank in this process. It is for every language except Go. docs/c-api.md is its reference.
 *
 * Ranks submit named tensors in any order. An operation runs when all its ranks have submitted it. Any thread may
 * call any function. Of the program the library calls only the function allocate of an hvd_op_t. It keeps no pointer
 * to memory of the program except the buffers of operations in flight, and what they need to allocate results.
 *
 *	float x[4] = {1, 2, 3, 4};
 *	int64_t shape[] = {4};
 *	hvd_tensor_t t = {x, x, sizeof x, shape, 1, 0};
 *	hvd_op_t op = hvd_op(HVD_ALLREDUCE, HVD_FLOAT32, &t);
 *	if (hvd_init(NULL, NULL) || hvd_run(&op, -1, NULL, NULL)) { ... hvd_last_error(&error) ... }
 *	hvd_shutdown(NULL, 0, NULL);
 */
#ifndef GOHVD_H
#define GOHVD_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#ifdef __cplusplus
extern "C" {
#endif

/* The version of this interface. A change that an old program would notice increases it. A new function, or a
 * new field at the end of a struct that has a size, does not. */
#define HVD_ABI_VERSION 1

/* The result of most functions. If it is neither HVD_SUCCESS nor HVD_PENDING, hvd_last_error has the details. */
typedef enum hvd_status {
	HVD_SUCCESS = 0,
	HVD_ERROR_USAGE = 1,           /* the call is wrong at this rank; nothing was submitted */
	HVD_ERROR_DUPLICATE_NAME = 2,  /* the name is in use; nothing was submitted */
	HVD_ERROR_MISMATCH = 3,        /* the requests of the ranks contradict each other; the job goes on */
	HVD_ERROR_PEER = 4,            /* ranks have failed; the job is over */
	HVD_ERROR_SHUT_DOWN = 5,       /* this rank or the job was shut down */
	HVD_ERROR_CLOSED = 6,          /* this rank could not wait for the end of the job */
	HVD_ERROR_NOT_INITIALIZED = 7, /* this process is in no job: call hvd_init */
	HVD_ERROR_STALL = 8,           /* the stall inspector has ended the job */
	HVD_ERROR_INTERNAL = 9,        /* any other failure, such as a file that cannot be written */
	HVD_ERROR_HANDLE = 10,         /* the handle does not exist, or was used up or released */
	HVD_ERROR_FORKED = 11,         /* this process was forked after the library was loaded, so it cannot use it */
	HVD_PENDING = 12               /* the time limit of the call has ended; the operation goes on */
} hvd_status_t;

/* The kinds of operations, with the numbers that the ranks and the sidecar use too. */
typedef enum hvd_kind {
	HVD_ALLREDUCE = 1,
	HVD_ALLGATHER = 2,
	HVD_BROADCAST = 3,
	HVD_ALLTOALL = 4,
	HVD_REDUCESCATTER = 5,
	HVD_BARRIER = 6,
	HVD_JOIN = 7,
	HVD_REDUCE = 10,
	HVD_GATHER = 11,
	HVD_SCATTER = 12,
	HVD_SEND = 14,
	HVD_RECV = 15
} hvd_kind_t;

typedef enum hvd_dtype {
	HVD_UINT8 = 1,
	HVD_INT8 = 2,
	HVD_UINT16 = 3,
	HVD_INT16 = 4,
	HVD_INT32 = 5,
	HVD_INT64 = 6,
	HVD_FLOAT16 = 7,
	HVD_BFLOAT16 = 8,
	HVD_FLOAT32 = 9,
	HVD_FLOAT64 = 10,
	HVD_BOOL = 11 /* one byte, 0 or 1 */
} hvd_dtype_t;

typedef enum hvd_reduction {
	HVD_AVERAGE = 1, /* the default */
	HVD_SUM = 2,
	HVD_MIN = 3,
	HVD_MAX = 4,
	HVD_PRODUCT = 5,
	HVD_ADASUM = 6,
	HVD_AVERAGE_ACTIVE = 7 /* divides by the number of ranks that have not joined */
} hvd_reduction_t;

/* A number for something that was begun and that the program has not waited for. 0 is no handle. */
typedef uint64_t hvd_handle_t;

/* The rank HVD_ANY_SOURCE in a receive stands for any member of the process set. */
#define HVD_ANY_SOURCE (-1)

/* Flags of hvd_op_t. */
#define HVD_GROUPED 1u        /* the tensors are a group: all of them are executed, or none */
#define HVD_ERROR_FEEDBACK 2u /* the rounding errors of the compression are added to the next tensor of the name */
#define HVD_EMPTY 4u          /* in a join: this rank also takes part in operations that have no neutral element */
#define HVD_ON_DEVICE 8u      /* an operation on a device that NCCL runs is done when it has been launched, and \
                               * result_stream waits for it; if it fails later, the job fails. In an elastic job \
                               * the flag has no effect unless HOROVOD_ENABLE_ASYNC_COMPLETION is set */

/* A flag of hvd_shutdown: the program has failed, so the rank fails too, and the other ranks learn why. This
 * also ends an hvd_init, unless a sidecar runs the engine, and a shutdown that wait for the other ranks. */
#define HVD_FAILED 1u

/* A flag of hvd_add_process_set: only the members call the function. */
#define HVD_MEMBERS_ONLY 1u

/* hvd_tensor_t is the memory of one tensor. From the submission until the operation is done, the library owns the
 * memory that input and output point to. If an operation on a device fails and the error says that the device may
 * still use the buffers, they must not be used or freed. The library copies the shape and this struct during the
 * call. */
typedef struct hvd_tensor {
	const void *input; /* the elements of this rank; not used by a receive */
	/* Where the result goes. It may be input, or part of it in a reducescatter, or contain input in an allgather.
	 * Any other overlap is an error. If it is NULL, the library allocates the result (hvd_result_t). */
	void *output;
	uint64_t output_bytes; /* the size of output, which must be that of the result */
	const int64_t *shape;  /* the shape of input, or of output in a receive; NULL if dims is 0 */
	uint32_t dims;
	uint32_t dtype; /* an hvd_dtype_t, or 0 for that of the operation; may differ only within a group */
} hvd_tensor_t;

/* hvd_op_t describes an operation. Make it with hvd_op, and then set the fields that the operation needs. The
 * library keeps nothing of it but the memory of the tensors, and allocate and context until the operation is done. */
typedef struct hvd_op {
	uint32_t size; /* sizeof(hvd_op_t), so that later versions can add fields */
	uint32_t kind; /* an hvd_kind_t */
	uint32_t dtype;
	uint32_t reduction;   /* an hvd_reduction_t; 0 is HVD_AVERAGE */
	uint32_t compression; /* HVD_FLOAT16 or HVD_BFLOAT16: an allreduce of float32 sends elements of this type */
	uint32_t flags;
	/* The name by which the ranks match the operation. Without a name, all ranks of the process set must make
	 * their unnamed calls of a kind in the same order. A name is in use until a wait or a poll has reported that
	 * the operation is done, or until the handle was released and the operation is done. */
	const char *name;
	const hvd_tensor_t *tensors; /* one tensor, none for a barrier and a join, any number with HVD_GROUPED */
	uint32_t num_tensors;
	int32_t process_set;    /* the number of a process set; 0 has all ranks */
	int32_t root;           /* the rank that is the root of a broadcast, reduce, gather or scatter */
	int32_t peer;           /* the other rank of a send or receive */
	uint32_t tag;           /* of a send or receive: 0 to 2^31-1 */
	uint32_t num_splits;    /* 0: every member gets the same number of rows */
	const int64_t *splits;  /* the rows for each member, in an alltoall, and at the root of a scatter */
	double prescale;        /* every element is multiplied by it before the reduction */
	double postscale;       /* and by this one after it */
	double timeout_seconds; /* the job fails if the operation takes longer; 0: HVD_OPERATION_TIMEOUT_SECONDS */
	/* The CUDA device that has all tensors, as the runtime of this process counts them, or -1 for host memory. The
	 * operation begins after the work that is on the stream now. */
	int32_t device;
	uint32_t reserved; /* 0 */
	void *stream;      /* a cudaStream_t */
	/* Allocates the result of a tensor without an output on a device: it gets context, the index of the tensor and
	 * the number of bytes, which is not 0, and returns their address. If it returns NULL, the operation fails at
	 * this rank. The library calls it at most once for each tensor: during the submission if the size is known
	 * then, and otherwise in a thread of its own when the ranks have agreed. The device is the current one of this
	 * thread, and the thread's mode of stream capture is relaxed. The function may wait for a lock of the program.
	 * It must not wait for an operation, nor call hvd_init or hvd_shutdown. It may run for several operations at
	 * the same time. It and context must stay valid until the operation is done, also after hvd_release.
	 * The memory belongs to the program, also if the operation fails. Earlier work on the stream may use it; the
	 * operation waits for that. If allocate is NULL, a tensor whose result on a device has elements needs an
	 * output, or the operation fails with HVD_ERROR_USAGE, perhaps only when the size is known. */
	void *(*allocate)(void *context, uint32_t tensor, uint64_t bytes);
	void *context;       /* the first argument of allocate */
	void *result_stream; /* the cudaStream_t of HVD_ON_DEVICE; it may be stream */
} hvd_op_t;

/* hvd_op returns an operation on one tensor, or on none if tensor is NULL, with default options. */
static inline hvd_op_t hvd_op(hvd_kind_t kind, hvd_dtype_t dtype, const hvd_tensor_t *tensor) {
	hvd_op_t op;
	memset(&op, 0, sizeof op);
	op.size = (uint32_t)sizeof op;
	op.kind = (uint32_t)kind;
	op.dtype = (uint32_t)dtype;
	op.tensors = tensor;
	op.num_tensors = tensor != NULL;
	op.prescale = op.postscale = 1;
	op.device = -1;
	return op;
}

/* hvd_output_t is the result of one tensor. */
typedef struct hvd_output {
	const void *data; /* output of the tensor, or memory of the library if that was NULL */
	uint64_t bytes;
	const int64_t *shape;
	uint32_t dims;
	uint32_t reserved;
} hvd_output_t;

/* hvd_result_t is the result of something that has succeeded. Set size before a call that fills it in. Afterwards
 * its memory belongs to the program, which calls hvd_free_result. If the call has not returned HVD_SUCCESS, the
 * result has no memory, but hvd_finish does not change it if it returns HVD_ERROR_HANDLE. */
typedef struct hvd_result {
	uint32_t size;         /* sizeof(hvd_result_t) */
	uint32_t num_outputs;  /* the number of tensors */
	hvd_output_t *outputs; /* one for each tensor */
	/* How many rows came from each member, after an alltoall, a gather or a scatter. */
	const int64_t *received;
	uint32_t num_received;
	int32_t source;      /* the rank that has sent the message, after a receive */
	int32_t last_joined; /* the rank that joined last, after a join */
	int32_t process_set; /* the number of the process set, after hvd_add_process_set */
	void *memory;        /* of the library */
} hvd_result_t;

/* hvd_error_t describes an error. The pointers are valid until the next call of this thread that fails. */
typedef struct hvd_error {
	uint32_t size; /* sizeof(hvd_error_t) */
	uint32_t status;
	const char *text;      /* the whole error, for people */
	const char *operation; /* such as "allreduce", or "" */
	const char *tensor;    /* the name, or "" */
	const int32_t *ranks;  /* the ranks that have failed, with HVD_ERROR_PEER */
	uint32_t num_ranks;
	uint32_t shut_down; /* 1 if these ranks did not crash, but have shut down while others waited for them */
} hvd_error_t;

/* hvd_last_error describes the last error that a function has returned in this thread. If there was none, the
 * status is HVD_SUCCESS and the text is empty. It returns HVD_ERROR_USAGE if error is NULL or has a wrong size. */
hvd_status_t hvd_last_error(hvd_error_t *error);

/* hvd_abi_version returns the HVD_ABI_VERSION with which the library was built. */
uint32_t hvd_abi_version(void);

/* hvd_version returns the version of gohvd, such as "0.7.0". */
const char *hvd_version(void);

/* hvd_mpi_built returns 1 if the library was built with MPI, and otherwise 0. */
int32_t hvd_mpi_built(void);

/* hvd_gpu_libraries returns a JSON object that says whether the library was built with NCCL, which NCCL and which CUDA
 * runtime it loads, and why it cannot (docs/nccl.md). It counts the devices only if count_devices is not 0, because
 * that starts the driver in this process, and then processes that are forked from it cannot use CUDA. The text must be
 * freed with hvd_free_text. */
hvd_status_t hvd_gpu_libraries(int32_t count_devices, char **text);

/* Joining and leaving the job.
 *
 * Functions with a parameter handle begin something and return at once. hvd_wait then waits for it and returns its
 * result. If handle is NULL, the function itself waits, without a limit. */

/* hvd_ranks_t is a list of ranks. */
typedef struct hvd_ranks {
	const int32_t *ranks;
	uint32_t num_ranks;
	uint32_t reserved; /* 0 */
} hvd_ranks_t;

typedef struct hvd_init_options {
	uint32_t size; /* sizeof(hvd_init_options_t) */
	uint32_t num_settings;
	/* Settings in the form NAME=value (docs/settings.md). They override the environment. */
	const char *const *settings;
	/* Process sets that exist from the start, with the numbers 1, 2 and so on. They are equal at all ranks. */
	const hvd_ranks_t *process_sets;
	uint32_t num_process_sets;
	uint32_t reserved; /* 0 */
	/* The Fortran handle of an MPI communicator with the processes of the job (MPI_Comm_c2f), or NULL. It needs a
	 * library that was built with the tag mpi, and makes mpi the default of HOROVOD_CONTROLLER. */
	const int32_t *mpi_comm;
} hvd_init_options_t;

/* hvd_init joins this process to its job and waits until all ranks have joined. It reads the environment as it is
 * now: hvdrun or another launcher has set it. Without a launcher, the job has one rank. options may be NULL. In a
 * job, hvd_init does nothing. After hvd_shutdown, it joins the next epoch of the job. In a new process of an elastic job
 * that trains already, it does not wait: hvd_epoch is 0, the other facts are those to expect, and there are no operations
 * before hvd_elastic_join has made the process a rank. */
hvd_status_t hvd_init(const hvd_init_options_t *options, hvd_handle_t *handle);

/* hvd_shutdown takes this rank out of the job, and waits for the operations that it has submitted. reason may be
 * NULL. Otherwise other ranks that still wait for this one report it. Outside of a job it does nothing. If the job
 * has failed, it returns the reason. A process that exits without it has failed. */
hvd_status_t hvd_shutdown(const char *reason, uint32_t flags, hvd_handle_t *handle);

/* hvd_check returns HVD_SUCCESS while the job runs, or why it is over. */
hvd_status_t hvd_check(void);

/* Facts about this rank. Outside of a job they are -1, and hvd_epoch is 0. */
int32_t hvd_rank(void);
int32_t hvd_size(void);
int32_t hvd_local_rank(void); /* among the ranks of this host */
int32_t hvd_local_size(void);
int32_t hvd_cross_rank(void); /* of this host, among the hosts that have this local rank */
int32_t hvd_cross_size(void);
int32_t hvd_is_homogeneous(void); /* 1 if every host has the same number of ranks */
/* 1 if operations on CUDA devices are possible; 2 if they are also done when they have been launched, by
 * HOROVOD_ENABLE_ASYNC_COMPLETION */
int32_t hvd_has_devices(void);
uint64_t hvd_epoch(void);         /* the number of the current life of the job, from 1 */

/* hvd_why_no_devices returns the reason why operations on CUDA devices are not possible, and the ranks that have it. It is
 * empty if they are possible. The text must be freed with hvd_free_text. */
hvd_status_t hvd_why_no_devices(char **text);

/* hvd_new_unique_id makes an id by which all ranks of a job can meet, as the setting HVD_UNIQUE_ID. This process
 * serves them until 30 s after they have met, or until an hvd_init of this process with the last id in its options
 * has failed. options may be NULL. The text must be freed with hvd_free_text. */
hvd_status_t hvd_new_unique_id(const hvd_init_options_t *options, char **text);

/* Operations. */

/* hvd_submit submits an operation. */
hvd_status_t hvd_submit(const hvd_op_t *op, hvd_handle_t *handle);

/* hvd_submit_many submits n operations in their order, and stops at the first one that fails. submitted, which may
 * be NULL, receives the number of operations that were submitted. handles has room for n handles. Those of
 * operations that were not submitted are 0 or unchanged. */
hvd_status_t hvd_submit_many(const hvd_op_t *ops, size_t n, hvd_handle_t *handles, size_t *submitted);

/* hvd_run submits an operation and waits for at most the given number of seconds, or without a limit if it is
 * negative. If the time ends before, it returns HVD_PENDING, and *handle is the operation. In all other cases
 * *handle is 0. handle may be NULL if there is no limit. result may be NULL. */
hvd_status_t hvd_run(const hvd_op_t *op, double seconds, hvd_handle_t *handle, hvd_result_t *result);

/* hvd_wait waits for at most the given number of seconds, or without a limit if it is negative. Unless it returns
 * HVD_PENDING, or a parameter is wrong, the handle is used up. result may be NULL. */
hvd_status_t hvd_wait(hvd_handle_t handle, double seconds, hvd_result_t *result);

/* hvd_finish waits as hvd_wait does, but uses up the handle and writes the result only if the operation has
 * succeeded. Otherwise a further call returns the same error, until hvd_release. So a program that has not seen what
 * hvd_finish has returned, because a signal handler has thrown an exception, learns it from a further call:
 * HVD_ERROR_HANDLE means that the operation has succeeded. */
hvd_status_t hvd_finish(hvd_handle_t handle, double seconds, hvd_result_t *result);

/* hvd_wait_any waits until one of n operations is done, and sets *index to the position of its handle, which
 * hvd_wait then uses up without waiting. It returns HVD_SUCCESS whether the operation has failed or not. */
hvd_status_t hvd_wait_any(const hvd_handle_t *handles, size_t n, double seconds, size_t *index);

/* hvd_poll sets *done to 1 if the operation is done, and otherwise to 0. If it is done, its name is free. */
hvd_status_t hvd_poll(hvd_handle_t handle, int32_t *done);

/* hvd_release gives up a handle without a wait. The operation goes on, and its buffers stay in use until it is
 * done. Its result is freed. A gate is opened. */
hvd_status_t hvd_release(hvd_handle_t handle);

/* hvd_new_gate makes a handle that is done when hvd_open_gate is called. With it among its handles, hvd_wait_any can
 * be ended by another thread, for example because there are more operations to wait for. */
hvd_status_t hvd_new_gate(hvd_handle_t *handle);

/* hvd_open_gate makes the handle of a gate done. A further call does nothing. */
hvd_status_t hvd_open_gate(hvd_handle_t handle);

/* hvd_free_result frees the memory of a result. */
void hvd_free_result(hvd_result_t *result);

/* hvd_alloc allocates memory that the other ranks of the host can read. Operations on at least 4 MiB of it run
 * without a copy (docs/execution.md). It is freed with hvd_free. */
hvd_status_t hvd_alloc(uint64_t bytes, void **memory);
hvd_status_t hvd_free(void *memory);

/* Process sets. */

/* hvd_add_process_set makes a process set of the given ranks. All ranks of the job call it with the same ranks, or
 * with HVD_MEMBERS_ONLY only these ranks. name may be NULL; it tells calls apart that are made at the same time.
 * timeout_seconds is as in hvd_op_t. If handle is NULL, *id receives the number of the set. */
hvd_status_t hvd_add_process_set(const hvd_ranks_t *ranks, uint32_t flags, const char *name,
                                 double timeout_seconds, int32_t *id, hvd_handle_t *handle);

/* hvd_remove_process_set removes a process set. The ranks that have added it call the function. */
hvd_status_t hvd_remove_process_set(int32_t id, double timeout_seconds, hvd_handle_t *handle);

/* hvd_process_sets stores the numbers of the process sets that this rank knows, at most capacity ones, and sets
 * *count to how many there are. */
hvd_status_t hvd_process_sets(int32_t *ids, uint32_t capacity, uint32_t *count);

/* hvd_process_set_ranks stores the ranks of a process set, at most capacity ones, in ascending order, and sets *count
 * to how many there are. */
hvd_status_t hvd_process_set_ranks(int32_t id, int32_t *ranks, uint32_t capacity, uint32_t *count);

/* Elastic jobs (docs/elastic.md, "In C"). The program keeps the state of its training and its last two commits. The
 * functions say what to do with them. They work in every job, but only the ranks of an elastic job change. */

/* How the launcher has changed the ranks. */
#define HVD_REMOVED 1u
#define HVD_ADDED 2u

/* Which state this rank has at the start of a generation. */
typedef enum hvd_held {
	HVD_HELD_NOTHING = 0, /* it must get the state */
	HVD_HELD_GRANTED = 1, /* its last commit that was granted; a later one that it has saved is void */
	HVD_HELD_SAVED = 2,   /* the last commit that it has saved, though hvd_elastic_vote has failed */
	HVD_HELD_PRESENT = 3  /* there is no commit, and the others get the present state of this rank */
} hvd_held_t;

typedef struct hvd_elastic {
	uint32_t size;       /* sizeof(hvd_elastic_t) */
	uint32_t removed;    /* 1 if hvd_init or hvd_elastic_join has failed because the launcher has removed this process */
	uint64_t generation; /* of which this process is a rank, from 1; 0 if the job is not elastic */
	uint32_t pending;    /* how the launcher has changed the ranks since this generation began, or 0 */
	uint32_t changes;    /* the same, after hvd_elastic_vote; equal at all ranks */
	/* After hvd_elastic_join: */
	uint32_t held;    /* an hvd_held_t */
	uint32_t restore; /* 1: first set the state to the commit, because the training has failed */
	uint32_t missing; /* 1: some rank has not got the state, so that root sends it to the others */
	int32_t root;
	/* 1: the ranks that have not got it can also get it from different ranks, by an HVD_ALLTOALL for example: each rank
	 * sends it to receiver and gets it from source. These are -1 where it sends or gets nothing. */
	uint32_t pairs;
	int32_t source;
	int32_t receiver;
} hvd_elastic_t;

/* hvd_elastic describes this process in its elastic job. It does not wait. */
hvd_status_t hvd_elastic(hvd_elastic_t *elastic);

/* A flag of hvd_elastic_join: this rank has a state, but none of its commits, because the program has replaced it by a
 * state for which there was no vote. Then all ranks get the state of the first rank that has one. */
#define HVD_LOOSE 1u

/* hvd_elastic_join agrees with the other ranks, after hvd_init, on the state with which they go on. In a new process of a
 * job that trains already, it first waits until the others commit, and makes the process a rank. So the program should
 * make its model before, and read the facts about its rank again afterwards. */
hvd_status_t hvd_elastic_join(uint32_t flags, hvd_handle_t *handle);

/* hvd_elastic_synced tells that this rank has done what hvd_elastic says. Its state is its last commit now. */
hvd_status_t hvd_elastic_synced(hvd_handle_t *handle);

/* A flag of hvd_elastic_vote: the program has saved its state, so it is a commit if all ranks have. */
#define HVD_SAVED 4u

/* Another flag: the rank has what it needs for its next step, such as the reduced gradients. If the vote succeeds, and
 * hvd_elastic has no changes, the rank makes the step. Its state is a commit then, of which it needs no copy: with
 * HVD_HELD_GRANTED it goes on with its present state, whatever restore says. With HVD_HELD_NOTHING it keeps this state,
 * or a copy, until hvd_elastic_synced has succeeded: if the ranks that send it the next one die meanwhile, the rank must
 * have its own again, because hvd_elastic_join says HVD_HELD_GRANTED for it. */
#define HVD_STEP 8u

/* hvd_elastic_vote waits for all ranks, which must call it equally often. seconds and handle are as in hvd_run. flags are
 * HVD_SAVED or HVD_STEP, and HVD_REMOVED and HVD_ADDED for a change that the program wants in a job that is not elastic. If
 * hvd_elastic then has changes, the program saves its state, calls hvd_elastic_end with HVD_TRAINING_CHANGED, leaves the
 * job and joins it again. */
hvd_status_t hvd_elastic_vote(uint32_t flags, double seconds, hvd_handle_t *handle);

/* How the training has ended in this process. */
typedef enum hvd_training {
	HVD_TRAINING_DONE = 0,     /* it is complete. hvd_elastic_join may begin another one, without new processes */
	HVD_TRAINING_CHANGED = 1,  /* the ranks change, and this rank has saved its present state, which is a commit */
	HVD_TRAINING_FAILED = 2,   /* an operation has failed with HVD_ERROR_PEER */
	HVD_TRAINING_ABANDONED = 3 /* there was any other error; SIGTERM has its usual effect again */
} hvd_training_t;

/* hvd_elastic_end tells how the training has ended. If it returns HVD_SUCCESS after HVD_TRAINING_CHANGED or
 * HVD_TRAINING_FAILED, the program calls hvd_shutdown, hvd_init and hvd_elastic_join again. Otherwise the training cannot
 * go on: the job is not elastic, or the training has failed three times in a row without a commit, each time within
 * 60 s, though the ranks have not become fewer. Then hvd_elastic_join has failed too. */
hvd_status_t hvd_elastic_end(uint32_t training, hvd_handle_t *handle);

/* Watching. Texts must be freed with hvd_free_text. With a sidecar, hvd_metrics, hvd_dump and hvd_next_stall fail
 * with HVD_ERROR_USAGE. */

/* hvd_start_timeline begins to write the timeline of this rank. Rank 0 writes to path, and rank r to a file beside
 * it with .rank<r> in its name (docs/timeline.md). */
hvd_status_t hvd_start_timeline(const char *path, int32_t mark_cycles);

/* hvd_stop_timeline ends the timeline. It returns when the file is complete. */
hvd_status_t hvd_stop_timeline(void);

/* hvd_mark_step says that the program now begins the training step with the given number, which lasts until the next
 * mark. The timeline and the metrics show the marks. All ranks should mark the same steps, with growing numbers.
 * Outside of a job, in a forked process and with a sidecar, it does nothing. */
void hvd_mark_step(uint64_t number);

/* hvd_begin_range returns the time at which the program begins something to which hvd_end_range gives a name, such as
 * "data" or "forward". The timeline shows these ranges, and hvdrun timeline says in which of them a late rank was.
 * Ranges may be inside of each other, and threads may have ranges at the same time. If there is no timeline in this
 * process, the time is 0, and hvd_end_range does nothing. It also does nothing if hvd_init was called in between. */
uint64_t hvd_begin_range(void);
void hvd_end_range(const char *name, uint64_t begun);

/* hvd_metrics returns the counters of this rank in the text format of Prometheus (docs/metrics.md). */
hvd_status_t hvd_metrics(char **text);

/* hvd_dump returns a JSON object with the operations that this rank waits for, and its last operations. */
hvd_status_t hvd_dump(char **text);

/* hvd_next_stall takes the oldest report of the stall inspector that the program has not taken, as a JSON object.
 * *text is NULL if there is none. Only rank 0 has reports. The last 1024 ones are kept. */
hvd_status_t hvd_next_stall(char **text);

void hvd_free_text(char *text);

/* The parameter server (docs/ps.md). A process can be a node and a rank at the same time. */

typedef struct hvd_node {
	uint32_t size; /* sizeof(hvd_node_t) */
	uint32_t role; /* 1: scheduler, 2: server, 4: worker */
	int32_t rank;  /* among the nodes of the same role */
	int32_t num_workers;
	int32_t num_servers;
	int32_t reserved;
} hvd_node_t;

/* hvd_ps_start joins this process to a job of a parameter server as a node. settings are as in hvd_init_options_t. If an
 * earlier call with the same settings has succeeded or is in progress, and no other call has used the node, this one only
 * waits for it. If that one fails, this one starts again. */
hvd_status_t hvd_ps_start(const char *const *settings, uint32_t num_settings, hvd_handle_t *handle);

/* hvd_ps_node describes this node. */
hvd_status_t hvd_ps_node(hvd_node_t *node);

/* hvd_ps_serve makes the server of an app, with a built-in handler and its parameters in this order: sum, assign,
 * sgd (rate), momentum (rate, momentum), adagrad (rate, epsilon) or adam (rate, beta1, beta2, epsilon). All but sum and
 * assign are only for floats. docs/ps.md says what they compute. */
hvd_status_t hvd_ps_serve(int32_t app, uint32_t dtype, const char *handler, const double *parameters,
                          uint32_t num_parameters);

/* hvd_exchange_t is a push, a pull, or a push and then a pull of the same keys. Until it is done, the library owns
 * the memory that it points to. */
typedef struct hvd_exchange {
	uint32_t size; /* sizeof(hvd_exchange_t) */
	int32_t app;
	uint32_t dtype; /* of the values */
	uint32_t flags; /* HVD_PUSH, HVD_PULL or both, and perhaps HVD_IN_SLICES */
	const uint64_t *keys; /* in ascending order, without duplicates */
	uint64_t num_keys;
	const void *values; /* pushed: the same number of elements for each key */
	uint64_t values_bytes;
	void *results; /* pulled */
	uint64_t results_bytes;
	int32_t command;  /* of a push: 0, or HVD_PS_INIT */
	int32_t priority; /* requests with a higher one are sent first */
} hvd_exchange_t;

#define HVD_PUSH 1u
#define HVD_PULL 2u
#define HVD_IN_SLICES 4u

/* The command with which a push sets values, whatever the handler does with other pushes. */
#define HVD_PS_INIT (-1)

/* hvd_ps_exchange begins a push or a pull of a worker. While too many requests to a server are not answered
 * (docs/ps.md), it waits for room, also if it gets a handle. With HVD_IN_SLICES and a handle, it waits for 0.05 s at
 * most: one request of each thread then goes on waiting in the library, and while it does, a further call of this
 * thread returns HVD_PENDING and has begun nothing, so that the program can look at signals and call again. hvd_ps_barrier
 * and hvd_ps_finalize with a barrier first wait until that request has room, and hvd_ps_clock until those of all threads
 * have. */
hvd_status_t hvd_ps_exchange(const hvd_exchange_t *exchange, hvd_handle_t *handle);

/* hvd_ps_clock ends an iteration of this worker (docs/ps.md, bounded staleness). */
hvd_status_t hvd_ps_clock(hvd_handle_t *handle);

/* hvd_ps_barrier waits until all nodes of a group have called it. The group is a sum of roles. */
hvd_status_t hvd_ps_barrier(int32_t group, hvd_handle_t *handle);

/* hvd_ps_finalize leaves the job. If barrier is not 0, it first waits for all other nodes. */
hvd_status_t hvd_ps_finalize(int32_t barrier, hvd_handle_t *handle);

/* hvd_ps_fail leaves the job because the program has failed. reason is a clause for the errors of the nodes that need
 * this one, such as "its file is damaged". It also ends an hvd_ps_finalize in progress. */
hvd_status_t hvd_ps_fail(const char *reason, hvd_handle_t *handle);

#ifdef __cplusplus
}
#endif

#endif
