// The part of the stand-in for libcudart that shares memory and events with other processes, and the few
// functions of libcuda, the library of the driver, that the Python package calls. cudart.c includes this file.
// A process that misuses a handle ends, or gets an error where CUDA returns one: a handle cannot be opened by
// the process that made it or after that process has ended, memory that was opened cannot be freed or
// exported, and closing it once more than it was opened ends the process. An event is exported only if it was
// made for several processes.

// A memoryHandle is what the 64 bytes of a handle of memory mean here. Memory is opened as a file of the process
// that has allocated it.
struct memoryHandle {
	char magic[8];
	pid_t pid;
	int device;
	size_t size;
	char name[40];
};

struct eventHandle {
	char magic[8];
	pid_t pid;
	char name[40];
};

struct handle {
	char bytes[64];
};

static const char memoryMagic[8] = "memory", eventMagic[8] = "event";

int cudaIpcGetMemHandle(struct handle *h, void *p) {
	pthread_mutex_lock(&lock);
	struct block *b = find(p);
	int code = !b || b->opens || setting("STANDIN_CUDA_NO_IPC", 0) ? invalidValue : success;
	if (code == success) {
		struct memoryHandle m = {.pid = getpid(), .device = b->device, .size = b->size};
		memcpy(m.magic, memoryMagic, sizeof m.magic);
		memcpy(m.name, b->name, sizeof m.name);
		memset(h, 0, sizeof *h);
		memcpy(h, &m, sizeof m);
	}
	pthread_mutex_unlock(&lock);
	return result(code);
}

int cudaIpcOpenMemHandle(void **p, struct handle h, unsigned flags) {
	struct memoryHandle m;
	memcpy(&m, &h, sizeof m);
	m.name[sizeof m.name - 1] = 0;
	if (memcmp(m.magic, memoryMagic, sizeof m.magic) != 0 || m.pid == getpid())
		return result(invalidValue);
	if (m.device != current && !(flags & 1))
		return result(invalidDevice); // the device may only use it as a peer
	pthread_mutex_lock(&lock);
	int code = success;
	struct block *b = blocks;
	while (b && !(b->opens && strcmp(b->name, m.name) == 0))
		b = b->next;
	if (b) {
		b->opens++;
	} else {
		b = calloc(1, sizeof *b);
		memcpy(b->name, m.name, sizeof b->name);
		b->size = m.size;
		b->device = current;
		b->opens = 1;
		code = map(b, open(b->name, O_RDWR));
	}
	if (code == success)
		*p = b->address;
	else
		free(b);
	pthread_mutex_unlock(&lock);
	return result(code);
}

int cudaIpcCloseMemHandle(void *p) {
	pthread_mutex_lock(&lock);
	struct block *b = find(p);
	if (!b || b->address != p || !b->opens)
		standin_violation("cudaIpcCloseMemHandle: %p is not memory that was opened", p);
	if (--b->opens == 0)
		unmap(b);
	pthread_mutex_unlock(&lock);
	return success;
}

int cudaIpcGetEventHandle(struct handle *h, void *event) {
	struct event *e = checkedEvent(event, "cudaIpcGetEventHandle");
	if (!e->interprocess)
		return result(invalidValue);
	struct eventHandle m = {.pid = getpid()};
	memcpy(m.magic, eventMagic, sizeof m.magic);
	memcpy(m.name, e->name, sizeof m.name);
	memset(h, 0, sizeof *h);
	memcpy(h, &m, sizeof m);
	return success;
}

int cudaIpcOpenEventHandle(void **event, struct handle h) {
	struct eventHandle m;
	memcpy(&m, &h, sizeof m);
	m.name[sizeof m.name - 1] = 0;
	if (memcmp(m.magic, eventMagic, sizeof m.magic) != 0 || m.pid == getpid())
		return result(invalidValue);
	struct event *e = calloc(1, sizeof *e);
	int fd = open(m.name, O_RDWR);
	int code = mapState(e, fd);
	if (fd >= 0)
		close(fd);
	if (code != success) {
		free(e);
		return result(code);
	}
	return addEvent(e, event); // without interprocess: only the process that made an event can export it
}

// ---- the driver

// A context is the number of its device plus 1.

static __thread int stack[16], depth; // the devices below the current one

int cuInit(unsigned flags) {
	(void)flags;
	return devices() > 0 ? success : noDevice;
}

int cuGetErrorString(int code, const char **text) {
	*text = cudaGetErrorString(code);
	return success;
}

int cuDeviceGet(int *device, int ordinal) {
	*device = ordinal;
	return ordinal >= 0 && ordinal < devices() ? success : invalidDevice;
}

int cuDeviceGetPCIBusId(char *text, int len, int device) { return cudaDeviceGetPCIBusId(text, len, device); }

int cuDevicePrimaryCtxRetain(void **context, int device) {
	*context = (void *)(uintptr_t)(device + 1);
	return device >= 0 && device < devices() ? success : invalidDevice;
}

int cuCtxPushCurrent_v2(void *context) {
	if (depth == sizeof stack / sizeof *stack)
		standin_violation("cuCtxPushCurrent: %d contexts were not popped", depth);
	stack[depth++] = current;
	current = (int)(uintptr_t)context - 1;
	return success;
}

int cuCtxPopCurrent_v2(void **context) {
	if (depth == 0)
		standin_violation("cuCtxPopCurrent: no context was pushed");
	*context = (void *)(uintptr_t)(current + 1);
	current = stack[--depth];
	return success;
}

int cuMemGetAddressRange_v2(uintptr_t *base, size_t *size, uintptr_t p) {
	pthread_mutex_lock(&lock);
	struct block *b = find((void *)p);
	if (b) {
		*base = (uintptr_t)b->address;
		*size = b->size;
	}
	pthread_mutex_unlock(&lock);
	return b ? success : invalidValue;
}

// The only attribute that is known is 7, a number that no other allocation of the process has or had.
int cuPointerGetAttribute(void *value, int attribute, uintptr_t p) {
	pthread_mutex_lock(&lock);
	struct block *b = find((void *)p);
	struct stat s;
	int code = b && attribute == 7 && fstat(b->fd, &s) == 0 ? success : invalidValue;
	if (code == success)
		*(unsigned long long *)value = (unsigned long long)s.st_ino;
	pthread_mutex_unlock(&lock);
	return code;
}

int cuIpcGetMemHandle(struct handle *h, uintptr_t p) { return cudaIpcGetMemHandle(h, (void *)p); }

int cuIpcGetEventHandle(struct handle *h, void *event) { return cudaIpcGetEventHandle(h, event); }

int cuEventCreate(void **event, unsigned flags) { return cudaEventCreateWithFlags(event, flags); }

int cuEventRecord(void *event, void *stream) { return cudaEventRecord(event, stream); }

int cuEventDestroy_v2(void *event) { return cudaEventDestroy(event); }

int cuStreamWaitEvent(void *stream, void *event, unsigned flags) {
	return cudaStreamWaitEvent(stream, event, flags);
}
