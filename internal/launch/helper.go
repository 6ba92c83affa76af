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

// HelperArg is the first argument of a process that must run HelperMain.
const HelperArg = "__hvdrun-rank-helper"

// The helper's file descriptors besides 0, 1 and 2, which are those of the rank.
const (
	// the launcher's orders: signal numbers, a byte each; end of file means that the launcher is gone
	orderFD  = 3
	reportFD = 4 // the helper's reports, as JSON
)

// shell is the interpreter of scripts that do not name one.
const shell = "/bin/sh"

// report is a message about a rank. The helper sends first PID or Errno and then, if the command ran, how it
// ended; the agent sends Gone.
type report struct {
	// PID is the process ID of the command, sent when it runs.
	PID int `json:"pid,omitempty"`
	// Errno is the error for which the command could not be started.
	Errno syscall.Errno `json:"errno,omitempty"`

	// Ended states that the command has ended, at time At (nanoseconds since 1970), with exit status Code or
	// killed by Signal.
	Ended  bool           `json:"ended,omitempty"`
	At     int64          `json:"at,omitempty"`
	Code   int            `json:"code,omitempty"`
	Signal syscall.Signal `json:"signal,omitempty"`
	// Sent is the last signal to end the command that the helper had sent before, or 0.
	Sent syscall.Signal `json:"sent,omitempty"`

	// Gone states that the helper has ended.
	Gone bool `json:"gone,omitempty"`
}

// helper runs the command of one rank for the launcher.
type helper struct {
	family  family
	reports *json.Encoder

	// The fields below are guarded by family.mu.
	pid    int // process ID of the command, and of its process group
	alive  bool
	sent   syscall.Signal
	killed bool // the launcher ordered SIGKILL, or is gone
}

// HelperMain runs the command of one rank for the launcher and returns the exit status of the process. The
// program's main must call it from the main goroutine, before anything else, if its first argument is
// HelperArg. args are the arguments after HelperArg. env is the environment, which is passed on to the
// command unchanged. The process must exit when HelperMain returns.
//
// The command runs in a process group of its own. When it has ended, HelperMain kills the processes that it
// has left behind, in any process group or session. If the command ended after a signal that asked it to, the
// processes of its group, which received the signal too, may run on until the next order of the launcher.
// When the launcher orders it, or ends for any reason, HelperMain kills everything. It returns when no
// descendant is left.
func HelperMain(args, env []string) int {
	// The command's parent-death signal is tied to the thread that starts it (prctl(2)).
	runtime.LockOSThread()
	if len(args) < 2 {
		fmt.Fprintf(os.Stderr, "hvdrun: %s is an internal argument of hvdrun\n", HelperArg)
		return 2
	}
	// The timeline signal is ignored until a rank installs a handler: by default it would end a program that
	// has not done so yet or never does, such as a shell. The command and its children inherit that the
	// signal is ignored.
	if s := timelineSignal(env); s != 0 {
		signal.Ignore(s)
	}
	// The launcher decides what a signal means. The helper catches the signals instead of ignoring them,
	// because the command would inherit ignored signals.
	for _, s := range []os.Signal{unix.SIGINT, unix.SIGTERM, unix.SIGHUP, unix.SIGQUIT, unix.SIGUSR1,
		unix.SIGUSR2} {
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
			errno = syscall.EINVAL // an argument has a zero byte, which gives an error without a number
		}
		h.sendReport(report{Errno: errno})
		return 0
	}
	go h.handleOrders(os.NewFile(orderFD, "orders"))
	h.family.reap() // on this goroutine, whose thread started the command
	if err := h.family.err; err != nil {
		fmt.Fprintf(os.Stderr, "hvdrun: %s\n", strings.TrimPrefix(err.Error(), "launch: "))
		return 1
	}
	return 0
}

// timelineSignal returns the signal that starts and stops the timeline of a rank with environment env:
// SIGUSR1 or SIGUSR2, or 0 if the setting has no or another value.
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
		if errors.Is(err, syscall.ENOEXEC) && isText(path) { // execvp does the same (exec(3))
			pid, _, err = syscall.StartProcess(shell, slices.Concat([]string{shell, path}, argv[1:]), attr)
		}
		if err == nil {
			h.pid, h.alive = pid, true
			h.sendReport(report{PID: pid})
		}
		return pid, err
	}, h.ended)
	return err
}

// isText reports whether the shell should run a file that the kernel cannot execute: POSIX decides that by
// the first line (XCU 2.9.1.4). It is false for a program of another machine.
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

// ended reports the end of the command to the launcher, and sets the action for the processes that it left
// behind. The caller holds family.mu.
func (h *helper) ended(status unix.WaitStatus) {
	h.alive = false
	r := report{Ended: true, At: time.Now().UnixNano(), Sent: h.sent}
	if status.Signaled() {
		r.Signal = status.Signal()
	} else {
		r.Code = status.ExitStatus()
	}
	h.sendReport(r)
	h.family.orphans = h.orphanAction
}

// orphanAction returns the action for a process that the command left behind. The caller holds family.mu.
func (h *helper) orphanAction(_, pgrp int) orphanAction {
	if h.sent != 0 && !h.killed && pgrp == h.pid {
		return awaitOrphan
	}
	return killOrphan
}

// sendReport sends a report to the launcher. It ignores errors: if the launcher is gone, handleOrders ends
// the command.
func (h *helper) sendReport(r report) { _ = h.reports.Encode(r) }

// handleOrders carries out the launcher's orders until the launcher is gone. Then it kills everything.
func (h *helper) handleOrders(orders *os.File) {
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
		// The command is not reaped, so the IDs of process and group are still its own. It may have left the
		// group.
		if err := unix.Kill(-h.pid, s); err != nil || s == unix.SIGKILL {
			_ = unix.Kill(h.pid, s) // this fails if the command now runs as another user
		}
	}
	if h.killed {
		h.family.orphans = h.orphanAction
		if _, err := h.family.sweep(); err != nil {
			fmt.Fprintf(os.Stderr, "hvdrun: %s\n", strings.TrimPrefix(err.Error(), "launch: "))
		}
	}
}
