package client

import (
	"bytes"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gohvd/gohvd/internal/config"
	"github.com/gohvd/gohvd/internal/logs"
)

const (
	// keptLines is how many of the last lines of the log of a sidecar an error shows. keptLine is the maximum
	// length of a line that has not ended.
	keptLines = 20
	keptLine  = 4096
	// describeTimeout is how long the end of the process is waited for after the connection has ended.
	describeTimeout = 5 * time.Second
	// exitTimeout is how long the sidecar may take to exit. It waits up to 10 s for other ranks.
	exitTimeout = 15 * time.Second
)

// child is a sidecar that this process has started.
type child struct {
	cmd    *exec.Cmd
	log    *lastLines
	exited chan struct{} // closed when err is set
	err    error         // of Wait
}

// lastLines writes to standard error, and keeps the last lines.
type lastLines struct {
	mu    sync.Mutex
	lines [][]byte
	rest  []byte // a line that has not ended
}

func (l *lastLines) Write(b []byte) (int, error) {
	_, _ = logs.Stderr{}.Write(b) // standard error may be closed
	l.mu.Lock()
	defer l.mu.Unlock()
	l.rest = append(l.rest, b...)
	for {
		line, rest, ended := bytes.Cut(l.rest, []byte("\n"))
		if !ended {
			break
		}
		l.lines, l.rest = append(l.lines, bytes.Clone(line)), rest
	}
	l.lines = l.lines[max(len(l.lines)-keptLines, 0):]
	l.rest = bytes.Clone(l.rest[max(len(l.rest)-keptLine, 0):])
	return len(b), nil
}

func (l *lastLines) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	all := l.lines
	if len(l.rest) > 0 {
		all = append(all[:len(all):len(all)], l.rest)
	}
	return strings.TrimSpace(strings.ToValidUTF8(string(bytes.Join(all, []byte("\n"))), "?"))
}

// find returns the path of hvdd.
func find(cfg *Config) (string, error) {
	if cfg.Binary != "" {
		if err := executable(cfg.Binary); err != nil {
			return "", fmt.Errorf("%s is %q, want the path of an executable file: %w", config.SidecarBinaryVariable,
				cfg.Binary, err)
		}
		return cfg.Binary, nil
	}
	for _, folder := range cfg.Near {
		if path := filepath.Join(folder, config.SidecarProgram); executable(path) == nil {
			return path, nil
		}
	}
	for _, folder := range filepath.SplitList(variable(cfg.Environ, "PATH")) {
		if path := filepath.Join(folder, config.SidecarProgram); filepath.IsAbs(path) &&
			executable(path) == nil {
			return path, nil
		}
	}
	return "", fmt.Errorf("%s was not found: %s is not set, and %s is neither in %s nor in PATH; in a checkout, build it "+
		"with `go build ./cmd/hvdd` and set %[2]s", config.SidecarProgram, config.SidecarBinaryVariable,
		config.SidecarProgram, strings.Join(cfg.Near, ", "))
}

func executable(path string) error {
	s, err := os.Stat(path)
	if err == nil && s.IsDir() {
		err = errors.New("it is a folder")
	}
	if err == nil {
		err = unix.Access(path, unix.X_OK)
	}
	return err
}

func variable(environ []string, name string) (value string) {
	for _, v := range environ {
		if n, text, _ := strings.Cut(v, "="); n == name {
			value = text
		}
	}
	return value
}

// start starts hvdd, and returns it and a connection to it.
func start(cfg *Config) (_ *child, _ *net.UnixConn, err error) {
	path, err := find(cfg)
	if err != nil {
		return nil, nil, err
	}
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, nil, err
	}
	theirs, ours := os.NewFile(uintptr(pair[0]), "sidecar"), os.NewFile(uintptr(pair[1]), "sidecar")
	handed := []*os.File{theirs}
	defer func() {
		for _, f := range append(handed, ours) {
			err = errors.Join(err, f.Close())
		}
	}()
	cmd := exec.Command(path, "--fd", "3")
	for _, v := range cfg.Environ {
		switch name, _, _ := strings.Cut(v, "="); name {
		case config.SidecarVariable, config.SidecarBinaryVariable, pmiVariable:
		default:
			cmd.Env = append(cmd.Env, v)
		}
	}
	if f := pmiSocket(cfg.Environ); f != nil {
		handed = append(handed, f)
		cmd.Env = append(cmd.Env, pmiVariable+"=4")
	}
	k := &child{cmd: cmd, log: new(lastLines), exited: make(chan struct{})}
	cmd.ExtraFiles, cmd.Stderr = handed, k.log
	// The sidecar gets a session of its own, so that the signals of a terminal or launcher reach only the
	// program. The sidecar ends when the program ends, because its connection ends.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	// A process that the sidecar has started may keep its standard error open.
	cmd.WaitDelay = time.Second
	if err := cmd.Start(); err != nil {
		return nil, nil, fmt.Errorf("cannot start the sidecar %s: %w", path, err)
	}
	go func() { // end waits for it
		k.err = cmd.Wait()
		close(k.exited)
	}()
	conn, err := net.FileConn(ours)
	if err != nil {
		return nil, nil, errors.Join(err, k.end())
	}
	return k, conn.(*net.UnixConn), nil
}

// pmiVariable is the variable with the descriptor of a launcher that speaks PMI.
const pmiVariable = "PMI_FD"

// pmiSocket returns a copy of the descriptor of the launcher, or nil if there is none. The variable may come
// from a process that has passed it on without the descriptor, so pmiSocket checks that it is a socket.
func pmiSocket(environ []string) *os.File {
	if variable(environ, "PMI_RANK") == "" && variable(environ, "PMI_SIZE") == "" {
		return nil
	}
	number, err := strconv.ParseUint(variable(environ, pmiVariable), 10, 31)
	if err != nil {
		return nil
	}
	var s unix.Stat_t
	if unix.Fstat(int(number), &s) != nil || s.Mode&unix.S_IFMT != unix.S_IFSOCK {
		return nil
	}
	fd, err := unix.FcntlInt(uintptr(number), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return nil
	}
	return os.NewFile(uintptr(fd), pmiVariable)
}

// describe returns a text that says how the sidecar has ended. reason is how the connection has ended.
func (k *child) describe(name, reason string) string {
	timeout := time.NewTimer(describeTimeout)
	defer timeout.Stop()
	select {
	case <-k.exited:
	case <-timeout.C:
		return fmt.Sprintf("%s is still running, but the connection to it has failed: %s", name, reason)
	}
	how := "has exited"
	if s := k.cmd.ProcessState; s != nil {
		if status := s.Sys().(syscall.WaitStatus); status.Signaled() {
			how = "was killed by " + unix.SignalName(status.Signal())
		} else {
			how = fmt.Sprintf("exited with status %d", status.ExitStatus())
		}
	}
	text := fmt.Sprintf("%s %s: %s", name, how, reason)
	if log := k.log.String(); log != "" {
		text += "; the end of its log:\n" + log
	}
	return text
}

// end waits for the exit of the sidecar, whose connection was closed. If the sidecar does not exit, end kills
// it.
func (k *child) end() error {
	if k == nil {
		return nil
	}
	timeout := time.NewTimer(exitTimeout)
	defer timeout.Stop()
	select {
	case <-k.exited:
		return nil
	case <-timeout.C:
	}
	if err := k.cmd.Process.Kill(); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return err
	}
	<-k.exited
	return nil
}
