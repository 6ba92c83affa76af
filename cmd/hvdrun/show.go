package main

import (
	"encoding/json"
	"fmt"
	"io"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"github.com/gohvd/gohvd/internal/config"
)

// shownSetting is a line in the output of hvdrun config.
type shownSetting struct {
	Name   string `json:"name"`
	Value  string `json:"value"` // empty if the setting has no value
	Origin string `json:"origin"`

	otherwise string // what applies if the setting has no value
}

// showSettings prints the settings that the ranks would get. It leaves out the settings that the launcher
// sets for each rank.
func (r *runner) showSettings(*cobra.Command, []string) error {
	if r.asMarkdown {
		_, err := io.WriteString(r.stdout, config.Page())
		return err
	}
	c, err := r.settings(config.Rank)
	if err != nil {
		return err
	}
	var shown []shownSetting
	for _, s := range config.Settings() {
		if s.Scope == config.ByLauncher {
			continue
		}
		value := c.Value(s.Name)
		if s.Secret && value != "" {
			value = "set, not shown"
		}
		shown = append(shown, shownSetting{s.Name, value, c.Origin(s.Name).String(), s.Otherwise})
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
