package main

import (
	"encoding/json"
	"fmt"
	"io"
	"runtime/debug"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"github.com/gohvd/gohvd/internal/config"
)

// version is set by the linker (-X main.version=...) in a release.
var version string

// shownSetting is one line of hvdrun config.
type shownSetting struct {
	Name   string `json:"name"`
	Value  string `json:"value"` // empty if there is none
	Origin string `json:"origin"`

	otherwise string // what holds if there is no value
}

// showSettings prints the settings as the ranks would get them, but for what is theirs alone.
func (r *runner) showSettings(*cobra.Command, []string) error {
	if r.asMarkdown {
		_, err := io.WriteString(r.stdout, config.Page())
		return err
	}
	c, err := r.settings()
	if err != nil {
		return err
	}
	var shown []shownSetting
	for _, s := range config.Settings() {
		if s.Scope != config.ByLauncher {
			shown = append(shown, shownSetting{s.Name, c.Value(s.Name), c.Origin(s.Name).String(), s.Otherwise})
		}
	}
	if r.asJSON {
		out := json.NewEncoder(r.stdout)
		out.SetIndent("", "  ")
		return out.Encode(shown)
	}
	table := tabwriter.NewWriter(r.stdout, 0, 0, 2, ' ', 0)
	fmt.Fprintln(table, "SETTING\tVALUE\tFROM")
	for _, s := range shown {
		if s.Value == "" {
			s.Value = "(" + s.otherwise + ")"
		}
		fmt.Fprintf(table, "%s\t%s\t%s\n", s.Name, s.Value, s.Origin)
	}
	return table.Flush()
}

// printBuild has the form of Horovod's.
func (r *runner) printBuild() error {
	_, err := fmt.Fprintf(r.stdout, `gohvd %s:

Available Frameworks:
    [X] Go
    [ ] PyTorch
    [ ] TensorFlow
    [ ] MXNet

Available Controllers:
    [ ] MPI
    [X] Gloo (gohvd's own, over TCP)

Available Tensor Operations:
    [ ] NCCL
    [ ] DDL
    [ ] CCL
    [ ] MPI
    [X] Gloo (gohvd's own, over TCP)
`, versionText())
	return err
}

func versionText() string {
	text, commit := version, ""
	if info, ok := debug.ReadBuildInfo(); ok {
		if text == "" {
			text = info.Main.Version
		}
		for _, s := range info.Settings {
			if s.Key == "vcs.revision" {
				commit = " (" + s.Value + ")"
			}
		}
	}
	if text == "" {
		text = "(devel)"
	}
	return text + commit
}
