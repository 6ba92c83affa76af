package main

import (
	"encoding/json"
	"fmt"
	"io"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"github.com/gohvd/gohvd/internal/config"
	"github.com/gohvd/gohvd/internal/version"
)

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
`, version.Text())
	return err
}
