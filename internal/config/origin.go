package config

import "fmt"

// Source is a kind of source of values. A later one overrides an earlier one.
type Source int

const (
	FromDefault Source = iota // no source has a value
	FromFile                  // the file that HVD_CONFIG_FILE names
	FromEnviron               // the environment
	FromFlag                  // hvdrun's command line
	FromAPI                   // the program
)

// Origin is the source of a value.
type Origin struct {
	Source Source
	// File and Line are the position in the file, for FromFile.
	File string
	Line int
	// Flag is the flag as on hvdrun's command line, for FromFlag.
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

// value is the value of a setting in the form of the environment, with its origin.
type value struct {
	text   string
	origin Origin
}

// Origin returns the source of the value of the named setting. For a name that is not a setting it is
// FromDefault.
func (c Config) Origin(name string) Origin { return c.given[name].origin }

// Value returns the value of the named setting in the form of the environment; empty if it has neither a
// value nor a default.
func (c Config) Value(name string) string {
	if v, ok := c.given[name]; ok {
		return v.text
	}
	s, _ := Lookup(name)
	return s.Default
}

// Terms returns the settings that must be the same at all ranks, by name, in a canonical form: equal values
// have equal texts.
func (c Config) Terms() map[string]string {
	terms := make(map[string]string)
	for _, s := range settings {
		if s.Scope == PerJob {
			terms[s.Name] = s.canonical(c.Value(s.Name))
		}
	}
	return terms
}
