package main

import (
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"text/tabwriter"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

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

// printBuild has the form of Horovod's, for scripts that look for "[X] PyTorch".
func (r *runner) printBuild() error {
	torch := "[X] PyTorch (over hvdd)"
	if err := r.findSidecar(); err != nil {
		torch = fmt.Sprintf("[ ] PyTorch (%v)", err)
	}
	const own = "[X] Gloo (gohvd's own, over shared memory and TCP)"
	_, err := fmt.Fprintf(r.stdout, `gohvd %s:

Available Frameworks:
    [X] Go
    %s
    [ ] TensorFlow
    [ ] MXNet

Available Controllers:
    [ ] MPI
    %s

Available Tensor Operations:
    [ ] NCCL
    [ ] DDL
    [ ] CCL
    [ ] MPI
    %s
`, version.Text(), torch, own, own)
	return err
}

// findSidecar looks for hvdd where ranks in Python would, but for their package, which hvdrun does not know. The error says why there is
// none.
func (r *runner) findSidecar() error {
	for _, v := range r.env {
		if named, is := strings.CutPrefix(v, sidecarVariable+"="); is && named != "" {
			if info, err := os.Stat(named); err != nil || !info.Mode().IsRegular() || unix.Access(named, unix.X_OK) != nil {
				return fmt.Errorf("%s is %q, which is no program", sidecarVariable, named)
			}
			return nil
		}
	}
	if besideSelf(sidecar) != "" {
		return nil
	}
	if _, err := exec.LookPath(sidecar); err != nil {
		return fmt.Errorf("no %s: %s is not set, and there is none beside hvdrun or on PATH", sidecar, sidecarVariable)
	}
	return nil
}
