package conformance

import (
	"testing"

	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/tensor"
	"github.com/gohvd/gohvd/internal/testcluster"
	"github.com/gohvd/gohvd/internal/topo"
)

// changes has pairs of operations that differ in one parameter. The first operation of a pair is base. The
// second is base after the function change has modified it.
var changes = []struct {
	name   string
	base   what
	change func(j *job)
}{
	{"kind", sumOf(tensor.Float32), func(j *job) { j.kind = message.Reducescatter }},
	{"type", sumOf(tensor.Int32), func(j *job) { j.dt = tensor.Float32 }},
	{"type of the same width", sumOf(tensor.Float16), func(j *job) { j.dt = tensor.BFloat16 }},
	{"reduction", sumOf(tensor.Float32), func(j *job) { j.op = tensor.Max }},
	{"sum or average", sumOf(tensor.Float32), func(j *job) { j.op = tensor.Average }},
	{"prescale", sumOf(tensor.Float32), func(j *job) { j.pre = 2.5 }},
	{"postscale", sumOf(tensor.Float32), func(j *job) { j.post = 2.5 }},
	{"compression", sumOf(tensor.Float32), func(j *job) { j.wire = tensor.Float16 }},
	{"first dimension", sumOf(tensor.Float32), func(j *job) { j.elements = 128 }},
	{"number of rows to gather", movedOf(message.Allgather), func(j *job) { j.elements = 128 }},
	{"root", movedOf(message.Broadcast), func(j *job) { j.lead++ }},
	{"root of a reduce", with(sumOf(tensor.Float32), message.Reduce), func(j *job) { j.lead++ }},
	{"allreduce or reduce", sumOf(tensor.Float32), func(j *job) { j.kind = message.Reduce }},
	{"root of a gather", movedOf(message.Gather), func(j *job) { j.lead++ }},
	{"root of a scatter", movedOf(message.Scatter), func(j *job) { j.lead++ }},
	{"rows of a scatter", movedOf(message.Scatter), func(j *job) { j.elements = 128 }},
	{"gather or scatter", movedOf(message.Gather), func(j *job) { j.kind = message.Scatter }},
	{"splits", movedOf(message.Alltoall), func(j *job) { j.uneven = true }},
	{"place", sumOf(tensor.Float32), func(j *job) { j.inPlace = true }},
}

func sumOf(dt tensor.DType) what {
	return what{kind: message.Allreduce, reduction: reduction{dt: dt, op: tensor.Sum, pre: 1.5, post: 0.5}}
}

func with(w what, kind message.Kind) what {
	w.kind = kind
	return w
}

func movedOf(kind message.Kind) what {
	return what{kind: kind, reduction: reduction{dt: tensor.Int16, pre: 1, post: 1}}
}

// Two operations differ in one parameter, and each must give the result of the reference. If both are ready
// at the same time, they must not be fused. If they run one after the other with the same name, the cache
// must not confuse them.
func TestOneParameterChanges(t *testing.T) {
	const ranks = 3
	members := topo.UpTo(ranks)
	// pair returns base operation i and the changed operation as two jobs.
	pair := func(i int, names [2]string, seed uint64) []*job {
		jobs := make([]*job, 2)
		for k := range jobs {
			jobs[k] = &job{what: changes[i].base, name: names[k], members: members, elements: 64,
				seed: seed + uint64(k)}
		}
		changes[i].change(jobs[1])
		return jobs
	}
	for _, l := range links {
		t.Run(l.String(), func(t *testing.T) {
			var steps [][]*job // the jobs of a step are submitted at the same time
			for i, c := range changes {
				steps = append(steps, pair(i, [2]string{c.name + " 0", c.name + " 1"}, 0))
				for round := range 3 { // the name is in the cache from the second round on
					for _, j := range pair(i, [2]string{c.name, c.name}, uint64(round)) {
						steps = append(steps, []*job{j})
					}
				}
			}
			c := configuration{link: l, cacheCapacity: 1024, fusionThreshold: 64 << 20}
			testcluster.Run(t, testcluster.Options{
				Ranks: ranks, Transport: l.transport, Hosts: l.layout.hosts(ranks), Config: c.apply,
				SegmentBytes: c.segmentBytes,
			}, func(r *testcluster.Rank) {
				for _, jobs := range steps {
					var ops []*testcluster.Op
					for _, j := range jobs {
						ops = append(ops, j.submission(r))
					}
					r.Must(r.Submit(ops...))
					for k, j := range jobs {
						_ = r.Wait(ops[k]) // the error is ignored here, because check reports it
						if err := j.check(r, ops[k]); err != nil {
							r.Errorf("%v", err)
						}
					}
				}
			})
		})
	}
}
