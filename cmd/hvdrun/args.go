package main

import (
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/pflag"
)

// aliases maps the names that flags have in Horovod and mpirun to the names that they have in hvdrun.
var aliases = map[string]string{
	"np":               "num-proc",
	"min-np":           "min-num-proc",
	"max-np":           "max-num-proc",
	"cb":               "check-build",
	"prefix-timestamp": "prefix-output-with-timestamp",
}

// singleDash lists the long names of flags that, as in Horovod, may follow a single dash.
var singleDash = []string{"np", "cb", "prefix-timestamp", "hostfile", "hosts"}

// ownCommands lists the subcommands of hvdrun. A subcommand is recognized only as the first argument. After
// flags or after --, the same word is the command to launch.
var ownCommands = []string{"completion", configCommand, doctorCommand, "help", storeCommand, timelineCommand,
	topCommand, viewCommand, "__complete", "__completeNoDesc"}

// normalize returns the canonical name of a long flag. It accepts aliases. Like torchrun, it also accepts _
// in place of -.
func normalize(_ *pflag.FlagSet, name string) pflag.NormalizedName {
	name = strings.ReplaceAll(name, "_", "-")
	if canonical, ok := aliases[name]; ok {
		name = canonical
	}
	return pflag.NormalizedName(name)
}

// rewrite converts the arguments to a form that pflag can parse: -np becomes --np, two numbers of a cooldown
// become one argument, and -- is inserted before the command to launch. Without this --, pflag would take
// flags of the command for flags of hvdrun.
func rewrite(args []string, flags *pflag.FlagSet) []string {
	var out []string
	if len(args) > 0 && slices.Contains(ownCommands, args[0]) {
		if args[0] != configCommand {
			return args
		}
		out, args = args[:1:1], args[1:] // what follows hvdrun config has the form of hvdrun's own arguments
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
			value, rest := args[0], args[1:]
			if isCooldown(arg, flags) && len(rest) > 0 && isNumber(value) && isNumber(rest[0]) {
				value, rest = value+","+rest[0], rest[1:]
			}
			out, args = append(out, value), rest
		}
	}
	return out
}

// isCooldown reports whether arg is the flag for which Horovod wants LO HI, and hvdrun LO,HI too.
func isCooldown(arg string, flags *pflag.FlagSet) bool {
	f := flags.Lookup(strings.TrimPrefix(arg, "--"))
	if f == nil {
		return false
	}
	_, is := f.Value.(*cooldown)
	return is
}

func isNumber(text string) bool {
	_, err := strconv.ParseFloat(text, 64)
	return err == nil
}

// wantsValue reports whether the argument after the flag arg is the value of that flag. It returns false for
// an unknown flag, which pflag will reject.
func wantsValue(arg string, flags *pflag.FlagSet) bool {
	if name, long := strings.CutPrefix(arg, "--"); long {
		f := flags.Lookup(name) // f is nil if name has the form name=value
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
