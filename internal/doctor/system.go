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
	"sync"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/gohvd/gohvd/internal/binding"
	"github.com/gohvd/gohvd/internal/config"
	"github.com/gohvd/gohvd/internal/cuda"
	"github.com/gohvd/gohvd/internal/kernel"
	"github.com/gohvd/gohvd/internal/shmem"
)

// System describes a machine to the checks. The checks use a System concurrently and do not change it.
type System struct {
	// Root is the root of the file system. The checks read the folders /proc, /sys, /dev and /etc.
	Root fs.FS
	// Environ is the environment of the ranks, in the form NAME=value.
	Environ []string
	// Build describes how this program was built.
	Build Build
	// SIMD is the result of kernel.Level, and Arch is runtime.GOARCH.
	SIMD, Arch string
	// Affinity is the number of processors that this process may run on. GOMAXPROCS is the number of threads
	// that may run Go code at the same time.
	Affinity, GOMAXPROCS int
	// Allowed are the processors that this process may run on. It is empty if the kernel does not say.
	Allowed binding.CPUs

	// Hosts holds the names of the hosts to reach. Agent returns the command that runs a program on one of
	// these hosts. The first element of words is the program, and the rest are its arguments. The first word
	// of the returned command is the same for all hosts.
	Hosts []string
	Agent func(host string, words []string) []string

	// Rlimit calls getrlimit(2), Statfs calls statfs(2), and Clock calls adjtimex(2) without changing the
	// clock.
	Rlimit func(resource int) (unix.Rlimit, error)
	Statfs func(path string) (unix.Statfs_t, error)
	Clock  func() (state int, t unix.Timex, err error)
	// Memfd allocates numBytes of shared memory in the same way as ranks do, and frees it.
	Memfd func(numBytes int64) error
	// Interfaces returns the network interfaces. Hostname returns the name of this host. LookupHost returns
	// the addresses of a name.
	Interfaces func() ([]Interface, error)
	Hostname   func() (string, error)
	LookupHost func(ctx context.Context, name string) ([]string, error)
	// LookPath finds a program, as exec.LookPath does.
	LookPath func(name string) (string, error)
	// Library is the path of the libgohvd.so in the folder of hvdrun, or empty if there is none. hvdrun
	// passes it to ranks whose environment does not name another library.
	Library string
	// Python is the name or path of the Python interpreter to check.
	Python string
	// Output runs the command argv with the environment env and empty standard input. It returns the last
	// part of the command's standard output. If ctx ends, it kills the command.
	Output func(ctx context.Context, env, argv []string) (string, error)
	// Reach runs the command argv with empty standard input. It returns the last part of the command's
	// standard error. If ctx ends, it kills the command.
	Reach func(ctx context.Context, argv []string) (stderr string, err error)

	asked     sync.Once // done when the results of gpus are known
	found     cuda.Found
	whyNoGPUs error
}

// Build describes how a program was built.
type Build struct {
	// Go is the version of the Go toolchain.
	Go string
	// CGO is set if cgo was enabled, and NoAsm if assembly was left out. They are valid only if Known is set.
	CGO, NoAsm, Known bool
}

// Interface is a network interface.
type Interface struct {
	Name string
	// Addrs holds the addresses of the interface, with their prefix lengths.
	Addrs []string
	MTU   int
	// Up is set if the interface was turned on. Running is set if the interface is operational, which means
	// that it has a carrier.
	Up, Running, Loopback bool
}

// Here returns the System of this machine, for ranks with the given environment. The caller must set Hosts
// and Agent.
func Here(environ []string) *System {
	s := &System{
		Environ: environ, Library: BesideSelf(config.LibraryFile),
		Python: AnyPython,
		Root:   os.DirFS("/"), SIMD: kernel.Level(), Arch: runtime.GOARCH, Affinity: runtime.NumCPU(),
		GOMAXPROCS: runtime.GOMAXPROCS(0),
		Build:      Build{Go: runtime.Version()},
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
	s.Allowed, _ = binding.Allowed() // fails if the kernel supports more processors than a set has
	if info, known := debug.ReadBuildInfo(); known {
		s.Build.read(info)
	}
	return s
}

// BesideSelf returns the path of the file with this name in the folder of the running program. If there is no
// such file, or if it cannot be read, BesideSelf returns "".
func BesideSelf(name string) string {
	self, err := os.Executable()
	if err != nil {
		return ""
	}
	path := filepath.Join(filepath.Dir(self), name)
	if unix.Access(path, unix.R_OK) != nil {
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
			Up: f.Flags&net.FlagUp != 0, Running: f.Flags&net.FlagRunning != 0,
			Loopback: f.Flags&net.FlagLoopback != 0,
		}
		for _, a := range addrs {
			all[i].Addrs = append(all[i].Addrs, a.String())
		}
	}
	return all, nil
}

const (
	// killDelay is how long to wait for the end of a command's standard error after the command has ended. A
	// process that the command leaves behind may keep it open.
	killDelay = grace / 2
	// keptBytes is the number of bytes that are kept of a command's output: its last part.
	keptBytes = 4 << 10
)

// command prepares a command in a process group of its own. When ctx ends, the whole group is killed.
func command(ctx context.Context, argv []string, stderr *tail) *exec.Cmd {
	cmd := exec.CommandContext(ctx, argv[0], argv[1:]...)
	cmd.Stderr = stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error { return unix.Kill(-cmd.Process.Pid, unix.SIGKILL) }
	cmd.WaitDelay = killDelay
	return cmd
}

// output runs a program and returns the last part of its standard output. If the program fails, the error
// contains the last line of its standard error.
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

// reach runs the command of an agent and returns the last part of its standard error.
func reach(ctx context.Context, argv []string) (stderr string, err error) {
	var last tail
	err = command(ctx, argv, &last).Run()
	if errors.Is(err, exec.ErrWaitDelay) {
		// The command has succeeded, but a process that it left behind keeps standard error open. ssh with
		// ControlPersist leaves such a process.
		err = nil
	}
	return string(last), err
}

// tail is a writer that keeps the last keptBytes bytes.
type tail []byte

func (t *tail) Write(b []byte) (int, error) {
	*t = append(*t, b[max(0, len(b)-keptBytes):]...)
	if len(*t) > keptBytes {
		*t = bytes.Clone((*t)[len(*t)-keptBytes:])
	}
	return len(b), nil
}

// AnyPython is the interpreter that is checked if the user names none. Then it may be missing, because Go
// programs do not need it.
const AnyPython = "python3"
