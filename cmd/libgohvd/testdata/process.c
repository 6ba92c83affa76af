/* What the library does to its process: the arguments are its path and that of a copy. */
#include <dlfcn.h>
#include <signal.h>
#include <unistd.h>

#include "check.h"

/* handler has a handler for a signal, so that one that the library would install shows. */
static void handler(int number) { (void)number; }

static const int kept[] = {SIGINT, SIGTERM, SIGCHLD, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2, SIGALRM, SIGPROF};

/* unchanged reports whether the handlers of the signals are what main has set. */
static int unchanged(void) {
	for (size_t i = 0; i < sizeof kept / sizeof *kept; i++) {
		struct sigaction now;
		sigaction(kept[i], NULL, &now);
		if (now.sa_handler != (i % 2 ? handler : SIG_DFL)) {
			fprintf(stderr, "signal %d has another handler\n", kept[i]);
			return 0;
		}
	}
	return 1;
}

int main(int argc, char **argv) {
	want(argc == 3);
	for (size_t i = 1; i < sizeof kept / sizeof *kept; i += 2) {
		signal(kept[i], handler);
	}
	void *lib = dlopen(argv[1], RTLD_NOW | RTLD_GLOBAL);
	want(lib);
	want(unchanged());
	signal(kept[1], handler); /* without SA_ONSTACK */
	hvd_status_t (*init)(const hvd_init_options_t *, hvd_handle_t *) = dlsym(lib, "hvd_init");
	hvd_status_t (*shutdown)(const char *, uint32_t, hvd_handle_t *) = dlsym(lib, "hvd_shutdown");
	hvd_status_t (*error)(hvd_error_t *) = dlsym(lib, "hvd_last_error");
	int32_t (*size)(void) = dlsym(lib, "hvd_size");
	hvd_error_t e = {sizeof e, 0, NULL, NULL, NULL, NULL, 0, 0};

	/* The environment of the moment of the call counts. */
	setenv("HOROVOD_CYCLE_TIME", "x", 1);
	want(init(NULL, NULL) != HVD_SUCCESS);
	error(&e);
	want(strstr(e.text, "HOROVOD_CYCLE_TIME"));
	unsetenv("HOROVOD_CYCLE_TIME");
	want(init(NULL, NULL) == HVD_SUCCESS && size() == 1);
	want(unchanged());
	/* A handler that ran on a stack of Go would overwrite memory. */
	struct sigaction now;
	sigaction(kept[1], NULL, &now);
	want(now.sa_flags & SA_ONSTACK);
	want(shutdown(NULL, 0, NULL) == HVD_SUCCESS);
	want(unchanged());

	/* A second copy refuses every call. */
	void *copy = dlopen(argv[2], RTLD_NOW | RTLD_LOCAL);
	want(copy);
	hvd_status_t (*init2)(const hvd_init_options_t *, hvd_handle_t *) = dlsym(copy, "hvd_init");
	hvd_status_t (*error2)(hvd_error_t *) = dlsym(copy, "hvd_last_error");
	want(init2(NULL, NULL) == HVD_ERROR_USAGE);
	error2(&e);
	want(strstr(e.text, argv[1]));
	_exit(0); /* the exit handlers of two Go runtimes are not what this tests */
}
