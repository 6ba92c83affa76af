package bootstrap

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/url"
	"path/filepath"
	"strconv"
	"sync"
	"testing"

	"github.com/gohvd/gohvd/internal/secret"
	"github.com/gohvd/gohvd/internal/testnet"
	"github.com/gohvd/gohvd/store"
	"github.com/gohvd/gohvd/store/c10d"
)

// unknown returns options without rank and size, so that they must come from the URL or from the variables in
// env.
func unknown(env map[string]string) MethodOptions {
	return MethodOptions{Rank: -1, Size: -1, Getenv: func(name string) string { return env[name] }}
}

func newStore(t *testing.T) *store.HashStore {
	h := store.NewHashStore(store.Limits{})
	t.Cleanup(func() { h.Close() })
	return h
}

// serve serves kv to processes that know the secret s, until the test ends.
func serve(t *testing.T, kv *store.HashStore, s secret.Secret) *store.Server {
	t.Helper()
	server, err := store.Serve(loopback+":0", kv, store.Config{Secret: s})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { server.Close() })
	return server
}

// serveTorch serves kv as a TCPStore on loopback until the test ends, and returns its port.
func serveTorch(t *testing.T, kv *store.HashStore) (port string) {
	t.Helper()
	server, err := c10d.Serve(loopback+":0", kv, c10d.Config{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { server.Close() })
	_, port, _ = net.SplitHostPort(server.Addr())
	return port
}

func freePort(t *testing.T) string {
	t.Helper()
	return strconv.Itoa(testnet.FreePort(t))
}

func TestMethods(t *testing.T) {
	const n = 3
	for name, method := range map[string]func(t *testing.T) func(rank int) (string, MethodOptions){
		"tcp": func(t *testing.T) func(rank int) (string, MethodOptions) {
			port := freePort(t)
			return func(rank int) (string, MethodOptions) {
				return fmt.Sprintf("tcp://127.0.0.1:%s?rank=%d&world_size=%d", port, rank, n), unknown(nil)
			}
		},
		"rank beside the URL": func(t *testing.T) func(rank int) (string, MethodOptions) {
			port := freePort(t)
			return func(rank int) (string, MethodOptions) {
				return "tcp://127.0.0.1:" + port, MethodOptions{Rank: rank, Size: n}
			}
		},
		"file": func(t *testing.T) func(rank int) (string, MethodOptions) {
			path := filepath.Join(t.TempDir(), "with space")
			return func(rank int) (string, MethodOptions) {
				u := url.URL{Scheme: "file", Path: path, RawQuery: fmt.Sprintf("rank=%d&world_size=%d", rank,
					n)}
				return u.String(), unknown(nil)
			}
		},
		"env": func(t *testing.T) func(rank int) (string, MethodOptions) {
			port := freePort(t)
			return func(rank int) (string, MethodOptions) {
				return "env://", unknown(map[string]string{
					"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": fmt.Sprint(rank),
					"WORLD_SIZE": fmt.Sprint(n),
				})
			}
		},
		"env and URL": func(t *testing.T) func(rank int) (string, MethodOptions) {
			port := freePort(t)
			return func(rank int) (string, MethodOptions) {
				return fmt.Sprintf("env://?rank=%d", rank), unknown(map[string]string{
					"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": "77",
					"WORLD_SIZE": fmt.Sprint(n),
				})
			}
		},
		"torchrun": func(t *testing.T) func(rank int) (string, MethodOptions) {
			port := serveTorch(t, newStore(t))
			return func(rank int) (string, MethodOptions) {
				return "env://", unknown(map[string]string{
					"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": fmt.Sprint(rank),
					"WORLD_SIZE":                   fmt.Sprint(n),
					"TORCHELASTIC_USE_AGENT_STORE": "True",
				})
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			at := method(t)
			ctx := testnet.Context(t)
			var wg sync.WaitGroup
			var done sync.WaitGroup // makes rank 0 close its store last
			done.Add(n)
			for rank := range n {
				wg.Go(func() {
					rawURL, o := at(rank)
					p, err := NewMethods().Open(ctx, rawURL, o)
					if err != nil {
						t.Error(err)
						done.Done()
						return
					}
					if p.Rank != rank || p.Size != n {
						t.Errorf("rank %d of %d, want %d of %d", p.Rank, p.Size, rank, n)
					}
					for other := range n {
						if other == rank {
							err = p.Store.Set(ctx, fmt.Sprint("rank", rank), fmt.Append(nil, rank))
						} else {
							_, err = p.Store.Get(ctx, fmt.Sprint("rank", other))
						}
						if err != nil {
							t.Errorf("rank %d: %v", rank, err)
						}
					}
					if done.Done(); rank == 0 {
						done.Wait()
					}
					if err := p.Close(); err != nil {
						t.Error(err)
					}
				})
			}
			wg.Wait()
		})
	}
}

func TestMethodErrors(t *testing.T) {
	master := map[string]string{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "RANK": "0",
		"WORLD_SIZE": "1"}
	lack := func(name string) MethodOptions {
		env := make(map[string]string)
		for k, v := range master {
			if k != name {
				env[k] = v
			}
		}
		return unknown(env)
	}
	given := MethodOptions{Rank: 0, Size: 1}
	for _, test := range []struct {
		url  string
		o    MethodOptions
		want string
	}{
		{"mpi://", unknown(nil),
			`init method mpi://: no handler for "mpi://", want one of the schemes env, file, tcp`},
		{"nothing", unknown(nil), "init method: no handler"},
		{"tcp://[", unknown(nil), "missing ']'"},
		{"tcp://127.0.0.1?rank=0&world_size=1", unknown(nil), "init method tcp://: the URL has no port number"},
		{"tcp://127.0.0.1:1?world_size=1", unknown(nil), "the URL has no parameter rank"},
		{"tcp://127.0.0.1:1?rank=0", unknown(nil), "the URL has no parameter world_size"},
		{"tcp://127.0.0.1:1?rank=x&world_size=1", unknown(nil), `rank is "x", want a number`},
		{"tcp://127.0.0.1:1?rank=1&world_size=1", unknown(nil), "rank is 1, want 0 to 0"},
		{"tcp://127.0.0.1:1?rank=0&world_size=0", unknown(nil), "world size is 0, want at least 1"},
		{"tcp://127.0.0.1:1?rank=0", given, "rank or world size is given twice"},
		{"tcp://127.0.0.1:1?rank=0&world_size=1&%zz", unknown(nil), "invalid URL escape"},
		{"tcp://127.0.0.1:99999?rank=0&world_size=1", unknown(nil), "invalid port"},
		{"file://?rank=0&world_size=1", unknown(nil), "init method file://: the URL has no path"},
		{"file://foo?rank=0&world_size=1", unknown(nil), "the URL has no path"},
		{"file:///nowhere?world_size=1", unknown(nil), "the URL has no parameter rank"},
		{"file:///nowhere?rank=0", unknown(nil), "the URL has no parameter world_size"},
		{"file://foo/bar", given, `"foo/bar" is not a path of this host`},
		{"file:///dev/null/x", given, "open /dev/null/x"},
		{"env://", lack("RANK"), "init method env://: the environment variable RANK is not set"},
		{"env://", lack("WORLD_SIZE"), "environment variable WORLD_SIZE is not set"},
		{"env://", lack("MASTER_ADDR"), "environment variable MASTER_ADDR is not set"},
		{"env://", lack("MASTER_PORT"), "environment variable MASTER_PORT is not set"},
	} {
		testMethodError(t, test.url, test.o, test.want)
	}
	// The port is in use, for example because PyTorch serves its own store there. The error must say that
	// gohvd's store needs another port.
	_, port, err := net.SplitHostPort(testnet.FakeServer(t, func(net.Conn) {}))
	if err != nil {
		t.Fatal(err)
	}
	testMethodError(t, "tcp://127.0.0.1:"+port, MethodOptions{Rank: 0, Size: 2},
		"address already in use: the store of gohvd needs a port that init_process_group and other jobs do not use")
}

func testMethodError(t *testing.T, rawURL string, o MethodOptions, want string) {
	t.Helper()
	_, err := NewMethods().Open(testnet.Context(t), rawURL, o)
	testnet.WantError(t, err, "init method", want)
	if _, ok := errors.AsType[*MethodError](err); !ok {
		t.Errorf("%s: got a %T", rawURL, err)
	}
}

// TestOwnMethod adds a method of the program's own. If a method cannot connect, Open must return when ctx
// ends, and the error must contain the reason.
func TestOwnMethod(t *testing.T) {
	m := NewMethods()
	m["own"] = func(ctx context.Context, u *url.URL, _ MethodOptions) (*Place, error) {
		rank, size, err := placeOf(u.Query())
		return New(store.NewHashStore(store.Limits{}), rank, size), err
	}
	p, err := m.Open(t.Context(), "own://here", MethodOptions{Rank: 1, Size: 2})
	if err != nil || p.Rank != 1 || p.Size != 2 {
		t.Fatalf("got %+v, %v", p, err)
	}
	if err := p.Close(); err != nil {
		t.Error(err)
	}
	err = testnet.EventuallyError(t, func(ctx context.Context) error {
		_, err := m.Open(ctx, "tcp://127.0.0.1:"+freePort(t), MethodOptions{Rank: 1, Size: 2})
		return err
	}, "connection refused")
	if !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("got %v, want that the time is over", err)
	}
}
