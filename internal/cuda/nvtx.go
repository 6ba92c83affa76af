//go:build nccl && cgo

package cuda

/*
#include <stdint.h>
#include <stdio.h>

// A nvtxEventAttributes_t of version 2, which NVTX 3 still has.
typedef struct {
	uint16_t version, size;
	uint32_t category;
	int32_t colorType;
	uint32_t color;
	int32_t payloadType, reserved;
	uint64_t payload;
	int32_t messageType;
	const char *message;
} attributes;

// The functions of NVTX, in the order of the list RangeFunctions in Go.
typedef struct {
	void *(*domainCreate)(const char *);
	int (*push)(void *, const attributes *);
	int (*pop)(void *);
	void *domain;
} ranges;

static void gohvdDomain(ranges *r) { r->domain = r->domainCreate("gohvd"); }
static void gohvdRangePush(ranges *r, _GoString_ kind, _GoString_ name, int others) {
	char text[256], more[32] = "";
	if (others > 0)
		snprintf(more, sizeof more, " and %d more", others);
	snprintf(text, sizeof text, "%.*s %.*s%s", (int)_GoStringLen(kind), _GoStringPtr(kind),
		_GoStringLen(name) < 200 ? (int)_GoStringLen(name) : 200, _GoStringPtr(name), more);
	attributes a = {.version = 2, .size = sizeof a, .messageType = 1, .message = text}; // 1: ASCII
	r->push(r->domain, &a);
}
static void gohvdRangePop(ranges *r) { r->pop(r->domain); }
*/
import "C"

import (
	"errors"
	"runtime"
	"unsafe"
)

// RangeFunctions are the names of the functions in C's struct ranges, in its order.
var RangeFunctions = []string{"nvtxDomainCreateA", "nvtxDomainRangePushEx", "nvtxDomainRangePop"}

// Ranges records NVTX ranges, with which tools such as Nsight Systems show what a program does. A nil *Ranges
// records none.
type Ranges struct{ c C.ranges }

// OpenRanges loads the library of NVTX. It returns nil if the process finds none, or if no tool watches it:
// then NVTX makes no domain.
func OpenRanges() *Ranges {
	r := new(Ranges)
	if err := OpenLibrary(func(l *Library) error {
		if err := l.load(unsafe.Slice((*unsafe.Pointer)(unsafe.Pointer(&r.c)), len(RangeFunctions)),
			RangeFunctions); err != nil {
			return err
		}
		if C.gohvdDomain(&r.c); r.c.domain == nil {
			return errors.New("no tool records ranges")
		}
		return nil
	}, Candidates("libnvtx3interop.so.1*", "libnvtx3interop.so.1", "libnvToolsExt.so.1")...); err != nil {
		return nil
	}
	return r
}

// In calls f in a range of the calling thread. The range has the kind of an operation, the name of its first
// tensor, and the number of the others.
func (r *Ranges) In(kind, name string, others int, f func() error) error {
	if r == nil {
		return f()
	}
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	C.gohvdRangePush(&r.c, kind, name, C.int(others))
	defer C.gohvdRangePop(&r.c)
	return f()
}
