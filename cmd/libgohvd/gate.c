// The functions of gohvd.h. They refuse calls that must not reach Go, because they would hang or crash there: calls
// in a forked process, calls if there are two copies of the library in the process, and wrong pointers and sizes.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <link.h>
#include <pthread.h>
#include <signal.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "_cgo_export.h"
#include "gate.h"

#define PUBLIC __attribute__((visibility("default")))

// Whether this process is a child of the one that has loaded the library. A child has only the thread that has
// called fork, so the Go runtime does not work in it.
static volatile int forked;

// code_begin and code_end are the bounds of the code of this library. first_term is what SIGTERM did before
// hvd_elastic_join, or has no flags and SIG_DFL.
static uintptr_t code_begin, code_end;
static struct sigaction first_term;

// is_ours reports whether the handler of a signal is that of the Go runtime.
static int is_ours(const struct sigaction *a) {
	return (uintptr_t)a->sa_handler >= code_begin && (uintptr_t)a->sa_handler < code_end;
}

// keep_term sets first_term.
static void keep_term(void) {
	struct sigaction a;
	if (!sigaction(SIGTERM, NULL, &a) && !is_ours(&a)) {
		first_term = a;
	}
}

// block_term blocks or unblocks SIGTERM in this thread, and returns whether it was blocked.
static int block_term(int how) {
	sigset_t term, before;
	sigemptyset(&term);
	sigaddset(&term, SIGTERM);
	return !pthread_sigmask(how, &term, &before) && sigismember(&before, SIGTERM);
}

// term_was_blocked says whether this thread blocked SIGTERM before it called fork.
static __thread int term_was_blocked;

// before_fork blocks SIGTERM, so that a child gets it only after after_fork.
static void before_fork(void) { term_was_blocked = block_term(SIG_BLOCK); }

static void unblock_after_fork(void) {
	if (!term_was_blocked) {
		block_term(SIG_UNBLOCK);
	}
}

char gohvd_poller[64];

// close_sockets closes, in a child, the sockets that an epoll instance contains, and those in epoll instances nested in
// it, up to `nested` levels deep. Otherwise other ranks would not notice the death of the parent while the child lives.
// `poller` is the instance's file in /proc/self/fdinfo, which has one line for each descriptor.
static void close_sockets(const char *poller, int nested);

// close_one handles one such line: it closes a socket, or calls close_sockets for a nested instance. It does nothing if
// the inode in the line is not that of the descriptor, because then the descriptor is another file by now.
static void close_one(const char *line, int nested) {
	const char *inode = strstr(line, "ino:");
	struct stat s;
	if (!strncmp(line, "tfd:", 4) && inode) {
		int fd = (int)strtol(line + 4, NULL, 10);
		if (fstat(fd, &s) || s.st_ino != strtoull(inode + 4, NULL, 16)) {
			return;
		}
		if (S_ISSOCK(s.st_mode)) {
			close(fd);
		} else if (nested) {
			char poller[sizeof gohvd_poller];
			snprintf(poller, sizeof poller, "/proc/self/fdinfo/%d", fd);
			close_sockets(poller, nested - 1);
		}
	}
}

static void close_sockets(const char *poller, int nested) {
	char buffer[1024];
	size_t have = 0;
	ssize_t n;
	int f = open(poller, O_RDONLY | O_CLOEXEC);
	while (f >= 0 && (n = read(f, buffer + have, sizeof buffer - 1 - have)) > 0) {
		buffer[have += (size_t)n] = 0;
		char *line = buffer, *end;
		for (; (end = strchr(line, '\n')); line = end + 1) {
			*end = 0;
			close_one(line, nested);
		}
		have -= (size_t)(line - buffer);
		memmove(buffer, line, have);
	}
	if (f >= 0) {
		close(f);
	}
}

uint64_t gohvd_inodes[GOHVD_MAX_INODES];

// is_listed reports whether an inode number is in gohvd_inodes.
static int is_listed(uint64_t inode) {
	for (uint64_t i = 1; i <= gohvd_inodes[0]; i++) {
		if (gohvd_inodes[i] == inode) {
			return 1;
		}
	}
	return 0;
}

// close_listed closes, in a child, the sockets in gohvd_inodes. They may be in no epoll instance, or the parent may
// have taken them out of one after the fork.
static void close_listed(void) {
	_Alignas(8) char buffer[1024];
	long n;
	int folder = gohvd_inodes[0] ? open("/proc/self/fd", O_RDONLY | O_DIRECTORY | O_CLOEXEC) : -1;
	while (folder >= 0 && (n = syscall(SYS_getdents64, folder, buffer, sizeof buffer)) > 0) {
		for (long at = 0; at < n;) {
			const struct entry {
				uint64_t inode;
				int64_t next;
				uint16_t length;
				uint8_t type;
				char name[];
			} *e = (const void *)(buffer + at);
			struct stat s;
			int fd = (int)strtol(e->name, NULL, 10); // . and .. are 0
			if (!fstat(fd, &s) && S_ISSOCK(s.st_mode) && is_listed(s.st_ino)) {
				close(fd);
			}
			at += e->length;
		}
	}
	if (folder >= 0) {
		close(folder);
	}
}

// after_fork is called in a child. SIGTERM must not wait there for a goroutine, which would never run.
static void after_fork(void) {
	struct sigaction a;
	forked = 1;
	if (gohvd_poller[0]) {
		close_sockets(gohvd_poller, 2);
		gohvd_poller[0] = 0; // the child may use these descriptors for other files before it forks itself
	}
	close_listed();
	gohvd_inodes[0] = 0;
	if (!sigaction(SIGTERM, NULL, &a) && is_ours(&a)) {
		sigaction(SIGTERM, &first_term, NULL);
	}
	unblock_after_fork();
}

// The path of another copy of the library in this process, or an empty string. Two copies would have two Go runtimes
// and two ranks that do not know each other.
static char other_copy[4096];

// names are the paths of the shared objects of the process.
struct names {
	char **all;
	size_t n;
};

// add_name is called for each shared object.
static int add_name(struct dl_phdr_info *info, size_t size, void *data) {
	(void)size;
	struct names *names = data;
	for (int i = 0; i < info->dlpi_phnum; i++) {
		const ElfW(Phdr) *p = &info->dlpi_phdr[i];
		uintptr_t begin = info->dlpi_addr + p->p_vaddr, here = (uintptr_t)&add_name;
		if (p->p_type == PT_LOAD && here >= begin && here < begin + p->p_memsz) {
			code_begin = begin;
			code_end = begin + p->p_memsz;
		}
	}
	char **all = realloc(names->all, (names->n + 1) * sizeof *all);
	if (!all) {
		return 1;
	}
	names->all = all;
	all[names->n] = strdup(info->dlpi_name);
	names->n += all[names->n] != NULL;
	return 0;
}

char *gohvd_path;

// find_copies sets gohvd_path to the path of this library, and other_copy if another object has its functions.
static void find_copies(void) {
	struct names names = {NULL, 0};
	Dl_info self, other;
	if (!dladdr((void *)&find_copies, &self)) {
		return;
	}
	gohvd_path = realpath(self.dli_fname, NULL);
	dl_iterate_phdr(add_name, &names);
	for (size_t i = 0; i < names.n; i++) {
		// The main program has an empty name, and finds the functions of the libraries that it is linked with.
		void *object = names.all[i][0] ? dlopen(names.all[i], RTLD_LAZY | RTLD_NOLOAD) : NULL;
		void *version = object ? dlsym(object, "hvd_abi_version") : NULL;
		if (version && dladdr(version, &other) && other.dli_fbase != self.dli_fbase) {
			snprintf(other_copy, sizeof other_copy, "%s", other.dli_fname);
		}
		if (object) {
			dlclose(object);
		}
		free(names.all[i]);
	}
	free(names.all);
}

// details are those of the last error of a thread.
struct details {
	hvd_status_t status;
	uint32_t num_ranks, shut_down;
	int32_t *ranks;
	char *text, *operation, *tensor;
};

static pthread_key_t details_key;

static void free_details(void *p) {
	struct details *d = p;
	free(d->ranks);
	free(d->text);
	free(d->operation);
	free(d->tensor);
	free(d);
}

// first_limit is the limit of open files before the library was loaded. The constructor runs before those without a
// priority, of which one starts the Go runtime.
static struct rlimit first_limit;

__attribute__((constructor(101))) static void save_limit(void) { getrlimit(RLIMIT_NOFILE, &first_limit); }

// gohvd_restore_limit undoes what package syscall of Go does to the limit. The runtime calls it before any function
// of the program's reaches Go.
void gohvd_restore_limit(void) {
	struct rlimit now;
	if (!getrlimit(RLIMIT_NOFILE, &now) && now.rlim_max == first_limit.rlim_max && now.rlim_cur == now.rlim_max - 1) {
		setrlimit(RLIMIT_NOFILE, &first_limit);
	}
}

__attribute__((constructor)) static void load(void) {
	pthread_key_create(&details_key, free_details);
	pthread_atfork(before_fork, unblock_after_fork, after_fork);
	find_copies();
}

hvd_status_t gohvd_set_error(hvd_status_t status, const char *text, const char *operation, const char *tensor,
                             const int32_t *ranks, uint32_t num_ranks, uint32_t shut_down) {
	struct details *d = pthread_getspecific(details_key);
	if (d) {
		free(d->ranks);
		free(d->text);
		free(d->operation);
		free(d->tensor);
	} else {
		d = malloc(sizeof *d);
		if (!d) {
			return status;
		}
		pthread_setspecific(details_key, d);
	}
	d->status = status;
	d->text = strdup(text);
	d->operation = strdup(operation);
	d->tensor = strdup(tensor);
	d->num_ranks = num_ranks;
	d->shut_down = shut_down;
	d->ranks = malloc((num_ranks + 1) * sizeof *ranks);
	if (d->ranks) {
		memcpy(d->ranks, ranks, num_ranks * sizeof *ranks);
	} else {
		d->num_ranks = 0;
	}
	return status;
}

static hvd_status_t fail(hvd_status_t status, const char *operation, const char *text) {
	return gohvd_set_error(status, text, operation, "", NULL, 0, 0);
}

// usable returns HVD_SUCCESS if calls may reach Go.
static hvd_status_t usable(const char *operation) {
	if (__builtin_expect(forked, 0)) {
		return fail(HVD_ERROR_FORKED, operation,
		            "hvd: this process was forked from one that has loaded gohvd, so it cannot use gohvd: use the "
		            "start method spawn or forkserver, or call gohvd only in the parent");
	}
	if (__builtin_expect(other_copy[0] != 0, 0)) {
		char text[sizeof other_copy + 100];
		snprintf(text, sizeof text, "hvd: another copy of the library is in this process: %s: load only one",
		         other_copy);
		return fail(HVD_ERROR_USAGE, operation, text);
	}
	return HVD_SUCCESS;
}

// needs returns an error of the operation from the function in which it stands if the condition is not met.
#define needs(condition, operation, text)                             \
	do {                                                          \
		hvd_status_t status_ = usable(operation);             \
		if (status_) {                                        \
			return status_;                               \
		}                                                     \
		if (!(condition)) {                                   \
			return fail(HVD_ERROR_USAGE, operation, "hvd: " operation ": " text); \
		}                                                     \
	} while (0)

#define needs_size(p, type, operation) \
	needs((p) && (p)->size == sizeof(type), operation, "the pointer to " #type " is null, or its size is not sizeof(" #type ")")

// clear makes a result have no memory, so that hvd_free_result does nothing if the call then fails.
static void clear(hvd_result_t *result) {
	if (result && result->size == sizeof *result) {
		memset(&result->num_outputs, 0, sizeof *result - sizeof result->size);
	}
}

// no_handle sets the handle that a call returns to 0, in case the call then fails.
static void no_handle(hvd_handle_t *handle) {
	if (handle) {
		*handle = 0;
	}
}

// use_signal_stacks makes the handlers of the program run on the signal stacks that Go gives to threads. A
// thread in a call may run on a small stack of Go, and a handler would overwrite the memory after it. Go has
// done the same for the handlers that existed when the library was loaded.
static void use_signal_stacks(void) {
	for (int i = 1; i < NSIG; i++) {
		struct sigaction a;
		if (sigaction(i, NULL, &a) == 0 && a.sa_handler != SIG_DFL && a.sa_handler != SIG_IGN &&
		    !(a.sa_flags & SA_ONSTACK)) {
			a.sa_flags |= SA_ONSTACK;
			sigaction(i, &a, NULL);
		}
	}
}

PUBLIC hvd_status_t hvd_last_error(hvd_error_t *error) {
	if (!error || error->size != sizeof *error) {
		return HVD_ERROR_USAGE;
	}
	struct details *d = pthread_getspecific(details_key);
	error->status = d ? d->status : HVD_SUCCESS;
	error->text = d && d->text ? d->text : "";
	error->operation = d && d->operation ? d->operation : "";
	error->tensor = d && d->tensor ? d->tensor : "";
	error->ranks = d ? d->ranks : NULL;
	error->num_ranks = d ? d->num_ranks : 0;
	error->shut_down = d ? d->shut_down : 0;
	return HVD_SUCCESS;
}

PUBLIC uint32_t hvd_abi_version(void) { return HVD_ABI_VERSION; }

PUBLIC const char *hvd_version(void) { return forked ? "" : gohvdVersion(); }

PUBLIC int32_t hvd_mpi_built(void) { return !forked && gohvdMPIBuilt(); }

PUBLIC hvd_status_t hvd_gpu_libraries(int32_t count_devices, char **text) {
	needs(text, "GPU libraries", "got a null pointer");
	return gohvdGPULibraries(count_devices, text);
}

#define needs_options(options, operation)                                                                             \
	do {                                                                                                          \
		needs(!(options) || (options)->size == sizeof(hvd_init_options_t), operation,                         \
		      "the size of the options is not sizeof(hvd_init_options_t)");                                   \
		needs(!(options) || ((!(options)->num_settings || (options)->settings) &&                             \
		                     (!(options)->num_process_sets || (options)->process_sets)),                      \
		      operation, "got a null pointer for the settings or the process sets");                          \
		needs(!(options) || !(options)->reserved, operation, "the field reserved is not 0");                  \
		for (uint32_t i_ = 0; (options) && i_ < (options)->num_process_sets; i_++) {                          \
			const hvd_ranks_t *set_ = &(options)->process_sets[i_];                                       \
			needs(!set_->num_ranks || set_->ranks, operation,                                             \
			      "got a null pointer for the ranks of a process set");                                   \
			needs(!set_->reserved, operation, "the field reserved of a process set is not 0");            \
		}                                                                                                     \
	} while (0)

PUBLIC hvd_status_t hvd_init(const hvd_init_options_t *options, hvd_handle_t *handle) {
	no_handle(handle);
	needs_options(options, "init");
	use_signal_stacks();
	return gohvdInit((hvd_init_options_t *)options, handle);
}

PUBLIC hvd_status_t hvd_shutdown(const char *reason, uint32_t flags, hvd_handle_t *handle) {
	no_handle(handle);
	needs(1, "shutdown", "");
	return gohvdShutdown((char *)reason, flags, handle);
}

PUBLIC hvd_status_t hvd_check(void) {
	needs(1, "check", "");
	return gohvdCheck();
}

// fact returns what gohvdFact does, or what it returns outside of a job if calls must not reach Go.
static int64_t fact(int which) {
	if (usable("query")) {
		return which == GOHVD_EPOCH ? 0 : -1;
	}
	return gohvdFact(which);
}

PUBLIC int32_t hvd_rank(void) { return (int32_t)fact(GOHVD_RANK); }
PUBLIC int32_t hvd_size(void) { return (int32_t)fact(GOHVD_SIZE); }
PUBLIC int32_t hvd_local_rank(void) { return (int32_t)fact(GOHVD_LOCAL_RANK); }
PUBLIC int32_t hvd_local_size(void) { return (int32_t)fact(GOHVD_LOCAL_SIZE); }
PUBLIC int32_t hvd_cross_rank(void) { return (int32_t)fact(GOHVD_CROSS_RANK); }
PUBLIC int32_t hvd_cross_size(void) { return (int32_t)fact(GOHVD_CROSS_SIZE); }
PUBLIC int32_t hvd_is_homogeneous(void) { return (int32_t)fact(GOHVD_HOMOGENEOUS); }
PUBLIC int32_t hvd_has_devices(void) { return (int32_t)fact(GOHVD_DEVICES); }
PUBLIC uint64_t hvd_epoch(void) { return (uint64_t)fact(GOHVD_EPOCH); }

PUBLIC hvd_status_t hvd_new_unique_id(const hvd_init_options_t *options, char **text) {
	needs_options(options, "new unique id");
	needs(text, "new unique id", "got a null pointer for the text");
	return gohvdNewUniqueID((hvd_init_options_t *)options, text);
}

// old_op is the size of an hvd_op_t in programs that were compiled before it got the field allocate.
enum { old_op = offsetof(hvd_op_t, allocate) };

#define needs_op(op, operation) \
	needs((op) && ((op)->size == sizeof(hvd_op_t) || (op)->size == old_op), operation, \
	      "the pointer to hvd_op_t is null, or its size is neither sizeof(hvd_op_t) nor that of an earlier version")

static size_t name_bytes(const hvd_op_t *op) { return op->name ? strlen(op->name) : 0; }

PUBLIC hvd_status_t hvd_submit(const hvd_op_t *op, hvd_handle_t *handle) {
	no_handle(handle);
	needs_op(op, "submit");
	needs(!op->reserved, "submit", "the field reserved is not 0");
	needs(handle, "submit", "got a null pointer for the handle");
	return gohvdSubmit((hvd_op_t *)op, name_bytes(op), handle);
}

PUBLIC hvd_status_t hvd_submit_many(const hvd_op_t *ops, size_t n, hvd_handle_t *handles, size_t *submitted) {
	size_t i = 0, k, done, names[64];
	size_t *count = submitted ? submitted : &i;
	*count = 0;
	needs(!n || (ops && handles), "submit", "got a null pointer for the operations or the handles");
	while (n && ops->size == old_op && *count < n) {
		hvd_status_t status = hvd_submit((const void *)((const char *)ops + *count * old_op), handles + *count);
		if (status) {
			return status;
		}
		++*count;
	}
	while (*count < n) {
		const hvd_op_t *next = ops + *count;
		hvd_handle_t *to = handles + *count;
		for (k = 0; k < sizeof names / sizeof *names && *count + k < n; k++) {
			if (next[k].size != sizeof *next || next[k].reserved) {
				break;
			}
			names[k] = name_bytes(&next[k]);
		}
		if (k == 0) {
			return hvd_submit(next, to); // it says what is wrong
		}
		hvd_status_t status = gohvdSubmitMany((hvd_op_t *)next, names, k, to, &done);
		*count += done;
		if (status) {
			return status;
		}
	}
	return HVD_SUCCESS;
}

PUBLIC hvd_status_t hvd_run(const hvd_op_t *op, double seconds, hvd_handle_t *handle, hvd_result_t *result) {
	no_handle(handle);
	clear(result);
	needs_op(op, "run");
	needs(!op->reserved, "run", "the field reserved is not 0");
	needs(!result || result->size == sizeof *result, "run", "the size of the result is not sizeof(hvd_result_t)");
	return gohvdRun((hvd_op_t *)op, name_bytes(op), seconds, handle, result);
}

PUBLIC hvd_status_t hvd_wait(hvd_handle_t handle, double seconds, hvd_result_t *result) {
	clear(result);
	needs(!result || result->size == sizeof *result, "wait", "the size of the result is not sizeof(hvd_result_t)");
	return gohvdWait(handle, seconds, result);
}

static hvd_status_t finish(hvd_handle_t handle, double seconds, hvd_result_t *result) {
	needs(!result || result->size == sizeof *result, "finish", "the size of the result is not sizeof(hvd_result_t)");
	return gohvdFinish(handle, seconds, result);
}

// If hvd_finish returns HVD_ERROR_HANDLE, an earlier call may have written the result.
PUBLIC hvd_status_t hvd_finish(hvd_handle_t handle, double seconds, hvd_result_t *result) {
	hvd_status_t status = finish(handle, seconds, result);
	if (status && status != HVD_ERROR_HANDLE) {
		clear(result);
	}
	return status;
}

PUBLIC hvd_status_t hvd_wait_any(const hvd_handle_t *handles, size_t n, double seconds, size_t *index) {
	needs(handles && n && n <= UINT32_MAX && index, "wait any", "got no handles, more than 2^32, or a null pointer");
	return gohvdWaitAny((hvd_handle_t *)handles, n, seconds, index);
}

PUBLIC hvd_status_t hvd_poll(hvd_handle_t handle, int32_t *done) {
	needs(done, "poll", "got a null pointer");
	return gohvdPoll(handle, done);
}

PUBLIC hvd_status_t hvd_release(hvd_handle_t handle) {
	needs(1, "release", "");
	return gohvdRelease(handle);
}

PUBLIC hvd_status_t hvd_new_gate(hvd_handle_t *handle) {
	needs(handle, "new gate", "got a null pointer for the handle");
	return gohvdNewGate(handle);
}

PUBLIC hvd_status_t hvd_open_gate(hvd_handle_t handle) {
	needs(1, "open gate", "");
	return gohvdOpen(handle);
}

PUBLIC void hvd_free_result(hvd_result_t *result) {
	if (!result || result->size != sizeof *result || !result->memory) {
		return;
	}
	void **made = (void **)(result->outputs + result->num_outputs);
	for (uint32_t i = 0; i < result->num_outputs; i++) {
		free(made[i]);
	}
	free(result->memory);
	clear(result);
}

PUBLIC hvd_status_t hvd_alloc(uint64_t bytes, void **memory) {
	needs(memory, "alloc", "got a null pointer");
	*memory = NULL;
	return gohvdAlloc(bytes, memory);
}

PUBLIC hvd_status_t hvd_free(void *memory) {
	if (!memory) {
		return HVD_SUCCESS;
	}
	needs(1, "free", "");
	return gohvdFree(memory);
}

PUBLIC hvd_status_t hvd_add_process_set(const hvd_ranks_t *ranks, uint32_t flags, const char *name,
                                        double timeout_seconds, int32_t *id, hvd_handle_t *handle) {
	no_handle(handle);
	needs(ranks && (!ranks->num_ranks || ranks->ranks), "add process set", "got a null pointer for the ranks");
	needs(!ranks->reserved, "add process set", "the field reserved is not 0");
	return gohvdAddProcessSet((hvd_ranks_t *)ranks, flags, (char *)name, timeout_seconds, id, handle);
}

PUBLIC hvd_status_t hvd_remove_process_set(int32_t id, double timeout_seconds, hvd_handle_t *handle) {
	no_handle(handle);
	needs(1, "remove process set", "");
	return gohvdRemoveProcessSet(id, timeout_seconds, handle);
}

PUBLIC hvd_status_t hvd_process_sets(int32_t *ids, uint32_t capacity, uint32_t *count) {
	needs((!capacity || ids) && count, "process sets", "got a null pointer");
	return gohvdProcessSets(ids, capacity, count);
}

PUBLIC hvd_status_t hvd_process_set_ranks(int32_t id, int32_t *ranks, uint32_t capacity, uint32_t *count) {
	needs((!capacity || ranks) && count, "process set ranks", "got a null pointer");
	return gohvdProcessSetRanks(id, ranks, capacity, count);
}

PUBLIC hvd_status_t hvd_elastic(hvd_elastic_t *elastic) {
	needs_size(elastic, hvd_elastic_t, "elastic");
	return gohvdElastic(elastic);
}

PUBLIC hvd_status_t hvd_elastic_join(uint32_t flags, hvd_handle_t *handle) {
	no_handle(handle);
	needs(!(flags & ~HVD_LOOSE), "elastic join", "got unknown flags, want HVD_LOOSE or 0");
	keep_term();
	return gohvdElasticJoin(flags, handle);
}

PUBLIC hvd_status_t hvd_elastic_synced(hvd_handle_t *handle) {
	no_handle(handle);
	needs(1, "elastic synced", "");
	return gohvdElasticSynced(handle);
}

PUBLIC hvd_status_t hvd_elastic_vote(uint32_t flags, double seconds, hvd_handle_t *handle) {
	no_handle(handle);
	needs(handle || seconds < 0, "elastic vote", "got a time limit and no place for the handle");
	needs(!(flags & ~(HVD_SAVED | HVD_STEP | HVD_REMOVED | HVD_ADDED)), "elastic vote",
	      "got unknown flags, want HVD_SAVED or HVD_STEP, HVD_REMOVED and HVD_ADDED");
	needs(!(flags & HVD_SAVED) || !(flags & HVD_STEP), "elastic vote", "got HVD_SAVED and HVD_STEP, want one of them");
	return gohvdElasticVote(flags, seconds, handle);
}

PUBLIC hvd_status_t hvd_elastic_end(uint32_t training, hvd_handle_t *handle) {
	no_handle(handle);
	needs(training <= HVD_TRAINING_ABANDONED, "elastic end", "got an unknown hvd_training_t");
	return gohvdElasticEnd(training, handle);
}

PUBLIC hvd_status_t hvd_start_timeline(const char *path, int32_t mark_cycles) {
	needs(path, "start timeline", "got a null pointer for the path");
	return gohvdStartTimeline((char *)path, mark_cycles);
}

PUBLIC hvd_status_t hvd_stop_timeline(void) {
	needs(1, "stop timeline", "");
	return gohvdStopTimeline();
}

PUBLIC void hvd_mark_step(uint64_t number) {
	if (!usable("mark step")) {
		gohvdMarkStep(number);
	}
}

PUBLIC uint64_t hvd_begin_range(void) { return usable("begin range") ? 0 : gohvdBeginRange(); }

PUBLIC void hvd_end_range(const char *name, uint64_t begun) {
	if (begun && name && !usable("end range")) {
		gohvdEndRange((char *)name, begun);
	}
}

PUBLIC hvd_status_t hvd_metrics(char **text) {
	needs(text, "metrics", "got a null pointer");
	return gohvdMetrics(text);
}

PUBLIC hvd_status_t hvd_dump(char **text) {
	needs(text, "dump", "got a null pointer");
	return gohvdDump(text);
}

PUBLIC hvd_status_t hvd_why_no_devices(char **text) {
	needs(text, "why no devices", "got a null pointer");
	return gohvdWhyNoDevices(text);
}

PUBLIC hvd_status_t hvd_next_stall(char **text) {
	needs(text, "next stall", "got a null pointer");
	return gohvdNextStall(text);
}

PUBLIC void hvd_free_text(char *text) { free(text); }

PUBLIC hvd_status_t hvd_ps_start(const char *const *settings, uint32_t num_settings, hvd_handle_t *handle) {
	no_handle(handle);
	needs(!num_settings || settings, "start", "got a null pointer for the settings");
	use_signal_stacks();
	return gohvdStartNode((char **)settings, num_settings, handle);
}

PUBLIC hvd_status_t hvd_ps_node(hvd_node_t *node) {
	needs_size(node, hvd_node_t, "node");
	return gohvdNode(node);
}

PUBLIC hvd_status_t hvd_ps_serve(int32_t app, uint32_t dtype, const char *handler, const double *parameters,
                                 uint32_t num_parameters) {
	needs(handler && (!num_parameters || parameters), "serve", "got a null pointer");
	return gohvdServe(app, dtype, (char *)handler, (double *)parameters, num_parameters);
}

PUBLIC hvd_status_t hvd_ps_exchange(const hvd_exchange_t *exchange, hvd_handle_t *handle) {
	no_handle(handle);
	needs_size(exchange, hvd_exchange_t, "exchange");
	return gohvdExchange((hvd_exchange_t *)exchange, handle);
}

PUBLIC hvd_status_t hvd_ps_clock(hvd_handle_t *handle) {
	no_handle(handle);
	needs(1, "clock", "");
	return gohvdClock(handle);
}

PUBLIC hvd_status_t hvd_ps_barrier(int32_t group, hvd_handle_t *handle) {
	no_handle(handle);
	needs(1, "barrier", "");
	return gohvdBarrier(group, handle);
}

PUBLIC hvd_status_t hvd_ps_fail(const char *reason, hvd_handle_t *handle) {
	no_handle(handle);
	needs(1, "fail", "");
	return gohvdFail((char *)reason, handle);
}

PUBLIC hvd_status_t hvd_ps_finalize(int32_t barrier, hvd_handle_t *handle) {
	no_handle(handle);
	needs(1, "finalize", "");
	return gohvdFinalize(barrier, handle);
}
