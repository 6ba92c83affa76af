package main

import (
	"context"
	"fmt"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

const long = `hvdbench measures collective operations between the ranks of a job, with the flags and the table of nccl-tests.
Run it under hvdrun, or without hvdrun as a job of one rank. The results of every case are verified first; the column
#wrong counts the wrong elements.

Sizes are bytes, with K, M or G for powers of 1024. GB is 10^9 bytes. algbw is bytes divided by the mean time. busbw is
algbw times 2(n-1)/n for allreduce, (n-1)/n for allgather, reducescatter and alltoall, and 1 for broadcast.

Out of place, package hvd allocates a new tensor for each result, which the time includes.

The exit status is 0 if all results are right, 1 if results are wrong or an operation failed, 2 for wrong usage, and
128+n if signal n ended hvdbench.`

const examples = `  hvdrun -np 2 hvdbench -b 8 -e 128M -f 2
  hvdrun -np 4 hvdbench allgather -b 1M -e 1G -f 4 -d bfloat16 --arena
  hvdrun -np 2 hvdbench --workload resnet50 --mode async,grouped
  hvdrun -np 2 --tag-output=false hvdbench --format csv -b 1K -e 64M -f 4 >a.csv
  bench/plot.py a.csv b.csv -o out.svg    # in a checkout`

// command is the values of the flags of one call of hvdbench.
type command struct {
	options
	in, out  bool // placements
	blocking int
}

// value is a flag whose text is parsed by a function of options.go.
type value[T any] struct {
	to    *T
	parse func(text string) (T, error)
	text  string
	kind  string
}

func (v *value[T]) String() string { return v.text }
func (v *value[T]) Type() string   { return v.kind }

func (v *value[T]) Set(text string) error {
	got, err := v.parse(text)
	if err != nil {
		return err
	}
	*v.to, v.text = got, text
	return nil
}

// add adds a flag whose text is parsed by parse. It panics if the default cannot be parsed, which is a defect
// that every test shows.
func add[T any](f *pflag.FlagSet, to *T, name, short, kind, fallback string, parse func(string) (T, error),
	usage string) {
	v := &value[T]{to: to, parse: parse, kind: kind}
	if fallback != "" {
		if err := v.Set(fallback); err != nil {
			panic(err)
		}
	}
	f.VarP(v, name, short, usage)
}

// newCommand returns the command line, which calls measure with the options.
func newCommand(measure func(ctx context.Context, o options) error) *cobra.Command {
	c := &command{}
	root := &cobra.Command{
		Use:     "hvdbench [collective] [flags]",
		Short:   "Measure collective operations",
		Long:    long,
		Example: examples,
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) > 1 {
				return usageError{fmt.Errorf("got %q, want one collective", args)}
			}
			return nil
		},
		SilenceErrors: true,
		SilenceUsage:  true,
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := c.complete(cmd.Flags(), args); err != nil {
				return usageError{err}
			}
			return measure(cmd.Context(), c.options)
		},
	}
	for _, k := range kinds {
		root.ValidArgs = append(root.ValidArgs, k.String())
	}
	root.SetFlagErrorFunc(func(_ *cobra.Command, err error) error { return usageError{err} })
	f := root.Flags()
	f.SortFlags = false
	f.SetNormalizeFunc(func(_ *pflag.FlagSet, name string) pflag.NormalizedName {
		return pflag.NormalizedName(strings.ReplaceAll(name, "_", "-")) // nccl-tests has --warmup_iters
	})
	o := &c.options
	add(f, &o.kind, "collective", "", "NAME", "allreduce", parseCollective, "what to measure: "+
		strings.Join(root.ValidArgs, ", "))
	add(f, &o.minBytes, "minbytes", "b", "SIZE", "32M", parseSize, "smallest size")
	add(f, &o.maxBytes, "maxbytes", "e", "SIZE", "32M", parseSize, "largest size")
	add(f, &o.stepBytes, "stepbytes", "i", "SIZE", "1M", parseSize,
		"bytes that are added to a size to get the next")
	f.IntVarP(&o.stepFactor, "stepfactor", "f", 0, "factor from a size to the next, instead of --stepbytes")
	f.IntVarP(&o.iters, "iters", "n", 20, "timed calls of each case")
	f.IntVarP(&o.warmup, "warmup-iters", "w", 1, "untimed calls before the timed ones")
	f.Float64Var(&o.seconds, "seconds", 0,
		"seconds for which each case is timed, with 20 to 20000 calls, instead of --iters")
	f.Float64Var(&o.maxSeconds, "max-seconds", 3,
		"with --seconds, make fewer than 20 calls if they would take longer than this, but at least 5, or 3 above 64M")
	f.IntVarP(&o.checks, "check", "c", 1, "how often each case is verified; 0 is never")
	add(f, &o.types, "datatype", "d", "TYPES", "float", parseTypes,
		"element types, separated by commas, or all; names of nccl-tests or of gohvd")
	add(f, &o.ops, "op", "o", "OPS", "sum", parseOps,
		"reductions, separated by commas, or all: sum, prod, min, max, avg")
	add(f, &o.roots, "root", "r", "RANK", "0", parseRoots, "root of broadcasts, or all")
	f.IntVarP(&c.blocking, "blocking", "z", 1,
		"accepted because nccl-tests has it: every call waits for its end, so 1 is the only value")
	f.IntVarP((*int)(&o.average), "average", "a", int(byKind),
		"which of the ranks' times is the time of a call: 0 rank 0's, 1 the mean, 2 the least, "+
			"3 the greatest; -1 is the greatest for broadcast, else the least with --touch, else the mean")
	f.BoolVar(&c.in, "in-place", true, "measure in place")
	f.BoolVar(&c.out, "out-of-place", true, "measure out of place")
	f.BoolVar(&o.raw, "raw", false, "measure only the backend, without negotiation")
	f.BoolVar(&o.arena, "arena", false, "allocate tensors in the shared arena")
	f.BoolVar(&o.touch, "touch", false,
		"each rank writes its tensor before every call; the writing is not timed")
	f.StringVar(&o.workload, "workload", "", "measure steps over the gradients of "+
		strings.Join(workloadNames, ", ")+" or `FILE`, which has lines of name, count, shape")
	add(f, &o.many, "many", "", "N:BYTES", "", parseMany, "measure steps over N tensors of BYTES each")
	add(f, &o.modes, "mode", "", "MODES", "async", parseModes,
		"how a step reduces its tensors, separated by commas, or all: "+strings.Join(modeNames[:], ", "))
	f.StringVar(&o.format, "format", "nccl", "output: "+strings.Join(formats, ", "))
	for name, of := range map[string][]string{"format": formats, "mode": modeNames[:],
		"collective": root.ValidArgs} {
		if err := root.RegisterFlagCompletionFunc(name,
			cobra.FixedCompletions(of, cobra.ShellCompDirectiveNoFileComp)); err != nil {
			panic(err) // the name of a flag above is wrong
		}
	}
	return root
}

// complete sets the options that depend on several flags and checks all options.
func (c *command) complete(f *pflag.FlagSet, args []string) (err error) {
	for _, name := range args {
		if f.Changed("collective") {
			return fmt.Errorf("got %q and --collective %v, want one collective", name, c.kind)
		}
		if c.kind, err = parseCollective(name); err != nil {
			return err
		}
	}
	// If one end of the range is given and is beyond the default of the other end, that end moves too.
	if !f.Changed("maxbytes") {
		c.maxBytes = max(c.maxBytes, c.minBytes)
		if f.Changed("minbytes") && !f.Changed("stepfactor") && !f.Changed("stepbytes") {
			c.maxBytes = c.minBytes
		}
	} else if !f.Changed("minbytes") {
		c.minBytes = min(c.minBytes, c.maxBytes)
	}
	if c.blocking != 1 {
		return fmt.Errorf("--blocking is %d, want 1: every call waits for its end; use --workload or --many for asynchronous operations", c.blocking)
	}
	if c.out {
		c.placements = append(c.placements, false)
	}
	if c.in {
		c.placements = append(c.placements, true)
	}
	return c.check()
}
