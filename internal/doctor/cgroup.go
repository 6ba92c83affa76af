package doctor

import (
	"io/fs"
	"iter"
	"path"
	"slices"
	"strings"
)

// cgroup is a control group of Linux. It is a folder in a cgroup hierarchy of version 1 or 2.
type cgroup struct {
	dir     string
	version int
}

// cgroups returns the cgroups that may limit this process through the given controller. In each hierarchy
// that may have the controller, these are the cgroup of the process and all cgroups above it. In a container
// the path in /proc may be a path on the host that does not exist in the container. Then the root of the
// hierarchy is the container's cgroup. So a returned folder may not exist, or may lack the files of the
// controller.
func (s *System) cgroups(controller string) iter.Seq[cgroup] {
	const mount = "sys/fs/cgroup"
	return func(yield func(cgroup) bool) {
		text, err := fs.ReadFile(s.Root, "proc/self/cgroup")
		if err != nil {
			return // the kernel has no cgroups
		}
		for line := range strings.Lines(string(text)) {
			// The format is hierarchy-ID:controllers:path. For version 2 the ID is 0 and there are no
			// controllers (cgroups(7)).
			part := strings.SplitN(strings.TrimSuffix(line, "\n"), ":", 3)
			if len(part) != 3 {
				continue
			}
			version, roots := 2, []string{mount, mount + "/unified"}
			if part[0] != "0" {
				names := strings.Split(part[1], ",")
				if !slices.Contains(names, controller) {
					continue
				}
				version, roots = 1, []string{mount + "/" + controller}
				if len(names) > 1 {
					roots = append(roots, mount+"/"+part[1])
				}
			}
			for _, root := range roots {
				for p := path.Clean("/" + part[2]); ; p = path.Dir(p) {
					if !yield(cgroup{path.Join(root, p), version}) {
						return
					}
					if p == "/" {
						break
					}
				}
			}
		}
	}
}

// word returns the content of a file that has one line, or "" if the file cannot be read.
func (s *System) word(file string) string {
	text, err := fs.ReadFile(s.Root, file)
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(text))
}
