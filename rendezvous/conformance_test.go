package rendezvous_test

import (
	"testing"

	"go.uber.org/goleak"
	"go.uber.org/zap/zaptest"

	"github.com/gohvd/gohvd/rendezvous"
	"github.com/gohvd/gohvd/rendezvous/storetest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestHashStoreConforms(t *testing.T) {
	storetest.Run(t, func(*testing.T) rendezvous.Store { return rendezvous.NewHashStore(rendezvous.Limits{}) })
}

func TestTCPStoreConforms(t *testing.T) {
	storetest.Run(t, func(t *testing.T) rendezvous.Store {
		hash := rendezvous.NewHashStore(rendezvous.Limits{})
		server, err := rendezvous.Serve("127.0.0.1:0", hash, zaptest.NewLogger(t))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { server.Close() })
		client, err := rendezvous.DialTCP(t.Context(), server.Addr())
		if err != nil {
			t.Fatal(err)
		}
		return client
	})
}
