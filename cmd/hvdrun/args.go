package main

import (
	"slices"
	"strings"

	"github.com/spf13/pflag"
)

// aliases maps other names of flags, from Horovod and mpirun, to hvdrun's names.
var aliases = map[string]string{
	"np":               "num-proc",
	"min-np":           "min-num-proc",
	"max-np":           "max-num-proc",
	"cb":               "check-build",
	"prefix-timestamp": "prefix-output-with-timestamp",
}

// singleDash lists the long names of flags that, as in Horovod, may follow a single dash.
var singleDash = []string{"np", "cb", "prefix-timestamp", "hostfile", "hosts"}

// ownCommands lists the subcommands of hvdrun. They are recognized only as the first argument. After flags or
// -- such a word is the command to launch.
var ownCommands = []string{"completion", configCommand, doctorCommand, "help", storeCommand, timelineCommand,
	"__complete", "__completeNoDesc"}

// normalize returns the canonical name of a long flag. It accepts aliases, and _ for - as torchrun does.
func normalize(_ *pflag.FlagSet, name string) pflag.NormalizedName {
	name = strings.ReplaceAll(name, "_", "-")
	if canonical, ok := aliases[name]; ok {
		name = canonical
	}
	return pflag.NormalizedName(name)
}

// rewrite converts the arguments to a form that pflag can parse: -np becomes --np, and -- is inserted before
// the command to launch, so that pflag does not take flags of the command for flags of hvdrun.
func rewrite(args []string, flags *pflag.FlagSet) []string {
	var out []string
	if len(args) > 0 && slices.Contains(ownCommands, args[0]) {
		if args[0] != configCommand {
			return args
		}
		out, args = args[:1:1], args[1:] // the arguments of hvdrun config are those of a job
	}
	for len(args) > 0 {
		arg := args[0]
		if arg == "--" {
			return append(out, args...)
		}
		if len(arg) < 2 || arg[0] != '-' {
			return append(append(out, "--"), args...)
		}
		args = args[1:]
		if name, _, _ := strings.Cut(arg[1:], "="); slices.Contains(singleDash, name) || len(name) > 1 &&
			isForeign(name) {
			arg = "-" + arg
		}
		out = append(out, arg)
		if wantsValue(arg, flags) && len(args) > 0 {
			out, args = append(out, args[0]), args[1:]
		}
	}
	return out
}

// wantsValue reports whether the next argument is the value of the flag arg. It returns false for an unknown
// flag, which pflag rejects.
func wantsValue(arg string, flags *pflag.FlagSet) bool {
	if name, long := strings.CutPrefix(arg, "--"); long {
		f := flags.Lookup(name) // nil for name=value
		return f != nil && f.NoOptDefVal == ""
	}
	for i := 1; i < len(arg); i++ {
		f := flags.ShorthandLookup(arg[i : i+1])
		if f == nil {
			return false
		}
		if f.NoOptDefVal == "" {
			return i == len(arg)-1
		}
	}
	return false
}
