package tcp

import (
	"fmt"
	"slices"
	"strings"

	"github.com/gohvd/gohvd/internal/message"
)

// algorithms lists the algorithms of each kind of operation. If no rule of a table applies, Plan chooses the
// first algorithm of the list that can serve the operation.
var algorithms = map[message.Kind][]message.Algorithm{
	message.Allreduce: {message.Ring, message.Direct, message.Exchange, message.RecursiveDoubling,
		message.HalvingDoubling},
	message.Reducescatter: {message.Ring, message.Direct},
	message.Allgather:     {message.Ring, message.Bruck},
	message.Broadcast:     {message.Tree, message.Chain},
	message.Alltoall:      {message.Direct, message.Bruck},
	message.Reduce:        {message.Direct},
	message.Gather:        {message.Direct},
	message.Scatter:       {message.Direct},
}

// Algorithms returns the algorithms of operations of the given kind. The caller must not change the slice.
func Algorithms(k message.Kind) []message.Algorithm { return algorithms[k] }

// Table chooses the algorithms of operations. The first rule that applies to an operation, and whose
// algorithm can serve it, counts.
type Table []Rule

// Rule is an entry of a Table. It applies to operations of one kind in process sets of at most MaxRanks
// ranks, whose output has at most MaxBytes bytes. A limit of 0 is no limit. Rules for kinds that send rows
// have no limit of bytes, because the size of their output is not known when the algorithm is chosen.
type Rule struct {
	Kind      message.Kind
	MaxRanks  int
	MaxBytes  int64
	Algorithm message.Algorithm
}

func (r *Rule) applies(k message.Kind, ranks int, numBytes int64) bool {
	return r.Kind == k && (r.MaxRanks == 0 || ranks <= r.MaxRanks) && (r.MaxBytes == 0 ||
		numBytes <= r.MaxBytes)
}

// DefaultTable is the table that applies if Config.Table is nil. Its limits for 2 to 4 ranks were measured on
// loopback (HVD_ALGORITHM with hvdbench --raw), and its limits for more ranks follow from the numbers of
// steps and bytes in the package comment. The rules with Exchange are for sums of half-precision types and
// for deterministic mode, which no algorithm of an earlier rule serves.
var DefaultTable = Table{
	{message.Allreduce, 4, 256 << 10, message.RecursiveDoubling},
	{message.Allreduce, 0, 64 << 10, message.RecursiveDoubling},
	{message.Allreduce, 2, 0, message.Ring},
	{message.Allreduce, 8, 1 << 20, message.HalvingDoubling},
	{message.Allreduce, 0, 2 << 20, message.HalvingDoubling},
	{message.Allreduce, 8, 32 << 10, message.Exchange},
	{message.Allgather, 0, 512 << 10, message.Bruck},
	{message.Broadcast, 0, 32 << 10, message.Tree},
	{message.Broadcast, 8, 0, message.Chain},
	{message.Broadcast, 0, 512 << 10, message.Tree},
	{message.Broadcast, 0, 0, message.Chain},
	{message.Alltoall, 32, 0, message.Direct},
	{message.Alltoall, 0, 0, message.Bruck},
}

// Forced maps kinds of operations to the algorithms that a user has chosen for them.
type Forced map[message.Kind]message.Algorithm

// ParseForced reads choices of algorithms such as "allreduce=ring,broadcast=tree". An empty text forces
// nothing.
func ParseForced(text string) (Forced, error) {
	f := Forced{}
	for choice := range strings.SplitSeq(text, ",") {
		if choice = strings.TrimSpace(choice); choice == "" {
			continue
		}
		operation, algorithm, ok := strings.Cut(choice, "=")
		if !ok {
			return nil, fmt.Errorf("got %q, want OPERATION=ALGORITHM, such as allreduce=ring", choice)
		}
		kind, alg, err := parseChoice(strings.TrimSpace(operation), strings.TrimSpace(algorithm))
		if err != nil {
			return nil, err
		}
		f[kind] = alg
	}
	return f, nil
}

// parseChoice returns the kind and the algorithm with the given names. The algorithm must be one of the kind.
func parseChoice(operation, algorithm string) (message.Kind, message.Algorithm, error) {
	var known []string
	for k := message.Kind(0); int(k) < message.NumKinds; k++ {
		all := algorithms[k]
		if all == nil {
			continue
		}
		known = append(known, k.String())
		if k.String() != operation {
			continue
		}
		i := slices.IndexFunc(all, func(a message.Algorithm) bool { return a.String() == algorithm })
		if i < 0 {
			return 0, 0, fmt.Errorf("%s: got algorithm %q, want %s", operation, algorithm, list(all))
		}
		return k, all[i], nil
	}
	return 0, 0, fmt.Errorf("got operation %q, want %s", operation, strings.Join(known, " or "))
}
