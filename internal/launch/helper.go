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

// HelperArg is the first argument of a process whose main must call HelperMain.
const HelperArg = "__hvdrun-rank-helper"

// These are the helper's file descriptors except 0, 1 and 2, which it shares with the rank.
const (
	// orderFD is a pipe that carries the launcher's orders. Each order is one byte, a signal number. The end
	// of the pipe means that the launcher is gone.
	orderFD  = 3
	reportFD = 4 // carries the helper's reports, as JSON
)

// shell is the program that runs scripts without a #! line.
const shell = "/bin/sh"

// report is a message about a rank. The helper first sends PID or Errno. When the command has ended, the
// helper sends a report with Ended and the fields below it. Gone is sent by the agent, not by the helper.
type report struct {
	// PID is the process ID of the command. It is sent when the command was started.
	PID int `json:"pid,omitempty"`
	// Errno is the reason why the command could not be started.
	Errno syscall.Errno `json:"errno,omitempty"`

	// Ended is set if the command has ended. At is the time of its end in nanoseconds since 1970. If Signal
	// is 0, the command ended with exit status Code. Otherwise Signal killed the command.
	Ended  bool           `json:"ended,omitempty"`
	At     int64          `json:"at,omitempty"`
	Code   int            `json:"code,omitempty"`
	Signal syscall.Signal `json:"signal,omitempty"`
	// Sent is the last signal that the helper sent to ask the command to end, or 0.
	Sent syscall.Signal `json:"sent,omitempty"`

	// Gone is set if the helper has ended.
	Gone bool `json:"gone,omitempty"`
}

// helper runs the command of one rank for the launcher.
type helper struct {
	family  family
	reports *json.Encoder
	grace   time.Duration // 0, or hostJob.Grace if hostJob.Starter is set

	// The fields below are guarded by family.mu.
	pid    int // process ID of the command, and of its process group
	alive  bool
	sent   syscall.Signal
	killed bool // the launcher has ordered SIGKILL, or is gone
}

// HelperMain runs the command of one rank for the launcher and returns the exit status of the process. If the
// first argument of the program is HelperArg, its main must call HelperMain from the main goroutine before
// anything else. args holds the arguments after HelperArg. env is the environment, which HelperMain passes to
// the command unchanged. The process must exit when HelperMain returns.
//
// The command runs in a process group of its own. When the command has ended, HelperMain kills the processes
// that the command left behind, in any process group or session. There is one exception: if the command ended
// after the launcher sent a signal that asked it to end, the other processes of its group received that
// signal too. They may run on until the next order of the launcher. If the launcher orders SIGKILL or is
// gone, HelperMain kills everything. If the command is itself a launcher, such as mpirun, it first gets
// SIGTERM and some time to end its processes, also those on other hosts, and to remove its files. HelperMain
// returns when no descendant is left.
func HelperMain(args, env []string) int {
	// The kernel sends the command its parent-death signal when the thread that started the command ends
	// (prctl(2)). So this goroutine must keep its thread.
	runtime.LockOSThread()
	var grace time.Duration
	err := errors.New("too few arguments")
	if len(args) >= 3 {
		grace, err = time.ParseDuration(args[0])
	}
	if err != nil {
		fmt.Fprintf(os.Stderr, "hvdrun: %s is an internal argument of hvdrun\n", HelperArg)
		return 2
	}
	// The launcher decides what a signal means, so the helper must not die of one. It catches the signals
	// instead of ignoring them, because the command would inherit ignored signals.
	catchSIGPIPE()
	catch(make(chan os.Signal, 1), unix.SIGINT, unix.SIGTERM, unix.SIGHUP, unix.SIGQUIT, unix.SIGUSR1,
		unix.SIGUSR2)
	unix.CloseOnExec(orderFD)
	unix.CloseOnExec(reportFD)
	if err := unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0); err != nil {
		fmt.Fprintf(os.Stderr, "hvdrun: become a subreaper: %v\n", err)
		return 1
	}
	h := &helper{reports: json.NewEncoder(os.NewFile(reportFD, "reports")), grace: grace}
	if err := h.start(args[1], args[2:], env); err != nil {
		var errno syscall.Errno
		if !errors.As(err, &errno) {
			errno = syscall.EINVAL // an argument contains a zero byte; that error has no number
		}
		h.sendReport(report{Errno: errno})
		return 0
	}
	go h.handleOrders(os.NewFile(orderFD, "orders"))
	// Call reap on this goroutine, so that its thread does not end. Otherwise the kernel would kill the
	// command, because this thread has started it.
	h.family.reap()
	if err := h.family.err; err != nil {
		fmt.Fprintf(os.Stderr, "hvdrun: %s\n", strings.TrimPrefix(err.Error(), "launch: "))
		return 1
	}
	return 0
}

// catch makes c receive signals, except those that are ignored.
func catch(c chan<- os.Signal, signals ...os.Signal) {
	for _, s := range signals {
		if !signal.Ignored(s) {
			signal.Notify(c, s)
		}
	}
}

// catchSIGPIPE makes a write to a pipe that nobody reads fail. Otherwise it would kill this process if the
// pipe is its standard output or standard error, and with it the ranks. Children do not inherit this, as they
// would if the signal were ignored.
func catchSIGPIPE() { signal.Notify(make(chan os.Signal, 1), unix.SIGPIPE) }

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
			h.sendReport(report{PID: pid})
		}
		return pid, err
	}, h.ended)
	return err
}

// isText reports whether the shell should run a file that the kernel cannot execute. According to POSIX it
// should if the first line of the file contains no zero byte (XCU 2.9.1.4). So it does not run a binary for
// another processor.
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

// ended reports the end of the command to the launcher. From then on orphanAction decides about the processes
// that the command left behind. The caller holds family.mu.
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

// orphanAction returns the action for a process that the command left behind. pgrp is its process group. The
// caller holds family.mu.
func (h *helper) orphanAction(_, pgrp int) orphanAction {
	if h.sent != 0 && !h.killed && pgrp == h.pid {
		return awaitOrphan
	}
	return killOrphan
}

// sendReport sends a report to the launcher. It ignores errors: if the launcher is gone, handleOrders ends
// the command.
func (h *helper) sendReport(r report) { _ = h.reports.Encode(r) }

// handleOrders carries out the launcher's orders. When the launcher is gone, it kills all processes of the
// rank, after h.grace.
func (h *helper) handleOrders(orders *os.File) {
	for {
		var order [1]byte
		if _, err := orders.Read(order[:]); err != nil {
			if h.grace > 0 {
				h.signal(unix.SIGTERM)
				<-time.After(h.grace)
			}
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
		if !h.killed {
			h.sent = s
		}
	case unix.SIGKILL:
		h.sent, h.killed = s, true
	}
	if h.alive {
		// The command has not been reaped, so its process ID and group ID have not been reused. The command
		// may have left its group, so SIGKILL is sent to it directly too.
		if err := unix.Kill(-h.pid, s); err != nil || s == unix.SIGKILL {
			_ = unix.Kill(h.pid, s) // fails if the command now runs as another user
		}
	}
	if h.killed {
		h.family.orphans = h.orphanAction
		if _, err := h.family.sweep(); err != nil {
			fmt.Fprintf(os.Stderr, "hvdrun: %s\n", strings.TrimPrefix(err.Error(), "launch: "))
		}
	}
}
