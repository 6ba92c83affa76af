package config

import (
	"fmt"
	"strings"
)

const pageHead = `<!-- Generated from the table in internal/config by "go generate ./internal/config". Do not edit. -->

# Settings

A setting is named by its environment variable: Horovod's if Horovod has the setting (` + "`HOROVOD_...`" + `), else
ours (` + "`HVD_...`" + `). Its value comes from the first of these that gives one:

1. the program: ` + "`hvd.WithSetting(name, value)`" + `,
2. a flag of hvdrun,
3. the environment, where an empty value counts as none,
4. the file of settings,
5. the default.

` + "`hvdrun config [flags]`" + ` shows every value as the ranks would get it, and where it comes from.

The file is YAML, with Horovod's keys if Horovod has them. hvdrun reads it with ` + "`--config-file FILE`" + `, a
program without hvdrun with ` + "`HVD_CONFIG_FILE=FILE`" + `. On the command line it overrides flags before it and is
overridden by flags after it, as in Horovod. The environment overrides it, unlike in Horovod.

` + "```yaml" + `
params:
  fusion_threshold_mb: 32
  cache_capacity: 2048
stall_check:
  warning_time_seconds: 30
logging:
  level: info
` + "```" + `

Settings whose scope is "the same at all ranks" are compared when the ranks meet. If some differ, Init fails at
every rank and names each of them, with the ranks and the values. Values that mean the same (1 and true) are
equal.

An invalid value and an unknown key are errors. An unknown variable that begins with ` + "`HOROVOD_`" + ` or
` + "`HVD_`" + ` gives a warning with the nearest name.
`

const pageInert = `
## Names that have no effect

Horovod has these settings, and gohvd ignores them. A variable, or a key in the file, with another value than
Horovod's default causes a warning. hvdrun refuses flags that ask for a missing feature, and accepts those that
turn one off.

| Variable | Key in the file | Horovod's default | Flags of horovodrun | Why it has no effect |
|---|---|---|---|---|
`

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
		fmt.Fprintf(&b, "| %s | %s | %s | %s | %s |\n", code(i.Name), code(i.Key), code(i.Default), strings.Join(flags, ", "), i.Reason)
	}
	return b.String()
}

func (s Setting) writeEntry(b *strings.Builder) {
	fmt.Fprintf(b, "\n### `%s`\n\n%s.", s.Name, capital(s.Doc))
	if s.Raise != "" {
		b.WriteString(" " + s.Raise)
	}
	fmt.Fprintf(b, "\n\n- Value: %s. Default: %s.\n", s.Want(), s.Fallback())
	if len(s.Flags) > 0 {
		flags := make([]string, len(s.Flags))
		for i, f := range s.Flags {
			flags[i] = f.entry()
		}
		fmt.Fprintf(b, "- Flags of hvdrun: %s.\n", strings.Join(flags, ", "))
	}
	if s.Key != "" {
		note := ""
		if s.form != nil {
			note = s.form.note
		}
		fmt.Fprintf(b, "- Key in the file: `%s`%s.\n", s.Key, note)
	}
	fmt.Fprintf(b, "- Scope: %s.\n", s.Scope)
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
