package main

import (
	"bufio"
	"embed"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/gohvd/gohvd/internal/tensor"
)

// stepMode says how the gradients of a step are reduced.
type stepMode uint8

const (
	// perTensor reduces one tensor after another. It waits for each reduction before it starts the next.
	perTensor stepMode = iota
	// asynchronous starts the reductions of all tensors, and then waits for all of them.
	asynchronous
	// grouped submits all tensors as one group.
	grouped
	// bucketed copies the tensors into buckets of 25 MiB, reduces the buckets, and copies the results back.
	bucketed
)

var modeNames = [...]string{"pertensor", "async", "grouped", "bucket25"}

func (m stepMode) String() string { return modeNames[m] }

// shapes holds files that list the parameters of ResNet-50 and of GPT-2 small, in the order in which the
// model registers them.
//
//go:embed shapes/*.txt
var shapes embed.FS

// gradient is a tensor of a workload.
type gradient struct {
	name     string
	numElems int64
}

// workload holds the gradients that a training step reduces, in the order in which they are ready.
type workload struct {
	name      string
	gradients []gradient
}

func (w workload) numElems() int64 {
	sum := int64(0)
	for _, g := range w.gradients {
		sum += g.numElems
	}
	return sum
}

// maxGradients is the maximum number of tensors in a file.
const maxGradients = 1 << 20

// readWorkload reads a list with a line "name elements shape" for each parameter. # begins a comment. It
// returns the parameters in reverse order, because the gradient of the last parameter is ready first.
func readWorkload(name string, r io.Reader) (workload, error) {
	w := workload{name: name}
	seen := make(map[string]bool)
	s := bufio.NewScanner(r)
	for line := 1; s.Scan(); line++ {
		text, _, _ := strings.Cut(s.Text(), "#")
		fields := strings.Fields(text)
		if len(fields) == 0 {
			continue
		}
		fail := func(format string, args ...any) (workload, error) {
			return w, fmt.Errorf("workload %s, line %d: %s", name, line, fmt.Sprintf(format, args...))
		}
		if len(fields) < 2 {
			return fail("got %q, want name, elements and shape", s.Text())
		}
		n, err := strconv.ParseInt(fields[1], 10, 64)
		if err != nil || n < 0 || n > 1<<40 {
			return fail("got %q as the number of elements, want an integer from 0 to 2^40", fields[1])
		}
		if seen[fields[0]] {
			return fail("tensor %q occurs twice", fields[0])
		}
		if len(fields) > 2 {
			if shape, err := elemsOf(fields[2]); err != nil || shape != n {
				return fail("shape %q does not have %d elements", fields[2], n)
			}
		}
		seen[fields[0]] = true
		w.gradients = append(w.gradients, gradient{fields[0], n})
		if len(w.gradients) > maxGradients {
			return fail("more than %d tensors", maxGradients)
		}
	}
	if err := s.Err(); err != nil {
		return w, fmt.Errorf("workload %s: %w", name, err)
	}
	if len(w.gradients) == 0 {
		return w, fmt.Errorf("workload %s: the list has no tensors", name)
	}
	slices.Reverse(w.gradients)
	return w, nil
}

// elemsOf returns the number of elements of a shape in the form 64x3x7x7.
func elemsOf(text string) (int64, error) {
	var shape tensor.Shape
	for d := range strings.SplitSeq(text, "x") {
		n, err := strconv.ParseInt(d, 10, 64)
		if err != nil {
			return 0, err
		}
		shape = append(shape, n)
	}
	return shape.NumElems()
}

// workloadNames lists the built-in workloads.
var workloadNames = []string{"resnet50", "gpt2"}

// openWorkload reads the built-in list with this name, or else the file with this name.
func openWorkload(name string) (workload, error) {
	var f fs.File
	var err error
	if slices.Contains(workloadNames, name) {
		f, err = shapes.Open("shapes/" + name + ".txt")
	} else {
		if f, err = os.Open(name); errors.Is(err, fs.ErrNotExist) {
			err = fmt.Errorf("%w (the built-in workloads are %s)", err, strings.Join(workloadNames, ", "))
		}
		name = strings.TrimSuffix(filepath.Base(name), ".txt")
	}
	if err != nil {
		return workload{}, fmt.Errorf("workload: %w", err)
	}
	defer f.Close()
	return readWorkload(name, f)
}

// manyTensors returns a workload of m.count tensors with m.bytes bytes each.
func manyTensors(m many, dt tensor.DType) (workload, error) {
	size := int64(dt.Size())
	if m.bytes%size != 0 {
		return workload{}, fmt.Errorf("--many: got %d bytes per tensor, want a multiple of the size of %v",
			m.bytes, dt)
	}
	w := workload{name: fmt.Sprintf("many%dx%d", m.count, m.bytes)}
	for i := range m.count {
		w.gradients = append(w.gradients, gradient{fmt.Sprintf("tensor%d", i), m.bytes / size})
	}
	return w, nil
}

// bucketBytes is the maximum size of a bucket. A larger tensor is a bucket by itself.
const bucketBytes = 25 << 20

// buckets divides tensors into buckets, and puts as many consecutive tensors into each as fit. It returns the
// index of the first tensor of each bucket, followed by the number of tensors.
func buckets(tensors []named) []int {
	var first []int
	have := 0
	for i, t := range tensors {
		if i == 0 || have+len(t.buf) > bucketBytes {
			first, have = append(first, i), 0
		}
		have += len(t.buf)
	}
	return append(first, len(tensors))
}
