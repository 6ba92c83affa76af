/* Threads call the library and another Go library at the same time. The arguments are the paths of the libraries in
 * the order in which they are loaded, and whether a crash ends the program. The program has one rank. */
#include <dlfcn.h>
#include <pthread.h>

#include "check.h"

static hvd_status_t (*run)(const hvd_op_t *, double, hvd_handle_t *, hvd_result_t *);
static int (*sum)(int);

static void *operations(void *name) {
	float x[4];
	int64_t shape[] = {4};
	hvd_tensor_t t = {x, x, sizeof x, shape, 1, 0};
	hvd_op_t op = hvd_op(HVD_ALLREDUCE, HVD_FLOAT32, &t);
	op.name = name;
	for (int i = 0; i < 2000; i++) {
		x[3] = (float)i;
		want(run(&op, -1, NULL, NULL) == HVD_SUCCESS && x[3] == (float)i);
	}
	return NULL;
}

static void *sums(void *unused) {
	(void)unused;
	for (int i = 0; i < 200; i++) {
		want(sum(100) == 4950);
	}
	return NULL;
}

int main(int argc, char **argv) {
	want(argc == 4);
	for (int i = 1; i <= 2; i++) {
		void *lib = dlopen(argv[i], RTLD_NOW | (i == 1 ? RTLD_GLOBAL : RTLD_LOCAL));
		want(lib);
		if (dlsym(lib, "other_sum")) {
			*(void **)&sum = dlsym(lib, "other_sum");
			want(sum(10) == 45);
			continue;
		}
		hvd_status_t (*init)(const hvd_init_options_t *, hvd_handle_t *);
		*(void **)&init = dlsym(lib, "hvd_init");
		*(void **)&run = dlsym(lib, "hvd_run");
		want(init(NULL, NULL) == HVD_SUCCESS);
	}
	pthread_t threads[4];
	char names[2][2] = {"a", "b"};
	for (int i = 0; i < 4; i++) {
		want(pthread_create(&threads[i], NULL, i < 2 ? operations : sums, i < 2 ? names[i] : NULL) == 0);
	}
	for (int i = 0; i < 4; i++) {
		want(pthread_join(threads[i], NULL) == 0);
	}
	printf("done\n");
	fflush(stdout);
	if (strcmp(argv[3], "crash") == 0) {
		*(volatile int *)1 = 0;
	}
	exit(0);
}
