package autotune

import (
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
)

// Kind says which values a parameter can have and how their distance is measured.
type Kind uint8

// These are the kinds of parameters.
const (
	// Log is a number from Min to Max on a logarithmic scale, of which the tuner tries two values per
	// doubling.
	Log Kind = iota + 1
	// PowerOfTwo is a power of two from Min to Max.
	PowerOfTwo
	// Choice is one of several words, which have no order.
	Choice
	// Switch is off or on.
	Switch
)

var kinds = []string{"none", "log", "power of two", "choice", "switch"}

func (k Kind) String() string {
	if int(k) >= len(kinds) {
		return fmt.Sprintf("Kind(%d)", uint8(k))
	}
	return kinds[k]
}

// stepsPerDoubling is the number of values of a Log parameter that the tuner tries per doubling. Scores of
// neighbours differ by less than the noise of a sample, so more values would not help.
const stepsPerDoubling = 2

// Parameter is a setting that the tuner may change.
type Parameter struct {
	// Name identifies the parameter in points, logs and files.
	Name string
	// Kind says which of the fields below apply.
	Kind Kind
	// Min and Max are the bounds of Log and PowerOfTwo. Both are greater than 0.
	Min, Max float64
	// Unit is the number of which the values of a Log parameter are multiples. If it is 0, values are not
	// rounded.
	Unit float64
	// Zero adds the value 0 to Log and PowerOfTwo. The tuner treats it as the value before Min.
	Zero bool
	// Choices has the words of a Choice.
	Choices []string
	// Default is the value that the tuner measures first. It may be outside of Min and Max, and then it is
	// tried too. For a Choice it is an index of Choices, and for a Switch it is 0 or 1.
	Default float64
	// Fixed says that the parameter keeps the value Default. It is for settings that the user has set.
	Fixed bool
}

// Space is the list of all parameters. Names must be unique.
type Space []Parameter

// These are the names of the parameters that gohvd tunes. The first six also are columns of Horovod's log.
const (
	HierarchicalAllreduceName = "hierarchical_allreduce"
	HierarchicalAllgatherName = "hierarchical_allgather"
	TorusAllreduceName        = "torus_allreduce"
	CacheEnabledName          = "cache_enabled"
	CycleTimeName             = "cycle_time_ms"
	FusionThresholdName       = "fusion_threshold_bytes"
	SegmentSizeName           = "segment_bytes"
	AlgorithmName             = "algorithm"
)

// FusionThreshold returns the parameter for HOROVOD_FUSION_THRESHOLD: 0, which means no fusion, or 64 KiB to
// 256 MiB. Its values are multiples of 4 KiB.
func FusionThreshold(defaultBytes int64) Parameter {
	return Parameter{Name: FusionThresholdName, Kind: Log, Min: 64 << 10, Max: 256 << 20, Unit: 4 << 10,
		Zero: true, Default: float64(defaultBytes)}
}

// CycleTime returns the parameter for HOROVOD_CYCLE_TIME: 0, which means that requests are answered at once,
// or 0.1 ms to 25 ms.
func CycleTime(defaultMilliseconds float64) Parameter {
	return Parameter{Name: CycleTimeName, Kind: Log, Min: 0.1, Max: 25, Unit: 0.01, Zero: true,
		Default: defaultMilliseconds}
}

// SegmentSize returns the parameter for the size of the segments of a backend: a power of two from 64 KiB to
// 8 MiB.
func SegmentSize(defaultBytes int64) Parameter {
	return Parameter{Name: SegmentSizeName, Kind: PowerOfTwo, Min: 64 << 10, Max: 8 << 20,
		Default: float64(defaultBytes)}
}

// Algorithm returns the parameter for the algorithm of reductions. The first choice is the default; it may
// stand for a table that selects the algorithm by size.
func Algorithm(choices ...string) Parameter {
	return Parameter{Name: AlgorithmName, Kind: Choice, Choices: choices}
}

// Toggle returns a parameter of the kind Switch.
func Toggle(name string, on bool) Parameter {
	p := Parameter{Name: name, Kind: Switch}
	if on {
		p.Default = 1
	}
	return p
}

// Fix returns p with Fixed set, so that the tuner keeps the value Default.
func (p Parameter) Fix() Parameter {
	p.Fixed = true
	return p
}

// check returns an error if p is not valid.
func (p *Parameter) check() error {
	fail := func(format string, args ...any) error {
		return fmt.Errorf("autotune: parameter %q: "+format, append([]any{p.Name}, args...)...)
	}
	if p.Name == "" || strings.ContainsAny(p.Name, ",\"\r\n") {
		return fail("want a name without commas, quotes and line breaks")
	}
	switch p.Kind {
	case Log, PowerOfTwo:
		if !(p.Min > 0 && p.Min <= p.Max) || math.IsInf(p.Max, 0) {
			return fail("bounds are %v and %v, want 0 < Min <= Max", p.Min, p.Max)
		}
		if !(p.Unit >= 0) || math.IsInf(p.Unit, 0) {
			return fail("unit is %v, want at least 0", p.Unit)
		}
		if !(p.Default >= 0) || math.IsInf(p.Default, 0) {
			return fail("default is %v, want at least 0", p.Default)
		}
		if p.Kind == PowerOfTwo && (!powerOfTwo(p.Min) || !powerOfTwo(p.Max)) {
			return fail("bounds are %v and %v, want powers of two", p.Min, p.Max)
		}
	case Choice, Switch:
		words := p.words()
		if len(words) == 0 {
			return fail("no choices")
		}
		for i, w := range words {
			if w == "" || strings.ContainsAny(w, ",\"\r\n") {
				return fail("choice %q, want a word without commas, quotes and line breaks", w)
			}
			if slices.Contains(words[:i], w) {
				return fail("choice %q occurs twice", w)
			}
		}
		if d := p.Default; !(d >= 0 && d < float64(len(words)) && d == math.Trunc(d)) {
			return fail("default is %v, want an integer from 0 to %d", d, len(words)-1)
		}
	default:
		return fail("%v is not a kind", p.Kind)
	}
	return nil
}

func powerOfTwo(v float64) bool {
	frac, _ := math.Frexp(v)
	return frac == 0.5
}

// words returns the words that stand for the values of a Choice or Switch.
func (p *Parameter) words() []string {
	if p.Kind == Switch {
		return []string{"off", "on"}
	}
	return p.Choices
}

// format returns the text of a value, as it is in errors and logs.
func (p *Parameter) format(value float64) string {
	if p.Kind == Choice || p.Kind == Switch {
		return p.words()[int(value)]
	}
	return strconv.FormatFloat(value, 'f', -1, 64)
}

// values returns the values that the tuner may try, in ascending order.
func (p *Parameter) values() []float64 {
	all := []float64{p.Default}
	if p.Fixed {
		return all
	}
	steps := 1
	switch p.Kind {
	case Log:
		steps = stepsPerDoubling
		fallthrough
	case PowerOfTwo:
		n := int(math.Floor(math.Log2(p.Max/p.Min)*float64(steps) + 1e-9))
		for i := range n + 1 {
			v := p.Min * math.Exp2(float64(i)/float64(steps))
			if p.Kind == Log && p.Unit > 0 {
				v = math.Round(v/p.Unit) * p.Unit
				// 0.3, not 0.30000000000000004
				v, _ = strconv.ParseFloat(strconv.FormatFloat(v, 'g', 12, 64), 64)
			}
			all = append(all, v)
		}
		if p.Kind == Log {
			all = append(all, p.Max)
		}
		if p.Zero {
			all = append(all, 0)
		}
	case Choice, Switch:
		for i := range p.words() {
			all = append(all, float64(i))
		}
	}
	slices.Sort(all)
	return slices.Compact(all)
}

// coordinate returns the place of a value on the axis of p. Values from Min to Max of a number are at 0 to 1,
// and the value 0 is before them. The places of words have no order.
func (p *Parameter) coordinate(value float64) float64 {
	if p.Kind == Choice || p.Kind == Switch {
		return value
	}
	doublings := max(math.Log2(p.Max/p.Min), 1)
	if value <= 0 {
		return -1 / doublings
	}
	return max(math.Log2(value/p.Min), -1) / doublings
}

// check returns an error if s is not valid.
func (s Space) check() error {
	for i := range s {
		if err := s[i].check(); err != nil {
			return err
		}
		if s[:i].index(s[i].Name) >= 0 {
			return fmt.Errorf("autotune: parameter %q occurs twice", s[i].Name)
		}
	}
	return nil
}

// index returns the index of a parameter, or -1 if s does not have it.
func (s Space) index(name string) int {
	return slices.IndexFunc(s, func(p Parameter) bool { return p.Name == name })
}

// Default returns the point with the default of each parameter. The space must be valid (see New).
func (s Space) Default() Point {
	p := Point{space: s, values: make([]float64, len(s))}
	for i := range s {
		p.values[i] = s[i].Default
	}
	return p
}

// Point has a value for each parameter of a space. Points are immutable. The zero value has no parameters.
type Point struct {
	space  Space
	values []float64
}

// Number returns the value of a Log or PowerOfTwo parameter. It reports false if the space has no such
// parameter.
func (p Point) Number(name string) (value float64, ok bool) {
	i := p.space.index(name)
	if i < 0 || p.space[i].Kind != Log && p.space[i].Kind != PowerOfTwo {
		return 0, false
	}
	return p.values[i], true
}

// Choice returns the word of a Choice parameter. It reports false if the space has no such parameter.
func (p Point) Choice(name string) (word string, ok bool) {
	i := p.space.index(name)
	if i < 0 || p.space[i].Kind != Choice {
		return "", false
	}
	return p.space[i].format(p.values[i]), true
}

// Switch returns the value of a Switch parameter. It reports false if the space has no such parameter.
func (p Point) Switch(name string) (on, ok bool) {
	i := p.space.index(name)
	if i < 0 || p.space[i].Kind != Switch {
		return false, false
	}
	return p.values[i] == 1, true
}

// Equal reports whether p and q have the same parameters with the same values.
func (p Point) Equal(q Point) bool {
	if len(p.values) != len(q.values) {
		return false
	}
	for i := range p.values {
		if p.space[i].Name != q.space[i].Name || p.text(i) != q.text(i) {
			return false
		}
	}
	return true
}

func (p Point) text(i int) string { return p.space[i].format(p.values[i]) }

func (p Point) String() string {
	var b strings.Builder
	for i := range p.values {
		if i > 0 {
			b.WriteByte(' ')
		}
		b.WriteString(p.space[i].Name + "=" + p.text(i))
	}
	return b.String()
}
