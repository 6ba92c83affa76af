package cuda

import (
	"bufio"
	"io"
	"path/filepath"
	"slices"
	"strings"
)

// Places returns the files of a library that a process with packages of pip uses: those that the
// process has mapped, as PyTorch does, and then those in the packages of NVIDIA beside the packages from
// which it has mapped any file. maps has the lines of /proc/self/maps. pattern is that of the file's name.
func Places(maps io.Reader, pattern string) []string {
	var mapped, sites []string
	for lines := bufio.NewScanner(maps); lines.Scan(); {
		// A line has an address, permissions, an offset, a device, an inode and then the file.
		_, file, isFile := strings.Cut(lines.Text(), " /")
		if file = "/" + file; !isFile {
			continue
		}
		if ok, _ := filepath.Match(pattern, filepath.Base(file)); ok {
			mapped = append(mapped, file)
		}
		for _, name := range []string{"/site-packages/", "/dist-packages/"} {
			if before, _, found := strings.Cut(file, name); found {
				sites = append(sites, before+name)
			}
		}
	}
	slices.Sort(sites)
	for _, site := range slices.Compact(sites) {
		packaged, _ := filepath.Glob(filepath.Join(site, "nvidia/*/lib", pattern))
		slices.SortStableFunc(packaged, func(a, b string) int { // the newest version first
			return strings.Compare(filepath.Base(b), filepath.Base(a))
		})
		mapped = append(mapped, packaged...)
	}
	seen := make(map[string]bool)
	return slices.DeleteFunc(mapped, func(file string) bool {
		defer func() { seen[file] = true }()
		return seen[file]
	})
}
