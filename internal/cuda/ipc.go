//go:build nccl && cgo

package cuda

/*
#include <stddef.h>
#include <string.h>

// A handle is passed by value, as CUDA declares it.
typedef struct { char bytes[64]; } ipcHandle;

// The functions of the runtime for several processes, in the order of the list ipcFunctions in Go.
typedef struct {
	int (*getMemHandle)(ipcHandle *, void *);
	int (*openMemHandle)(void **, ipcHandle, unsigned);
	int (*closeMemHandle)(void *);
	int (*getEventHandle)(ipcHandle *, void *);
	int (*openEventHandle)(void **, ipcHandle);
	int (*createEvent)(void **, unsigned);
	int (*getLastError)(void);
} ipcTable;

// cleared clears an error, so that it does not appear in a later call of the program.
static int cleared(ipcTable *f, int code) {
	if (code != 0)
		f->getLastError();
	return code;
}
static int gohvdExportMemory(ipcTable *f, void *handle, void *p) {
	return cleared(f, f->getMemHandle(handle, p));
}
static int gohvdOpenMemory(ipcTable *f, void **p, const void *handle) {
	ipcHandle h;
	memcpy(&h, handle, sizeof h);
	return cleared(f, f->openMemHandle(p, h, 1)); // 1: other devices can access it, which CUDA requires
}
static int gohvdCloseMemory(ipcTable *f, void *p) { return cleared(f, f->closeMemHandle(p)); }
static int gohvdSharedEvent(ipcTable *f, void **event) {
	return cleared(f, f->createEvent(event, 2 | 4)); // 2: it measures no time, 4: for several processes
}
static int gohvdExportEvent(ipcTable *f, void *handle, void *event) {
	return cleared(f, f->getEventHandle(handle, event));
}
static int gohvdOpenEvent(ipcTable *f, void **event, const void *handle) {
	ipcHandle h;
	memcpy(&h, handle, sizeof h);
	return cleared(f, f->openEventHandle(event, h));
}
*/
import "C"

import (
	"fmt"
	"strings"
	"unsafe"
)

// ipcFunctions are the names of the functions in C's struct ipcTable, in its order.
var ipcFunctions = []string{
	"cudaIpcGetMemHandle", "cudaIpcOpenMemHandle", "cudaIpcCloseMemHandle", "cudaIpcGetEventHandle",
	"cudaIpcOpenEventHandle", "cudaEventCreateWithFlags", "cudaGetLastError",
}

// IPC shares memory and events of devices with other processes of this host. Its methods may be called by any
// goroutine.
type IPC struct {
	runtime *Runtime
	f       *C.ipcTable
}

// NewIPC returns the functions of the runtime for several processes. It returns an error if the library lacks
// one of them.
func NewIPC(r *Runtime) (*IPC, error) {
	x := &IPC{r, new(C.ipcTable)}
	table := unsafe.Slice((*unsafe.Pointer)(unsafe.Pointer(x.f)), len(ipcFunctions))
	if missing := r.Library.Symbols(table, ipcFunctions); len(missing) > 0 {
		return nil, fmt.Errorf("cuda: %s lacks %s", r.Library.File, strings.Join(missing, ", "))
	}
	return x, nil
}

// on calls f with d as the current device, and returns the error for its result.
func (x *IPC) on(d *Device, call string, f func() C.int) error {
	return d.Use(func() error { return x.runtime.check(call, f()) })
}

// ExportMemory returns the handle of the allocation that begins with memory. The allocation must stay valid
// until every process that has opened the handle has closed it.
func (x *IPC) ExportMemory(d *Device, memory []byte) (h Handle, err error) {
	return h, x.on(d, "cudaIpcGetMemHandle", func() C.int {
		return C.gohvdExportMemory(x.f, unsafe.Pointer(&h), address(memory))
	})
}

// OpenMemory returns the n bytes of an allocation of another process. CUDA does not tell the size of the
// allocation, so n is trusted. CUDA counts how often a process has opened a handle.
func (x *IPC) OpenMemory(d *Device, h Handle, n int) ([]byte, error) {
	var p unsafe.Pointer
	err := x.on(d, "cudaIpcOpenMemHandle", func() C.int {
		return C.gohvdOpenMemory(x.f, &p, unsafe.Pointer(&h))
	})
	if err != nil {
		return nil, err
	}
	return unsafe.Slice((*byte)(p), n), nil
}

// CloseMemory closes memory that OpenMemory has returned. The device must no longer use it.
func (x *IPC) CloseMemory(d *Device, memory []byte) error {
	return x.on(d, "cudaIpcCloseMemHandle", func() C.int { return C.gohvdCloseMemory(x.f, address(memory)) })
}

// NewEvent makes an event that other processes can open.
func (x *IPC) NewEvent(d *Device) (*Event, error) {
	e := &Event{device: d}
	err := x.on(d, "cudaEventCreateWithFlags", func() C.int { return C.gohvdSharedEvent(x.f, &e.handle) })
	return e, err
}

// ExportEvent returns the handle of an event that NewEvent has returned.
func (x *IPC) ExportEvent(e *Event) (h Handle, err error) {
	return h, x.on(e.device, "cudaIpcGetEventHandle", func() C.int {
		return C.gohvdExportEvent(x.f, unsafe.Pointer(&h), e.handle)
	})
}

// OpenEvent returns an event of another process, which must not close it before this process does.
func (x *IPC) OpenEvent(d *Device, h Handle) (*Event, error) {
	e := &Event{device: d}
	err := x.on(d, "cudaIpcOpenEventHandle", func() C.int {
		return C.gohvdOpenEvent(x.f, &e.handle, unsafe.Pointer(&h))
	})
	return e, err
}

// Imported is memory or an event of another process that this process has opened.
type Imported struct {
	// Device is the index of the device.
	Device int
	// Memory is the memory, or nil for an event.
	Memory []byte
	// Event is the event, or nil for memory.
	Event *Event

	ipc    *IPC
	device *Device
}

// Import opens memory of n bytes of another process, or, if n is 0, an event. busID is the address of the
// device on the PCI bus, because the processes may count the devices differently.
func (d *Devices) Import(busID string, h Handle, n int) (*Imported, error) {
	if d == nil {
		return nil, errNoDevices
	}
	of, err := d.runtime.find(busID)
	if err != nil {
		return nil, err
	}
	x, err := NewIPC(d.runtime)
	if err != nil {
		return nil, err
	}
	m := &Imported{Device: of.Index(), ipc: x, device: of}
	if n == 0 {
		m.Event, err = x.OpenEvent(of, h)
	} else {
		m.Memory, err = x.OpenMemory(of, h, n)
	}
	return m, err
}

// Close closes what Import has opened. No operation may use it any more.
func (m *Imported) Close() error {
	if m.Event != nil {
		return m.Event.Close()
	}
	return m.ipc.CloseMemory(m.device, m.Memory)
}

// find returns the device with the given address on the PCI bus.
func (r *Runtime) find(busID string) (*Device, error) {
	var have []string
	for i := range r.Devices {
		d := &Device{r, C.int(i)}
		id, err := d.BusID()
		if err != nil {
			return nil, err
		}
		if strings.EqualFold(id, busID) {
			return d, nil
		}
		have = append(have, id)
	}
	return nil, fmt.Errorf("cuda: this process has no device %q, only %q; CUDA_VISIBLE_DEVICES may hide it",
		busID, have)
}
