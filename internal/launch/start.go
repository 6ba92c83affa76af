package launch

import (
	"os"
	"syscall"

	"golang.org/x/sys/unix"
)

// startWithPipes starts a program and gives it one pipe for each element of reading. The pipes are its
// descriptors from 0 on or, if first is not nil, from 1 on. Then first is its descriptor 0. mine holds this
// process's ends of the pipes. If reading[i] is true, this process reads from pipe i. On an error all pipes
// are closed.
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
		// A process group of its own protects the program from signals that are sent to the group of this
		// process.
		Sys: &syscall.SysProcAttr{Setpgid: true},
	})
	if err != nil {
		return mine, 0, os.NewSyscallError("start process", err)
	}
	return mine, pid, nil
}

// pipe makes a pipe and returns its two ends. mine is for this process and does not block. theirs is for a
// program and blocks, as programs expect. If readingIsMine is true, mine is the read end. A child inherits
// neither end unless it is passed explicitly.
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
