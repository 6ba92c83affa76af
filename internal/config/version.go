package config

import "runtime/debug"

const module = "github.com/gohvd/gohvd"

// release is set by the linker in a release: -X github.com/gohvd/gohvd/internal/config.release=v1.2.3.
var release string

// Version returns that of gohvd in this program, whose own module may be another; "(devel)" if that is not known.
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

// VersionText is Version, and what the program was built from if that is known, for people.
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
