package doctor

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/gohvd/gohvd/internal/config"
	"github.com/gohvd/gohvd/internal/kernel"
	"github.com/gohvd/gohvd/internal/shmem"
)

// System is what the checks see of a machine. They use it side by side and change nothing in it.
type System struct {
	// Root is the root of the file system, with proc, sys, dev and etc.
	Root fs.FS
	// Environ is the environment, NAME=value.
	Environ []string
	// Build is what this program was built of.
	Build Build
	// SIMD is kernel.Level, Arch the processor's architecture as Go calls it.
	SIMD, Arch string
	// Affinity is how many processors this process may run on, and GOMAXPROCS how many threads run Go at once.
	Affinity, GOMAXPROCS int

	// Hosts are those to reach, and Agent is the command that runs the words of another on one of them. Its first word is the same
	// for all.
	Hosts []string
	Agent func(host string, words []string) []string

	// Rlimit is getrlimit(2) and Statfs statfs(2) of a path, Clock adjtimex(2) without a change.
	Rlimit func(resource int) (unix.Rlimit, error)
	Statfs func(path string) (unix.Statfs_t, error)
	Clock  func() (state int, t unix.Timex, err error)
	// Memfd makes shared memory of numBytes as ranks do, and gives it back.
	Memfd func(numBytes int64) error
	// Interfaces are those of the network, Hostname is this host's name and LookupHost gives a name's addresses.
	Interfaces func() ([]Interface, error)
	Hostname   func() (string, error)
	LookupHost func(ctx context.Context, name string) ([]string, error)
	// LookPath finds a program.
	LookPath func(name string) (string, error)
	// Sidecar is the hvdd beside hvdrun, which it gives to ranks that name none; empty if there is none.
	Sidecar string
	// Output runs a command with an environment and without input to its end, or that of ctx, and returns what it printed.
	Output func(ctx context.Context, env, argv []string) (string, error)
	// Reach runs a command without input to its end, or that of ctx. said is the last that it wrote to standard error.
	Reach func(ctx context.Context, argv []string) (said string, err error)
}

// Build is what a program was built of.
type Build struct {
	// Go is the version of the compiler.
	Go string
	// CGO says whether C was allowed and NoAsm whether assembly was left out, where Known.
	CGO, NoAsm, Known bool
}

// Interface is one of the network.
type Interface struct {
	Name string
	// Addrs are its addresses, with the length of their prefixes.
	Addrs []string
	MTU   int
	// Up is what was wished and Running what is: there is a carrier.
	Up, Running, Loopback bool
}

// Here returns this machine, for ranks with an environment. The caller adds Hosts and Agent.
func Here(environ []string) *System {
	s := &System{
		Environ: environ, Sidecar: BesideSelf(config.SidecarProgram),
		Root: os.DirFS("/"), SIMD: kernel.Level(), Arch: runtime.GOARCH, Affinity: runtime.NumCPU(), GOMAXPROCS: runtime.GOMAXPROCS(0),
		Build: Build{Go: runtime.Version()},
		Rlimit: func(resource int) (r unix.Rlimit, err error) {
			err = unix.Getrlimit(resource, &r)
			return r, err
		},
		Statfs: func(path string) (st unix.Statfs_t, err error) {
			err = unix.Statfs(path, &st)
			return st, err
		},
		Clock: func() (state int, t unix.Timex, err error) {
			state, err = unix.Adjtimex(&t)
			return state, t, err
		},
		Memfd: func(numBytes int64) error {
			m, err := shmem.Create("hvdrun doctor", numBytes)
			if err != nil {
				return err
			}
			return m.Close()
		},
		Interfaces: netInterfaces,
		Hostname:   os.Hostname,
		LookupHost: net.DefaultResolver.LookupHost,
		LookPath:   exec.LookPath,
		Output:     output,
		Reach:      reach,
	}
	if info, known := debug.ReadBuildInfo(); known {
		s.Build.read(info)
	}
	return s
}

// BesideSelf returns the path of a program in the folder of this one; empty if there is none.
func BesideSelf(name string) string {
	self, err := os.Executable()
	if err != nil {
		return ""
	}
	path := filepath.Join(filepath.Dir(self), name)
	if unix.Access(path, unix.X_OK) != nil {
		return ""
	}
	return path
}

func (b *Build) read(info *debug.BuildInfo) {
	for _, s := range info.Settings {
		switch s.Key {
		case "CGO_ENABLED":
			b.CGO, b.Known = s.Value == "1", true
		case "-tags":
			for tag := range strings.SplitSeq(s.Value, ",") {
				b.NoAsm = b.NoAsm || tag == "noasm"
			}
		}
	}
}

func netInterfaces() ([]Interface, error) {
	found, err := net.Interfaces()
	if err != nil {
		return nil, err
	}
	all := make([]Interface, len(found))
	for i, f := range found {
		addrs, err := f.Addrs()
		if err != nil {
			return nil, err
		}
		all[i] = Interface{
			Name: f.Name, MTU: f.MTU,
			Up: f.Flags&net.FlagUp != 0, Running: f.Flags&net.FlagRunning != 0, Loopback: f.Flags&net.FlagLoopback != 0,
		}
		for _, a := range addrs {
			all[i].Addrs = append(all[i].Addrs, a.String())
		}
	}
	return all, nil
}

const (
	// killDelay is how long what an agent has left behind may keep its standard error open.
	killDelay = grace / 2
	// saidBytes bounds what is kept of what a command prints.
	saidBytes = 4 << 10
)

// command returns one in a process group of its own, all of which the end of ctx kills.
func command(ctx context.Context, argv []string, stderr *tail) *exec.Cmd {
	cmd := exec.CommandContext(ctx, argv[0], argv[1:]...)
	cmd.Stderr = stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error { return unix.Kill(-cmd.Process.Pid, unix.SIGKILL) }
	cmd.WaitDelay = killDelay
	return cmd
}

// output runs a program and returns the last that it wrote to standard output. An error has the last line of standard error.
func output(ctx context.Context, env, argv []string) (string, error) {
	var stdout, stderr tail
	cmd := command(ctx, argv, &stderr)
	cmd.Env, cmd.Stdout = env, &stdout
	err := cmd.Run()
	if last := lastLine(string(stderr)); err != nil && last != "" {
		err = fmt.Errorf("%w: %s", err, last)
	}
	return string(stdout), err
}

// reach runs an agent.
func reach(ctx context.Context, argv []string) (said string, err error) {
	var last tail
	err = command(ctx, argv, &last).Run()
	if errors.Is(err, exec.ErrWaitDelay) {
		err = nil // it has succeeded; ssh with ControlPersist leaves a process that shares its standard error
	}
	return string(last), err
}

// tail keeps the last saidBytes that were written.
type tail []byte

func (t *tail) Write(b []byte) (int, error) {
	*t = append(*t, b[max(0, len(b)-saidBytes):]...)
	if len(*t) > saidBytes {
		*t = bytes.Clone((*t)[len(*t)-saidBytes:])
	}
	return len(b), nil
}
