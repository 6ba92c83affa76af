// A library with a thread-local variable that needs static TLS, and a program that loads libraries in the order of its
// arguments. The last one is libgohvd.so, of which it joins a job. The program is not linked with it.
#include <stdio.h>

#ifdef LIBRARY

__thread char variable[56] __attribute__((tls_model("initial-exec")));
char *address(void) { return variable; }

#else

#include <dlfcn.h>

int main(int argc, char **argv) {
	void *library = NULL;
	for (int i = 1; i < argc; i++) {
		library = dlopen(argv[i], RTLD_NOW | RTLD_LOCAL);
		if (!library) {
			fprintf(stderr, "%s\n", dlerror());
			return 1;
		}
	}
	int (*init)(void *, void *) = (int (*)(void *, void *))dlsym(library, "hvd_init");
	int (*size)(void) = (int (*)(void))dlsym(library, "hvd_size");
	int (*leave)(void *, unsigned, void *) = (int (*)(void *, unsigned, void *))dlsym(library, "hvd_shutdown");
	return !init || init(NULL, NULL) || size() != 1 || leave(NULL, 0, NULL);
}

#endif
