package autotune

import (
	"math"
	"slices"
	"strings"
	"testing"
)

// TestValues checks which values the tuner may try for parameters of each kind. A case lists all values, or
// the first four and the last three. The values must include the default. The coordinates of numbers must
// increase.
func TestValues(t *testing.T) {
	for _, test := range []struct {
		name string
		p    Parameter
		want string // the first values and the last, or all
	}{
		{"fusion", FusionThreshold(128 << 20), "0 65536 94208 131072 ... 134217728 189812736 268435456"},
		{"fusion, other default", FusionThreshold(5000000), "0 65536 94208 131072 ... 134217728 189812736 268435456"},
		{"cycle", CycleTime(0), "0 0.1 0.14 0.2 ... 12.8 18.1 25"},
		{"cycle, great default", CycleTime(100), "0 0.1 0.14 0.2 ... 18.1 25 100"},
		{"segment", SegmentSize(256 << 10), "65536 131072 262144 524288 ... 2097152 4194304 8388608"},
		{"algorithm", Algorithm("auto", "ring"), "auto ring"},
		{"switch", Toggle(CacheEnabledName, true), "off on"},
		{"fixed", FusionThreshold(1 << 40).Fix(), "1099511627776"},
		{"fixed switch", Toggle(CacheEnabledName, true).Fix(), "on"},
		{"one value", Parameter{Name: "p", Kind: PowerOfTwo, Min: 4, Max: 4, Default: 4}, "4"},
	} {
		if err := test.p.check(); err != nil {
			t.Errorf("%s: %v", test.name, err)
		}
		values := test.p.values()
		var texts []string
		for _, v := range values {
			texts = append(texts, test.p.format(v))
		}
		if n := len(texts); n > 7 {
			texts = slices.Concat(texts[:4], []string{"..."}, texts[n-3:])
		}
		if got := strings.Join(texts, " "); got != test.want {
			t.Errorf("%s: got %s, want %s", test.name, got, test.want)
		}
		if !slices.Contains(values, test.p.Default) {
			t.Errorf("%s: the values do not have the default", test.name)
		}
		if test.p.Kind <= PowerOfTwo {
			var x []float64
			for _, v := range values {
				x = append(x, test.p.coordinate(v))
			}
			if !slices.IsSorted(x) || len(slices.Compact(x)) != len(values) {
				t.Errorf("%s: the coordinates %v do not rise", test.name, x)
			}
		}
	}
	p := CycleTime(0)
	if a, b := p.coordinate(0.1), p.coordinate(25); a != 0 || b != 1 {
		t.Errorf("the bounds are at %v and %v, want 0 and 1", a, b)
	}
}

// A space that is not valid is an error that names the parameter.
func TestInvalidSpaces(t *testing.T) {
	valid := Parameter{Name: "p", Kind: Log, Min: 1, Max: 8, Default: 2}
	with := func(change func(*Parameter)) Space {
		p := valid
		change(&p)
		return Space{p}
	}
	for want, s := range map[string]Space{
		`parameter "p" occurs twice`:                  {valid, valid},
		`want a name without`:                         with(func(p *Parameter) { p.Name = "a,b" }),
		`bounds are 0 and 8, want 0 < Min <= Max`:     with(func(p *Parameter) { p.Min = 0 }),
		`bounds are 9 and 8`:                          with(func(p *Parameter) { p.Min = 9 }),
		`bounds are 1 and +Inf`:                       with(func(p *Parameter) { p.Max = math.Inf(1) }),
		`default is NaN, want at least 0`:             with(func(p *Parameter) { p.Default = math.NaN() }),
		`unit is -1, want at least 0`:                 with(func(p *Parameter) { p.Unit = -1 }),
		`bounds are 3 and 8, want powers of two`:      with(func(p *Parameter) { p.Kind, p.Min = PowerOfTwo, 3 }),
		`no choices`:                                  {Algorithm()},
		`choice "ring" occurs twice`:                  {Algorithm("ring", "ring")},
		`choice ""`:                                   {Algorithm("")},
		`default is 0.5, want an integer from 0 to 1`: {Parameter{Name: "s", Kind: Switch, Default: 0.5}},
		`none is not a kind`:                          {Parameter{Name: "p"}},
	} {
		if err := s.check(); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("got error %v, want %s", err, want)
		}
	}
}

// A point answers only for parameters that its space has, of the kind that is asked for.
func TestPoint(t *testing.T) {
	p := Space{CycleTime(2.5), Algorithm("auto", "ring"), Toggle(CacheEnabledName, true)}.Default()
	if v, ok := p.Number(CycleTimeName); v != 2.5 || !ok {
		t.Errorf("cycle time is %v, %v", v, ok)
	}
	if v, ok := p.Choice(AlgorithmName); v != "auto" || !ok {
		t.Errorf("algorithm is %v, %v", v, ok)
	}
	if v, ok := p.Switch(CacheEnabledName); !v || !ok {
		t.Errorf("cache is %v, %v", v, ok)
	}
	if _, ok := p.Number(FusionThresholdName); ok {
		t.Error("the point has a number that the space does not have")
	}
	if _, ok := p.Number(AlgorithmName); ok {
		t.Error("a word is a number")
	}
	if _, ok := p.Choice(CacheEnabledName); ok {
		t.Error("a switch is a choice")
	}
	if _, ok := p.Switch(AlgorithmName); ok {
		t.Error("a choice is a switch")
	}
	if got, want := p.String(), "cycle_time_ms=2.5 algorithm=auto cache_enabled=on"; got != want {
		t.Errorf("got %s, want %s", got, want)
	}
	if (Point{}).Equal(p) || !p.Equal(p) || p.Equal(Space{CycleTime(2.5), Algorithm("ring", "auto"),
		Toggle(CacheEnabledName, true)}.Default()) {
		t.Error("Equal is wrong")
	}
}
