package main

/*
#include <stdlib.h>
#include "gohvd.h"
#include "gate.h"
*/
import "C"

import (
	"errors"
	"unsafe"

	"github.com/gohvd/gohvd/internal/failure"
	"github.com/gohvd/gohvd/internal/library"
)

// status returns the status of err, which may be nil. If it is an error, status stores its details for
// hvd_last_error in this thread.
func status(err error) C.hvd_status_t {
	switch {
	case err == nil:
		return C.HVD_SUCCESS
	case errors.Is(err, library.ErrPending):
		return C.HVD_PENDING
	}
	d := failure.Describe(err)
	code := C.hvd_status_t(d.Class)
	if errors.Is(err, library.ErrHandle) {
		code = C.HVD_ERROR_HANDLE
	}
	ranks := make([]C.int32_t, len(d.Ranks)+1) // one more, so that it has an address
	for i, r := range d.Ranks {
		ranks[i] = C.int32_t(r)
	}
	shutDown := C.uint32_t(0)
	if d.ShutDown {
		shutDown = 1
	}
	text, operation, name := C.CString(d.Text), C.CString(d.Operation), C.CString(d.Tensor)
	defer C.free(unsafe.Pointer(text))
	defer C.free(unsafe.Pointer(operation))
	defer C.free(unsafe.Pointer(name))
	return C.gohvd_set_error(code, text, operation, name, &ranks[0], C.uint32_t(len(d.Ranks)), shutDown)
}
