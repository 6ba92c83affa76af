package main

import (
	"slices"
	"strings"

	"github.com/spf13/pflag"
)

// aliases are Horovod's and mpirun's other names of flags.
var aliases = map[string]string{
	"np":               "num-proc",
	"min-np":           "min-num-proc",
	"max-np":           "max-num-proc",
	"cb":               "check-build",
	"prefix-timestamp": "prefix-output-with-timestamp",
}

// singleDash are long names that Horovod takes with one dash.
var singleDash = []string{"np", "cb", "prefix-timestamp", "hostfile", "hosts"}

// ownCommands are hvdrun's own if they come first. After flags or -- they are commands to launch.
var ownCommands = []string{"completion", configCommand, doctorCommand, "help", storeCommand, timelineCommand, "__complete", "__completeNoDesc"}

// normalize accepts torchrun's _ for - in long flags, and aliases.
func normalize(_ *pflag.FlagSet, name string) pflag.NormalizedName {
	name = strings.ReplaceAll(name, "_", "-")
	if canonical, ok := aliases[name]; ok {
		name = canonical
	}
	return pflag.NormalizedName(name)
}

// rewrite makes the arguments ones that pflag can read: -np becomes --np, and -- comes before the command to
// launch, so that its name and flags are never taken for hvdrun's.
func rewrite(args []string, flags *pflag.FlagSet) []string {
	var out []string
	if len(args) > 0 && slices.Contains(ownCommands, args[0]) {
		if args[0] != configCommand {
			return args
		}
		out, args = args[:1:1], args[1:] // what follows is as if it were to be launched
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
		if name, _, _ := strings.Cut(arg[1:], "="); slices.Contains(singleDash, name) || len(name) > 1 && isForeign(name) {
			arg = "-" + arg
		}
		out = append(out, arg)
		if wantsValue(arg, flags) && len(args) > 0 {
			out, args = append(out, args[0]), args[1:]
		}
	}
	return out
}

// wantsValue reports whether the flag takes the next argument as its value. An unknown flag takes none; pflag
// rejects it.
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
