package bootstrap

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"syscall"
	"time"

	"go.uber.org/zap"

	"github.com/gohvd/gohvd/internal/dial"
	"github.com/gohvd/gohvd/internal/secret"
)

// A process that makes the secret of a job hands it to the other processes of its user on this host, over a
// Unix socket in the abstract namespace. The kernel tells both ends which user the other end runs as, so the
// name of the socket need not be secret: a process may learn it from a store that anybody can change. The
// socket is gone when its process ends.

const (
	// handoverPrefix is the beginning of the names of these sockets. So a process that gets the rest of a
	// name from a store that another user has changed can only get to a socket for this purpose.
	handoverPrefix = "gohvd-secret-"
	// maxHandovers is the maximum number of processes that are handed the secret at the same time.
	maxHandovers = 1024
	// handoverTimeout is the time limit for handing over a secret after the connection.
	handoverTimeout = 5 * time.Second
)

// handOver hands the text of a secret to each process of this user that calls takeOver with the same name,
// until the returned function is called.
func handOver(name, text string, log *zap.Logger) (stop func() error, err error) {
	a, err := dial.Serve(dial.UnixPrefix+"@"+handoverPrefix+name, "bootstrap: secret", maxHandovers, log,
		func(_ context.Context, conn net.Conn, slot *dial.Slot) error {
			defer slot.Release()
			if err := dial.CheckUser(conn.(*net.UnixConn)); err != nil {
				return err
			}
			if err := conn.SetDeadline(time.Now().Add(handoverTimeout)); err != nil {
				return err
			}
			if _, err := io.WriteString(conn, text); err != nil {
				return err
			}
			return io.EOF
		})
	if err != nil {
		return nil, fmt.Errorf("opening the socket for handing over the secret: %w", err)
	}
	return a.Close, nil
}

// takeOver returns the secret that another process of this user hands over under the given name. Its error is
// ECONNREFUSED if no process does so.
func takeOver(ctx context.Context, name string) (s secret.Secret, err error) {
	conn, err := dial.Connect(ctx, dial.UnixPrefix+"@"+handoverPrefix+name)
	if err != nil {
		return s, err
	}
	defer conn.Close()
	// Another user may have opened the socket. Nothing that it sends may be used.
	if err := dial.CheckUser(conn.(*net.UnixConn)); err != nil {
		return s, fmt.Errorf("the socket %s%s, which hands over the secret: %w: let all processes run as one user, or "+
			"give them the same file in HVD_SECRET_FILE", handoverPrefix, name, err)
	}
	if err := conn.SetDeadline(time.Now().Add(handoverTimeout)); err != nil {
		return s, err
	}
	text, err := io.ReadAll(io.LimitReader(conn, secret.MaxBytes))
	if err == nil && len(text) == 0 {
		// The other process hands it over to too many processes at the moment, or ends.
		err = io.ErrUnexpectedEOF
	}
	if err != nil {
		return s, err
	}
	return secret.Parse(string(text))
}

// newHandoverName returns a name for handOver that no other process knows.
func newHandoverName() string { return strings.ToLower(rand.Text()) }

// checkHandoverName returns an error if name is not a result of newHandoverName. The name may come from a
// store that others can change.
func checkHandoverName(name string) error {
	if len(name) != len(newHandoverName()) || strings.Trim(name, "abcdefghijklmnopqrstuvwxyz234567") != "" {
		return errors.New("malformed name of the socket that hands over the secret")
	}
	return nil
}

// ErrNotOffered reports that the server at an address hands over no secret.
var ErrNotOffered = errors.New("it hands over no secret to processes of this user: give the server and all ranks " +
	"the same file in HVD_SECRET_FILE, or set HVD_INSECURE=1 for all of them to accept every user of this host")

// handoverAt returns the name under which the server at addr, host:port on loopback, hands over its secret.
func handoverAt(addr string) (string, error) {
	host, port, err := net.SplitHostPort(addr)
	if strings.EqualFold(host, "localhost") {
		host = loopback
	}
	return "at-" + net.JoinHostPort(host, port), err
}

// OfferSecret hands the text of a secret to processes of this user that call AskSecret, until the returned
// function is called. The secret is that of a server at addr, host:port, on loopback (netif.IsLoopback).
// OfferSecret must be called before the server accepts connections, unless no process knows addr yet.
func OfferSecret(addr, text string, log *zap.Logger) (stop func() error, err error) {
	name, err := handoverAt(addr)
	if err == nil {
		stop, err = handOver(name, text, log)
	}
	if errors.Is(err, syscall.EADDRINUSE) {
		err = fmt.Errorf("%w: another process uses this address: choose another port", err)
	}
	return stop, err
}

// AskSecret returns the secret of the server at addr, host:port, on loopback. It waits until there is a
// server. If the server has not called OfferSecret, the error is ErrNotOffered.
func AskSecret(ctx context.Context, addr string) (s secret.Secret, err error) {
	name, err := handoverAt(addr)
	if err != nil {
		return s, err
	}
	err = dial.Retry(ctx, func() (err error) {
		if s, err = takeOver(ctx, name); !errors.Is(err, syscall.ECONNREFUSED) {
			return err
		}
		conn, err := dial.Connect(ctx, addr)
		if err != nil {
			return err
		}
		conn.Close()
		// There is a server, which has offered its secret earlier, if at all.
		if s, err = takeOver(ctx, name); errors.Is(err, syscall.ECONNREFUSED) {
			return ErrNotOffered
		}
		return err
	})
	if err != nil {
		err = fmt.Errorf("asking the server at %s for its secret: %w", addr, err)
	}
	return s, err
}
