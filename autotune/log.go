package autotune

import (
	"bufio"
	"io"
	"strconv"
)

// horovodColumns has the columns of Horovod's log before the score, in their order, and the parameters that
// they show.
var horovodColumns = []struct{ column, parameter string }{
	{"hierarchical_allreduce", HierarchicalAllreduceName},
	{"hierarchical_allgather", HierarchicalAllgatherName},
	{"torus_allreduce", TorusAllreduceName},
	{"cache_enabled", CacheEnabledName},
	{"cycle_time_ms", CycleTimeName},
	{"tensor_fusion_threshold", FusionThresholdName},
}

// WriteLog writes a table of the rounds as comma-separated values (HOROVOD_AUTOTUNE_LOG). The first line has
// the names of the columns. Then comes a line for each round, and a last line for the best point.
//
// The first columns are Horovod's, with its units: 0 or 1 for switches, milliseconds for the cycle time, MiB
// for the fusion threshold, and bytes per microsecond for the score. All other parameters of the space
// follow, such as segment_bytes and algorithm. If the space does not have a parameter of Horovod's columns,
// the field is empty. No field has commas or quotes.
func (t *Tuner) WriteLog(w io.Writer) error {
	b := bufio.NewWriter(w) // it keeps the first error until Flush
	others := make([]int, 0, len(t.grid.space))
	for _, c := range horovodColumns {
		b.WriteString(c.column + ",")
	}
	b.WriteString("score")
	for i, p := range t.grid.space {
		known := false
		for _, c := range horovodColumns {
			known = known || c.parameter == p.Name
		}
		if !known {
			b.WriteString("," + p.Name)
			others = append(others, i)
		}
	}
	b.WriteByte('\n')
	line := func(p Point, score float64) {
		for _, c := range horovodColumns {
			if i := p.space.index(c.parameter); i >= 0 {
				b.WriteString(p.field(i))
			}
			b.WriteByte(',')
		}
		b.WriteString(strconv.FormatFloat(score, 'g', 6, 64))
		for _, i := range others {
			b.WriteString("," + p.field(i))
		}
		b.WriteByte('\n')
	}
	for _, r := range t.rounds {
		line(r.Point, r.Score)
	}
	line(t.best, t.score)
	return b.Flush()
}

// field returns the text of a value in the log.
func (p Point) field(i int) string {
	switch {
	case p.space[i].Kind == Switch:
		return strconv.Itoa(int(p.values[i]))
	case p.space[i].Name == FusionThresholdName && p.space[i].Kind == Log:
		return strconv.FormatFloat(p.values[i]/(1<<20), 'f', -1, 64)
	}
	return p.text(i)
}
