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

// orphanAction says what a family does with an orphan: a child that this process did not start but inherited
// as a subreaper.
type orphanAction int

const (
	ignoreOrphan orphanAction = iota // reap does not wait for the orphan
	awaitOrphan                      // reap returns only when the orphan has ended
	killOrphan                       // the orphan is killed at once, and reap returns only when it has ended
)

// family manages the children of this process: those that the process has started and those that it has
// inherited.
//
// The family kills a process by its ID only while the process is an unreaped child, and it reaps children
// only with mu held. So a signal never hits another process to which the system has given the same ID later.
// The family need not search for deeper descendants. When their parent dies, they become children of the
// nearest subreaper, which is this process, before the parent can be reaped. So the family lists the children
// again after each death, until none is left.
//
// A family reaps every child of its process. So there can be only one family in a process, and no other code
// in the process may wait for children.
type family struct {
	mu sync.Mutex
	// own holds the children that this family started and that are not reaped yet.
	own map[int]relative
	// orphans returns the action for a child that is not in own, given its process ID and process group. If
	// orphans is nil, the family ignores all such children and does not list the children of the process.
	orphans func(pid, pgrp int) orphanAction
	// before holds the children that the process already had when adopt was called.
	before map[int]bool

	batches []*batch // batches to which no child is added any more and whose children are not all reaped
	reaping bool     // a goroutine is running reap
	err     error    // why reap gave up; from then on all batches count as gone
	reaper  sync.WaitGroup
}

// relative is a child that the family has started. ended is called when the child is reaped, with family.mu
// held.
type relative struct {
	batch *batch
	ended func(unix.WaitStatus)
}

// batch is a set of children that are started for one purpose.
type batch struct {
	left int           // number of children that are not reaped yet; guarded by family.mu
	gone chan struct{} // closed when every child in the batch is reaped and reap need not wait for an orphan
}

func newBatch() *batch { return &batch{gone: make(chan struct{})} }

// adopt makes this process a subreaper. The family never kills children that exist at the time of the call.
// Such children exist if another program started them and then replaced itself with the launcher (execve).
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

// killOrphans is called when a child that should leave no processes behind has ended. A child whose status is
// not 0 may have left some. Then killOrphans makes the family kill all orphans from now on, except children
// that existed before adopt. The caller holds mu.
func (f *family) killOrphans(status unix.WaitStatus) {
	if status.Exited() && status.ExitStatus() == 0 {
		return
	}
	f.orphans = func(pid, _ int) orphanAction {
		if f.before[pid] {
			return ignoreOrphan
		}
		return killOrphan
	}
}

// start calls the function start, which starts a child, and adds the child to b. It holds mu meanwhile. The
// caller must not have called complete for b. ended is called when the child is reaped.
func (f *family) start(b *batch, start func() (pid int, err error),
	ended func(unix.WaitStatus)) (pid int, err error) {
	f.mu.Lock() // so that the child is not reaped before it is in own
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

// complete declares that no more children will be added to b. From now on the family reaps its children.
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

// kill kills a child that the family started, unless the child has been reaped.
func (f *family) kill(pid int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if _, ok := f.own[pid]; ok {
		_ = unix.Kill(pid, unix.SIGKILL) // the child is not reaped, so no other process has its ID
	}
}

// killGroup kills the process group of a child that the family started, unless the child has been reaped.
func (f *family) killGroup(pid int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if _, ok := f.own[pid]; ok {
		_ = unix.Kill(-pid, unix.SIGKILL)
	}
}

// reap reaps children until own is empty and there is no orphan to wait for.
func (f *family) reap() {
	for !f.collect() {
		// WNOWAIT leaves the child unreaped, because collect reaps it with mu held. The error can be ignored,
		// because collect gets the same error.
		_ = unix.Waitid(unix.P_ALL, 0, nil, unix.WEXITED|unix.WNOWAIT, nil)
	}
}

// collect reaps the dead children, then calls sweep for the inherited children. It reports whether reap must
// return.
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

// reapDead reaps the dead children and reports whether the process has no children left. The caller holds mu.
func (f *family) reapDead() (none bool, err error) {
	for {
		var status unix.WaitStatus
		pid, err := unix.Wait4(-1, &status, unix.WNOHANG, nil)
		switch {
		case err == unix.EINTR:
			continue
		case err == unix.ECHILD && len(f.own) > 0:
			return false, errors.New("launch: wait for children: other code in this process has reaped some of them")
		case err == unix.ECHILD:
			return true, nil
		case err != nil:
			return false, fmt.Errorf("launch: wait for children: %w", err)
		case pid == 0:
			return false, nil // the remaining children are alive
		}
		if r, ok := f.own[pid]; ok {
			delete(f.own, pid)
			r.batch.left--
			r.ended(status)
		}
	}
}

// sweep calls f.orphans for each child that is not in own, and carries out the action that it returns. sweep
// returns the number of these children for which reap must wait. The caller holds mu.
func (f *family) sweep() (awaiting int, err error) {
	if f.orphans == nil {
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
		switch f.orphans(c.pid, c.pgrp) {
		case killOrphan:
			// An error means that the child runs as another user. reap waits for the child nevertheless: if
			// it does not end, the launcher reports it after a deadline.
			_ = unix.Kill(c.pid, unix.SIGKILL)
			awaiting++
		case awaitOrphan:
			awaiting++
		}
	}
	return awaiting, nil
}

type child struct{ pid, pgrp int }

// listChildren returns the children of this process, including zombies, from /proc. It reads a file for each
// process of the host, unless this process has no children.
func listChildren() ([]child, error) {
	const anyChild = unix.WEXITED | unix.WNOHANG | unix.WNOWAIT | unix.WALL
	if unix.Waitid(unix.P_ALL, 0, nil, anyChild, nil) == unix.ECHILD {
		return nil, nil
	}
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
		if errors.Is(err, os.ErrNotExist) || errors.Is(err, syscall.ESRCH) ||
			errors.Is(err, os.ErrPermission) {
			continue // the process has ended since the directory was read, or belongs to another user
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

// parseStat returns the parent process and the process group from the text of /proc/PID/stat (proc(5)). The
// name of the program is in parentheses, and may itself contain parentheses and blanks. After the name come
// the state, the parent and the group.
func parseStat(text string) (ppid, pgrp int, err error) {
	fields := strings.Fields(text[strings.LastIndexByte(text, ')')+1:])
	if len(fields) < 3 {
		return 0, 0, fmt.Errorf("stat: got %.64q, want at least 5 fields", text)
	}
	if ppid, err = strconv.Atoi(fields[1]); err != nil {
		return 0, 0, fmt.Errorf("stat: parse the parent process: %w", err)
	}
	if pgrp, err = strconv.Atoi(fields[2]); err != nil {
		return 0, 0, fmt.Errorf("stat: parse the process group: %w", err)
	}
	return ppid, pgrp, nil
}
