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
	ignoreOrphan orphanAction = iota // reap does not wait for it
	awaitOrphan                      // reap returns only when it has ended
	killOrphan                       // it is killed at once, and reap returns only when it has ended
)

// family manages the children of this process: those that the process has started and those that it has
// inherited.
//
// A process is killed by its ID only while it is an unreaped child, and children are reaped only with mu
// held. So a signal never hits another process that has got the same ID later. The family need not search for
// deeper descendants. When their parent dies, they become children of the nearest subreaper, which is this
// process, and they do so before the parent can be reaped. So the family lists the children again after each
// death, until none is left.
//
// A family reaps every child of its process. So there can be only one family in a process, and no other code
// in the process may wait for children.
type family struct {
	mu sync.Mutex
	// own holds the children that this family started and that are not reaped yet.
	own map[int]relative
	// orphans returns the action for a child that is not in own, from its process ID and process group. If
	// orphans is nil, all such children are ignored, and the family need not list the children.
	orphans func(pid, pgrp int) orphanAction
	// before holds the children that the process already had when adopt was called.
	before map[int]bool

	batches []*batch // batches that are complete but not gone
	reaping bool     // a goroutine is running reap
	err     error    // why reap gave up, after which all batches count as gone
	reaper  sync.WaitGroup
}

// relative is a child that the family has started. ended is called with family.mu held when the child is
// reaped.
type relative struct {
	batch *batch
	ended func(unix.WaitStatus)
}

// batch is a set of children that are started for one purpose.
type batch struct {
	left int           // number of children that are not reaped yet; guarded by family.mu
	gone chan struct{} // closed when every child is reaped and reap waits for no orphan
}

func newBatch() *batch { return &batch{gone: make(chan struct{})} }

// adopt makes this process a subreaper. The family never kills children that exist at this time. Such
// children exist if another program started them and then replaced itself by the launcher (execve).
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

// killOrphans handles the end of a child that must leave no processes behind. A child whose status is not 0
// may have left some. So if status is not 0, all orphans are killed from then on, except the children from
// before adopt. The caller holds mu.
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

// start calls the function start with mu held to start a child, and adds the child to b. b must not be
// complete. ended is called when the child is reaped.
func (f *family) start(b *batch, start func() (pid int, err error),
	ended func(unix.WaitStatus)) (pid int, err error) {
	f.mu.Lock() // the child must not be reaped before it is in own
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

// complete marks a batch as complete: no more children will be added. Its children are reaped from now on.
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

// reap reaps children until own is empty and there is no orphan to wait for.
func (f *family) reap() {
	for !f.collect() {
		// WNOWAIT leaves the reaping to collect, which holds mu while it reaps. An error can be ignored here,
		// because collect gets the same error.
		_ = unix.Waitid(unix.P_ALL, 0, nil, unix.WEXITED|unix.WNOWAIT, nil)
	}
}

// collect reaps the dead children, then calls sweep for the inherited children. It reports whether reap has
// to end.
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

// sweep takes the action that f.orphans returns for each child that is not in own. It returns for how many of
// these children reap must wait. The caller holds mu.
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
			// An error means that the child runs as another user. reap waits for it nevertheless, because the
			// launcher has a deadline after which it reports the process.
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
// process of the host.
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
		if errors.Is(err, os.ErrNotExist) || errors.Is(err, syscall.ESRCH) ||
			errors.Is(err, os.ErrPermission) {
			continue // the process has ended meanwhile, or belongs to another user
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

// parseStat returns the parent and the process group from the text of /proc/PID/stat (proc(5)). The name of
// the program is in parentheses, and may itself contain parentheses and blanks. After it come the state, the
// parent and the group.
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
