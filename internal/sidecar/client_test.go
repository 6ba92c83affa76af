package sidecar

import (
	"context"
	"errors"
	"net"
	"os"
	"strconv"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"
	"go.uber.org/zap"

	"github.com/gohvd/gohvd/internal/failure"
	"github.com/gohvd/gohvd/internal/rank"
	"github.com/gohvd/gohvd/internal/sidecar/sidecartest"
	"github.com/gohvd/gohvd/internal/testnet"
	"github.com/gohvd/gohvd/store"
)

// These are the classes of errors that the tests expect.
const (
	classUsage          = uint32(failure.Usage)
	classDuplicate      = uint32(failure.Duplicate)
	classMismatch       = uint32(failure.Mismatch)
	classPeer           = uint32(failure.Peer)
	classNotInitialized = uint32(failure.NotInitialized)
	classInternal       = uint32(failure.Internal)
)

func TestMain(m *testing.M) {
	if path := os.Getenv(otherUserVariable); path != "" {
		os.Exit(otherUser(path))
	}
	goleak.VerifyTestMain(m)
}

// server returns a new Server, which is closed when the test ends.
func server(t testing.TB, cfg Config) *Server {
	s := New(cfg)
	t.Cleanup(func() { gone(t, s) })
	return s
}

// gone closes s with a context that has already ended. So the rank does not leave the job in an orderly way,
// and the other ranks see the same as if the process had ended.
func gone(t testing.TB, s *Server) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if err := s.Close(ctx); s.Report().State != StateIdle {
		t.Errorf("a closed server is %v: %v", s.Report(), err)
	}
}

// job returns n Servers that use one store. When their clients send Init, the Servers become the ranks of one
// job. settings holds names and values of settings in turn.
func job(t testing.TB, n int, settings ...string) []*Server {
	kv := store.NewHashStore(store.Limits{})
	t.Cleanup(func() { kv.Close() })
	servers := make([]*Server, n)
	for r := range servers {
		opts := rank.Options{Store: kv, Log: zap.NewNop(), Settings: map[string]string{
			"HOROVOD_RANK": strconv.Itoa(r), "HOROVOD_SIZE": strconv.Itoa(n), "HOROVOD_HOSTNAME": "test",
		}}
		for i := 0; i < len(settings); i += 2 {
			opts.Settings[settings[i]] = settings[i+1]
		}
		servers[r] = server(t, Config{Options: opts, Version: "test"})
	}
	return servers
}

// stub is a runner without an engine. It calls the functions in its fields.
type stub struct {
	begin func(*operation) error
	drive func(context.Context, func() bool)
}

func (s stub) Begin(o *operation) error                    { return s.begin(o) }
func (s stub) Notify()                                     {}
func (s stub) Drive(ctx context.Context, done func() bool) { s.drive(ctx, done) }

// install makes s run its operations with r instead of an engine.
func install(s *Server, r runner) { s.running.Store(&r) }

// client is a client of a Server in this process.
type client struct {
	*sidecartest.Client
	t      testing.TB
	served chan error // the result of ServeConn
}

// connect returns a new client of s, after the exchange of greetings.
func connect(t testing.TB, s *Server) *client {
	t.Helper()
	c := newClient(t, s)
	c.Hello()
	return c
}

// newClient returns a new client of s that has not sent its greeting yet.
func newClient(t testing.TB, s *Server) *client {
	t.Helper()
	pair := testnet.SocketPair(t)
	f := os.NewFile(uintptr(pair[0]), "sidecar")
	conn, err := net.FileConn(f)
	if err := errors.Join(err, f.Close()); err != nil {
		t.Fatal(err)
	}
	c := &client{Client: sidecartest.New(t, pair[1]), t: t, served: make(chan error, 1)}
	go func() { c.served <- s.ServeConn(conn.(*net.UnixConn)) }()
	return c
}

// bye sends Bye and waits for the end of the connection. If the connection ends with an error, the test
// fails.
func (c *client) bye() {
	c.t.Helper()
	c.Bye()
	if err := c.end(); err != nil {
		c.t.Errorf("Bye: %v", err)
	}
}

// end waits until ServeConn has returned for the connection, and returns the error that ServeConn returned.
func (c *client) end() error {
	c.t.Helper()
	select {
	case err := <-c.served:
		return err
	case <-time.After(sidecartest.HangTimeout):
		c.t.Fatal("the sidecar goes on serving the client")
		return nil
	}
}

// all calls f in a goroutine for each element of the slice some, and returns when all calls have returned.
func all[T any](some []T, f func(i int, one T)) {
	var wg sync.WaitGroup
	for i, one := range some {
		wg.Go(func() { f(i, one) })
	}
	wg.Wait()
}
