package tuning

import (
	"math"
	"slices"
	"time"

	"github.com/gohvd/gohvd/autotune"
	"github.com/gohvd/gohvd/internal/message"
)

// parameter connects a parameter of the search to its effect. A new parameter needs a row in the table
// parameters and a field of message.Tuning.
type parameter struct {
	// of returns the parameter with the value in t as default.
	of func(t *message.Tuning) autotune.Parameter
	// set stores the value of a point in t.
	set func(t *message.Tuning, p autotune.Point, name string)
	// fixed reports whether the value must not change, because the user has set it or because the job does
	// not use it.
	fixed func(c *Config) bool
}

var parameters = []parameter{
	{
		of: func(t *message.Tuning) autotune.Parameter {
			return autotune.Toggle(autotune.HierarchicalAllreduceName, !t.OneLevelAllreduce)
		},
		set: func(t *message.Tuning, p autotune.Point, name string) {
			on, _ := p.Switch(name)
			t.OneLevelAllreduce = !on
		},
		fixed: func(c *Config) bool {
			return c.Given("HOROVOD_HIERARCHICAL_ALLREDUCE") || c.Start.OneLevelAllreduce
		},
	},
	{
		of: func(t *message.Tuning) autotune.Parameter {
			return autotune.Toggle(autotune.HierarchicalAllgatherName, !t.OneLevelAllgather)
		},
		set: func(t *message.Tuning, p autotune.Point, name string) {
			on, _ := p.Switch(name)
			t.OneLevelAllgather = !on
		},
		fixed: func(c *Config) bool {
			return c.Given("HOROVOD_HIERARCHICAL_ALLGATHER") || c.Start.OneLevelAllgather
		},
	},
	{
		of: func(t *message.Tuning) autotune.Parameter {
			p := autotune.Algorithm(words()...)
			p.Default = float64(slices.Index(allreduces, t.Allreduce))
			return p
		},
		set: func(t *message.Tuning, p autotune.Point, name string) {
			word, _ := p.Choice(name)
			t.Allreduce = allreduces[slices.Index(words(), word)]
		},
		fixed: func(c *Config) bool {
			return !c.OverTCP || c.Given("HVD_ALGORITHM")
		},
	},
	{
		of: func(t *message.Tuning) autotune.Parameter {
			return autotune.FusionThreshold(t.FusionThresholdBytes)
		},
		set: func(t *message.Tuning, p autotune.Point, name string) {
			t.FusionThresholdBytes = int64(number(p, name))
		},
		fixed: func(c *Config) bool { return c.Given("HOROVOD_FUSION_THRESHOLD") },
	},
	{
		of: func(t *message.Tuning) autotune.Parameter {
			return autotune.CycleTime(float64(t.CycleTime) / float64(time.Millisecond))
		},
		set: func(t *message.Tuning, p autotune.Point, name string) {
			t.CycleTime = time.Duration(math.Round(number(p, name) * float64(time.Millisecond)))
		},
		fixed: func(c *Config) bool { return c.Given("HOROVOD_CYCLE_TIME") },
	},
	{
		of: func(t *message.Tuning) autotune.Parameter {
			return autotune.Toggle(autotune.CacheEnabledName, !t.CacheOff)
		},
		set: func(t *message.Tuning, p autotune.Point, name string) {
			on, _ := p.Switch(name)
			t.CacheOff = !on
		},
		fixed: func(c *Config) bool { return c.Given("HOROVOD_CACHE_CAPACITY") || c.Start.CacheOff },
	},
	{
		of: func(t *message.Tuning) autotune.Parameter {
			return autotune.SegmentSize(int64(t.SegmentBytes))
		},
		set: func(t *message.Tuning, p autotune.Point, name string) {
			t.SegmentBytes = int(number(p, name))
		},
		fixed: func(c *Config) bool { return !c.OverTCP },
	},
}

// allreduces has the algorithms of allreduce that are tried. NoAlgorithm stands for the table. Direct and
// Exchange are left out: they are for sums that no other algorithm serves.
var allreduces = []message.Algorithm{message.NoAlgorithm, message.Ring, message.RecursiveDoubling,
	message.HalvingDoubling}

// words returns the names of allreduces in points, logs and files.
func words() (all []string) {
	for _, a := range allreduces {
		all = append(all, (&message.Tuning{Allreduce: a}).AllreduceText())
	}
	return all
}

func number(p autotune.Point, name string) float64 {
	v, _ := p.Number(name)
	return v
}

// space returns the parameters, with the values in t as defaults.
func (c *Config) space(t message.Tuning) (s autotune.Space) {
	for _, p := range parameters {
		q := p.of(&t)
		q.Fixed = p.fixed(c)
		s = append(s, q)
	}
	return s
}

// valuesOf returns the values of a point.
func (c *Config) valuesOf(p autotune.Point) message.Tuning {
	t := c.Start
	for _, q := range parameters {
		q.set(&t, p, q.of(&t).Name)
	}
	return t
}
