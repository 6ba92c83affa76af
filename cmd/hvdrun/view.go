package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strconv"
	"strings"
	"sync"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/gohvd/gohvd/internal/outfile"
	"github.com/gohvd/gohvd/internal/rundir"
	"github.com/gohvd/gohvd/timeline/report"
	"github.com/gohvd/gohvd/timeline/view"
)

const viewCommand = "view"

const viewLong = `Show a job in a browser, while it runs or by its timelines: which rank, host or tensor was late, in which steps, and who
waited for whom.

JOB is the number of the process of an hvdrun of this user on this host. Without an argument, the only job is shown. The
page follows the job and stays with the verdict when the job ends. The ranks record only while a page is open.

FILE is given as for hvdrun timeline: usually the timeline of rank 0, such as t.json, or a folder.

Hvdrun prints the address of the page and serves it until SIGINT (Ctrl-C) or SIGTERM. The address works once, and only in
the browser that opens it first. The page needs no network: it loads nothing from other servers.`

const viewExamples = `
Examples:
  hvdrun view
  hvdrun view 4711
  hvdrun view t.json
  hvdrun view --open timelines/
  hvdrun view before/ --compare after/       do the steps take longer than before?
  hvdrun view --export late.html t.json      then send late.html to a colleague
`

// viewFlags holds the flags of hvdrun view.
type viewFlags struct {
	addr    string
	open    bool
	export  string
	compare string
}

// view returns the command that shows timelines in a browser.
func (r *runner) view() *cobra.Command {
	var given viewFlags
	g := newGroup("Flags")
	g.flags.StringVar(&given.addr, "addr", "127.0.0.1:0",
		"address `HOST:PORT` at which the page is served; port 0 chooses a free port")
	g.flags.BoolVar(&given.open, "open", false, "open the page in the browser (by xdg-open)")
	g.flags.StringVar(&given.export, "export", "",
		"do not serve the page, but write it to `OUT.html` as one file, which opens in any browser without hvdrun")
	g.flags.StringVar(&given.compare, "compare", "", compareUsage)
	cmd := &cobra.Command{
		Use:   viewCommand + " [flags] [JOB | FILE...]",
		Short: "Show a running job, or timelines, in a browser",
		RunE: func(cmd *cobra.Command, args []string) error {
			if isJob(args) && given.compare != "" {
				return usagef("view: --compare: got a running job, want FILE")
			}
			if isJob(args) {
				return r.viewJob(cmd.Context(), &given, args)
			}
			return r.viewTimelines(cmd.Context(), &given, args)
		},

		DisableFlagsInUseLine: true,
	}
	withFlags(cmd, g, viewLong, viewExamples)
	return cmd
}

// viewTimelines reads timelines, and serves or exports the page about them.
func (r *runner) viewTimelines(ctx context.Context, given *viewFlags, paths []string) error {
	var listener net.Listener
	if given.export == "" {
		var err error
		if listener, err = listenPage(given.addr); err != nil {
			return err
		}
		defer listener.Close() // Serve closes it too
	}
	job, bad, err := report.Open(paths)
	if err != nil {
		return fmt.Errorf("view: %w", err)
	}
	if bad != nil {
		fmt.Fprintf(r.stderr, "hvdrun: view: %v\n", bad)
	}
	title := strings.Join(paths, " ")
	run, err := view.Read(job, optionsOf(job), title)
	if err != nil {
		return fmt.Errorf("view: %w", err)
	}
	var other *report.Job
	if given.compare != "" {
		run.Compared, other, bad, err = compareWith(given.compare, run.Report(), title)
		if err != nil {
			return fmt.Errorf("view: --compare: %w", err)
		}
		if bad != nil {
			fmt.Fprintf(r.stderr, "hvdrun: view: --compare: %v\n", bad)
		}
	}
	if given.export != "" {
		if job.Reads(given.export) || other != nil && other.Reads(given.export) {
			return fmt.Errorf("view: the output %s is one of the timelines: choose another name", given.export)
		}
		if err := exportTo(given.export, run, append(paths, given.compare)...); err != nil {
			return fmt.Errorf("view: %w", err)
		}
		fmt.Fprintf(r.stderr, "hvdrun: wrote %s\n", given.export)
		return nil
	}
	newServer := func(addr string) *view.Server { return view.NewServer(run, addr) }
	return r.servePage(ctx, given, listener, newServer, nil)
}

// listenPage listens at the address of a page.
func listenPage(addr string) (net.Listener, error) {
	l, err := net.Listen("tcp", addr)
	if err != nil {
		return nil, fmt.Errorf("view: cannot serve the page at %s: %w", addr, err)
	}
	return l, nil
}

// servePage prints the address of the page of a server and serves it until a signal arrives or ctx ends.
// along, unless it is nil, runs meanwhile.
func (r *runner) servePage(ctx context.Context, given *viewFlags, listener net.Listener,
	newServer func(addr string) *view.Server, along func(context.Context)) error {
	// Until now nothing has to be removed, so a signal ends hvdrun at once.
	ctx, stop := signal.NotifyContext(ctx, unignored(unix.SIGINT, unix.SIGTERM)...)
	defer stop()
	server := r.announce(r.stdout, given.addr, listener, newServer)
	if given.open {
		done, err := r.openBrowser(ctx, server.Redirect())
		if err != nil {
			fmt.Fprintf(r.stderr, "hvdrun: view: cannot open the browser: %v\n", err)
		}
		defer done()
	}
	var running sync.WaitGroup
	defer running.Wait()
	if along != nil {
		running.Go(func() { along(ctx) })
	}
	return server.Serve(ctx, listener)
}

// announce makes the server of a page and prints the address of the page.
func (r *runner) announce(to io.Writer, given string, listener net.Listener,
	newServer func(addr string) *view.Server) *view.Server {
	at := listener.Addr().(*net.TCPAddr)
	server := newServer(pageAddress(given, at))
	fmt.Fprintf(to, "open %s\n", server.URL())
	if at.IP.IsLoopback() && r.isRemote() {
		fmt.Fprintf(to, "from your own machine, first run: ssh -L %d:%s %s\n", at.Port, at, hostName())
	}
	return server
}

// pageAddress returns the address of the page for browsers. given is the value of --addr, and at the address
// of the listener. If hvdrun listens on all addresses, a browser can use the name of this host.
func pageAddress(given string, at *net.TCPAddr) string {
	host, _, _ := net.SplitHostPort(given) // net.Listen has returned the error
	if at.IP.IsUnspecified() {
		host = hostName()
	}
	return net.JoinHostPort(host, strconv.Itoa(at.Port))
}

// openBrowser opens a page that redirects to the address with the token. All users can read command lines, so
// the token is in a file that only this user can read. done waits for xdg-open and removes the file.
func (r *runner) openBrowser(ctx context.Context, page []byte) (done func(), err error) {
	dir, err := rundir.New(r.variable(xdgVariable))
	if err != nil {
		return func() {}, err
	}
	done = func() { _ = dir.Close() } // the next hvdrun removes what is left
	file := filepath.Join(dir.Path(), "open.html")
	if err := os.WriteFile(file, page, 0o600); err != nil {
		return done, err
	}
	browser := exec.CommandContext(ctx, "xdg-open", file)
	if err := browser.Start(); err != nil {
		return done, err
	}
	return func() {
		_ = browser.Wait() // its status does not matter
		_ = dir.Close()
	}, nil
}

// isRemote reports whether the user has logged in to this host by ssh.
func (r *runner) isRemote() bool {
	for _, v := range r.env {
		if strings.HasPrefix(v, "SSH_CONNECTION=") {
			return true
		}
	}
	return false
}

// hostName returns the name of this host, or HOST if it is not known.
func hostName() string {
	name, err := os.Hostname()
	if err != nil {
		return "HOST"
	}
	return name
}

// exportTo writes the page about a job to a file. If that fails, it leaves no file, but removes no device and
// no link.
func exportTo(name string, run *view.Run, given ...string) error {
	f, err := outfile.Create(name, 0o666)
	if err != nil {
		return err
	}
	err = errors.Join(view.Export(f, run, given...), f.Close())
	if info, is := os.Lstat(name); err != nil && is == nil && info.Mode().IsRegular() {
		err = errors.Join(err, os.Remove(name))
	}
	return err
}
