package launch

import (
	"os"
	"syscall"

	"golang.org/x/sys/unix"
)

// startWithPipes starts a program with one pipe for each entry of reading as its descriptors, from 0 on, or
// from 1 on if first is its descriptor 0. mine holds this process's ends of the pipes; reading[i] states that
// this process reads from pipe i. On an error all pipes are closed.
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
		// A process group of its own protects the program from signals to the group of this process.
		Sys: &syscall.SysProcAttr{Setpgid: true},
	})
	if err != nil {
		return mine, 0, os.NewSyscallError("start process", err)
	}
	return mine, pid, nil
}

// pipe returns the two ends of a pipe: mine for this process, non-blocking, and theirs, blocking, as programs
// expect. readingIsMine states that mine is the read end. Neither is inherited unless it is passed on
// explicitly.
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
