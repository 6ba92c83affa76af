package place

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
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

// handOver makes a secret and hands it to each process of this user that calls takeOver with the same name,
// until the returned function is called.
func handOver(name string, log *zap.Logger) (s secret.Secret, stop func() error, err error) {
	s, text := secret.New()
	a, err := dial.Serve(dial.UnixPrefix+"@"+handoverPrefix+name, "place: secret", maxHandovers, log,
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
		return secret.Secret{}, nil, fmt.Errorf("opening the socket for handing over the secret: %w", err)
	}
	return s, a.Close, nil
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
		return s, fmt.Errorf("the socket %s%s, which hands over the secret: %w", handoverPrefix, name, err)
	}
	if err := conn.SetDeadline(time.Now().Add(handoverTimeout)); err != nil {
		return s, err
	}
	text, err := io.ReadAll(io.LimitReader(conn, secret.MaxBytes))
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
