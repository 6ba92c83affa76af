package config

import "runtime/debug"

const module = "github.com/gohvd/gohvd"

// release is the version of gohvd in a release, and empty in other builds. The linker sets it with -X
// github.com/gohvd/gohvd/internal/config.release=v1.2.3.
var release string

// Version returns the version of gohvd in this program, or "(devel)" if it is not known. It also finds the
// version if the program belongs to another module that imports gohvd.
func Version() string {
	if release != "" {
		return release
	}
	if info, ok := debug.ReadBuildInfo(); ok {
		for _, m := range append(info.Deps, &info.Main) {
			if m.Path == module && m.Version != "" {
				return m.Version
			}
		}
	}
	return "(devel)"
}

// VersionText returns the version for users. It includes the commit that the program was built from if the
// commit is known.
func VersionText() string {
	text := Version()
	if info, ok := debug.ReadBuildInfo(); ok {
		for _, s := range info.Settings {
			if s.Key == "vcs.revision" {
				text += " (" + s.Value + ")"
			}
		}
	}
	return text
}
