package main

import (
	"context"
	"fmt"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/gohvd/gohvd/internal/config"
)

const long = `hvdbench measures collective operations between the ranks of a job. Its flags and its table are like those of
nccl-tests. Run it under hvdrun. Without hvdrun it is a job with one rank. The results of every case are verified
before and after the case is timed. The column #wrong shows how many elements were wrong.

Sizes are in bytes. K, M and G stand for powers of 1024. GB is 10^9 bytes. algbw is bytes divided by the mean time.
busbw is algbw times 2(n-1)/n for allreduce, (n-1)/n for allgather, reducescatter and alltoall, and 1 for broadcast.

Out of place, package hvd allocates a new tensor for each result. The time includes that.

The exit status is 0 if all results are right, 1 if results are wrong or an operation failed, 2 for wrong usage, and
128+n if signal n ended hvdbench.`

const examples = `  hvdrun -np 2 hvdbench -b 8 -e 128M -f 2
  hvdrun -np 4 hvdbench allgather -b 1M -e 1G -f 4 -d bfloat16 --arena
  hvdrun -np 2 hvdbench --workload resnet50 --mode async,grouped
  hvdrun -np 2 --tag-output=false hvdbench --format csv -b 1K -e 64M -f 4 >a.csv
  bench/plot.py a.csv b.csv -o out.svg    # in a checkout`

// psUsage returns an error if the command line has more than --ps and --seconds.
func psUsage(f *pflag.FlagSet, args []string) (err error) {
	if len(args) > 0 {
		err = fmt.Errorf("got %q, but --ps measures no collective", args)
	}
	f.Visit(func(flag *pflag.Flag) {
		if flag.Name != "ps" && flag.Name != "seconds" {
			err = fmt.Errorf("--%s has no effect with --ps", flag.Name)
		}
	})
	return err
}

// stepUsage returns an error if the command line has a flag that has no effect. steps is set if hvdbench
// measures the steps of a workload.
func stepUsage(f *pflag.FlagSet, steps bool) (err error) {
	f.Visit(func(flag *pflag.Flag) {
		switch flag.Name {
		case "mode":
			if !steps {
				err = fmt.Errorf("--mode has no effect without --workload or --many")
			}
		case "minbytes", "maxbytes", "stepbytes", "stepfactor", "op", "root":
			if steps {
				err = fmt.Errorf("--%s has no effect with --workload and --many, which sum tensors of given sizes",
					flag.Name)
			}
		}
	})
	return err
}

// command holds the values of the flags on a command line.
type command struct {
	options
	ps      bool // measure the parameter server instead
	in, out bool // whether to measure in place and out of place
}

// value is the pflag.Value of a flag whose text is parsed by a function from options.go.
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

// add adds a flag whose text is parsed by the function parse. It panics if the default value cannot be
// parsed, which every test would detect.
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

// newCommand returns the command for hvdbench. When it runs, it calls measure with the options from the
// command line.
func newCommand(measure func(ctx context.Context, o options) error) *cobra.Command {
	c := &command{}
	root := &cobra.Command{
		Use:     "hvdbench [collective] [flags]",
		Short:   "Measure collective operations",
		Long:    long,
		Example: examples,
		Version: config.VersionText(),
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) > 1 {
				return usageError{fmt.Errorf("got %q, want the name of one collective", args)}
			}
			return nil
		},
		SilenceErrors: true,
		SilenceUsage:  true,
		RunE: func(cmd *cobra.Command, args []string) error {
			if c.ps {
				if err := psUsage(cmd.Flags(), args); err != nil {
					return usageError{err}
				}
				return measurePS(cmd.Context(), c.seconds, cmd.OutOrStdout())
			}
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
		return pflag.NormalizedName(strings.ReplaceAll(name, "_", "-")) // as in --warmup_iters
	})
	o := &c.options
	f.BoolVar(&c.ps, "ps", false,
		"measure pushes and pulls of the parameter server instead, as the node that DMLC_ROLE says (docs/ps.md)")
	add(f, &o.kind, "collective", "", "NAME", "allreduce", parseCollective, "what to measure: "+
		strings.Join(root.ValidArgs, ", "))
	add(f, &o.minBytes, "minbytes", "b", "SIZE", "32M", parseSize, "smallest size")
	add(f, &o.maxBytes, "maxbytes", "e", "SIZE", "32M", parseSize, "largest size")
	add(f, &o.stepBytes, "stepbytes", "i", "SIZE", "1M", parseSize,
		"number of bytes by which each size is larger than the one before")
	f.IntVarP(&o.stepFactor, "stepfactor", "f", 0, "multiply the size by this factor from one case to the next, instead of adding --stepbytes")
	f.IntVarP(&o.iters, "iters", "n", 20, "number of timed calls of each case")
	f.IntVarP(&o.warmup, "warmup-iters", "w", 1, "number of untimed calls before the timed calls")
	f.Float64Var(&o.seconds, "seconds", 0,
		"time each case for this many seconds, with 20 to 20000 calls, instead of for --iters calls")
	f.Float64Var(&o.maxSeconds, "max-seconds", 3,
		"with --seconds: if 20 calls would take longer than this many seconds, make fewer, but at least 5, or 3 for sizes above 64M")
	f.IntVarP(&o.checks, "check", "c", 1,
		"verify this many calls of each case before the timed calls, and one call after them; 0 turns verification off")
	add(f, &o.types, "datatype", "d", "TYPES", "float", parseTypes,
		"element types, separated by commas, or all; the names of nccl-tests and of gohvd are accepted")
	add(f, &o.ops, "op", "o", "OPS", "sum", parseOps,
		"reductions, separated by commas, or all: sum, prod, min, max, avg")
	add(f, &o.roots, "root", "r", "RANK", "0", parseRoots, "root rank of broadcasts, or all to measure each rank as root")
	f.IntVarP((*int)(&o.average), "average", "a", int(byKind),
		"how to combine the times that the ranks measured for a call: 0 uses rank 0's time, 1 the mean, 2 the minimum, "+
			"3 the maximum; -1 uses the maximum for broadcast, otherwise the minimum with --touch and the mean without it")
	f.BoolVar(&c.in, "in-place", true, "measure in place")
	f.BoolVar(&c.out, "out-of-place", true, "measure out of place")
	f.BoolVar(&o.raw, "raw", false, "measure only the backend, without negotiation")
	f.BoolVar(&o.arena, "arena", false, "allocate tensors in the shared arena")
	f.Int64Var(&o.offset, "offset", 0, "where in a page of 4096 bytes each tensor begins, in bytes, because the speed of copies may depend "+
		"on it; with 0, Go's allocator chooses")
	f.BoolVar(&o.gpu, "gpu", false, "allreduce tensors on the CUDA device of each rank, with HOROVOD_GPU_OPERATIONS=nccl in a build "+
		"with the tag nccl, and measure plain copies on the device beside (docs/nccl.md)")
	f.BoolVar(&o.touch, "touch", false,
		"write to each rank's tensor before every call, outside the timed part")
	f.StringVar(&o.workload, "workload", "", "measure training steps that reduce the gradients of a built-in model ("+
		strings.Join(workloadNames, ", ")+
		") or the tensors listed in `FILE`, one per line: name, number of elements, shape")
	add(f, &o.many, "many", "", "N:BYTES", "", parseMany, "measure steps that reduce N tensors of BYTES bytes each")
	add(f, &o.modes, "mode", "", "MODES", "async", parseModes,
		"how a step reduces its tensors, separated by commas, or all: "+strings.Join(modeNames[:], ", "))
	addFormat(root, &o.format)
	offer(root, "mode", modeNames[:])
	offer(root, "collective", root.ValidArgs)
	root.AddCommand(newCoresCommand())
	return root
}

// addFormat adds the flag --format to a command.
func addFormat(c *cobra.Command, format *string) {
	c.Flags().StringVar(format, "format", "nccl", "format of the output: "+strings.Join(formats, ", "))
	offer(c, "format", formats)
}

// offer completes the values of a flag.
func offer(c *cobra.Command, name string, values []string) {
	if err := c.RegisterFlagCompletionFunc(name,
		cobra.FixedCompletions(values, cobra.ShellCompDirectiveNoFileComp)); err != nil {
		panic(err) // only if the command has no such flag
	}
}

// complete sets the options that depend on several flags, and checks all options.
func (c *command) complete(f *pflag.FlagSet, args []string) (err error) {
	for _, name := range args {
		if f.Changed("collective") {
			return fmt.Errorf("got %q and --collective %v, want one collective", name, c.kind)
		}
		if c.kind, err = parseCollective(name); err != nil {
			return err
		}
	}
	if err := stepUsage(f, c.workload != "" || c.many.count > 0); err != nil {
		return err
	}
	// If the user gives only one end of the range, and it lies beyond the default of the other end, move the
	// other end to it. If the user gives only the minimum and no step, measure only this size.
	if !f.Changed("maxbytes") {
		c.maxBytes = max(c.maxBytes, c.minBytes)
		if f.Changed("minbytes") && !f.Changed("stepfactor") && !f.Changed("stepbytes") {
			c.maxBytes = c.minBytes
		}
	} else if !f.Changed("minbytes") {
		c.minBytes = min(c.minBytes, c.maxBytes)
	}
	if c.out {
		c.placements = append(c.placements, false)
	}
	if c.in {
		c.placements = append(c.placements, true)
	}
	return c.check()
}
