package launch

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// HelperArg is the first argument of a process that is to run HelperMain.
const HelperArg = "__hvdrun-rank-helper"

// The helper's file descriptors besides 0, 1 and 2, which are the rank's.
const (
	orderFD  = 3 // the launcher's orders: signal numbers, a byte each; its end is the launcher's
	reportFD = 4 // the helper's reports, JSON
)

// shell runs scripts that do not say what runs them.
const shell = "/bin/sh"

// report is news of a rank: from its helper first PID or Errno and then, if the command ran, how it ended; from the agent Gone.
type report struct {
	// PID is the command's process, once it runs.
	PID int `json:"pid,omitempty"`
	// Errno is why the command could not be started.
	Errno syscall.Errno `json:"errno,omitempty"`

	// Ended says that the command has ended, At (nanoseconds since 1970), with Code or by Signal.
	Ended  bool           `json:"ended,omitempty"`
	At     int64          `json:"at,omitempty"`
	Code   int            `json:"code,omitempty"`
	Signal syscall.Signal `json:"signal,omitempty"`
	// Sent is the last signal meant to end it that it was sent before.
	Sent syscall.Signal `json:"sent,omitempty"`

	// Gone says that the helper has ended.
	Gone bool `json:"gone,omitempty"`
}

// helper stands between the launcher and one rank's command.
type helper struct {
	family  family
	reports *json.Encoder

	// Guarded by family.mu.
	pid    int // the command; its process group too
	alive  bool
	sent   syscall.Signal
	killed bool // by order, or because the launcher is gone
}

// HelperMain runs one rank's command for the launcher and returns the process's exit status. The program's main
// must call it, from the main goroutine and before anything else, when its first argument is HelperArg; args are the
// arguments after that one and env is the environment, which the command gets as it is. It ends with the process.
//
// The command runs in a process group of its own. When it ends, what it has started and left behind is killed, in
// whatever process group or session. If it ended after a signal that asked it to, those in its group, who got the
// signal too, may go on until the launcher's next order. When the launcher ends, however it ends, or orders it,
// everything is killed. The helper returns when no descendant is left.
func HelperMain(args, env []string) int {
	// The command's parent-death signal is tied to the thread that starts it (prctl(2)).
	runtime.LockOSThread()
	if len(args) < 2 {
		fmt.Fprintf(os.Stderr, "hvdrun: %s is for the launcher's own use\n", HelperArg)
		return 2
	}
	// The one for the timeline is for who asks for it: it would end a program that has not done that yet, or never does, as a shell. That
	// it is ignored passes on to the command and what that runs, until they ask.
	if s := timelineSignal(env); s != 0 {
		signal.Ignore(s)
	}
	// The launcher decides what a signal means. Ignoring them would make the command ignore them as well.
	for _, s := range []os.Signal{unix.SIGINT, unix.SIGTERM, unix.SIGHUP, unix.SIGQUIT, unix.SIGUSR1, unix.SIGUSR2} {
		if !signal.Ignored(s) {
			signal.Notify(make(chan os.Signal, 1), s)
		}
	}
	unix.CloseOnExec(orderFD)
	unix.CloseOnExec(reportFD)
	if err := unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0); err != nil {
		fmt.Fprintf(os.Stderr, "hvdrun: become a subreaper: %v\n", err)
		return 1
	}
	h := &helper{reports: json.NewEncoder(os.NewFile(reportFD, "reports"))}
	if err := h.start(args[0], args[1:], env); err != nil {
		var errno syscall.Errno
		if !errors.As(err, &errno) {
			errno = syscall.EINVAL // a zero byte in an argument
		}
		h.tell(report{Errno: errno})
		return 0
	}
	go h.obey(os.NewFile(orderFD, "orders"))
	h.family.reap() // here, since another goroutine would be another thread
	if err := h.family.err; err != nil {
		fmt.Fprintf(os.Stderr, "hvdrun: %s\n", strings.TrimPrefix(err.Error(), "launch: "))
		return 1
	}
	return 0
}

// timelineSignal returns the signal that starts and stops the timeline of a rank with an environment; 0 if there is none, or it is not one that
// the setting can have.
func timelineSignal(env []string) syscall.Signal {
	switch name := valueOf(env, "HVD_TIMELINE_SIGNAL"); {
	case strings.EqualFold(name, "SIGUSR1"):
		return unix.SIGUSR1
	case strings.EqualFold(name, "SIGUSR2"):
		return unix.SIGUSR2
	}
	return 0
}

func (h *helper) start(path string, argv, env []string) error {
	attr := &syscall.ProcAttr{
		Env:   env,
		Files: []uintptr{0, 1, 2},
		Sys:   &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL},
	}
	_, err := h.family.start(newBatch(), func() (int, error) {
		pid, _, err := syscall.StartProcess(path, argv, attr)
		if errors.Is(err, syscall.ENOEXEC) && isText(path) { // as execvp does (exec(3))
			pid, _, err = syscall.StartProcess(shell, slices.Concat([]string{shell, path}, argv[1:]), attr)
		}
		if err == nil {
			h.pid, h.alive = pid, true
			h.tell(report{PID: pid})
		}
		return pid, err
	}, h.ended)
	return err
}

// isText reports whether a file that the kernel cannot run is to be read by the shell: by its first line, as POSIX has it (XCU 2.9.1.4). A
// program for another machine is not.
func isText(path string) bool {
	f, err := os.Open(path)
	if err != nil {
		return false
	}
	defer f.Close()
	head := make([]byte, 128)
	n, err := io.ReadFull(f, head)
	if err != nil && err != io.EOF && err != io.ErrUnexpectedEOF {
		return false
	}
	line, _, _ := bytes.Cut(head[:n], []byte("\n"))
	return bytes.IndexByte(line, 0) < 0
}

// ended is called with family.mu held.
func (h *helper) ended(status unix.WaitStatus) {
	h.alive = false
	r := report{Ended: true, At: time.Now().UnixNano(), Sent: h.sent}
	if status.Signaled() {
		r.Signal = status.Signal()
	} else {
		r.Code = status.ExitStatus()
	}
	h.tell(r)
	h.family.fate = h.fate
}

// fate returns that of what the command left behind.
func (h *helper) fate(_, pgrp int) fate {
	if h.sent != 0 && !h.killed && pgrp == h.pid {
		return awaited
	}
	return doomed
}

// tell reports to the launcher. If it is gone there is nobody to tell, and obey ends the command.
func (h *helper) tell(r report) { _ = h.reports.Encode(r) }

// obey carries out the launcher's orders until it is gone.
func (h *helper) obey(orders *os.File) {
	for {
		var order [1]byte
		if _, err := orders.Read(order[:]); err != nil {
			h.signal(unix.SIGKILL)
			return
		}
		h.signal(syscall.Signal(order[0]))
	}
}

func (h *helper) signal(s syscall.Signal) {
	h.family.mu.Lock()
	defer h.family.mu.Unlock()
	switch s {
	case unix.SIGINT, unix.SIGTERM, unix.SIGHUP:
		h.sent = s
	case unix.SIGKILL:
		h.sent, h.killed = s, true
	}
	if h.alive {
		// It is not reaped, so both ids are its own still. It may have left the group.
		if err := unix.Kill(-h.pid, s); err != nil || s == unix.SIGKILL {
			_ = unix.Kill(h.pid, s) // fails if it has taken another user's rights
		}
	}
	if h.killed {
		h.family.fate = h.fate
		if _, err := h.family.sweep(); err != nil {
			fmt.Fprintf(os.Stderr, "hvdrun: %s\n", strings.TrimPrefix(err.Error(), "launch: "))
		}
	}
}
