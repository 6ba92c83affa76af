//go:build nccl && cgo

package cuda

/*
#cgo LDFLAGS: -ldl
#define _GNU_SOURCE
#include <dlfcn.h>
#include <link.h>
#include <stdlib.h>

static const char *gohvdFile(void *handle) {
	struct link_map *map;
	return dlinfo(handle, RTLD_DI_LINKMAP, &map) == 0 ? map->l_name : "";
}
*/
import "C"

import (
	"errors"
	"fmt"
	"os"
	"runtime"
	"strings"
	"unsafe"
)

// Built says whether this program was built with NCCL and CUDA.
const Built = true

// Library is a loaded shared library. It is never unloaded.
type Library struct {
	// File is the path of the library.
	File   string
	handle unsafe.Pointer
}

// Candidates returns the names with which OpenLibrary finds a library: its Places in this process, and then
// the given names for the dynamic loader.
func Candidates(pattern string, names ...string) []string {
	maps, err := os.Open("/proc/self/maps")
	if err != nil {
		return names
	}
	defer maps.Close()
	return append(Places(maps, pattern), names...)
}

// OpenLibrary loads the libraries with the given names, one after the other, until try returns nil for one. A
// name that contains a slash is the path of a file. Otherwise the error has those of all names.
func OpenLibrary(try func(*Library) error, names ...string) error {
	var failures []string
	for _, name := range names {
		l, err := open(name)
		if err == nil {
			err = try(l)
		}
		if err == nil {
			return nil
		}
		failures = append(failures, err.Error())
	}
	return fmt.Errorf("no library could be loaded: %s", strings.Join(failures, "; "))
}

func open(name string) (*Library, error) {
	runtime.LockOSThread() // dlerror returns the last error of the thread
	defer runtime.UnlockOSThread()
	text := C.CString(name)
	defer C.free(unsafe.Pointer(text))
	handle := C.dlopen(text, C.RTLD_NOW|C.RTLD_LOCAL)
	if handle == nil {
		return nil, errors.New(C.GoString(C.dlerror()))
	}
	return &Library{File: C.GoString(C.gohvdFile(handle)), handle: handle}, nil
}

// Symbols stores the addresses of the named functions in table, which has an element for each name. It stores
// nil for a function that the library does not have, and returns the names of these functions.
func (l *Library) Symbols(table []unsafe.Pointer, names []string) (missing []string) {
	for i, name := range names {
		text := C.CString(name)
		table[i] = C.dlsym(l.handle, text)
		if table[i] == nil {
			missing = append(missing, name)
		}
		C.free(unsafe.Pointer(text))
	}
	return missing
}

// load does the same as Symbols, and returns an error if the library lacks a function.
func (l *Library) load(table []unsafe.Pointer, names []string) error {
	if missing := l.Symbols(table, names); len(missing) > 0 {
		return fmt.Errorf("%s lacks %s", l.File, strings.Join(missing, ", "))
	}
	return nil
}
