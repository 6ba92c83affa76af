package main

import (
	"fmt"
	"io"
	"os"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"golang.org/x/sys/unix"

	"github.com/gohvd/gohvd/internal/bench"
)

const long = `Hvdbench measures collective operations between the ranks of a job, with the flags and the table of nccl-tests. Run it
under hvdrun, or alone as a job of one rank. Every case is verified first; what is wrong is counted as #wrong.

Sizes are bytes, with K, M or G for powers of 1024. GB is 10^9 bytes; algbw is bytes by mean time, busbw that times
2(n-1)/n for allreduce, (n-1)/n for allgather, reducescatter and alltoall, and 1 for broadcast.

Out of place, package hvd makes a new tensor for each result, which the time includes.

The exit status is 0 if all is well, 1 if results are wrong or something failed, 2 for wrong usage, and 128+n if signal n
ended it.`

const examples = `  hvdrun -np 2 hvdbench -b 8 -e 128M -f 2
  hvdrun -np 4 hvdbench allgather -b 1M -e 1G -f 4 -d bfloat16 --arena
  hvdrun -np 2 hvdbench --workload resnet50 --mode async,grouped
  hvdrun -np 2 hvdbench --workload resnet50 --negotiation 30
  hvdrun -np 2 --tag-output=false hvdbench --format csv -b 1K -e 64M -f 4 >a.csv
  hvdbench plot a.csv b.csv -o out.svg`

// bencher is one call of hvdbench.
type bencher struct {
	env            []string
	stdout, stderr io.Writer

	options    bench.Options
	collective string
	in, out    bool // placements
	blocking   int
	average    int
	peers      bool
	variants   string
}

// value is a flag whose text is read by a function of package bench.
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

// add makes a flag that is read by parse. A default that cannot be read would be a defect, which every test shows.
func add[T any](f *pflag.FlagSet, to *T, name, short, kind, fallback string, parse func(string) (T, error), usage string) {
	v := &value[T]{to: to, parse: parse, kind: kind}
	if fallback != "" {
		if err := v.Set(fallback); err != nil {
			panic(err)
		}
	}
	f.VarP(v, name, short, usage)
}

func (b *bencher) command() *cobra.Command {
	root := &cobra.Command{
		Use:     "hvdbench [collective] [flags]",
		Short:   "Measure collective operations",
		Long:    long,
		Example: examples,
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) > 1 {
				return usagef("got %q, want one collective", args)
			}
			return nil
		},
		ValidArgs:     bench.CollectiveNames(),
		SilenceErrors: true,
		SilenceUsage:  true,
		RunE:          b.measure,
	}
	root.SetOut(b.stdout)
	root.SetErr(b.stderr)
	root.SetFlagErrorFunc(func(_ *cobra.Command, err error) error { return usageError{err} })
	f := root.Flags()
	f.SortFlags = false
	f.SetNormalizeFunc(func(_ *pflag.FlagSet, name string) pflag.NormalizedName {
		return pflag.NormalizedName(strings.ReplaceAll(name, "_", "-")) // nccl-tests has --warmup_iters
	})
	o := &b.options
	add(f, &b.collective, "collective", "", "NAME", "allreduce", bench.ParseCollective, "what to measure: "+strings.Join(bench.CollectiveNames(), ", "))
	add(f, &o.MinBytes, "minbytes", "b", "SIZE", "32M", bench.ParseSize, "smallest size")
	add(f, &o.MaxBytes, "maxbytes", "e", "SIZE", "32M", bench.ParseSize, "largest size")
	add(f, &o.StepBytes, "stepbytes", "i", "SIZE", "1M", bench.ParseSize, "what is added to a size for the next")
	f.IntVarP(&o.StepFactor, "stepfactor", "f", 0, "what a size is multiplied with for the next, instead of --stepbytes")
	f.IntVarP(&o.Iters, "iters", "n", 20, "timed calls of each case")
	f.IntVarP(&o.Warmup, "warmup-iters", "w", 1, "untimed calls before")
	f.IntVarP(&o.Checks, "check", "c", 1, "how often each case is verified; 0 is never")
	add(f, &o.Types, "datatype", "d", "TYPES", "float", bench.ParseTypes, "element types, by commas, or all; nccl-tests' names or ours")
	add(f, &o.Ops, "op", "o", "OPS", "sum", bench.ParseOps, "reductions, by commas, or all: sum, prod, min, max, avg")
	add(f, &o.Roots, "root", "r", "RANK", "0", bench.ParseRoots, "root of broadcasts, or all")
	f.IntVarP(&b.blocking, "blocking", "z", 1, "for nccl-tests' sake: every call waits for its end, so 1 is the only value")
	f.IntVarP(&b.average, "average", "a", int(bench.ByKind), "what counts of the ranks' times for a call: 0 rank 0's, 1 the mean, 2 the least, "+
		"3 the greatest; -1 is the mean, but the greatest for broadcast and otherwise the least with --touch")
	f.BoolVar(&b.in, "in-place", true, "measure in place")
	f.BoolVar(&b.out, "out-of-place", true, "measure out of place")
	f.BoolVar(&o.Raw, "raw", false, "the backend alone, without negotiation")
	f.BoolVar(&o.Arena, "arena", false, "tensors of the shared arena")
	f.BoolVar(&o.Touch, "touch", false, "each rank writes its tensor before every call; the writing is not timed")
	f.StringVar(&o.Workload, "workload", "", "steps over the gradients of "+strings.Join(bench.WorkloadNames(), ", ")+" or `FILE`, lines of name, count, shape")
	add(f, &o.Many, "many", "", "N:BYTES", "", bench.ParseMany, "steps over N tensors of so many bytes")
	f.StringSliceVar(&o.Modes, "mode", []string{"async"}, "how a step reduces its tensors, by commas: "+strings.Join(bench.ModeNames(), ", "))
	f.IntVar(&o.Negotiation, "negotiation", 0, "compare `N` pairs of a negotiated and a raw step, asynchronous, of one type; instead of --iters")
	f.StringVar(&o.Format, "format", "nccl", "output: "+strings.Join(bench.Formats, ", "))
	f.StringVar(&o.Plot, "plot", "", "draw bus bandwidth over size, or algbw where one rank has no other, into `FILE`, as SVG")
	f.BoolVar(&o.Memory, "memory", false, "show the memory of each rank at the end")
	f.BoolVar(&o.CPU, "cpu", false, "show the CPU time of each rank for each case")
	f.BoolVar(&o.Progress, "progress", false, "say what is measured also where standard error is no terminal")
	f.BoolVar(&b.peers, "peers", false, "the matrix of bench/peers, as its BENCH_ variables say, instead")
	f.StringVar(&b.variants, "variants", "", "with --peers, some of slices, arena, raw, arena-raw (BENCH_VARIANTS); all if not given")
	for name, of := range map[string][]string{"format": bench.Formats, "mode": bench.ModeNames(), "collective": bench.CollectiveNames()} {
		if err := root.RegisterFlagCompletionFunc(name, cobra.FixedCompletions(of, cobra.ShellCompDirectiveNoFileComp)); err != nil {
			panic(err) // the name of a flag above is wrong
		}
	}
	root.AddCommand(b.plotCommand(), b.reportCommand())
	return root
}

func (b *bencher) measure(cmd *cobra.Command, args []string) error {
	streams := bench.Streams{Out: b.stdout, Err: b.stderr}
	if b.peers {
		m, err := bench.ReadMatrix(b.env, b.variants)
		if err != nil {
			return usageError{err}
		}
		return bench.RunMatrix(cmd.Context(), m, bench.Place{}, streams)
	}
	if err := b.complete(cmd.Flags(), args); err != nil {
		return usageError{err}
	}
	return bench.Run(cmd.Context(), b.options, bench.Place{}, streams)
}

// complete makes the options of the flags.
func (b *bencher) complete(f *pflag.FlagSet, args []string) error {
	o := &b.options
	for _, name := range args {
		if f.Changed("collective") {
			return fmt.Errorf("got %q and --collective %s, want one collective", name, b.collective)
		}
		var err error
		if b.collective, err = bench.ParseCollective(name); err != nil {
			return err
		}
	}
	o.Collective, o.Average = b.collective, bench.Average(b.average)
	// One end of the range that contradicts the default of the other takes that along.
	if !f.Changed("maxbytes") {
		o.MaxBytes = max(o.MaxBytes, o.MinBytes)
		if f.Changed("minbytes") && !f.Changed("stepfactor") && !f.Changed("stepbytes") {
			o.MaxBytes = o.MinBytes
		}
	} else if !f.Changed("minbytes") {
		o.MinBytes = min(o.MinBytes, o.MaxBytes)
	}
	if b.blocking != 1 {
		return fmt.Errorf("--blocking is %d, want 1: every call waits for its end; --workload and --many start many at once", b.blocking)
	}
	if !b.in && !b.out {
		return fmt.Errorf("neither in place nor out of place leaves nothing to measure")
	}
	if b.out {
		o.Placements = append(o.Placements, false)
	}
	if b.in {
		o.Placements = append(o.Placements, true)
	}
	if o.Negotiation > 0 {
		for _, name := range []string{"mode", "iters", "check", "average", "cpu", "in-place", "out-of-place"} {
			if f.Changed(name) {
				return fmt.Errorf("--%s says nothing about --negotiation: its steps are asynchronous, checked once, and last as long as at the slowest rank", name)
			}
		}
	}
	o.Terminal = isTerminal(b.stderr)
	return o.Check()
}

func isTerminal(w io.Writer) bool {
	f, ok := w.(*os.File)
	if !ok {
		return false
	}
	_, err := unix.IoctlGetTermios(int(f.Fd()), unix.TCGETS)
	return err == nil
}

func (b *bencher) plotCommand() *cobra.Command {
	var out, metric string
	var o bench.PlotOptions
	cmd := &cobra.Command{
		Use:   "plot FILE.csv... -o FILE.svg",
		Short: "Draw the results of CSV files, hvdbench's own or those of bench/peers",
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) == 0 {
				return usagef("the files to draw are missing")
			}
			return nil
		},
		RunE: func(_ *cobra.Command, files []string) error {
			o.Metric = bench.Metric(metric)
			if o.Metric != bench.BusBandwidth && o.Metric != bench.Time {
				return usagef("--metric is %q, want %s or %s", metric, bench.BusBandwidth, bench.Time)
			}
			if out == "" {
				return usagef("--output is missing")
			}
			return bench.Plot(out, files, o)
		},
	}
	f := cmd.Flags()
	f.StringVarP(&out, "output", "o", "", "`FILE` to write")
	f.StringVar(&o.Op, "op", "", "draw this operation alone")
	f.IntVar(&o.Ranks, "ranks", 0, "draw results of so many ranks alone")
	f.StringVar(&metric, "metric", string(bench.BusBandwidth), "busbw or time")
	f.StringVar(&o.Title, "title", "", "title of the drawing")
	return cmd
}

func (b *bencher) reportCommand() *cobra.Command {
	var out, chart string
	cmd := &cobra.Command{
		Use:   "report DIR",
		Short: "Compare this library with others, from a folder of results of bench/peers",
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) != 1 {
				return usagef("got %q, want one folder", args)
			}
			return nil
		},
		RunE: func(_ *cobra.Command, args []string) error {
			page, err := bench.Report(args[0], chart)
			if err != nil {
				return err
			}
			if out == "" {
				_, err = b.stdout.Write(page)
				return err
			}
			return os.WriteFile(out, page, 0o666)
		},
	}
	f := cmd.Flags()
	f.StringVarP(&out, "output", "o", "", "`FILE` to write instead of standard output")
	f.StringVar(&chart, "chart", "", "draw allreduce into `FILE`, as SVG, beside the output")
	return cmd
}
