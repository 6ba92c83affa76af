package autotune

import (
	"errors"
	"fmt"
	"io"
	"math"
	"slices"
	"strings"

	"github.com/go-json-experiment/json"
	"github.com/go-json-experiment/json/jsontext"
)

const (
	// fileVersion is the version of the format that Save writes.
	fileVersion = 1
	// maxFileBytes bounds what Load reads.
	maxFileBytes = 1 << 20
)

// file is the format of a file with settings.
type file struct {
	Version  int                       `json:"version"`
	Score    float64                   `json:"score"`
	Settings map[string]jsontext.Value `json:"settings"`
}

// Save writes the values of a point and its score in bytes per microsecond as JSON, for Load. Numbers have
// the unit that the name of the parameter says, choices are strings, and switches are true or false. Fixed
// parameters are not saved: they are not results of the search, and a later job may be free to choose.
func Save(w io.Writer, p Point, score float64) error {
	f := file{fileVersion, score, make(map[string]jsontext.Value)}
	for i := range p.values {
		if p.space[i].Fixed {
			continue
		}
		var v any = p.values[i]
		switch p.space[i].Kind {
		case Choice:
			v = p.text(i)
		case Switch:
			v = p.values[i] == 1
		}
		text, err := json.Marshal(v)
		if err != nil {
			return fmt.Errorf("autotune: save %s: %w", p.space[i].Name, err)
		}
		f.Settings[p.space[i].Name] = text
	}
	text, err := json.Marshal(f, json.Deterministic(true), jsontext.WithIndent("  "))
	if err != nil {
		return fmt.Errorf("autotune: save settings: %w", err)
	}
	if _, err := w.Write(append(text, '\n')); err != nil {
		return fmt.Errorf("autotune: save settings: %w", err)
	}
	return nil
}

// Load reads what Save has written and returns the point and its score. A parameter that the file does not
// have gets its default. A fixed parameter keeps its value, whatever the file says.
//
// Load returns an error if the version is another one, if the file has a name that the space does not have or
// has a name twice, or if a value is not one that the parameter can have.
func Load(r io.Reader, s Space) (p Point, score float64, err error) {
	if err := s.check(); err != nil {
		return Point{}, 0, err
	}
	text, err := io.ReadAll(io.LimitReader(r, maxFileBytes+1))
	if err != nil {
		return Point{}, 0, fmt.Errorf("autotune: load settings: %w", err)
	}
	if len(text) > maxFileBytes {
		return Point{}, 0, fmt.Errorf("autotune: load settings: more than %d bytes", maxFileBytes)
	}
	if p, score, err = decode(text, slices.Clone(s)); err != nil {
		return Point{}, 0, fmt.Errorf("autotune: load settings: %w", err)
	}
	return p, score, nil
}

func decode(text []byte, s Space) (Point, float64, error) {
	var f file
	// The version is decoded first, because another version may have other members.
	if err := json.Unmarshal(text, &f); err != nil {
		return Point{}, 0, err
	}
	if f.Version != fileVersion {
		return Point{}, 0, fmt.Errorf("version is %d, want %d", f.Version, fileVersion)
	}
	if err := json.Unmarshal(text, &f, json.RejectUnknownMembers(true)); err != nil {
		return Point{}, 0, err
	}
	if !(f.Score >= 0) {
		return Point{}, 0, fmt.Errorf("score is %v, want at least 0", f.Score)
	}
	for name := range f.Settings {
		if s.index(name) < 0 {
			return Point{}, 0, unknown(f, s)
		}
	}
	p := s.Default()
	for i := range s {
		text, ok := f.Settings[s[i].Name]
		if !ok || s[i].Fixed {
			continue
		}
		v, err := s[i].decode(text)
		if err != nil {
			return Point{}, 0, fmt.Errorf("%s is %s, want %w", s[i].Name, text, err)
		}
		p.values[i] = v
	}
	return p, f.Score, nil
}

// unknown returns the error for a file with names that the space does not have.
func unknown(f file, s Space) error {
	var extra, known []string
	for name := range f.Settings {
		if s.index(name) < 0 {
			extra = append(extra, fmt.Sprintf("%q", name))
		}
	}
	for _, p := range s {
		known = append(known, p.Name)
	}
	slices.Sort(extra)
	return fmt.Errorf("unknown settings %s: want only %s", strings.Join(extra, ", "), strings.Join(known, ", "))
}

// decode returns the value of the parameter that text encodes in JSON. If text is not valid, decode returns
// an error that lists the valid values. Its text fits after the word "want".
func (p *Parameter) decode(text jsontext.Value) (float64, error) {
	switch p.Kind {
	case Choice:
		var word string
		i := -1
		if json.Unmarshal(text, &word) == nil {
			i = slices.Index(p.Choices, word)
		}
		if i < 0 {
			return 0, fmt.Errorf("one of %s", strings.Join(p.Choices, ", "))
		}
		return float64(i), nil
	case Switch:
		switch text.Kind() {
		case 't':
			return 1, nil
		case 'f':
			return 0, nil
		}
		return 0, errors.New("true or false")
	}
	v := math.NaN()
	if text.Kind() == '0' && json.Unmarshal(text, &v) != nil {
		v = math.NaN()
	}
	if v == p.Default || p.Zero && v == 0 || v >= p.Min && v <= p.Max && (p.Kind == Log || powerOfTwo(v)) {
		return v + 0, nil // -0 becomes 0
	}
	want := fmt.Sprintf("a number from %s to %s", p.format(p.Min), p.format(p.Max))
	if p.Kind == PowerOfTwo {
		want = fmt.Sprintf("a power of two from %s to %s", p.format(p.Min), p.format(p.Max))
	}
	if p.Zero {
		want = "0 or " + want
	}
	return 0, errors.New(want)
}
