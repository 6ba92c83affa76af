/* Wrong calls. Each must be an error with a text. The program has one rank. */
#include "check.h"

#include <sys/wait.h>
#include <unistd.h>

int main(void) {
	float x[4] = {0};
	int64_t shape[2] = {2, 2}, huge[2] = {INT64_MAX, 3}, negative = -1;
	hvd_tensor_t t = {x, x, sizeof x, shape, 2, 0};
	const hvd_op_t good = hvd_op(HVD_ALLREDUCE, HVD_FLOAT32, &t);
	hvd_op_t op = good;
	hvd_handle_t h = 0;
	hvd_result_t r = {0};
	hvd_error_t e = {0};
	char *text;
	int32_t number = 0;
	uint32_t count;
	size_t index;

	want(hvd_abi_version() == HVD_ABI_VERSION && hvd_version()[0]);
	want(hvd_last_error(NULL) == HVD_ERROR_USAGE && hvd_last_error(&e) == HVD_ERROR_USAGE);
	want(!strcmp(last(), ""));
	fails(hvd_run(&op, -1, NULL, NULL), HVD_ERROR_NOT_INITIALIZED, "not initialized");
	fails(hvd_submit(&op, &h), HVD_ERROR_NOT_INITIALIZED, "not initialized");
	fails(hvd_metrics(&text), HVD_ERROR_NOT_INITIALIZED, "not initialized");
	fails(hvd_process_sets(&number, 1, &count), HVD_ERROR_NOT_INITIALIZED, "not initialized");
	hvd_init_options_t options = {sizeof options};
	options.reserved = 1;
	fails(hvd_init(&options, NULL), HVD_ERROR_USAGE, "reserved is not 0");
	fails(hvd_new_unique_id(&options, &text), HVD_ERROR_USAGE, "reserved is not 0");
	const hvd_ranks_t sets[] = {{&number, 1, 7}};
	options.reserved = 0;
	options.process_sets = sets;
	options.num_process_sets = 1;
	fails(hvd_init(&options, NULL), HVD_ERROR_USAGE, "reserved of a process set is not 0");
	want(hvd_mpi_built() == 0);
	fails(hvd_gpu_libraries(0, NULL), HVD_ERROR_USAGE, "null pointer");
	setenv("HVD_NCCL_LIBRARY", "/none/libnccl.so.2", 1);
	want(hvd_gpu_libraries(0, &text) == HVD_SUCCESS && strstr(text, "{\"built\":true") &&
	     strstr(text, "/none/libnccl.so.2: cannot open"));
	hvd_free_text(text);
	fails(hvd_ps_clock(NULL), HVD_ERROR_USAGE, "no node");
	fails(hvd_ps_fail("x", NULL), HVD_ERROR_USAGE, "no node");
	fails(hvd_ps_fail(NULL, NULL), HVD_ERROR_USAGE, "no reason");
	hvd_elastic_t at = {0};
	fails(hvd_elastic(&at), HVD_ERROR_USAGE, "hvd_elastic_t");
	fails(hvd_elastic(NULL), HVD_ERROR_USAGE, "hvd_elastic_t");
	at.size = sizeof at;
	want(hvd_elastic(&at) == HVD_SUCCESS && at.generation == 0 && at.removed == 0 && at.pending == 0);
	fails(hvd_elastic_join(0, NULL), HVD_ERROR_NOT_INITIALIZED, "not initialized");
	fails(hvd_elastic_join(2, NULL), HVD_ERROR_USAGE, "HVD_LOOSE");
	fails(hvd_elastic_vote(16, -1, NULL), HVD_ERROR_USAGE, "HVD_SAVED");
	fails(hvd_elastic_vote(HVD_SAVED | HVD_STEP, -1, NULL), HVD_ERROR_USAGE, "want one of them");
	fails(hvd_elastic_vote(0, -1, NULL), HVD_ERROR_NOT_INITIALIZED, "not initialized");
	fails(hvd_elastic_end(4, NULL), HVD_ERROR_USAGE, "hvd_training_t");
	fails(hvd_check(), HVD_ERROR_NOT_INITIALIZED, "not initialized");
	fails(hvd_dump(&text), HVD_ERROR_NOT_INITIALIZED, "not initialized");
	fails(hvd_start_timeline("x", 0), HVD_ERROR_NOT_INITIALIZED, "not initialized");
	fails(hvd_stop_timeline(), HVD_ERROR_NOT_INITIALIZED, "not initialized");
	fails(hvd_remove_process_set(1, 0, NULL), HVD_ERROR_NOT_INITIALIZED, "not initialized");
	fails(hvd_process_set_ranks(0, &number, 1, &count), HVD_ERROR_NOT_INITIALIZED, "not initialized");
	ok(hvd_shutdown(NULL, 0, NULL));

	hvd_init_options_t o = {0};
	fails(hvd_init(&o, NULL), HVD_ERROR_USAGE, "size");
	o.size = sizeof o;
	o.num_settings = 1;
	fails(hvd_init(&o, NULL), HVD_ERROR_USAGE, "null");
	const char *settings[] = {"HOROVOD_CYCLE_TIME", "=1", "HVD_NO_SUCH_SETTING=1", "HOROVOD_CYCLE_TIME=\xff", NULL};
	const char *says[] = {"NAME=value", "NAME=value", "HVD_NO_SUCH_SETTING", "HOROVOD_CYCLE_TIME", "null"};
	for (int i = 0; i < 5; i++) {
		o.settings = &settings[i];
		want(hvd_init(&o, NULL) != HVD_SUCCESS && strstr(last(), says[i]));
	}
	o.num_settings = 0;
	o.num_process_sets = 1;
	fails(hvd_init(&o, NULL), HVD_ERROR_USAGE, "null");
	int32_t ranks[] = {0, 0, 9};
	const hvd_ranks_t wrong_sets[] = {{ranks, 2, 0}, {ranks + 2, 1, 0}, {ranks, 0, 0}, {NULL, 1, 0}};
	const char *says_of_sets[] = {"twice", "rank 9", "without ranks", "null"};
	for (int i = 0; i < 4; i++) {
		o.process_sets = &wrong_sets[i];
		want(hvd_init(&o, NULL) != HVD_SUCCESS && strstr(last(), says_of_sets[i]));
	}
	fails(hvd_new_unique_id(&o, &text), HVD_ERROR_USAGE, "null");
	o.process_sets = NULL;
	fails(hvd_new_unique_id(&o, &text), HVD_ERROR_USAGE, "null");
	o.num_process_sets = 0;
	o.mpi_comm = ranks;
	want(hvd_init(&o, NULL) != HVD_SUCCESS && strstr(last(), "MPI"));
	ok(hvd_init(NULL, NULL));

	ok(hvd_elastic_join(0, NULL));
	want(hvd_elastic(&at) == HVD_SUCCESS && at.held == HVD_HELD_PRESENT && at.root == 0 && !at.missing && !at.restore);
	ok(hvd_elastic_synced(NULL));
	fails(hvd_elastic_vote(0, 1, NULL), HVD_ERROR_USAGE, "no place for the handle");
	ok(hvd_elastic_vote(HVD_SAVED | HVD_ADDED, -1, NULL));
	want(hvd_elastic(&at) == HVD_SUCCESS && at.changes == HVD_ADDED);
	ok(hvd_elastic_end(HVD_TRAINING_CHANGED, NULL));
	ok(hvd_elastic_join(HVD_LOOSE, NULL));
	want(hvd_elastic(&at) == HVD_SUCCESS && at.held == HVD_HELD_PRESENT && at.changes == 0);
	ok(hvd_elastic_synced(NULL));
	ok(hvd_elastic_end(HVD_TRAINING_DONE, NULL));

	fails(hvd_run(NULL, -1, NULL, NULL), HVD_ERROR_USAGE, "hvd_op_t");
	op.size--;
	fails(hvd_submit(&op, &h), HVD_ERROR_USAGE, "hvd_op_t");
	op = good;
	fails(hvd_submit(&op, NULL), HVD_ERROR_USAGE, "null");
	fails(hvd_run(&op, 1, NULL, NULL), HVD_ERROR_USAGE, "handle");
	fails(hvd_run(&op, NAN, &h, NULL), HVD_ERROR_USAGE, "not a number");
	fails(hvd_run(&op, -1, NULL, &r), HVD_ERROR_USAGE, "hvd_result_t");
	op.kind = 99;
	fails(hvd_run(&op, -1, NULL, NULL), HVD_ERROR_USAGE, "99");
	op.kind = HVD_PENDING + 1; /* a kind of responses only */
	fails(hvd_run(&op, -1, NULL, NULL), HVD_ERROR_USAGE, "unknown");
	op = good;
	op.dtype = 1000;
	fails(hvd_run(&op, -1, NULL, NULL), HVD_ERROR_USAGE, "1000");
	op.num_tensors = 0; /* also of a barrier, which uses no element type */
	op.kind = HVD_BARRIER;
	fails(hvd_run(&op, -1, NULL, NULL), HVD_ERROR_USAGE, "1000");
	op = hvd_op(HVD_BARRIER, HVD_BOOL, NULL);
	ok(hvd_run(&op, -1, NULL, NULL));
	op = good;
	op.reduction = 8;
	fails(hvd_run(&op, -1, NULL, NULL), HVD_ERROR_USAGE, "reduction 8");
	op = good;
	op.flags = 64;
	fails(hvd_run(&op, -1, NULL, NULL), HVD_ERROR_USAGE, "0x40");
	op = good;
	op.tensors = NULL;
	fails(hvd_run(&op, -1, NULL, NULL), HVD_ERROR_USAGE, "null");
	op = good;
	op.num_tensors = 0;
	fails(hvd_run(&op, -1, NULL, NULL), HVD_ERROR_USAGE, "0 tensors");
	op = good;
	op.num_splits = 1;
	fails(hvd_run(&op, -1, NULL, NULL), HVD_ERROR_USAGE, "null");
	op.num_splits = UINT32_MAX; /* nothing of the list may be read */
	op.splits = &negative;
	fails(hvd_run(&op, -1, NULL, NULL), HVD_ERROR_USAGE, "at most one for each of 1 ranks");
	op = good;
	op.reserved = 1;
	fails(hvd_run(&op, -1, NULL, NULL), HVD_ERROR_USAGE, "reserved is not 0");
	fails(hvd_submit(&op, &h), HVD_ERROR_USAGE, "reserved is not 0");
	hvd_ranks_t unknown = {&number, 1, 1};
	fails(hvd_add_process_set(&unknown, 0, NULL, 0, &number, NULL), HVD_ERROR_USAGE, "reserved is not 0");
	op = good;
	op.process_set = 5;
	fails(hvd_run(&op, -1, NULL, NULL), HVD_ERROR_USAGE, "process set");
	op = good;
	op.kind = HVD_BROADCAST;
	op.root = 3;
	fails(hvd_run(&op, -1, NULL, NULL), HVD_ERROR_USAGE, "root rank 3");
	op = good;
	op.timeout_seconds = -1;
	fails(hvd_run(&op, -1, NULL, NULL), HVD_ERROR_USAGE, "timeout");
	op.timeout_seconds = NAN;
	fails(hvd_run(&op, -1, NULL, NULL), HVD_ERROR_USAGE, "timeout");
	op = good;
	op.device = 0;
	want(hvd_run(&op, -1, NULL, NULL) != HVD_SUCCESS && *last());
	op.device = -2;
	fails(hvd_run(&op, -1, NULL, NULL), HVD_ERROR_USAGE, "device -2");
	op = good;
	op.name = "\xff";
	fails(hvd_run(&op, -1, NULL, NULL), HVD_ERROR_USAGE, "UTF-8");
	char *name = malloc(1 << 20);
	memset(name, 'a', 1 << 20);
	name[(1 << 20) - 1] = 0;
	op.name = name;
	fails(hvd_run(&op, -1, NULL, NULL), HVD_ERROR_USAGE, "name of 1048575 bytes");
	want(strlen(last()) < 200);
	free(name);
	op = good;
	op.prescale = NAN;
	fails(hvd_run(&op, -1, NULL, NULL), HVD_ERROR_USAGE, "NaN");
	op = good;
	op.compression = 99;
	fails(hvd_run(&op, -1, NULL, NULL), HVD_ERROR_USAGE, "99");
	op = good;
	op.num_tensors = UINT32_MAX;
	fails(hvd_run(&op, -1, NULL, NULL), HVD_ERROR_USAGE, "4294967295 tensors");
	op = good;
	op.kind = HVD_BARRIER; /* which has no tensor */
	fails(hvd_run(&op, -1, NULL, NULL), HVD_ERROR_USAGE, "1 tensors");
	int64_t splits[] = {-1, INT64_MAX};
	op.kind = HVD_ALLTOALL;
	op.num_splits = 1;
	for (int i = 0; i < 2; i++) {
		op.splits = &splits[i];
		fails(hvd_run(&op, -1, NULL, NULL), HVD_ERROR_USAGE, "splits");
	}
	op = good;
	op.kind = HVD_SEND; /* to itself, and with a tag that is too large */
	fails(hvd_run(&op, -1, NULL, NULL), HVD_ERROR_USAGE, "rank 0");
	op.kind = HVD_RECV;
	op.tag = UINT32_MAX;
	fails(hvd_run(&op, -1, NULL, NULL), HVD_ERROR_USAGE, "tag 4294967295");
	op = good;
	hvd_tensor_t bad = t;
	op.tensors = &bad;
	bad.input = NULL;
	fails(hvd_run(&op, -1, NULL, NULL), HVD_ERROR_USAGE, "no input");
	bad = t;
	bad.shape = NULL;
	fails(hvd_run(&op, -1, NULL, NULL), HVD_ERROR_USAGE, "shape");
	bad.dims = 1u << 30;
	bad.shape = shape;
	fails(hvd_run(&op, -1, NULL, NULL), HVD_ERROR_USAGE, "dimensions");
	bad = t;
	bad.shape = huge;
	fails(hvd_run(&op, -1, NULL, NULL), HVD_ERROR_USAGE, "shape");
	bad.shape = &negative;
	bad.dims = 1;
	fails(hvd_run(&op, -1, NULL, NULL), HVD_ERROR_USAGE, "negative");
	bad = t;
	bad.output_bytes = 8;
	fails(hvd_run(&op, -1, NULL, NULL), HVD_ERROR_USAGE, "8 bytes");
	bad = t;
	bad.output = x + 1;
	fails(hvd_run(&op, -1, NULL, NULL), HVD_ERROR_USAGE, "overlaps");
	op = good;
	op.kind = HVD_REDUCESCATTER; /* of a scalar in place */
	op.tensors = &bad;
	bad = t;
	bad.dims = 0;
	bad.output_bytes = sizeof *x;
	fails(hvd_run(&op, -1, NULL, NULL), HVD_ERROR_MISMATCH, "scalar");
	op = good;
	op.tensors = &bad;
	bad = t;
	bad.input = (char *)x + 1;
	fails(hvd_run(&op, -1, NULL, NULL), HVD_ERROR_USAGE, "multiple of 4");
	bad = t;
	bad.output = (char *)x + 1;
	fails(hvd_run(&op, -1, NULL, NULL), HVD_ERROR_USAGE, "multiple of 4");
	bad = t;
	bad.output_bytes = UINT64_MAX;
	fails(hvd_run(&op, -1, NULL, NULL), HVD_ERROR_USAGE, "18446744073709551615 bytes");
	bad = t;
	bad.dtype = HVD_FLOAT64;
	fails(hvd_run(&op, -1, NULL, NULL), HVD_ERROR_USAGE, "float64");

	/* A call that fails sets what it returns, so that a program that reads or frees it makes no second error. */
	hvd_op_t worse = good;
	worse.num_splits = 1;
	for (int i = 0; i < 2; i++) {
		hvd_result_t none;
		memset(&none, 0xff, sizeof none);
		none.size = sizeof none;
		hvd_handle_t one = 1, many[1] = {1};
		size_t submitted = 1;
		const hvd_op_t *wrong = i ? &worse : NULL;
		fails(hvd_run(wrong, 1, &one, &none), HVD_ERROR_USAGE, i ? "null" : "hvd_op_t");
		want(one == 0 && !none.memory);
		hvd_free_result(&none);
		one = 1;
		fails(hvd_submit(wrong, &one), HVD_ERROR_USAGE, "null");
		want(one == 0);
		fails(hvd_submit_many(wrong, 1, many, &submitted), HVD_ERROR_USAGE, "null");
		want(submitted == 0);
	}
	h = 1;
	fails(hvd_shutdown(NULL, 64, &h), HVD_ERROR_USAGE, "0x40");
	want(h == 0);
	fails(hvd_wait_any(&h, SIZE_MAX / 2, 0, &index), HVD_ERROR_USAGE, "no handles");

	fails(hvd_wait(0, -1, NULL), HVD_ERROR_HANDLE, "handle");
	fails(hvd_wait(UINT64_MAX, -1, NULL), HVD_ERROR_HANDLE, "handle");
	fails(hvd_release(12345), HVD_ERROR_HANDLE, "handle");
	fails(hvd_poll(1, NULL), HVD_ERROR_USAGE, "null");
	fails(hvd_poll(1, &number), HVD_ERROR_HANDLE, "handle");
	fails(hvd_wait_any(&h, 0, -1, &index), HVD_ERROR_USAGE, "no handles");

	/* A program that was compiled before hvd_op_t had the field allocate. */
	{
		enum { OLD = offsetof(hvd_op_t, allocate) };
		_Alignas(hvd_op_t) char old[2 * OLD];
		hvd_handle_t handles[2];
		size_t submitted = 0;
		op = good;
		op.size = OLD;
		ok(hvd_run(&op, -1, NULL, NULL));
		for (int i = 0; i < 2; i++) {
			op.name = i ? "old 1" : "old 0";
			memcpy(old + i * OLD, &op, OLD);
		}
		ok(hvd_submit_many((const hvd_op_t *)old, 2, handles, &submitted));
		want(submitted == 2);
		ok(hvd_wait(handles[0], -1, NULL));
		ok(hvd_wait(handles[1], -1, NULL));
	}

	/* An operation among many that fails in C, and one that fails in Go. Those before it are in flight. */
	for (int in_go = 0; in_go < 2; in_go++) {
		enum { COUNT = 150, WRONG = 100 };
		hvd_op_t ops[COUNT];
		hvd_handle_t handles[COUNT];
		char names[COUNT][8];
		size_t submitted = 1;
		for (int i = 0; i < COUNT; i++) {
			ops[i] = good;
			snprintf(names[i], sizeof names[i], "m%d", i);
			ops[i].name = names[i];
		}
		if (in_go) {
			ops[WRONG].name = "m0";
		} else {
			ops[WRONG].size--;
		}
		fails(hvd_submit_many(ops, COUNT, handles, &submitted), in_go ? HVD_ERROR_DUPLICATE_NAME : HVD_ERROR_USAGE,
		      in_go ? "\"m0\"" : "sizeof");
		want(submitted == WRONG);
		for (int i = 0; i < WRONG; i++) {
			ok(hvd_wait(handles[i], -1, NULL));
		}
		ok(hvd_submit_many(&ops[WRONG + 1], 1, &handles[WRONG], NULL));
		ok(hvd_wait(handles[WRONG], -1, NULL));
		ok(hvd_submit_many(NULL, 0, NULL, &submitted));
		want(submitted == 0);
	}

	/* A handle that was used up or released, and one of another kind. */
	op = good;
	op.name = "x";
	for (int i = 0; i < 2; i++) {
		ok(hvd_submit(&op, &h));
		fails(hvd_open_gate(h), HVD_ERROR_HANDLE, "handle");
		fails(hvd_submit(&op, &(hvd_handle_t){0}), HVD_ERROR_DUPLICATE_NAME, "\"x\"");
		ok(i ? hvd_release(h) : hvd_wait(h, -1, NULL));
		fails(hvd_wait(h, -1, NULL), HVD_ERROR_HANDLE, "handle");
		fails(hvd_poll(h, &number), HVD_ERROR_HANDLE, "handle");
		fails(hvd_release(h), HVD_ERROR_HANDLE, "handle");
		fails(hvd_wait_any(&h, 1, -1, &index), HVD_ERROR_HANDLE, "handle");
		fails(hvd_open_gate(h), HVD_ERROR_HANDLE, "handle");
	}
	fails(hvd_new_gate(NULL), HVD_ERROR_USAGE, "null");
	ok(hvd_new_gate(&h));
	want(hvd_wait(h, 0, NULL) == HVD_PENDING);
	ok(hvd_release(h));
	fails(hvd_open_gate(h), HVD_ERROR_HANDLE, "handle");

	fails(hvd_add_process_set(NULL, 0, NULL, 0, &number, NULL), HVD_ERROR_USAGE, "null");
	for (int i = 0; i < 4; i++) {
		fails(hvd_add_process_set(&wrong_sets[i], 0, NULL, 0, &number, NULL), HVD_ERROR_USAGE, says_of_sets[i]);
	}
	const hvd_ranks_t self = {ranks, 1, 0};
	fails(hvd_add_process_set(&self, 8, NULL, 0, &number, NULL), HVD_ERROR_USAGE, "0x8");
	fails(hvd_add_process_set(&self, 0, NULL, NAN, &number, NULL), HVD_ERROR_USAGE, "timeout");
	fails(hvd_add_process_set(&self, 0, "\xff", 0, &number, NULL), HVD_ERROR_USAGE, "UTF-8");
	fails(hvd_remove_process_set(0, 0, NULL), HVD_ERROR_USAGE, "global");
	fails(hvd_remove_process_set(-1, 0, NULL), HVD_ERROR_USAGE, "process set -1");
	fails(hvd_process_sets(&number, 1, NULL), HVD_ERROR_USAGE, "null");
	fails(hvd_process_set_ranks(0, NULL, 1, &count), HVD_ERROR_USAGE, "null");
	fails(hvd_start_timeline(NULL, 0), HVD_ERROR_USAGE, "null");
	fails(hvd_start_timeline("/no/such/folder/x", 0), HVD_ERROR_USAGE, "/no/such/folder");
	fails(hvd_metrics(NULL), HVD_ERROR_USAGE, "null");
	fails(hvd_dump(NULL), HVD_ERROR_USAGE, "null");
	fails(hvd_next_stall(NULL), HVD_ERROR_USAGE, "null");
	fails(hvd_new_unique_id(NULL, NULL), HVD_ERROR_USAGE, "null");

	/* The parameter server, of which this process is no node. */
	hvd_node_t node = {0};
	hvd_exchange_t exchange = {0};
	const char *cook = "DMLC_ROLE=cook";
	fails(hvd_ps_node(&node), HVD_ERROR_USAGE, "hvd_node_t");
	fails(hvd_ps_exchange(&exchange, &h), HVD_ERROR_USAGE, "hvd_exchange_t");
	exchange.size = sizeof exchange;
	exchange.flags = 8;
	fails(hvd_ps_exchange(&exchange, &h), HVD_ERROR_USAGE, "0x8");
	exchange.flags = HVD_PUSH | HVD_IN_SLICES;
	fails(hvd_ps_exchange(&exchange, NULL), HVD_ERROR_USAGE, "no place for the handle");
	exchange.num_keys = 1;
	fails(hvd_ps_exchange(&exchange, &h), HVD_ERROR_USAGE, "null");
	exchange.num_keys = UINT64_MAX;
	fails(hvd_ps_exchange(&exchange, &h), HVD_ERROR_USAGE, "cannot exist");
	fails(hvd_ps_serve(0, HVD_FLOAT32, NULL, NULL, 0), HVD_ERROR_USAGE, "null");
	fails(hvd_ps_serve(0, HVD_FLOAT32, "sum", NULL, 0), HVD_ERROR_USAGE, "no node");
	fails(hvd_ps_barrier(4, NULL), HVD_ERROR_USAGE, "no node");
	fails(hvd_ps_finalize(1, NULL), HVD_ERROR_USAGE, "no node");
	fails(hvd_ps_start(NULL, 1, NULL), HVD_ERROR_USAGE, "null");
	want(hvd_ps_start(&cook, 1, NULL) != HVD_SUCCESS && strstr(last(), "cook"));

	fails(hvd_alloc(0, NULL), HVD_ERROR_USAGE, "null");
	void *memory;
	fails(hvd_alloc(0, &memory), HVD_ERROR_USAGE, "0 bytes");
	want(hvd_alloc(UINT64_MAX, &memory) != HVD_SUCCESS && !memory);
	want(hvd_alloc(1ull << 55, &memory) != HVD_SUCCESS && !memory && *last());
	ok(hvd_free(NULL));
	fails(hvd_free(x), HVD_ERROR_USAGE, "hvd_alloc");
	ok(hvd_alloc(100, &memory));
	fails(hvd_free((char *)memory + 8), HVD_ERROR_USAGE, "hvd_alloc");
	ok(hvd_free(memory));
	fails(hvd_free(memory), HVD_ERROR_USAGE, "freed");
	fails(hvd_start_timeline("", 0), HVD_ERROR_USAGE, "file name");
	fails(hvd_shutdown(NULL, 64, NULL), HVD_ERROR_USAGE, "0x40");
	fails(hvd_shutdown(NULL, HVD_FAILED, NULL), HVD_ERROR_USAGE, "reason");

	/* A submission that fails leaves the name free, and the good operation still works. */
	op = good;
	op.name = "x";
	ok(hvd_run(&op, -1, NULL, NULL));

	hvd_handle_t waiting;
	ok(hvd_new_gate(&waiting));
	fflush(NULL);
	pid_t child = fork();
	if (child == 0) {
		fails(hvd_run(&op, -1, NULL, NULL), HVD_ERROR_FORKED, "forked");
		fails(hvd_init(NULL, NULL), HVD_ERROR_FORKED, "spawn");
		fails(hvd_submit(&op, &h), HVD_ERROR_FORKED, "forked");
		fails(hvd_wait(waiting, -1, NULL), HVD_ERROR_FORKED, "forked");
		fails(hvd_poll(waiting, &number), HVD_ERROR_FORKED, "forked");
		fails(hvd_alloc(1, &memory), HVD_ERROR_FORKED, "forked");
		fails(hvd_ps_start(NULL, 0, NULL), HVD_ERROR_FORKED, "forked");
		fails(hvd_shutdown(NULL, 0, NULL), HVD_ERROR_FORKED, "forked");
		want(hvd_rank() == -1);
		_exit(0);
	}
	int status = -1;
	want(waitpid(child, &status, 0) == child && status == 0);
	ok(hvd_run(&op, -1, NULL, NULL));
	op.name = "left";
	ok(hvd_submit(&op, &h));
	ok(hvd_shutdown("\xff", 0, NULL));
	fails(hvd_run(&op, -1, NULL, NULL), HVD_ERROR_NOT_INITIALIZED, "not initialized");
	ok(hvd_wait(h, -1, NULL)); /* a handle of the job that is over */
	fails(hvd_wait(h, -1, NULL), HVD_ERROR_HANDLE, "handle");
	return 0;
}
