package launch

import (
	"errors"
	"fmt"
	"os"
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
	// own holds the children that were started here and are not reaped, with what to do when they are. The function
	// is called with mu held.
	own map[int]func(unix.WaitStatus)
	// fate decides about a child that is not in own, by its process id and group. nil ignores all and saves
	// looking for them.
	fate func(pid, pgrp int) fate
}

// reap returns when own is empty and no other child is awaited.
func (f *family) reap() error {
	for {
		done, err := f.collect()
		if done || err != nil {
			return err
		}
		// WNOWAIT leaves the child for collect, which reaps with mu held.
		err = unix.Waitid(unix.P_ALL, 0, nil, unix.WEXITED|unix.WNOWAIT, nil)
		if err != nil && err != unix.EINTR && err != unix.ECHILD {
			return fmt.Errorf("launch: wait for children: %w", err)
		}
	}
}

// collect reaps the children that are dead, then looks at the others. It reports whether there is nothing to wait
// for any more.
func (f *family) collect() (bool, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
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
		}
		if pid == 0 {
			break // the rest is alive
		}
		if ended := f.own[pid]; ended != nil {
			delete(f.own, pid)
			ended(status)
		}
	}
	left, err := f.sweep()
	return left == 0 && len(f.own) == 0, err
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
