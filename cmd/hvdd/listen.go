package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"strconv"
	"sync"
	"time"

	"go.uber.org/zap"
	"golang.org/x/sys/unix"

	"github.com/gohvd/gohvd/internal/config"
	"github.com/gohvd/gohvd/internal/dial"
	"github.com/gohvd/gohvd/internal/sidecar"
)

// listener is a source of clients that connect to a Unix socket at a path.
type listener struct {
	*net.UnixListener
	ctx    context.Context
	cancel func()
}

const (
	// lockTimeout is how long to wait for another hvdd that is about to listen at the same path.
	lockTimeout = 5 * time.Second
	// firstListenFD is the first file descriptor that systemd passes (sd_listen_fds).
	firstListenFD = 3
)

func newListener(l *net.UnixListener) *listener {
	ctx, cancel := context.WithCancel(context.Background())
	return &listener{UnixListener: l, ctx: ctx, cancel: cancel}
}

// listen makes a socket at path and listens on it. If path already has a socket on which no process listens,
// listen replaces it. If there is any other file at path, listen returns an error.
func listen(path string) (clients, error) {
	unlock, err := lock(path)
	if err != nil {
		return nil, fmt.Errorf("--socket %s: %w", path, err)
	}
	defer unlock()
	if err := removeStale(path); err != nil {
		return nil, fmt.Errorf("--socket %s: %w", path, err)
	}
	l, err := net.ListenUnix("unix", &net.UnixAddr{Net: "unix", Name: path})
	if err != nil {
		return nil, fmt.Errorf("--socket: %w", err)
	}
	// A client that connects before the chmod has to authenticate as all clients do.
	if err := os.Chmod(path, 0o600); err != nil {
		return nil, errors.Join(fmt.Errorf("--socket: %w", err), l.Close())
	}
	return newListener(l), nil
}

// lock keeps other hvdds from removing a stale socket at path. Without the lock, one of them could remove a
// socket that is bound but not listening yet, because it looks stale. The lock is on a file beside the
// socket, which this process makes so that only this user can open it. Any user could lock the folder, if it
// is one such as /tmp. A user who can create files there can still take the name of the file, as that of the
// socket.
func lock(path string) (unlock func(), err error) {
	name := path + ".lock"
	ctx, cancel := context.WithTimeout(context.Background(), lockTimeout)
	defer cancel()
	var wait dial.Backoff
	for {
		f, err := os.OpenFile(name, os.O_RDWR|os.O_CREATE|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0o600)
		if err != nil {
			return nil, err
		}
		err = unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		switch {
		case err == nil && !names(name, f):
			// The process that had the lock has removed the file.
		case err == nil:
			return func() {
				_ = os.Remove(name) // if this fails, an empty file stays, which disturbs nobody
				_ = f.Close()       // releases the lock
			}, nil
		case err != unix.EWOULDBLOCK && err != unix.EINTR, ctx.Err() != nil:
			return nil, errors.Join(fmt.Errorf("lock %s: %w", name, err), f.Close())
		}
		_ = f.Close() // the error is ignored, because nothing was written
		dial.Pause(ctx, wait.Next(), nil)
	}
}

// names reports whether name is the name of f.
func names(name string, f *os.File) bool {
	at, err := os.Lstat(name)
	if err != nil {
		return false
	}
	ours, err := f.Stat()
	return err == nil && os.SameFile(at, ours)
}

// removeStale removes the socket at path if no process listens on it.
func removeStale(path string) error {
	info, err := os.Lstat(path)
	switch {
	case errors.Is(err, os.ErrNotExist):
		return nil
	case err != nil:
		return err
	case info.Mode()&os.ModeSocket == 0:
		return fmt.Errorf("the path belongs to a file that is not a socket, with mode %v", info.Mode())
	}
	conn, err := net.DialTimeout("unix", path, lockTimeout)
	if err == nil {
		return errors.Join(errors.New("another process is already listening at this path"), conn.Close())
	}
	if !errors.Is(err, unix.ECONNREFUSED) {
		return fmt.Errorf("check whether the socket is in use: %w", err)
	}
	return os.Remove(path)
}

// fromSystemd returns the socket that systemd has passed (sd_listen_fds), or nil if there is none.
func fromSystemd(settings *config.Config) (clients, error) {
	if settings.Variable("LISTEN_PID") != strconv.Itoa(os.Getpid()) {
		return nil, nil
	}
	switch n := settings.Variable("LISTEN_FDS"); n {
	case "", "0":
		return nil, nil
	case "1":
	default:
		return nil, fmt.Errorf("LISTEN_FDS is %q, want 1, because hvdd listens at one socket", n)
	}
	unix.CloseOnExec(firstListenFD)
	f := os.NewFile(firstListenFD, "LISTEN_FDS")
	l, err := net.FileListener(f)
	if err := errors.Join(err, f.Close()); err != nil {
		return nil, fmt.Errorf("LISTEN_FDS: %w", err)
	}
	u, ok := l.(*net.UnixListener)
	if !ok {
		return nil, errors.Join(fmt.Errorf("LISTEN_FDS: got a socket of network %v, want a Unix socket",
			l.Addr().Network()), l.Close())
	}
	return newListener(u), nil
}

// serve accepts clients until stop is called. It returns when their connections have ended.
func (l *listener) serve(s *sidecar.Server, log *zap.Logger) error {
	var (
		serving sync.WaitGroup
		wait    dial.Backoff
	)
	defer serving.Wait()
	for {
		conn, err := l.AcceptUnix()
		switch {
		case err == nil:
			wait = 0
			serving.Go(func() {
				if err := s.ServeConn(conn); err != nil {
					log.Warn("the connection of a client ended with an error", zap.Error(err))
				}
			})
		case l.ctx.Err() != nil:
			return nil
		default: // usually because no file descriptor is free until a connection ends
			log.Error("cannot accept clients", zap.Error(err))
			dial.Pause(l.ctx, wait.Next(), nil)
		}
	}
}

func (l *listener) stop() {
	l.cancel()
	_ = l.Close() // the error is ignored, because nothing depends on the success of Close
}
