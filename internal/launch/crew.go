package launch

import (
	"encoding/json"
	"fmt"
	"io"
	"os"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"
)

// crew is ranks of this host, each with its helper. A process can have one only, and must start no other children while it runs.
type crew struct {
	// news is told what the helpers report, by the rank's index, and last nil for the helper's end. Several goroutines call it.
	news func(i int, p *report)

	family  family
	before  map[int]bool // children that this process had before
	members []*member    // those that were started

	// workers are the goroutines that end with the last helper: the one that reaps and one per rank's reports.
	workers sync.WaitGroup
	over    chan struct{} // closed after them, and after all news
	reapErr error         // valid then
}

// member is one rank's helper.
type member struct {
	helper  int      // process id
	orders  *os.File // to the helper; closing it ends the rank
	reports *os.File // from the helper
	outputs [2]*pipeSource
}

// adopt makes this process a subreaper. A program that replaces itself by the launcher leaves it its children.
func adopt() (before map[int]bool, err error) {
	if err := unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0); err != nil {
		return nil, fmt.Errorf("launch: become a subreaper: %w", err)
	}
	children, err := listChildren()
	if err != nil {
		return nil, err
	}
	before = make(map[int]bool, len(children))
	for _, c := range children {
		before[c.pid] = true
	}
	return before, nil
}

// start starts a helper for each environment, to run the program at path with the words of a command. If it fails those that
// were started are members still: lead, and then end them.
func (c *crew) start(path string, command []string, envs [][]string) (err error) {
	c.over = make(chan struct{})
	c.family.own = make(map[int]func(unix.WaitStatus), len(envs))
	if c.before, err = adopt(); err != nil {
		return err
	}
	null, err := os.Open(os.DevNull)
	if err != nil {
		return fmt.Errorf("launch: standard input of the ranks: %w", err)
	}
	defer null.Close()
	// family.own is complete before anything is reaped.
	argv := append([]string{"hvdrun", HelperArg, path}, command...)
	for _, env := range envs {
		m, err := startHelper(argv, env, null)
		if err != nil {
			return err
		}
		c.members = append(c.members, m)
		c.family.own[m.helper] = doomOrphans(&c.family, c.before)
	}
	return nil
}

// doomOrphans is what to do when a child of this process has ended that is to leave nobody behind: the status 0 says that it has
// not.
func doomOrphans(f *family, before map[int]bool) func(unix.WaitStatus) {
	return func(status unix.WaitStatus) {
		if status.Exited() && status.ExitStatus() == 0 {
			return
		}
		f.fate = func(pid, _ int) fate {
			if before[pid] {
				return ignored
			}
			return doomed
		}
	}
}

// startHelper starts one helper. On an error nothing is left of it.
func startHelper(argv, env []string, null *os.File) (*member, error) {
	// In the order of the helper's descriptors from 1 on.
	mine, pid, err := startWithPipes("/proc/self/exe", argv, env, null, []bool{true, true, false, true})
	if err != nil {
		return nil, err
	}
	return &member{
		helper: pid, orders: mine[2], reports: mine[3],
		outputs: [2]*pipeSource{{File: mine[0]}, {File: mine[1]}},
	}, nil
}

// startWithPipes starts a program with pipes as its descriptors, from 0 on or, with first, from 1; reading says which of them are
// read here. On an error nothing is left of it.
func startWithPipes(path string, argv, env []string, first *os.File, reading []bool) (mine []*os.File, pid int, err error) {
	var theirs, files []uintptr
	defer func() {
		for _, fd := range theirs {
			unix.Close(int(fd))
		}
		if err != nil {
			for _, f := range mine {
				f.Close()
			}
		}
	}()
	for _, r := range reading {
		f, fd, err := pipe(r)
		if err != nil {
			return mine, 0, err
		}
		mine, theirs = append(mine, f), append(theirs, uintptr(fd))
	}
	if first != nil {
		files = []uintptr{first.Fd()}
	}
	pid, _, err = syscall.StartProcess(path, argv, &syscall.ProcAttr{
		Env:   env,
		Files: append(files, theirs...),
		// A group of its own keeps it from signals meant for this process's.
		Sys: &syscall.SysProcAttr{Setpgid: true},
	})
	if err != nil {
		return mine, 0, os.NewSyscallError("start process", err)
	}
	return mine, pid, nil
}

// pipe returns a pipe's reading and writing end. mine is the one that stays here, non-blocking; the other blocks,
// as programs expect. Neither is inherited unless it is passed on.
func pipe(readingIsMine bool) (mine *os.File, theirs int, err error) {
	var p [2]int
	if err := unix.Pipe2(p[:], unix.O_CLOEXEC); err != nil {
		return nil, 0, os.NewSyscallError("pipe2", err)
	}
	here, there := p[0], p[1]
	if !readingIsMine {
		here, there = there, here
	}
	if err := unix.SetNonblock(here, true); err != nil {
		unix.Close(here)
		unix.Close(there)
		return nil, 0, os.NewSyscallError("fcntl", err)
	}
	return os.NewFile(uintptr(here), "pipe"), there, nil
}

// lead begins to reap and to listen. It goes on until over is closed.
func (c *crew) lead() {
	c.workers.Go(func() { c.reapErr = c.family.reap() })
	for i, m := range c.members {
		c.workers.Go(func() { c.listen(i, m) })
	}
	go func() {
		c.workers.Wait()
		close(c.over)
	}()
}

// listen tells the helper's reports.
func (c *crew) listen(i int, m *member) {
	reports := json.NewDecoder(m.reports)
	for range maxNews - 1 {
		var p report
		if reports.Decode(&p) != nil {
			break
		}
		c.news(i, &p)
	}
	// Only the helper has the other end, so this is the helper's end.
	_, _ = io.Copy(io.Discard, m.reports)
	c.news(i, nil)
}

// send has the helper of a rank send s to the rank's process group, or kill everything if it is SIGKILL. It does not wait: a
// pipe holds 65536 signals.
func (c *crew) send(i int, s syscall.Signal) {
	_, _ = c.members[i].orders.Write([]byte{byte(s)}) // an error is a helper that has just ended
}

// force kills the helpers, and with them the ranks.
func (c *crew) force() {
	c.family.mu.Lock()
	defer c.family.mu.Unlock()
	for pid := range c.family.own {
		_ = unix.Kill(pid, unix.SIGKILL) // it is a child and not reaped
	}
}

func (c *crew) done() <-chan struct{} { return c.over }

// release lets go of the helpers, which are gone or will not go, and has the outputs end.
func (c *crew) release() error {
	for _, m := range c.members {
		m.orders.Close()
		m.reports.Close()
		for _, p := range m.outputs {
			p.finish()
		}
	}
	select {
	case <-c.over:
		return c.reapErr
	default:
		return nil // who is left is another error
	}
}
