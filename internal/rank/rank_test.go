package rank

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"

	"github.com/gohvd/gohvd/internal/rendezvous"
	"github.com/gohvd/gohvd/internal/testnet"
	"github.com/gohvd/gohvd/store"
)

// If the program of a rank runs in another process, as with the sidecar, each rank counts as two processes.
func TestProcesses(t *testing.T) {
	for _, c := range []struct {
		forClient bool
		want      int
	}{{false, 3}, {true, 6}} {
		o := Options{ForClient: c.forClient}
		if got := o.processes(3); got != c.want {
			t.Errorf("ForClient %v: 3 ranks count as %d processes, want %d", c.forClient, got, c.want)
		}
	}
}

// A rank whose store has ended looks for the store of a later program until its time limit passes. Its error
// also says that the first store has ended.
func TestFirstErrorOfInit(t *testing.T) {
	h := store.NewHashStore(store.Limits{})
	server, err := store.Serve("127.0.0.1:0", h, store.Config{})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(testnet.Context(t))
	defer cancel()
	log, _ := testnet.Logs()
	log = log.WithOptions(zap.Hooks(func(e zapcore.Entry) error {
		switch {
		case e.Message == "init: joining the other ranks":
			return errors.Join(server.Close(), h.Close())
		case strings.HasSuffix(e.Message, "meeting again"):
			cancel() // as if the time limit had passed
		}
		return nil
	}))
	err = new(Rank).Start(ctx, Options{Log: log,
		Method:   fmt.Sprintf("tcp://%s?rank=1&world_size=2", server.Addr()),
		Settings: map[string]string{"HVD_INSECURE": "1", "HOROVOD_GLOO_TIMEOUT_SECONDS": "300"}})
	if !errors.Is(err, rendezvous.ErrStoreEnded) || !errors.Is(err, context.Canceled) {
		t.Errorf("got error %v, want one with both reasons", err)
	}
}
