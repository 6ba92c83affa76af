package main

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/tensor"
)

// options says what is measured and how it is printed. Every rank must have the same options.
type options struct {
	kind message.Kind
	// Sizes from minBytes to maxBytes are measured. If stepFactor is greater than 1, each size is stepFactor
	// times the size before. Otherwise each size is stepBytes larger than the size before.
	minBytes, maxBytes, stepBytes int64
	stepFactor                    int
	iters, warmup                 int
	// If seconds is not 0, the number of calls is computed from seconds and maxSeconds (see the method
	// calls). Otherwise it is iters.
	seconds, maxSeconds float64
	checks              int // number of verified calls before the timed calls; 0 turns verification off
	types               []tensor.DType
	ops                 []tensor.ReduceOp
	roots               []int  // nil means all ranks
	placements          []bool // true means in place, false means out of place
	average             average

	raw   bool // use only the backend, without negotiation
	arena bool // allocate tensors in the shared arena
	// offset is where in a page the tensors begin, in bytes. 0 means that the allocator of Go chooses it.
	offset int64
	gpu    bool // allreduce tensors on a CUDA device, and measure plain copies beside
	touch  bool // each rank writes to its whole buffer before every call

	// workload is the name of a built-in list of gradients, or of a file with such a list. many describes
	// tensors of equal size. If either is given, hvdbench does not measure a collective. It measures steps
	// that reduce these tensors, in each mode in modes.
	workload string
	many     many
	modes    []stepMode

	format string // one of formats
}

// many is a number of tensors that have the same number of bytes each.
type many struct {
	count int
	bytes int64
}

// parseSize parses a number of bytes. The digits may be followed by K, M, G or T, for powers of 1024, and
// then by B or iB.
func parseSize(text string) (int64, error) {
	digits, shift := strings.ToUpper(text), 0
	for _, unit := range []string{"IB", "B"} {
		digits = strings.TrimSuffix(digits, unit)
	}
	if n := len(digits); n > 0 {
		if i := strings.IndexByte("KMGT", digits[n-1]); i >= 0 {
			digits, shift = digits[:n-1], 10*(i+1)
		}
	}
	n, err := strconv.ParseInt(digits, 10, 64)
	if err != nil || n < 0 || n > (1<<62)>>shift {
		return 0, fmt.Errorf("got %q, want a number of bytes such as 8, 64K or 1G", text)
	}
	return n << shift, nil
}

// formatSize returns the shortest text that parseSize parses as n.
func formatSize(n int64) string {
	for i, unit := range "GMK" {
		if shift := 30 - 10*i; n >= 1<<shift && n%(1<<shift) == 0 {
			return strconv.FormatInt(n>>shift, 10) + string(unit)
		}
	}
	return strconv.FormatInt(n, 10)
}

// parseList splits text at commas and parses each word with the function parse. If text is "all", it returns
// the parameter all.
func parseList[T comparable](text string, all []T, parse func(word string) (T, error)) ([]T, error) {
	if text == "all" {
		return all, nil
	}
	var list []T
	for word := range strings.SplitSeq(text, ",") {
		v, err := parse(word)
		if err != nil {
			return nil, err
		}
		list = append(list, v)
	}
	return list, nil
}

// parseOne returns the element of values that has word as one of its names. An error lists the first name of
// each element.
func parseOne[T any](word string, values []T, names func(T) []string) (T, error) {
	var known []string
	for _, v := range values {
		if slices.Contains(names(v), word) {
			return v, nil
		}
		known = append(known, names(v)[0])
	}
	var none T
	return none, fmt.Errorf("got %q, want one of %s", word, strings.Join(known, ", "))
}

// ncclType returns the name of an element type in nccl-tests.
func ncclType(dt tensor.DType) string {
	switch dt {
	case tensor.Invalid:
		return "none"
	case tensor.Float16:
		return "half"
	case tensor.Float32:
		return "float"
	case tensor.Float64:
		return "double"
	}
	return dt.String()
}

func parseTypes(text string) ([]tensor.DType, error) {
	return parseList(text, tensor.DTypes(), func(word string) (tensor.DType, error) {
		return parseOne(word, tensor.DTypes(), func(dt tensor.DType) []string {
			return []string{dt.String(), ncclType(dt)}
		})
	})
}

var reductions = []tensor.ReduceOp{tensor.Sum, tensor.Product, tensor.Min, tensor.Max, tensor.Average}

// ncclOp returns the name of a reduction in nccl-tests.
func ncclOp(op tensor.ReduceOp) string {
	switch op {
	case tensor.NoReduce:
		return "none"
	case tensor.Product:
		return "prod"
	case tensor.Average:
		return "avg"
	}
	return op.String()
}

func parseOps(text string) ([]tensor.ReduceOp, error) {
	return parseList(text, reductions, func(word string) (tensor.ReduceOp, error) {
		return parseOne(word, reductions, func(op tensor.ReduceOp) []string {
			return []string{ncclOp(op), op.String()}
		})
	})
}

// parseRoots parses the roots of broadcasts: a rank, or "all", for which it returns nil.
func parseRoots(text string) ([]int, error) {
	if text == "all" {
		return nil, nil
	}
	root, err := strconv.Atoi(text)
	if err != nil || root < 0 {
		return nil, fmt.Errorf("got %q, want a rank or the word all", text)
	}
	return []int{root}, nil
}

// parseMany parses a text of the form N:BYTES.
func parseMany(text string) (many, error) {
	count, size, _ := strings.Cut(text, ":")
	n, err := strconv.Atoi(count)
	b, sizeErr := parseSize(size)
	if err != nil || sizeErr != nil || n < 1 {
		return many{}, fmt.Errorf("got %q, want N:BYTES, such as 1000:256", text)
	}
	return many{n, b}, nil
}

// mpiNames maps collectives to their names in nccl-tests and MPI.
var mpiNames = map[message.Kind]string{
	message.Allreduce: "all_reduce", message.Allgather: "all_gather", message.Reducescatter: "reduce_scatter",
	message.Alltoall: "all_to_all", message.Broadcast: "bcast", message.Barrier: "barrier",
}

func parseCollective(text string) (message.Kind, error) {
	return parseOne(strings.ReplaceAll(text, "-", "_"), kinds, func(k message.Kind) []string {
		return []string{k.String(), mpiNames[k]}
	})
}

func parseModes(text string) ([]stepMode, error) {
	modes := []stepMode{perTensor, asynchronous, grouped, bucketed}
	return parseList(text, modes, func(word string) (stepMode, error) {
		return parseOne(word, modes, func(m stepMode) []string { return []string{m.String()} })
	})
}

// maxLines is the maximum number of sizes to measure.
const maxLines = 100000

// sizes returns the sizes to measure, but at most maxLines+1 of them. That is enough, because check rejects
// more than maxLines sizes.
func (o *options) sizes() []int64 {
	var all []int64
	for n := o.minBytes; n <= o.maxBytes && len(all) <= maxLines; {
		all = append(all, n)
		next := n + o.stepBytes
		if o.stepFactor > 1 {
			next = n * int64(o.stepFactor)
		}
		if next <= n {
			break
		}
		n = next
	}
	return all
}

// check returns an error if options contradict each other or are out of range.
func (o *options) check() error {
	switch {
	case o.maxBytes < o.minBytes:
		return fmt.Errorf("--maxbytes is %d, want at least %d, the value of --minbytes", o.maxBytes, o.minBytes)
	case o.stepFactor == 1 || o.stepFactor < 0:
		return fmt.Errorf("--stepfactor is %d, want 2 or more, or 0 to use --stepbytes", o.stepFactor)
	case o.stepFactor > 1 && o.minBytes == 0 && o.maxBytes > 0:
		return fmt.Errorf("--minbytes is 0, want 1 or more, because --stepfactor multiplies it")
	case o.stepFactor == 0 && o.stepBytes <= 0 && o.maxBytes > o.minBytes:
		return fmt.Errorf("--stepbytes is %d, want 1 or more", o.stepBytes)
	case o.iters < 1:
		return fmt.Errorf("--iters is %d, want 1 or more", o.iters)
	case o.warmup < 0 || o.checks < 0:
		return fmt.Errorf("--warmup-iters is %d and --check is %d, want 0 or more", o.warmup, o.checks)
	case !(o.seconds >= 0 && o.maxSeconds > 0):
		return fmt.Errorf("--seconds is %v, want 0 or more, and --max-seconds is %v, want more than 0",
			o.seconds, o.maxSeconds)
	case o.average < byKind || o.average > ofMax:
		return fmt.Errorf("--average is %d, want 0 (rank 0), 1 (mean), 2 (minimum), 3 (maximum) or -1 (the default)", o.average)
	case len(o.placements) == 0:
		return fmt.Errorf("--in-place and --out-of-place are both false, want at least one of them")
	case o.workload != "" && o.many.count > 0:
		return fmt.Errorf("--workload and --many cannot be used together")
	case (o.workload != "" || o.many.count > 0) && o.kind != message.Allreduce:
		return fmt.Errorf("--workload and --many measure only allreduce, got %v", o.kind)
	case o.offset < 0 || o.offset >= pageBytes || o.offset%8 != 0:
		return fmt.Errorf("--offset is %d, want a multiple of 8 from 0 to %d", o.offset, pageBytes-8)
	case o.offset > 0 && (o.arena || o.gpu):
		return fmt.Errorf("--offset cannot be used with --arena and --gpu, which allocate tensors in other ways")
	case o.gpu && (o.kind != message.Allreduce || o.raw || o.arena || o.touch || o.workload != "" ||
		o.many.count > 0):
		return fmt.Errorf("--gpu measures only allreduce, without --raw, --arena, --touch, --workload and --many")
	case len(o.sizes()) > maxLines:
		return fmt.Errorf("the range from --minbytes to --maxbytes has more than %d sizes: raise --stepbytes or --stepfactor", maxLines)
	}
	return checkFormat(o.format)
}

// checkFormat returns an error if there is no format with this name.
func checkFormat(name string) error {
	if !slices.Contains(formats, name) {
		return fmt.Errorf("--format is %q, want one of %s", name, strings.Join(formats, ", "))
	}
	return nil
}
