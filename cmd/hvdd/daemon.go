package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/signal"
	"sync"
	"time"

	"go.uber.org/zap"
	"golang.org/x/sys/unix"

	"github.com/gohvd/gohvd/internal/config"
	"github.com/gohvd/gohvd/internal/sidecar"
)

// shutdownTimeout is how long hvdd waits for the shutdown of the job after it has got a signal.
const shutdownTimeout = 10 * time.Second

// daemon is the state of one execution of hvdd.
type daemon struct {
	stderr         io.Writer
	version        string
	fd             int
	socket, health string

	log      *zap.Logger
	settings config.Config
	server   *sidecar.Server
}

// run runs hvdd with the settings of its environment. It serves clients until hvdd has to end.
func (d *daemon) run() error {
	if d.fd >= 0 && d.socket != "" {
		return usagef("got --fd and --socket, want only one of them")
	}
	var err error
	// With --fd, an error in the settings is not reported here, because Init of the client reports it. With a
	// listener, the settings must be valid now.
	if d.settings, err = config.FromEnvironment(nil, true); err != nil && d.fd < 0 {
		return err
	}
	d.log = d.settings.Logger(d.stderr).Named("hvdd")
	// An error of Sync is ignored: the log goes to standard error, so an error about it could not be printed
	// either.
	defer func() { _ = d.log.Sync() }()
	cfg := sidecar.Config{Version: d.version, Log: d.log}
	clients, err := d.clients()
	if err != nil {
		return err
	}
	d.server = sidecar.New(cfg)
	if d.health != "" {
		health, err := serveHealth(d.health, d.server, d.log)
		if err != nil {
			return err
		}
		defer health.Close()
	}
	return d.serve(clients)
}

// clients returns the source of clients that the command line chooses. If it chooses none, clients returns
// the socket from systemd.
func (d *daemon) clients() (clients, error) {
	switch {
	case d.fd >= 0:
		return inherited(d.fd)
	case d.socket != "":
		return listen(d.socket)
	}
	c, err := fromSystemd(&d.settings)
	if err == nil && c == nil {
		err = usagef("no socket: want --fd, --socket, or a socket from systemd (LISTEN_FDS)")
	}
	return c, err
}

// serve serves clients until no more clients can come, a signal arrives or the rank fails.
func (d *daemon) serve(from clients) error {
	signals := make(chan os.Signal, 2)
	signal.Notify(signals, unix.SIGTERM, unix.SIGINT)
	defer signal.Stop(signals)
	if d.fd >= 0 {
		signal.Ignore(unix.SIGINT)
	}
	served := make(chan error, 1)
	// from.serve ends when no more clients can come, or when the process ends.
	go func() { served <- from.serve(d.server, d.log) }()
	var systemd notifier
	if d.fd < 0 { // with --fd, systemd may manage the client, but it does not manage hvdd
		systemd = newNotifier(&d.settings, d.log)
	}
	var notifying sync.WaitGroup
	done := make(chan struct{})
	notifying.Go(func() { systemd.run(d.server, done) })
	defer notifying.Wait()
	defer close(done)
	select {
	case <-d.server.Dead():
		return fmt.Errorf("the rank has failed: %w", d.server.Death())
	case err := <-served:
		select {
		case <-d.server.Dead(): // from.serve has returned because the rank failed
			return fmt.Errorf("the rank has failed: %w", d.server.Death())
		default:
		}
		return errors.Join(err, d.end(signals))
	case <-signals:
	}
	systemd.send("STOPPING=1\n")
	from.stop()
	return d.end(signals)
}

// end shuts down the job. It returns an error if another signal arrives before the job is shut down.
func (d *daemon) end(signals <-chan os.Signal) error {
	// Cancel the context, because this rank gives up by itself: with a deadline, the other ranks would be at
	// fault.
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	defer time.AfterFunc(shutdownTimeout, cancel).Stop()
	ended := make(chan error, 1)
	go func() { ended <- d.server.Close(ctx) }() // this goroutine may still be running when the process exits
	select {
	case <-signals:
		return errors.New("a second signal ended hvdd before the job was shut down")
	case err := <-ended:
		if err != nil {
			d.log.Warn("shutting down the job failed", zap.Error(err))
		}
		return nil
	}
}

// clients is a source of connections from clients of a sidecar.
type clients interface {
	// serve passes each client to the server, which serves it. serve returns when no more clients can come.
	serve(*sidecar.Server, *zap.Logger) error
	stop()
}

// singleClient is a source of only one client. That client is at the other end of an inherited connection.
type singleClient struct{ conn *net.UnixConn }

func inherited(fd int) (clients, error) {
	conn, err := unixConn(fd)
	if err != nil {
		return nil, usagef("--fd %d: %w", fd, err)
	}
	return singleClient{conn}, nil
}

func unixConn(fd int) (*net.UnixConn, error) {
	f := os.NewFile(uintptr(fd), fmt.Sprintf("descriptor %d", fd))
	if f == nil {
		return nil, errors.New("the number is not an open file descriptor")
	}
	c, err := net.FileConn(f)
	if err := errors.Join(err, f.Close()); err != nil {
		return nil, err
	}
	conn, ok := c.(*net.UnixConn)
	if !ok {
		return nil, errors.Join(fmt.Errorf("got a socket of network %v, want a Unix socket",
			c.LocalAddr().Network()), c.Close())
	}
	return conn, nil
}

func (o singleClient) serve(s *sidecar.Server, _ *zap.Logger) error {
	return s.ServeConn(o.conn)
}

func (o singleClient) stop() {}
