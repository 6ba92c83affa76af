package simulate

import (
	"bufio"
	"fmt"
	"io"
	"strings"

	"github.com/gohvd/gohvd/controller"
	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/tensor"
	"github.com/gohvd/gohvd/internal/topo"
)

// Workload is what the ranks of a job submit in each step.
type Workload struct {
	Name    string
	tensors []asked // those of data parallelism: allreduces of all ranks
	// If shard is not 0, the job is one of fully sharded data parallelism. Each shard of so many ranks in
	// sequence is a process set, and so are the ranks at the same place in all shards.
	shard   int
	sharded []asked // the operations of a rank; set has 0 for the shard, 1 for the other set
	ranks   int     // number of ranks for which all is valid
	all     []controller.Set
}

// asked is a request of a rank in a process set.
type asked struct {
	set     topo.ProcessSetID
	request *message.Request
}

// ReadWorkload reads a list of parameters: lines with a name, a number of elements and a shape, as in
// cmd/hvdbench/shapes. The tensors are submitted in reverse order, as a backward pass does.
func ReadWorkload(name string, in io.Reader) (*Workload, error) {
	w := &Workload{Name: name}
	for lines := bufio.NewScanner(in); lines.Scan(); {
		var tensorName, shape string
		var elements int64
		if strings.HasPrefix(lines.Text(), "#") {
			continue
		}
		if _, err := fmt.Sscan(lines.Text(), &tensorName, &elements, &shape); err != nil {
			return nil, fmt.Errorf("simulate: %s: %q: %w", name, lines.Text(), err)
		}
		w.tensors = append([]asked{{topo.Global, sum("gradient."+tensorName, elements)}}, w.tensors...)
	}
	return w, nil
}

// Small returns a workload of so many small allreduces.
func Small(tensors int) *Workload {
	w := &Workload{Name: fmt.Sprintf("%d small", tensors)}
	for i := range tensors {
		w.tensors = append(w.tensors, asked{topo.Global, sum(fmt.Sprint("g", i), 2)})
	}
	return w
}

func sum(name string, elements int64) *message.Request {
	return &message.Request{Kind: message.Allreduce, Name: name, DType: tensor.Float32,
		Shape: tensor.Shape{elements}, Op: tensor.Sum, Prescale: 1, Postscale: 1}
}

// Sharded returns a workload of fully sharded data parallelism in shards of so many ranks, with the given
// number of layers. For each layer, the ranks of a shard gather the parameters and scatter the gradients, and
// the ranks at the same place of all shards sum them.
func Sharded(layers, shard int) *Workload {
	w := &Workload{Name: "fsdp", shard: shard}
	for l := range layers {
		const elements = 1 << 20
		gather := &message.Request{Kind: message.Allgather, Name: fmt.Sprint("parameters.", l),
			DType: tensor.BFloat16, Shape: tensor.Shape{elements}}
		scatter := &message.Request{Kind: message.Reducescatter, Name: fmt.Sprint("gradients.", l),
			DType: tensor.BFloat16, Shape: tensor.Shape{elements * int64(shard)}, Op: tensor.Sum, Prescale: 1,
			Postscale: 1}
		w.sharded = append(w.sharded, asked{0, gather}, asked{0, scatter},
			asked{1, sum(fmt.Sprint("sum.", l), elements)})
	}
	return w
}

// sets returns the process sets of a job.
func (w *Workload) sets(ranks int) []controller.Set {
	if w.ranks == ranks {
		return w.all
	}
	sets := []controller.Set{controller.Global(ranks)}
	add := func(first, step, members int) {
		s := controller.Set{ID: topo.ProcessSetID(len(sets))}
		for i := range members {
			s.Ranks = append(s.Ranks, topo.Rank(first+i*step))
		}
		sets = append(sets, s)
	}
	if w.shard > 0 {
		for first := 0; first < ranks; first += w.shard {
			add(first, 1, w.shard)
		}
		for place := range w.shard {
			add(place, w.shard, ranks/w.shard)
		}
	}
	w.ranks, w.all = ranks, sets
	return sets
}

// members returns the number of members of a set.
func (w *Workload) members(set topo.ProcessSetID, ranks int) int {
	return len(w.sets(ranks)[set].Ranks)
}

// of returns what a rank submits in a step.
func (w *Workload) of(r topo.Rank) []asked {
	if w.shard == 0 {
		return w.tensors
	}
	sets := [2]topo.ProcessSetID{topo.ProcessSetID(1 + int(r)/w.shard),
		topo.ProcessSetID(1 + w.ranks/w.shard + int(r)%w.shard)}
	mine := make([]asked, len(w.sharded))
	for i, a := range w.sharded {
		mine[i] = asked{sets[a.set], a.request}
	}
	return mine
}

// burst returns the part i of n of what a rank submits in a step.
func (w *Workload) burst(r topo.Rank, i, n int) []asked {
	all := w.of(r)
	return all[len(all)*i/n : len(all)*(i+1)/n]
}
