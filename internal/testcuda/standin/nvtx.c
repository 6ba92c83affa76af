// A stand-in for NVTX. If NVTX_INJECTION64_PATH is set, as for a tool that records ranges, the file of
// STANDIN_CUDA_CALLS gets a line "range DOMAIN: TEXT" when a range begins, and "end of range" when it ends.
#include "standin.h"

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

static __thread int depth; // the number of ranges of the thread

void *nvtxDomainCreateA(const char *name) {
	const char *tool = getenv("NVTX_INJECTION64_PATH");
	return tool && *tool ? (void *)name : NULL;
}

int nvtxDomainRangePushEx(void *domain, const void *attributes) {
	const uint16_t *sizes = attributes;
	const uint32_t *type = (const uint32_t *)attributes + 8; // ASCII is 1
	if (sizes[0] != 2 || sizes[1] != 48 || *type != 1)
		standin_violation("nvtxDomainRangePushEx: got version %d, size %d, type %d", sizes[0], sizes[1], (int)*type);
	char line[512];
	snprintf(line, sizeof line, "range %s: %s", (const char *)domain, ((const char *const *)attributes)[5]);
	standin_called(line);
	return depth++;
}

int nvtxDomainRangePop(void *domain) {
	if (depth == 0)
		standin_violation("nvtxDomainRangePop: the thread has no range in %s", (const char *)domain);
	standin_called("end of range");
	return --depth;
}
