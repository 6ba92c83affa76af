package config

import (
	_ "embed" // for pageLogs
	"fmt"
	"strings"
	"unicode/utf8"
)

const pageHead = `<!-- Generated from the table in internal/config by "go generate ./internal/config". Do not edit. -->

# Settings

The name of a setting is its environment variable. If Horovod has the setting, the name is Horovod's
(` + "`HOROVOD_...`" + `). Otherwise it begins with ` + "`HVD_`" +
	`. The value comes from the first of these that has one:

1. the program: ` + "`hvd.WithSetting(name, value)`" + ` in Go, the options of ` + "`hvd_init`" + ` in C,
2. a flag of hvdrun,
3. the environment, where an empty value counts as none,
4. the settings file,
5. the default.

` + "`hvdrun config [flags]`" + ` shows every value as the ranks would get it, and where it comes from.

The settings are read by the process that runs the engine of a rank, when it joins the job. So a program in
Python or C may change its environment before it calls ` + "`init`" + `. If ` + "`hvdd`" + ` runs the engine
([sidecar.md](sidecar.md)), it gets what the program passes to ` + "`init`" +
	`, and what has changed in the environment
of the program since it has connected. For all other settings, the environment of ` + "`hvdd`" + ` counts.

The settings file is YAML. If Horovod has a setting, its key is Horovod's too. Name the file with the flag
` + "`--config-file FILE`" + ` of hvdrun, or without hvdrun with ` + "`HVD_CONFIG_FILE=FILE`" +
	`. As in Horovod, the file
overrides the flags before ` + "`--config-file`" +
	` on the command line, and the flags after it override the file.
Unlike in Horovod, the environment overrides the file.

` + "```yaml" + `
params:
  fusion_threshold_mb: 32
  cache_capacity: 2048
stall_check:
  warning_time_seconds: 30
logging:
  level: info
` + "```" + `

Init compares the settings with the scope "must be the same at all ranks". If ranks differ in some of them, it
fails at every rank with an error that names each such setting, the ranks and the values. Values that mean the
same, such as 1 and true, are equal.

An invalid value or an unknown key in the file is an error. An unknown variable that begins with ` + "`HOROVOD_`" +
	` or
` + "`HVD_`" + ` causes a warning that suggests the most similar name.

A setting that has no effect in a process of its kind causes a warning that says why. Examples are
` + "`HVD_ALGORITHM`" + ` over MPI, ` + "`HOROVOD_AUTOTUNE_LOG`" + ` without ` + "`HOROVOD_AUTOTUNE`" + `, and
` + "`HOROVOD_CYCLE_TIME`" + ` at a node of a parameter server. hvdrun prints the warning once for all its ranks or
nodes. A switch that is off causes none, nor does another setting with its default value, because these ask
for nothing.
`

const pageInert = `
## Names that have no effect

Horovod or ps-lite has these settings, and gohvd ignores them. If a variable, or a key in the file, has
another value than the default there, gohvd warns. hvdrun refuses a flag that turns on a missing feature, and
accepts a flag that turns it off.

| Variable | Key in the file | Default there | Flags of horovodrun | Why it has no effect |
|---|---|---|---|---|
`

// pageLogs describes the log, after the settings.
//
//go:embed logs.txt
var pageLogs string

// pageColumns is the maximum width of the prose on the page.
const pageColumns = 110

// Page returns the text of docs/settings.md.
func Page() string {
	var b strings.Builder
	b.WriteString(pageHead)
	section := ""
	for _, s := range settings {
		if s.Section != section {
			section = s.Section
			fmt.Fprintf(&b, "\n## %s\n", section)
		}
		s.writeEntry(&b)
	}
	b.WriteString(pageInert)
	for _, i := range inerts {
		var flags []string
		for _, name := range strings.Fields(i.Flags) {
			flags = append(flags, code("--"+name))
		}
		fmt.Fprintf(&b, "| %s | %s | %s | %s | %s |\n", code(i.Name), code(i.Key), code(i.Default),
			strings.Join(flags, ", "), i.Reason)
	}
	b.WriteString("\n" + pageLogs)
	return b.String()
}

func (s Setting) writeEntry(b *strings.Builder) {
	fmt.Fprintf(b, "\n### `%s`\n\n", s.Name)
	writeWrapped(b, capital(s.Doc)+". "+s.Raise)
	fmt.Fprintln(b)
	writeWrapped(b, fmt.Sprintf("- Value: %s. Default: %s.", s.Want(), s.Fallback()))
	if len(s.Flags) > 0 {
		flags := make([]string, len(s.Flags))
		for i, f := range s.Flags {
			flags[i] = f.entry()
		}
		writeWrapped(b, fmt.Sprintf("- Flags of hvdrun: %s.", strings.Join(flags, ", ")))
	}
	if s.Key != "" {
		note := ""
		if s.form != nil {
			note = s.form.note
		}
		writeWrapped(b, fmt.Sprintf("- Key in the file: `%s`%s.", s.Key, note))
	}
	writeWrapped(b, fmt.Sprintf("- Scope: %s.", s.Scope))
}

// writeWrapped writes a paragraph in lines of at most pageColumns columns. If the paragraph is a list item,
// all lines after the first are indented. A line may be broken at any space, even in a code span.
func writeWrapped(b *strings.Builder, text string) {
	indent := ""
	if strings.HasPrefix(text, "- ") {
		indent = "  "
	}
	line := ""
	for _, word := range strings.Fields(text) {
		switch {
		case line == "":
			line = word
		case utf8.RuneCountInString(line)+1+utf8.RuneCountInString(word) <= pageColumns:
			line += " " + word
		default:
			b.WriteString(line + "\n")
			line = indent + word
		}
	}
	b.WriteString(line + "\n")
}

func (f Flag) entry() string {
	note := ""
	if f.Instead != "" {
		note = " (deprecated)"
	}
	return "`--" + strings.TrimSpace(f.Name+" "+f.Arg) + "`" + note
}

func code(text string) string {
	if text == "" {
		return ""
	}
	return "`" + text + "`"
}

func capital(text string) string { return strings.ToUpper(text[:1]) + text[1:] }
