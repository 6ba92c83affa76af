package bench

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/gohvd/gohvd/message"
	"github.com/gohvd/gohvd/tensor"
)

// Options say what is measured and how it is shown. Every rank must have the same.
type Options struct {
	Collective string // of kinds, by name
	// MinBytes to MaxBytes are the sizes, by factor StepFactor if that is more than 1, else by StepBytes.
	MinBytes, MaxBytes, StepBytes int64
	StepFactor                    int
	Iters, Warmup                 int
	Checks                        int // how often each case is verified; 0 is never
	Types                         []tensor.DType
	Ops                           []tensor.ReduceOp
	Roots                         []int  // nil is all
	Placements                    []bool // whether in place
	Average                       Average

	Raw   bool // the backend alone
	Arena bool // tensors of the shared arena
	Touch bool // each rank writes its buffer before every call

	// Workload is the name of a built-in list of gradients, or the file of one; Many says the same of equal tensors. If
	// either is given, steps over them are measured instead of a collective, in each of Modes.
	Workload string
	Many     Many
	Modes    []string
	// Negotiation is the number of pairs of a negotiated and a raw step to compare; 0 compares none.
	Negotiation int

	Format   string // one of Formats
	Plot     string // file to draw the result into; empty draws none
	Memory   bool   // show what memory each rank has used
	CPU      bool   // show what CPU time each rank has used
	Progress bool   // say on Stderr what is measured
	Terminal bool   // Stderr is a terminal
}

// Average is how the times of all ranks for one call become one, by nccl-tests' numbers.
type Average int

// The averages. ByKind is the mean, but the longest for a broadcast, from which the root returns first, and the
// shortest where buffers are touched: there each rank waits for the last to come, which alone has waited for nobody.
const (
	ByKind Average = iota - 1
	OfRank0
	OfMean
	OfMin
	OfMax
)

// Many is a number of tensors of so many bytes each.
type Many struct {
	Count int
	Bytes int64
}

// ParseSize reads a number of bytes: digits, and one of the letters K, M, G and T for powers of 1024.
func ParseSize(text string) (int64, error) {
	digits, shift := text, 0
	upper := strings.ToUpper(text)
	for _, unit := range []string{"IB", "B"} {
		upper = strings.TrimSuffix(upper, unit)
	}
	digits = upper
	if n := len(upper); n > 0 {
		if i := strings.IndexByte("KMGT", upper[n-1]); i >= 0 {
			digits, shift = upper[:n-1], 10*(i+1)
		}
	}
	n, err := strconv.ParseInt(digits, 10, 64)
	if err != nil || n < 0 || n > (1<<62)>>shift {
		return 0, fmt.Errorf("got %q, want a number of bytes as 8, 64K or 1G", text)
	}
	return n << shift, nil
}

// FormatSize is the shortest text that ParseSize reads as n.
func FormatSize(n int64) string {
	for _, u := range []struct {
		name  string
		shift int
	}{{"G", 30}, {"M", 20}, {"K", 10}} {
		if n >= 1<<u.shift && n%(1<<u.shift) == 0 {
			return strconv.FormatInt(n>>u.shift, 10) + u.name
		}
	}
	return strconv.FormatInt(n, 10)
}

// ncclTypes are nccl-tests' names, where they differ from ours.
var ncclTypes = map[tensor.DType]string{tensor.Float16: "half", tensor.Float32: "float", tensor.Float64: "double"}

func ncclType(dt tensor.DType) string {
	if name, ok := ncclTypes[dt]; ok {
		return name
	}
	if dt == tensor.Invalid {
		return "none"
	}
	return dt.String()
}

// ParseTypes reads element types, by our names or nccl-tests', separated by commas. "all" is every type.
func ParseTypes(text string) ([]tensor.DType, error) {
	if text == "all" {
		return tensor.DTypes(), nil
	}
	var types []tensor.DType
	for word := range strings.SplitSeq(text, ",") {
		i := slices.IndexFunc(tensor.DTypes(), func(dt tensor.DType) bool { return word == dt.String() || word == ncclType(dt) })
		if i < 0 {
			return nil, fmt.Errorf("got %q, want all or one of %s", word, words(tensor.DTypes()))
		}
		types = append(types, tensor.DTypes()[i])
	}
	return types, nil
}

// ncclOps are nccl-tests' names of reductions.
var ncclOps = []struct {
	op   tensor.ReduceOp
	name string
}{{tensor.Sum, "sum"}, {tensor.Product, "prod"}, {tensor.Min, "min"}, {tensor.Max, "max"}, {tensor.Average, "avg"}}

func ncclOp(op tensor.ReduceOp) string {
	for _, o := range ncclOps {
		if o.op == op {
			return o.name
		}
	}
	return "none"
}

// ParseOps reads reductions, by our names or nccl-tests', separated by commas. "all" is every one.
func ParseOps(text string) ([]tensor.ReduceOp, error) {
	var ops []tensor.ReduceOp
	for word := range strings.SplitSeq(text, ",") {
		known := len(ops)
		for _, o := range ncclOps {
			if word == o.name || word == o.op.String() || text == "all" {
				ops = append(ops, o.op)
			}
		}
		if len(ops) == known {
			return nil, fmt.Errorf("got %q, want all or one of sum, prod, min, max, avg", word)
		}
	}
	return ops, nil
}

// ParseRoots reads the roots of broadcasts: a rank, or "all", which is nil.
func ParseRoots(text string) ([]int, error) {
	if text == "all" {
		return nil, nil
	}
	root, err := strconv.Atoi(text)
	if err != nil || root < 0 {
		return nil, fmt.Errorf("got %q, want a rank or all", text)
	}
	return []int{root}, nil
}

// ParseMany reads N:BYTES.
func ParseMany(text string) (Many, error) {
	count, size, _ := strings.Cut(text, ":")
	n, err := strconv.Atoi(count)
	b, sizeErr := ParseSize(size)
	if err != nil || sizeErr != nil || n < 1 {
		return Many{}, fmt.Errorf("got %q, want N:BYTES, as 1000:256", text)
	}
	return Many{n, b}, nil
}

// CollectiveNames are what can be measured.
func CollectiveNames() []string {
	names := make([]string, len(kinds))
	for i, k := range kinds {
		names[i] = k.String()
	}
	return names
}

// nameForms are other spellings of collectives: nccl-tests' and MPI's.
var nameForms = map[string]string{
	"all_reduce": "allreduce", "all_gather": "allgather", "reduce_scatter": "reducescatter", "all_to_all": "alltoall", "bcast": "broadcast",
}

// ParseCollective reads the name of a collective, in any of its spellings.
func ParseCollective(text string) (string, error) {
	if name, ok := nameForms[strings.ReplaceAll(text, "-", "_")]; ok {
		text = name
	}
	if !slices.Contains(CollectiveNames(), text) {
		return "", fmt.Errorf("got %q, want one of %s", text, strings.Join(CollectiveNames(), ", "))
	}
	return text, nil
}

func kindOf(collective string) message.Kind {
	for _, k := range kinds {
		if k.String() == collective {
			return k
		}
	}
	return message.NoKind
}

// Formats are the forms of the output.
var Formats = []string{"nccl", "osu", "csv", "json"}

// sizes are the bytes of the table's lines, or the first maxLines+1 of them, which Check refuses.
func (o *Options) sizes() []int64 {
	var all []int64
	for n := o.MinBytes; n <= o.MaxBytes && len(all) <= maxLines; {
		all = append(all, n)
		next := n + o.StepBytes
		if o.StepFactor > 1 {
			next = n * int64(o.StepFactor)
		}
		if next <= n {
			break
		}
		n = next
	}
	return all
}

// Check says what contradicts itself.
func (o *Options) Check() error {
	switch {
	case o.MaxBytes < o.MinBytes:
		return fmt.Errorf("--maxbytes is %d, less than --minbytes %d", o.MaxBytes, o.MinBytes)
	case o.StepFactor == 1 || o.StepFactor < 0:
		return fmt.Errorf("--stepfactor is %d, want 2 or more, or 0 for --stepbytes", o.StepFactor)
	case o.StepFactor > 1 && o.MinBytes == 0 && o.MaxBytes > 0:
		return fmt.Errorf("--minbytes is 0, which no factor makes larger")
	case o.StepFactor == 0 && o.StepBytes <= 0 && o.MaxBytes > o.MinBytes:
		return fmt.Errorf("--stepbytes is %d, want 1 or more", o.StepBytes)
	case o.Iters < 1:
		return fmt.Errorf("--iters is %d, want 1 or more", o.Iters)
	case o.Warmup < 0 || o.Checks < 0:
		return fmt.Errorf("--warmup-iters is %d and --check %d, want 0 or more", o.Warmup, o.Checks)
	case o.Average < ByKind || o.Average > OfMax:
		return fmt.Errorf("--average is %d, want 0 (rank 0), 1 (mean), 2 (least) or 3 (greatest)", o.Average)
	case !slices.Contains(Formats, o.Format):
		return fmt.Errorf("--format is %q, want one of %s", o.Format, strings.Join(Formats, ", "))
	case o.Workload != "" && o.Many.Count > 0:
		return fmt.Errorf("--workload and --many exclude each other")
	case o.Negotiation != 0 && o.Workload == "" && o.Many.Count == 0:
		return fmt.Errorf("--negotiation needs --workload or --many")
	case o.Negotiation < 0 || o.Negotiation == 1:
		return fmt.Errorf("--negotiation is %d pairs, want 2 or more", o.Negotiation)
	case o.Negotiation > 0 && o.Raw:
		return fmt.Errorf("--negotiation and --raw exclude each other: a comparison has raw steps already")
	case o.Negotiation > 0 && len(o.Types) > 1:
		return fmt.Errorf("--negotiation compares steps of one type, got --datatype %s", words(o.Types))
	case o.Negotiation > 0 && o.Plot != "":
		return fmt.Errorf("--negotiation and --plot exclude each other: a comparison has no sizes")
	case o.Plot != "" && kindOf(o.Collective) == message.Barrier && o.Workload == "" && o.Many.Count == 0:
		return fmt.Errorf("--plot: a barrier has no size to draw")
	}
	for _, m := range o.Modes {
		if _, err := parseMode(m); err != nil {
			return fmt.Errorf("--mode: %w", err)
		}
	}
	if len(o.sizes()) > maxLines {
		return fmt.Errorf("more than %d sizes: raise --stepbytes or --stepfactor", maxLines)
	}
	return nil
}

const maxLines = 100000

func words[T fmt.Stringer](values []T) string {
	var all []string
	for _, v := range values {
		all = append(all, v.String())
	}
	return strings.Join(all, ", ")
}
