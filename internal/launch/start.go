package launch

import (
	"os"
	"syscall"

	"golang.org/x/sys/unix"
)

// startWithPipes starts a program and gives it one pipe for each element of reading. The pipes are file
// descriptors 0, 1, ... of the program. If first is not nil, first is descriptor 0 and the pipes begin at
// descriptor 1. mine holds the ends of the pipes in this process. If reading[i] is true, this process reads
// from pipe i, otherwise it writes to it. On an error all pipes are closed.
func startWithPipes(path string, argv, env []string, first *os.File,
	reading []bool) (mine []*os.File, pid int, err error) {
	var theirs, files []uintptr
	defer func() {
		for _, fd := range theirs {
			unix.Close(int(fd))
		}
		if err != nil {
			for _, f := range mine {
				f.Close()
			}
		}
	}()
	for _, r := range reading {
		f, fd, err := pipe(r)
		if err != nil {
			return mine, 0, err
		}
		mine, theirs = append(mine, f), append(theirs, uintptr(fd))
	}
	if first != nil {
		files = []uintptr{first.Fd()}
	}
	pid, _, err = syscall.StartProcess(path, argv, &syscall.ProcAttr{
		Env:   env,
		Files: append(files, theirs...),
		// The program gets a process group of its own, so that it does not get signals that are sent to the
		// group of this process.
		Sys: &syscall.SysProcAttr{Setpgid: true},
	})
	if err != nil {
		return mine, 0, os.NewSyscallError("start process", err)
	}
	return mine, pid, nil
}

// pipe makes a pipe and returns its two ends. mine is the end for this process and is non-blocking. theirs is
// the end for another program and is blocking, as programs expect. If readingIsMine is true, mine is the read
// end. A child inherits an end of the pipe only if the caller passes that end to it explicitly.
func pipe(readingIsMine bool) (mine *os.File, theirs int, err error) {
	var p [2]int
	if err := unix.Pipe2(p[:], unix.O_CLOEXEC); err != nil {
		return nil, 0, os.NewSyscallError("pipe2", err)
	}
	mineFD, theirsFD := p[0], p[1]
	if !readingIsMine {
		mineFD, theirsFD = theirsFD, mineFD
	}
	if err := unix.SetNonblock(mineFD, true); err != nil {
		unix.Close(mineFD)
		unix.Close(theirsFD)
		return nil, 0, os.NewSyscallError("fcntl", err)
	}
	return os.NewFile(uintptr(mineFD), "pipe"), theirsFD, nil
}
