package rank

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"

	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/rendezvous"
	"github.com/gohvd/gohvd/internal/tensor"
	"github.com/gohvd/gohvd/internal/testnet"
	"github.com/gohvd/gohvd/internal/topo"
	"github.com/gohvd/gohvd/store"
	"github.com/gohvd/gohvd/tensorqueue"
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

// full is a Remote that refuses its first operations with errs. It records the names of all.
type full struct {
	Remote
	names []string
	errs  []error
}

func (f *full) Queue(entries ...*tensorqueue.Entry) error {
	f.names = append(f.names, entries[0].Request.Name)
	if n := len(f.names); n <= len(f.errs) {
		return f.errs[n-1]
	}
	return nil
}

// TestNameAfterRefusal checks that an unnamed call that only this rank refuses does not change later names,
// unless the program uses its name.
func TestNameAfterRefusal(t *testing.T) {
	f := &full{errs: []error{errors.New("64512 operations are in flight"), new(tensorqueue.DuplicateNameError)}}
	r := NewRemote(Joined{Place: topo.Topology{Size: 1}}, f)
	for i := range 4 {
		c := NewCall(message.Allreduce, tensor.Float32)
		c.Rank = r
		if err := c.Check(); err != nil {
			t.Fatal(err)
		}
		e := new(tensorqueue.Entry)
		c.Fill(e)
		if err := c.Submit(e); (err != nil) != (i < 2) {
			t.Errorf("call %d: got %v", i, err)
		}
	}
	for i, number := range []int{1, 1, 2, 3} {
		if want := fmt.Sprint("allreduce.noname.", number); f.names[i] != want {
			t.Errorf("call %d: got %q, want %q", i, f.names[i], want)
		}
	}
}
