package client

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"syscall"
	"time"

	"github.com/gohvd/gohvd/internal/dial"
	"github.com/gohvd/gohvd/internal/sidecar/wire"
)

// connect connects to the sidecar, which may be starting, and greets it.
func connect(ctx context.Context, cfg *Config) (conn *net.UnixConn, err error) {
	ctx, cancel := context.WithTimeout(ctx, cfg.ConnectTimeout)
	defer cancel()
	var wait dial.Backoff
	for {
		var d net.Dialer
		c, err := d.DialContext(ctx, "unix", cfg.Path)
		if err == nil {
			conn = c.(*net.UnixConn)
			break
		}
		if !errors.Is(err, syscall.ECONNREFUSED) && !errors.Is(err, fs.ErrNotExist) || ctx.Err() != nil {
			return nil, fmt.Errorf("sidecar %s: %w", cfg.Path, err)
		}
		dial.Pause(ctx, wait.Next(), nil)
		if ctx.Err() != nil {
			return nil, fmt.Errorf("sidecar %s: none came within %v: %w", cfg.Path, cfg.ConnectTimeout, err)
		}
	}
	stop := context.AfterFunc(ctx, func() { _ = conn.SetDeadline(time.Unix(1, 0)) })
	defer stop()
	if err := greet(conn, cfg); err != nil {
		if ctx.Err() != nil {
			err = fmt.Errorf("%w: %w", ctx.Err(), err)
		}
		return nil, errors.Join(fmt.Errorf("sidecar %s: %w", cfg.Path, err), conn.Close())
	}
	return conn, nil
}

func greet(conn *net.UnixConn, cfg *Config) error {
	if !cfg.Secret.IsZero() {
		if _, err := cfg.Secret.Dial(conn, wire.Magic); err != nil {
			return err
		}
	}
	if _, err := conn.Write(dial.Greeting(wire.Magic, wire.Version)); err != nil {
		return err
	}
	got, err := dial.ReadGreeting(conn, wire.Magic)
	if err != nil {
		return err
	}
	if got != wire.Version {
		return &dial.VersionError{Got: got, Want: wire.Version}
	}
	return nil
}
