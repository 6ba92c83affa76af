package config

import "fmt"

// Source is a kind of source of values. A greater Source overrides a smaller one.
type Source int

const (
	FromDefault Source = iota // no source has a value
	FromFile                  // the settings file
	FromEnviron               // the environment
	FromFlag                  // hvdrun's command line
	FromAPI                   // the program
)

// Origin says where a value comes from.
type Origin struct {
	Source Source
	// File and Line are the settings file and the line of the value if Source is FromFile.
	File string
	Line int
	// Flag is the flag on hvdrun's command line if Source is FromFlag.
	Flag string
}

func (o Origin) String() string {
	switch o.Source {
	case FromFile:
		return fmt.Sprintf("file %s line %d", o.File, o.Line)
	case FromEnviron:
		return "environment"
	case FromFlag:
		return "flag " + o.Flag
	case FromAPI:
		return "API"
	}
	return "default"
}

// value is a value of a setting, in the form of the environment, and its origin.
type value struct {
	text   string
	origin Origin
}

// Origin returns where the value of the named setting comes from. If name is not a setting, Source is
// FromDefault.
func (c Config) Origin(name string) Origin { return c.given[name].origin }

// Value returns the value of the named setting as it would be written in the environment. It returns "" if
// the setting has neither a value nor a default.
func (c Config) Value(name string) string {
	if v, ok := c.given[name]; ok {
		return v.text
	}
	s, _ := Lookup(name)
	return s.Default
}

// Chosen returns the values of the settings for which a source has a value, by name. It leaves out secrets,
// and what a launcher has said about the place of this process.
func (c Config) Chosen() map[string]string {
	chosen := make(map[string]string)
	for _, s := range settings {
		if v, ok := c.given[s.Name]; ok && !s.Secret && s.Scope != ByLauncher {
			chosen[s.Name] = v.text
		}
	}
	return chosen
}

// Terms returns the values of the settings that must be the same at all ranks, by name. The values are in a
// canonical form, in which equal values have equal texts.
func (c Config) Terms() map[string]string {
	terms := make(map[string]string)
	for _, s := range settings {
		if s.Scope == PerJob {
			terms[s.Name] = s.canonical(c.Value(s.Name))
		}
	}
	return terms
}
