package config

import (
	"fmt"
	"maps"
	"slices"
	"strings"
)

// loader collects values from the sources. It reads the sources in order of increasing precedence, so that a
// value replaces the values that were read before it.
type loader struct {
	src      Sources
	environ  map[string]string // environment variables whose value is not empty, by name
	given    map[string]value
	warnings []warning
	shown    []string // names about which the launcher has printed warnings
}

func collect(src Sources) (*loader, error) {
	l := &loader{src: src, environ: make(map[string]string), given: make(map[string]value)}
	for _, e := range src.Environ {
		name, text, _ := strings.Cut(e, "=")
		l.environ[name] = text // if a name occurs more than once, its last value counts
	}
	maps.DeleteFunc(l.environ, func(_, text string) bool { return text == "" })
	l.shown = strings.Split(l.environ[shownVariable], ",")
	file, err := l.file()
	if err != nil {
		return nil, err
	}
	maps.Copy(l.given, file)
	l.environment()
	l.flags(file)
	return l, l.api()
}

// file reads the settings file that the environment, a flag or the program names. It returns nil if none of
// them names a file.
func (l *loader) file() (map[string]value, error) {
	path := l.environ[FileVariable]
	for _, f := range l.src.Flags {
		if f.Name == FileVariable {
			path = f.Value
		}
	}
	if p := l.src.API[FileVariable]; p != "" {
		path = p
	}
	if path == "" {
		return nil, nil
	}
	values, warnings, err := readFile(path)
	l.warnings = append(l.warnings, warnings...)
	return values, err
}

// environment reads the settings from the environment. It adds a warning for each unknown name that begins
// with HOROVOD_ or HVD_.
func (l *loader) environment() {
	for _, name := range slices.Sorted(maps.Keys(l.environ)) {
		text := l.environ[name]
		if s, ok := Lookup(name); ok {
			if !l.src.Launcher || s.Scope != ByLauncher {
				l.given[name] = value{text, Origin{Source: FromEnviron}}
			}
			continue
		}
		if i, ok := inertByName(name); ok {
			if !same(text, i.Default) {
				l.warnings = append(l.warnings, noEffect(name, i.Reason))
			}
			continue
		}
		if strings.HasPrefix(name, "HOROVOD_") || strings.HasPrefix(name, "HVD_") {
			l.warnings = append(l.warnings,
				warning{name, fmt.Sprintf("%s is not a setting%s", name, suggest(nearestName(name)))})
		}
	}
}

// flags reads the values of the launcher's flags. It skips a flag if the settings file also has the setting
// and the flag comes before the flag that names the file.
func (l *loader) flags(file map[string]value) {
	last := -1
	for i, f := range l.src.Flags {
		if f.Name == FileVariable {
			last = i
		}
	}
	for i, v := range l.src.Flags {
		f := flagOf(v)
		w := warning{v.Flag, fmt.Sprintf("%s is deprecated: use --%s", v.Flag, f.Instead)}
		if f.Instead != "" && !slices.Contains(l.warnings, w) {
			l.warnings = append(l.warnings, w)
		}
		if _, ok := file[v.Name]; ok && i < last {
			continue
		}
		text := v.Value
		if before := l.given[v.Name]; f.Adds && before.origin.Source == FromFlag {
			text = before.text + "," + text
		}
		l.given[v.Name] = value{text, Origin{Source: FromFlag, Flag: v.Flag}}
	}
}

// flagOf returns the row of the flag, or the zero Flag for a flag such as -x that can set every setting.
func flagOf(v FlagValue) Flag {
	s, _ := Lookup(v.Name)
	i := slices.IndexFunc(s.Flags, func(f Flag) bool { return "--"+f.Name == v.Flag })
	if i < 0 {
		return Flag{}
	}
	return s.Flags[i]
}

func (l *loader) api() error {
	for _, name := range slices.Sorted(maps.Keys(l.src.API)) {
		if _, ok := Lookup(name); !ok {
			if i, ok := inertByName(name); ok {
				return fmt.Errorf("config: %s has no effect: %s", name, i.Reason)
			}
			return fmt.Errorf("config: unknown setting %q%s", name, suggest(nearestName(name)))
		}
		if text := l.src.API[name]; text != "" {
			l.given[name] = value{text, Origin{Source: FromAPI}}
		}
	}
	return nil
}

// warning is a sentence for the user. Its name is the variable, key or flag that the sentence is about.
type warning struct{ name, text string }

func noEffect(name, reason string) warning {
	return warning{name, fmt.Sprintf("%s has no effect: %s", name, reason)}
}

// warn appends the warnings to c.Warnings, except those whose name is in shown. It records the names of all
// warnings and all names in shown in the field c.warned.
func (c *Config) warn(warnings []warning, shown []string) {
	c.warned = slices.DeleteFunc(slices.Clone(shown), func(name string) bool { return name == "" })
	for _, w := range warnings {
		if !slices.Contains(shown, w.name) {
			c.Warnings = append(c.Warnings, w.text)
			c.warned = append(c.warned, w.name)
		}
	}
}

// ForRanks returns the variables, as NAME=value, that the launcher adds to the environment of the ranks: the
// values of its flags, and the names that it has printed warnings about.
func (c Config) ForRanks() []string {
	var env []string
	for _, s := range settings {
		if v, ok := c.given[s.Name]; ok && v.origin.Source == FromFlag {
			env = append(env, s.Name+"="+v.text)
		}
	}
	if len(c.warned) > 0 {
		env = append(env, shownVariable+"="+strings.Join(c.warned, ","))
	}
	return env
}
