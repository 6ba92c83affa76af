package launch

import (
	"context"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gohvd/gohvd/internal/logs"
)

// Discovery finds the hosts of an elastic job by a program.
type Discovery struct {
	// Command is run by /bin/sh. It prints a line for each host, as name or name:slots. Run runs it again
	// Interval after it has ended. It is killed with its process group after Limit.
	Command  string
	Slots    int // the number of slots of a line without one
	Interval time.Duration
	Limit    time.Duration
}

// readGrace is how long the output of the program is read after its end.
const readGrace = 200 * time.Millisecond

// run runs the program once, as a child of the family children and with the environment env, and returns the
// hosts that it prints. If it succeeds without printing a host, warning has the last line of its standard
// error, if there is one.
func (d *Discovery) run(ctx context.Context, children *family, env []string) (hosts []Host, warning string,
	err error) {
	fail := func(format string, args ...any) ([]Host, string, error) {
		return nil, "", fmt.Errorf("host discovery: %s: "+format, append([]any{d.Command}, args...)...)
	}
	null, err := os.Open(os.DevNull)
	if err != nil {
		return fail("%w", err)
	}
	defer null.Close()
	var mine []*os.File
	var status unix.WaitStatus
	ended := newBatch()
	pid, err := children.start(ended, func() (pid int, err error) {
		mine, pid, err = startWithPipes(shell, []string{shell, "-c", d.Command}, env, null,
			[]bool{true, true})
		return pid, err
	}, func(s unix.WaitStatus) { status = s })
	children.complete(ended)
	if err != nil {
		return fail("%w", err)
	}
	late := time.AfterFunc(d.Limit, func() { children.killGroup(pid) })
	defer late.Stop()
	stop := context.AfterFunc(ctx, func() { children.killGroup(pid) })
	defer stop()
	var output [2]string
	var read sync.WaitGroup
	for i, f := range mine {
		read.Go(func() {
			defer f.Close()
			text, _ := io.ReadAll(io.LimitReader(f, maxFileBytes))
			output[i] = string(text)
		})
	}
	<-ended.gone
	timedOut := !late.Stop()
	for _, f := range mine { // a process that the program has left behind may keep the pipes open
		_ = f.SetReadDeadline(time.Now().Add(readGrace))
	}
	read.Wait()
	last := lastLine(output[1])
	switch {
	case timedOut:
		return fail("killed, because it has not ended within %v", d.Limit)
	case status.Signaled():
		return fail("killed by %s", unix.SignalName(status.Signal()))
	case status.ExitStatus() != 0 && last == "":
		return fail("exit status %d", status.ExitStatus())
	case status.ExitStatus() != 0:
		return fail("exit status %d: %s", status.ExitStatus(), last)
	}
	if hosts, err = d.parse(output[0]); err != nil {
		return fail("%w", err)
	}
	if len(hosts) == 0 && last != "" {
		warning = fmt.Sprintf("host discovery: %s: it has printed no hosts: %s", d.Command, last)
	}
	return hosts, warning, nil
}

// parse parses the output of the program.
func (d *Discovery) parse(text string) (hosts []Host, err error) {
	for line := range strings.Lines(text) {
		if line = strings.TrimSpace(line); line == "" {
			continue
		}
		h, err := parseHost(line)
		if err != nil {
			return nil, fmt.Errorf("got the line %.80q, %w", line, err)
		}
		if _, rest, _ := cutHost(line); rest == "" {
			h.Slots = d.Slots
		}
		if i := slices.IndexFunc(hosts, func(o Host) bool { return o.Name == h.Name }); i >= 0 {
			hosts[i] = h // programs that make such lists often repeat a line
		} else {
			hosts = append(hosts, h)
		}
	}
	return hosts, nil
}

// lastLine returns the last line of a text, for a message.
func lastLine(text string) string {
	lines := strings.Split(strings.TrimSpace(text), "\n")
	return logs.Plain(lines[len(lines)-1])
}
