package config

import "fmt"

// Source is a kind of place that values come from, the later ones above the earlier.
type Source int

const (
	FromDefault Source = iota // nothing gives one
	FromFile                  // the file that HVD_CONFIG_FILE names
	FromEnviron               // the environment
	FromFlag                  // hvdrun's command line
	FromAPI                   // the program
)

// Origin is where a value came from.
type Origin struct {
	Source Source
	// File and Line are where in a file, for FromFile.
	File string
	Line int
	// Flag is hvdrun's flag as people write it, for FromFlag.
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

// value is a setting's value as in the environment, and where it came from.
type value struct {
	text   string
	origin Origin
}

// Origin says where the value of the named setting came from; a name that is no setting has the default.
func (c Config) Origin(name string) Origin { return c.given[name].origin }

// Value returns the named setting's value as in the environment; empty if there is neither a value nor a default.
func (c Config) Value(name string) string {
	if v, ok := c.given[name]; ok {
		return v.text
	}
	s, _ := Lookup(name)
	return s.Default
}

// Terms returns the settings that must be the same at all ranks, by name, in a form that equal values share.
func (c Config) Terms() map[string]string {
	terms := make(map[string]string)
	for _, s := range settings {
		if s.Scope == PerJob {
			terms[s.Name] = s.canonical(c.Value(s.Name))
		}
	}
	return terms
}
