package store_test

import (
	"path/filepath"
	"testing"

	"go.uber.org/goleak"
	"go.uber.org/zap/zaptest"

	"github.com/gohvd/gohvd/internal/launch"
	"github.com/gohvd/gohvd/internal/secret"
	"github.com/gohvd/gohvd/store"
	"github.com/gohvd/gohvd/store/storetest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func newHash(*testing.T) store.Store { return store.NewHashStore(store.Limits{}) }

func newFile(t *testing.T) store.Store {
	s, err := store.NewFileStore(t.Context(), filepath.Join(t.TempDir(), "store"), 1)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func newClient(t *testing.T) store.Store { return clientOf(t, secret.Secret{}) }

// newEncrypted returns a client whose connection to the server is encrypted.
func newEncrypted(t *testing.T) store.Store {
	key, _ := secret.New()
	return clientOf(t, key)
}

func clientOf(t *testing.T, key secret.Secret) store.Store { return clientsOf(t, key, 1)[0] }

// clientsOf returns so many clients of a server.
func clientsOf(t testing.TB, key secret.Secret, clients int) (stores []store.Store) {
	hash := store.NewHashStore(store.Limits{})
	server, err := store.Serve("127.0.0.1:0", hash, store.Config{Secret: key, Log: zaptest.NewLogger(t)})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { server.Close() })
	for range clients {
		client, err := store.Dial(t.Context(), server.Addr(), store.Config{Secret: key})
		if err != nil {
			t.Fatal(err)
		}
		stores = append(stores, client)
	}
	return stores
}

func BenchmarkSetGet(b *testing.B) {
	storetest.SetGet(b, func(b *testing.B, clients int) []store.Store {
		return clientsOf(b, secret.Secret{}, clients)
	})
}

func TestHashStoreConforms(t *testing.T) { storetest.Run(t, storetest.Lacks{}, newHash) }

func TestClientConforms(t *testing.T) { storetest.Run(t, storetest.Lacks{}, newClient) }

func TestEncryptedClientConforms(t *testing.T) { storetest.Run(t, storetest.Lacks{}, newEncrypted) }

func TestFileStoreConforms(t *testing.T) {
	storetest.Run(t, storetest.Lacks{Queues: true, OwnKeys: 1}, newFile)
}

func TestPrefixStoreConforms(t *testing.T) {
	for name, under := range map[string]struct {
		open  func(*testing.T) store.Store
		lacks storetest.Lacks
	}{"hash": {newHash, storetest.Lacks{}}, "client": {newClient, storetest.Lacks{}}, "file": {newFile,
		storetest.Lacks{Queues: true, OwnKeys: 1}}} {
		t.Run(name, func(t *testing.T) {
			storetest.Run(t, under.lacks, func(t *testing.T) store.Store {
				return store.NewPrefixStore("outer", store.NewPrefixStore("in/ner", under.open(t)))
			})
		})
	}
}

// A rank of hvdrun has two connections in an elastic job and with --mpi, and hosts connect before the ranks
// start.
func TestClientsOfJob(t *testing.T) {
	if want := 3 * launch.MaxRanks; store.MaxClients < want {
		t.Errorf("got at most %d clients, want at least %d", store.MaxClients, want)
	}
}
