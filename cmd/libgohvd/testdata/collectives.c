/* Every kind of operation, with results in memory of the program and of the library. */
#include "check.h"

static int me, n;

/* tensor returns a tensor of one dimension. */
static hvd_tensor_t tensor(const void *in, void *out, uint64_t out_bytes, const int64_t *rows) {
	hvd_tensor_t t = {in, out, out_bytes, rows, 1, 0};
	return t;
}

static void reductions(void) {
	float x[3] = {(float)me, 1, 2}, y[3], z[3] = {1, 2, 3};
	int64_t three = 3, all = 3 * n;
	hvd_tensor_t t = tensor(x, y, sizeof y, &three);
	hvd_op_t op = hvd_op(HVD_ALLREDUCE, HVD_FLOAT32, &t);
	op.name = "x";
	ok(hvd_run(&op, -1, NULL, NULL)); /* the default is the average */
	want(y[0] == (float)(n - 1) / 2 && y[2] == 2 && x[0] == (float)me);
	op.reduction = HVD_SUM;
	op.prescale = 2;
	ok(hvd_run(&op, -1, NULL, NULL));
	want(y[1] == 2 * (float)n);
	t.output = x;
	op.prescale = 1;
	op.compression = HVD_FLOAT16;
	ok(hvd_run(&op, -1, NULL, NULL));
	want(x[1] == (float)n);

	op = hvd_op(HVD_REDUCE, HVD_FLOAT32, &t);
	t.input = z;
	t.output = y;
	op.reduction = HVD_MAX;
	op.root = n - 1;
	y[0] = -1;
	ok(hvd_run(&op, -1, NULL, NULL));
	want(y[0] == (me == n - 1 ? 1 : -1));

	float *rows = malloc(sizeof *rows * 3 * (size_t)n);
	for (int i = 0; i < 3 * n; i++) {
		rows[i] = (float)i;
	}
	t = tensor(rows, y, sizeof y, &all);
	op = hvd_op(HVD_REDUCESCATTER, HVD_FLOAT32, &t);
	op.reduction = HVD_SUM;
	ok(hvd_run(&op, -1, NULL, NULL));
	want(y[0] == (float)(n * 3 * me) && y[2] == (float)(n * (3 * me + 2)));
	t.output = rows + 3 * me; /* in place */
	ok(hvd_run(&op, -1, NULL, NULL));
	want(rows[3 * me] == (float)(n * 3 * me));
	free(rows);
}

static void moves(void) {
	int32_t x[2] = {me, 10 * me};
	int64_t rows = me + 1, two = 2, each = n;
	int32_t *mine = malloc(sizeof *mine * (size_t)(me + 1)), *many = malloc(sizeof *many * 2 * (size_t)n);
	for (int i = 0; i <= me; i++) {
		mine[i] = me;
	}
	/* Only the engine knows the size of the result. */
	hvd_tensor_t t = tensor(mine, NULL, 0, &rows);
	hvd_op_t op = hvd_op(HVD_ALLGATHER, HVD_INT32, &t);
	hvd_result_t r = {sizeof r};
	ok(hvd_run(&op, -1, NULL, &r));
	want(r.num_outputs == 1 && r.outputs[0].dims == 1 && r.outputs[0].shape[0] == n * (n + 1) / 2);
	want(r.outputs[0].bytes == 4 * (uint64_t)r.outputs[0].shape[0]);
	want(((const int32_t *)r.outputs[0].data)[r.outputs[0].shape[0] - 1] == n - 1);
	hvd_free_result(&r);
	hvd_free_result(&r); /* a second time does nothing */
	/* The input may be a part of the output. */
	many[2 * me] = x[0];
	many[2 * me + 1] = x[1];
	t = tensor(many + 2 * me, many, 8 * (uint64_t)n, &two);
	ok(hvd_run(&op, -1, NULL, NULL));
	want(many[0] == 0 && many[2 * n - 1] == 10 * (n - 1));

	t = tensor(me == 0 ? x : NULL, x, sizeof x, &two);
	op = hvd_op(HVD_BROADCAST, HVD_INT32, &t);
	ok(hvd_run(&op, -1, NULL, NULL));
	want(x[0] == 0 && x[1] == 0);

	int64_t *splits = malloc(sizeof *splits * (size_t)n);
	for (int i = 0; i < n; i++) {
		many[i] = 100 * me + i;
		splits[i] = 1;
	}
	t = tensor(many, NULL, 0, &each);
	op = hvd_op(HVD_ALLTOALL, HVD_INT32, &t);
	op.splits = splits;
	op.num_splits = (uint32_t)n;
	ok(hvd_run(&op, -1, NULL, &r));
	want(r.num_received == (uint32_t)n && r.received[n - 1] == 1);
	want(((const int32_t *)r.outputs[0].data)[n - 1] == 100 * (n - 1) + me);
	hvd_free_result(&r);

	t = tensor(mine, NULL, 0, &rows);
	op = hvd_op(HVD_GATHER, HVD_INT32, &t);
	op.root = n - 1;
	ok(hvd_run(&op, -1, NULL, &r));
	want(me < n - 1 ? r.outputs[0].bytes == 0 : r.received[n - 1] == n && r.outputs[0].shape[0] == n * (n + 1) / 2);
	hvd_free_result(&r);

	t = tensor(me == 1 ? many : NULL, NULL, 0, &each);
	op = hvd_op(HVD_SCATTER, HVD_INT32, &t);
	op.root = 1;
	ok(hvd_run(&op, -1, NULL, &r));
	want(r.outputs[0].shape[0] == 1 && *(const int32_t *)r.outputs[0].data == 100 + me);
	hvd_free_result(&r);
	free(splits);
	free(many);
	free(mine);
}

static void asynchronous(void) {
	enum { count = 100 };
	static double x[count][8];
	int64_t shape[2] = {2, 4};
	hvd_tensor_t t[count];
	hvd_op_t ops[count];
	hvd_handle_t h[count], single;
	char names[count][8];
	for (int i = 0; i < count; i++) {
		int k = me % 2 ? count - 1 - i : i; /* the ranks submit in different orders */
		x[k][7] = k;
		t[i] = tensor(x[k], x[k], sizeof x[k], shape);
		t[i].dims = 2;
		ops[i] = hvd_op(HVD_ALLREDUCE, HVD_FLOAT64, &t[i]);
		ops[i].reduction = HVD_SUM;
		snprintf(names[i], sizeof names[i], "t%d", k);
		ops[i].name = names[i];
	}
	size_t submitted = 0, index = 0;
	ok(hvd_submit_many(ops, count, h, &submitted));
	want(submitted == count);
	fails(hvd_submit(&ops[3], &single), HVD_ERROR_DUPLICATE_NAME, "t");
	ok(hvd_wait_any(h, count, -1, &index));
	want(index < count);
	int32_t done = 0;
	while (!done) {
		ok(hvd_poll(h[count - 1], &done));
	}
	for (int i = 0; i < count; i++) {
		ok(i % 2 ? hvd_wait(h[i], -1, NULL) : hvd_finish(h[i], -1, NULL));
	}
	for (int i = 0; i < count; i++) {
		want(x[i][7] == (double)n * i);
	}
	fails(hvd_wait(h[0], -1, NULL), HVD_ERROR_HANDLE, "handle");
	fails(hvd_finish(h[0], -1, NULL), HVD_ERROR_HANDLE, "handle");

	hvd_op_t sync = hvd_op(HVD_BARRIER, (hvd_dtype_t)0, NULL);
	hvd_result_t old; /* its fields are set whatever they were before */
	for (int i = 0; i < 2; i++) {
		memset(&old, 0xff, sizeof old);
		old.size = sizeof old;
		if (i == 0) {
			ok(hvd_submit(&sync, &single));
			ok(hvd_finish(single, -1, &old));
		} else {
			want(hvd_finish(single, NAN, &old) == HVD_ERROR_USAGE);
		}
		want(!old.memory && !old.outputs && !old.num_outputs && !old.received && !old.num_received);
		hvd_free_result(&old);
	}

	hvd_op_t group = hvd_op(HVD_ALLREDUCE, HVD_FLOAT64, t);
	group.num_tensors = count;
	group.flags = HVD_GROUPED;
	group.reduction = HVD_MIN;
	hvd_result_t r = {sizeof r};
	ok(hvd_run(&group, -1, NULL, &r));
	want(r.num_outputs == count && r.outputs[count - 1].dims == 2);
	hvd_free_result(&r);

	/* A wait with a limit, and an operation whose handle is given up. */
	hvd_op_t late = hvd_op(HVD_BARRIER, (hvd_dtype_t)0, NULL);
	late.name = "late";
	hvd_handle_t barrier = 0;
	if (me == 0) {
		want(hvd_run(&late, 0, &barrier, NULL) == HVD_PENDING && barrier);
		want(hvd_wait(barrier, 0.001, NULL) == HVD_PENDING);
		want(hvd_wait_any(&barrier, 1, 0.001, &index) == HVD_PENDING);
		hvd_handle_t both[2] = {barrier, 0};
		ok(hvd_new_gate(&both[1]));
		want(hvd_wait_any(both, 2, 0.001, &index) == HVD_PENDING);
		fails(hvd_open_gate(barrier), HVD_ERROR_HANDLE, "handle");
		ok(hvd_open_gate(both[1]));
		ok(hvd_open_gate(both[1]));
		ok(hvd_wait_any(both, 2, -1, &index));
		want(index == 1);
		ok(hvd_wait(both[1], -1, NULL));
		ok(hvd_release(barrier));
		fails(hvd_wait(barrier, 0, NULL), HVD_ERROR_HANDLE, "handle");
		hvd_op_t early = hvd_op(HVD_BARRIER, (hvd_dtype_t)0, NULL);
		early.name = "early";
		ok(hvd_run(&early, -1, NULL, NULL));
	} else {
		hvd_op_t early = hvd_op(HVD_BARRIER, (hvd_dtype_t)0, NULL);
		early.name = "early";
		ok(hvd_run(&early, -1, NULL, NULL));
		ok(hvd_run(&late, -1, NULL, NULL));
	}
}

/* mixed waits for an operation and for a change of the process sets, each of which is done first once. */
static void mixed(void) {
	int32_t alone = 0, ids[2];
	uint32_t count = 0;
	hvd_ranks_t r = {&alone, 1, 0};
	hvd_op_t late = hvd_op(HVD_BARRIER, (hvd_dtype_t)0, NULL), early = late;
	hvd_handle_t h[2];
	size_t index = 9;
	late.name = "mixed";
	early.name = "before mixed";
	if (me == 0) {
		ok(hvd_submit(&late, &h[0]));
	}
	ok(hvd_add_process_set(&r, 0, NULL, 0, NULL, &h[1]));
	if (me > 0) {
		ok(hvd_wait(h[1], -1, NULL));
		ok(hvd_run(&early, -1, NULL, NULL));
		ok(hvd_run(&late, -1, NULL, NULL));
	} else {
		ok(hvd_wait_any(h, 2, -1, &index));
		want(index == 1);
		ok(hvd_wait(h[1], -1, NULL));
		ok(hvd_run(&early, -1, NULL, NULL));
		ok(hvd_wait_any(h, 1, -1, &index));
		want(index == 0);
		ok(hvd_wait(h[0], -1, NULL));
	}
	ok(hvd_process_sets(ids, 2, &count));
	want(count == 2);
	/* Rank 0 begins the removal, which is done only after the operation. */
	if (me == 0) {
		ok(hvd_remove_process_set(ids[1], 0, &h[0]));
		ok(hvd_submit(&late, &h[1]));
		ok(hvd_wait_any(h, 2, -1, &index));
		want(index == 1);
		ok(hvd_wait(h[1], -1, NULL));
		want(hvd_wait_any(h, 1, 0.001, &index) == HVD_PENDING);
		ok(hvd_run(&early, -1, NULL, NULL));
		ok(hvd_wait(h[0], -1, NULL));
	} else {
		ok(hvd_run(&late, -1, NULL, NULL));
		ok(hvd_run(&early, -1, NULL, NULL));
		ok(hvd_remove_process_set(ids[1], 0, NULL));
	}
}

static void messages(void) {
	int16_t out = (int16_t)me, in = -1;
	int64_t one = 1;
	hvd_tensor_t t = tensor(&out, NULL, 0, &one), u = tensor(NULL, &in, sizeof in, &one);
	hvd_op_t send = hvd_op(HVD_SEND, HVD_INT16, &t), recv = hvd_op(HVD_RECV, HVD_INT16, &u);
	hvd_handle_t h;
	hvd_result_t r = {sizeof r};
	send.peer = (me + 1) % n;
	recv.peer = HVD_ANY_SOURCE;
	send.tag = recv.tag = 7;
	ok(hvd_submit(&send, &h));
	ok(hvd_run(&recv, -1, NULL, &r));
	want(in == (me + n - 1) % n && r.source == in);
	hvd_free_result(&r);
	ok(hvd_wait(h, -1, NULL));
}

static void sets(void) {
	int32_t pair[2] = {0, 1}, id = -1, ids[4], ranks[4];
	uint32_t count = 0, members = n > 2 ? 2 : 1; /* no other set may have all ranks */
	hvd_ranks_t r = {pair, members, 0};
	ok(hvd_add_process_set(&r, 0, NULL, 0, &id, NULL));
	want(id > 0);
	ok(hvd_process_sets(ids, 4, &count));
	want(count == 2 && ids[0] == 0 && ids[1] == id);
	ok(hvd_process_set_ranks(id, ranks, 1, &count)); /* it stores only one */
	want(count == members && ranks[0] == 0);
	fails(hvd_process_set_ranks(99, ranks, 4, &count), HVD_ERROR_USAGE, "99");
	if (me < (int)members) {
		hvd_op_t op = hvd_op(HVD_BARRIER, (hvd_dtype_t)0, NULL);
		op.process_set = id;
		ok(hvd_run(&op, -1, NULL, NULL));
	}
	hvd_handle_t h;
	ok(hvd_remove_process_set(id, 0, &h));
	ok(hvd_wait(h, -1, NULL));
}

/* watch uses the functions that look at the engine. With a sidecar they are errors. */
static void watch(int sidecar) {
	char *text;
	if (sidecar) {
		fails(hvd_metrics(&text), HVD_ERROR_USAGE, "HVD_SIDECAR");
		fails(hvd_dump(&text), HVD_ERROR_USAGE, "HVD_SIDECAR");
		fails(hvd_next_stall(&text), HVD_ERROR_USAGE, "HVD_SIDECAR");
		return;
	}
	ok(hvd_metrics(&text));
	want(strstr(text, "hvd_"));
	hvd_free_text(text);
	ok(hvd_dump(&text));
	want(text[0] == '{');
	hvd_free_text(text);
	ok(hvd_next_stall(&text));
	want(!text);
}

/* With an argument, the engine of this rank is in a sidecar. */
int main(int argc, char **argv) {
	(void)argv;
	want(hvd_rank() == -1 && hvd_size() == -1 && hvd_epoch() == 0);
	hvd_handle_t h;
	ok(hvd_init(NULL, &h));
	ok(hvd_wait(h, -1, NULL));
	ok(hvd_init(NULL, NULL)); /* it does nothing */
	me = hvd_rank();
	n = hvd_size();
	want(hvd_local_size() == n && hvd_cross_size() == 1 && hvd_is_homogeneous() == 1 && hvd_epoch() > 0);
	for (int round = 0; round < 3; round++) {
		reductions();
		moves();
		asynchronous();
		mixed();
		messages();
		sets();
	}
	watch(argc > 1);

	void *memory;
	ok(hvd_alloc(6 << 20, &memory)); /* the ranks read it without a copy */
	float *big = memory;
	int64_t elements = 6 << 18;
	for (int64_t i = 0; i < elements; i++) {
		big[i] = (float)(i % 1000);
	}
	hvd_tensor_t t = tensor(big, big, 6 << 20, &elements);
	hvd_op_t op = hvd_op(HVD_ALLREDUCE, HVD_FLOAT32, &t);
	op.reduction = HVD_SUM;
	ok(hvd_run(&op, -1, NULL, NULL));
	want(big[elements - 1] == (float)n * (float)((elements - 1) % 1000));
	ok(hvd_free(memory));
	fails(hvd_free(memory), HVD_ERROR_USAGE, "freed");

	op = hvd_op(HVD_JOIN, (hvd_dtype_t)0, NULL);
	hvd_result_t r = {sizeof r};
	ok(hvd_run(&op, -1, NULL, &r));
	want(r.last_joined >= 0 && r.last_joined < n);
	hvd_free_result(&r);
	ok(hvd_check());
	ok(hvd_shutdown(NULL, 0, NULL));
	fails(hvd_check(), HVD_ERROR_NOT_INITIALIZED, "init");
	ok(hvd_shutdown(NULL, 0, NULL)); /* it does nothing */
	ok(hvd_init(NULL, NULL));        /* the next epoch */
	want(hvd_rank() == me);
	ok(hvd_shutdown(NULL, 0, NULL));
	return 0;
}
