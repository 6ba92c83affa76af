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

// OpenLibrary loads the first of the libraries that the dynamic loader finds. A name that contains a slash is
// the path of a file.
func OpenLibrary(names ...string) (*Library, error) {
	runtime.LockOSThread() // dlerror returns the last error of the thread
	defer runtime.UnlockOSThread()
	var failures []string
	for _, name := range names {
		text := C.CString(name)
		handle := C.dlopen(text, C.RTLD_NOW|C.RTLD_LOCAL)
		C.free(unsafe.Pointer(text))
		if handle != nil {
			return &Library{File: C.GoString(C.gohvdFile(handle)), handle: handle}, nil
		}
		failures = append(failures, C.GoString(C.dlerror()))
	}
	return nil, fmt.Errorf("cuda: no library could be loaded: %s", strings.Join(failures, "; "))
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
