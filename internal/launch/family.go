package launch

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"
)

// fate is what becomes of a child that this process did not start: an orphan that came to it as a subreaper.
type fate int

const (
	ignored fate = iota // it is nobody's business here
	awaited             // reap does not return before it is gone
	doomed              // awaited, and killed now
)

// family is the children of this process: those it started and those it inherits.
//
// A process is killed through its id only while it is a child that is not reaped, and children are reaped only
// with mu held, so an id that was given to another process in the meantime is never hit. Deeper descendants need no
// search: when their parent dies they become children of the nearest subreaper, this process, before the parent can
// be reaped. Each death is therefore followed by another look, until nobody is left.
//
// A family takes every child of its process: a process can have one only, and must not wait for children itself.
type family struct {
	mu sync.Mutex
	// own holds the children that were started here and are not reaped.
	own map[int]relative
	// fate decides about a child that is not in own, by its process id and group. nil ignores all and saves
	// looking for them.
	fate func(pid, pgrp int) fate
	// before are the children that the process had at adopt.
	before map[int]bool

	batches []*batch // complete and not gone
	reaping bool     // a goroutine runs reap
	err     error    // why reap gave up; all batches count as gone then
	reaper  sync.WaitGroup
}

// relative is a child of a batch, with what to do when it is reaped. The function is called with mu held.
type relative struct {
	batch *batch
	ended func(unix.WaitStatus)
}

// batch is children that are started for one purpose.
type batch struct {
	left int           // children that are not reaped; guarded by family.mu
	gone chan struct{} // closed when none is left, and no orphan is awaited
}

func newBatch() *batch { return &batch{gone: make(chan struct{})} }

// adopt makes this process a subreaper. Children that it has already are left alone: a program that replaces itself by the
// launcher leaves it its children.
func (f *family) adopt() error {
	if f.before != nil {
		return nil
	}
	if err := unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0); err != nil {
		return fmt.Errorf("launch: become a subreaper: %w", err)
	}
	children, err := listChildren()
	if err != nil {
		return err
	}
	f.before = make(map[int]bool, len(children))
	for _, c := range children {
		f.before[c.pid] = true
	}
	return nil
}

// doomOrphans is for a child that has ended and was to leave nobody behind. If its status is not 0 it may have: then all orphans are
// killed from now on. mu is held.
func (f *family) doomOrphans(status unix.WaitStatus) {
	if status.Exited() && status.ExitStatus() == 0 {
		return
	}
	f.fate = func(pid, _ int) fate {
		if f.before[pid] {
			return ignored
		}
		return doomed
	}
}

// start starts a child of a batch that is not complete.
func (f *family) start(b *batch, start func() (pid int, err error), ended func(unix.WaitStatus)) (pid int, err error) {
	f.mu.Lock() // nobody reaps it before it is in own
	defer f.mu.Unlock()
	if pid, err = start(); err == nil {
		if f.own == nil {
			f.own = make(map[int]relative)
		}
		f.own[pid] = relative{b, ended}
		b.left++
	}
	return pid, err
}

// complete says that a batch gets no more children. Its children are reaped from now on.
func (f *family) complete(b *batch) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if b.left == 0 {
		close(b.gone)
		return
	}
	f.batches = append(f.batches, b)
	if !f.reaping {
		f.reaping = true
		f.reaper.Go(f.reap)
	}
}

// kill kills a child if it is not reaped.
func (f *family) kill(pid int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if _, ok := f.own[pid]; ok {
		_ = unix.Kill(pid, unix.SIGKILL) // it is a child and not reaped
	}
}

// reap returns when own is empty and no other child is awaited.
func (f *family) reap() {
	for !f.collect() {
		// WNOWAIT leaves the child for collect, which reaps with mu held. An error comes again there.
		_ = unix.Waitid(unix.P_ALL, 0, nil, unix.WEXITED|unix.WNOWAIT, nil)
	}
}

// collect reaps the children that are dead, then looks at the others. It reports whether reap is to end.
func (f *family) collect() bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	none, err := f.reapDead()
	awaiting := 0
	if !none && err == nil {
		awaiting, err = f.sweep()
	}
	if err != nil {
		f.err = err
	} else if awaiting > 0 {
		return false
	}
	f.batches = slices.DeleteFunc(f.batches, func(b *batch) bool {
		if b.left == 0 || err != nil {
			close(b.gone)
		}
		return b.left == 0 || err != nil
	})
	f.reaping = err == nil && len(f.own) > 0
	return !f.reaping
}

// reapDead reports whether there are no children at all. mu is held.
func (f *family) reapDead() (none bool, err error) {
	for {
		var status unix.WaitStatus
		pid, err := unix.Wait4(-1, &status, unix.WNOHANG, nil)
		switch {
		case err == unix.EINTR:
			continue
		case err == unix.ECHILD && len(f.own) > 0:
			return false, errors.New("launch: wait for children: somebody else in this process has reaped them")
		case err == unix.ECHILD:
			return true, nil
		case err != nil:
			return false, fmt.Errorf("launch: wait for children: %w", err)
		case pid == 0:
			return false, nil // the rest is alive
		}
		if r, ok := f.own[pid]; ok {
			delete(f.own, pid)
			r.batch.left--
			r.ended(status)
		}
	}
}

// sweep gives every child that is not in own its fate and returns how many of them are awaited. mu is held.
func (f *family) sweep() (awaiting int, err error) {
	if f.fate == nil {
		return 0, nil
	}
	children, err := listChildren()
	if err != nil {
		return 0, err
	}
	for _, c := range children {
		if _, ok := f.own[c.pid]; ok {
			continue
		}
		switch f.fate(c.pid, c.pgrp) {
		case doomed:
			// An error is a child with another user's rights. It is awaited like the rest: the launcher, which
			// has a deadline, says so.
			_ = unix.Kill(c.pid, unix.SIGKILL)
			awaiting++
		case awaited:
			awaiting++
		}
	}
	return awaiting, nil
}

type child struct{ pid, pgrp int }

// listChildren reads the children of this process from /proc, zombies included. It costs a file per process of the
// host.
func listChildren() ([]child, error) {
	dir, err := os.Open("/proc")
	if err != nil {
		return nil, fmt.Errorf("launch: list children: %w", err)
	}
	defer dir.Close()
	names, err := dir.Readdirnames(-1)
	if err != nil {
		return nil, fmt.Errorf("launch: list children: %w", err)
	}
	self := os.Getpid()
	var children []child
	for _, name := range names {
		pid, err := strconv.Atoi(name)
		if err != nil {
			continue
		}
		stat, err := os.ReadFile("/proc/" + name + "/stat")
		if errors.Is(err, os.ErrNotExist) || errors.Is(err, syscall.ESRCH) || errors.Is(err, os.ErrPermission) {
			continue // gone meanwhile, or not ours to see
		}
		if err != nil {
			return nil, fmt.Errorf("launch: list children: %w", err)
		}
		ppid, pgrp, err := parseStat(string(stat))
		if err != nil {
			return nil, fmt.Errorf("launch: list children: process %d: %w", pid, err)
		}
		if ppid == self {
			children = append(children, child{pid, pgrp})
		}
	}
	return children, nil
}

// parseStat reads the parent and the process group from the text of /proc/PID/stat (proc(5)): the name in
// parentheses, which may itself hold parentheses and blanks, is followed by state, parent and group.
func parseStat(text string) (ppid, pgrp int, err error) {
	fields := strings.Fields(text[strings.LastIndexByte(text, ')')+1:])
	if len(fields) < 3 {
		return 0, 0, fmt.Errorf("stat: got %.64q, want at least 5 fields", text)
	}
	if ppid, err = strconv.Atoi(fields[1]); err != nil {
		return 0, 0, fmt.Errorf("stat: parent: %w", err)
	}
	if pgrp, err = strconv.Atoi(fields[2]); err != nil {
		return 0, 0, fmt.Errorf("stat: group: %w", err)
	}
	return ppid, pgrp, nil
}
