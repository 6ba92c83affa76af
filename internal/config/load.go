package config

import (
	"fmt"
	"maps"
	"slices"
	"strings"
)

// loader gathers values, the lowest source first.
type loader struct {
	src      Sources
	environ  map[string]string // without empty values
	given    map[string]value
	warnings []warning
	shown    []string // what a launcher further up has warned of
}

func collect(src Sources) (*loader, error) {
	l := &loader{src: src, environ: make(map[string]string), given: make(map[string]value)}
	for _, e := range src.Environ {
		name, text, _ := strings.Cut(e, "=")
		l.environ[name] = text // of equal names the last counts
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

// file reads the file of settings, whoever names it.
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

// environment takes the settings, and warns of names that look like one.
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
			l.warnings = append(l.warnings, warning{name, fmt.Sprintf("%s is not a setting%s", name, suggest(nearestName(name)))})
		}
	}
}

// flags takes the launcher's, but those that stand before the flag that names the file, where the file says otherwise.
func (l *loader) flags(file map[string]value) {
	last := -1
	for i, f := range l.src.Flags {
		if f.Name == FileVariable {
			last = i
		}
	}
	for i, f := range l.src.Flags {
		if instead := deprecated(f); instead != "" {
			l.warnings = append(l.warnings, warning{f.Flag, fmt.Sprintf("%s is deprecated: use --%s", f.Flag, instead)})
		}
		if _, ok := file[f.Name]; !ok || i > last {
			l.given[f.Name] = value{f.Value, Origin{Source: FromFlag, Flag: f.Flag}}
		}
	}
}

func deprecated(v FlagValue) string {
	s, _ := Lookup(v.Name)
	for _, f := range s.Flags {
		if "--"+f.Name == v.Flag {
			return f.Instead
		}
	}
	return ""
}

func (l *loader) api() error {
	for _, name := range slices.Sorted(maps.Keys(l.src.API)) {
		if _, ok := Lookup(name); !ok {
			if i, ok := inertByName(name); ok {
				return fmt.Errorf("config: %s has no effect: %s", name, i.Reason)
			}
			return fmt.Errorf("config: there is no setting %q%s", name, suggest(nearestName(name)))
		}
		if text := l.src.API[name]; text != "" {
			l.given[name] = value{text, Origin{Source: FromAPI}}
		}
	}
	return nil
}

// warning is a sentence about the variable, key or flag of that name.
type warning struct{ name, text string }

func noEffect(name, reason string) warning {
	return warning{name, fmt.Sprintf("%s has no effect: %s", name, reason)}
}

// warn keeps those that are not about a name in shown.
func (c *Config) warn(warnings []warning, shown []string) {
	c.warned = slices.DeleteFunc(slices.Clone(shown), func(name string) bool { return name == "" })
	for _, w := range warnings {
		if !slices.Contains(shown, w.name) {
			c.Warnings = append(c.Warnings, w.text)
			c.warned = append(c.warned, w.name)
		}
	}
}

// ForRanks returns what the launcher adds to its environment for the ranks, NAME=value: the values of its flags, and which
// warnings it has shown.
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
