package bootstrap

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"strconv"
	"strings"
	"sync"
	"syscall"

	"github.com/gohvd/gohvd/internal/dial"
	"github.com/gohvd/gohvd/store"
	"github.com/gohvd/gohvd/store/c10d"
)

const (
	// masterPlace is the key under which rank 0 publishes the port of its own store in the TCPStore at
	// MASTER_ADDR:MASTER_PORT. The value is port,word, where word is the result of torchSecret.
	masterPlace = "place"
	// masterClaim is the key of a counter in the same TCPStore. Each rank 0 that meets there increments the
	// counter. A value above 1 means that a second job uses the same port.
	masterClaim = "claim"
	// masterFreeKey is the key that rank 0 sets in its own store when it has closed the server at
	// MASTER_PORT.
	masterFreeKey = "bootstrap/master-free"
)

// meetAtMaster meets at MASTER_ADDR:MASTER_PORT, where rank 0 serves a TCPStore by PyTorch's convention.
// PyTorch in the same process may already serve that TCPStore, or may have to serve it later. So the ranks
// use it only to learn the port of another store that rank 0 serves. If PyTorch's TCPStore exists, rank 0
// publishes the port there. Otherwise rank 0 serves a TCPStore itself. When all ranks have met, it closes
// this TCPStore before any other rank continues.
func (e *Env) meetAtMaster(ctx context.Context, o MeetOptions, m *Place) error {
	if o.Secret.IsZero() && !o.Insecure && !e.OneHost() {
		return ErrNoSecret
	}
	host, port := cmp.Or(o.Host, e.host), o.Port
	if e.OneHost() {
		host = loopback
	}
	if e.Rank == 0 {
		return e.publishAtMaster(ctx, o, m, host, port)
	}
	dialed, err := o.resolve(ctx, host)
	if err != nil {
		return err
	}
	master := net.JoinHostPort(dialed, strconv.Itoa(port))
	text, err := e.readAtMaster(ctx, master)
	if err != nil {
		return err
	}
	portText, word, _ := strings.Cut(string(text), ",")
	if port, err = decimal(portText, 1<<16-1); err != nil || port == 0 {
		return fmt.Errorf("malformed announcement from rank 0 in the TCPStore at %s: got no port, want \"port,word\"", master)
	}
	err = dial.Retry(ctx, func() error { return e.adoptTorchSecret(ctx, o, m, word) })
	if err != nil {
		return err
	}
	m.onMet(func(ctx context.Context) error { return m.Store.Wait(ctx, masterFreeKey) })
	return e.dial(ctx, o, m, host, port)
}

// readAtMaster returns what rank 0 has published in the TCPStore at master. If the TCPStore ends before, it
// was perhaps that of an earlier program of the same processes, so readAtMaster waits for the next one.
func (e *Env) readAtMaster(ctx context.Context, master string) (text []byte, err error) {
	var wait dial.Backoff
	var ended error // why the last TCPStore has been lost
	for {
		client, err := c10d.Dial(ctx, master, c10d.Unknown)
		if err != nil {
			err = fmt.Errorf("no connection to rank 0 at %s and %s: %w", e.hostName, e.portName, err)
			if ended != nil {
				err = fmt.Errorf("%w (an earlier TCPStore there has ended: %w)", err, ended)
			}
			return nil, err
		}
		text, err = e.atMasterStore(client).Get(ctx, masterPlace)
		if err == nil {
			return text, client.Close()
		}
		ended = errors.Join(fmt.Errorf(
			"rank 0 has published no address in the TCPStore at %s; if PyTorch serves this store, all ranks must call "+
				"init_process_group and Init in the same order: %w", master, err), client.Close())
		if ctx.Err() != nil || !dial.MayRecover(err) {
			return nil, ended
		}
		dial.Pause(ctx, wait.Next(), nil)
	}
}

// atMasterStore returns a view of s, the TCPStore at MASTER_ADDR:MASTER_PORT. The view adds a prefix for this
// package and the job to all keys.
func (e *Env) atMasterStore(s store.Store) store.Store {
	return store.NewPrefixStore("gohvd/"+cmp.Or(e.JobID, "plain"), s)
}

// publishAtMaster does the work of meetAtMaster at rank 0.
func (e *Env) publishAtMaster(ctx context.Context, o MeetOptions, m *Place, host string, port int) error {
	word, err := e.torchSecret(o, m)
	if err != nil {
		return err
	}
	listen, err := e.listenHost(ctx, o, host)
	if err != nil {
		return err
	}
	server, err := e.serve(ctx, o, m, listen, 0)
	if err != nil {
		return err
	}
	_, own, err := net.SplitHostPort(server.Addr())
	if err != nil {
		return err
	}
	master, release, err := e.masterStore(ctx, o, listen, port)
	if err != nil {
		return err
	}
	m.removeWhenMet(release)
	s := e.atMasterStore(master)
	// This uses Add instead of a compare-and-set, because on older servers of PyTorch a compare-and-set does
	// not wake ranks that wait for its key.
	if n, err := s.Add(ctx, masterClaim, 1); err != nil {
		return err
		// The proof of the secret does not detect this mistake, because the other job may have the same
		// secret.
	} else if n != 1 {
		return fmt.Errorf("another job, or another rank 0 of this job, uses port %d of this host: set a different RANK at each rank, and a different %s for each job", port, e.portName)
	}
	m.removeWhenMet(func() error {
		// PyTorch's store continues to exist after this meeting, and the same processes may meet there again.
		// So the keys must be removed.
		ctx, cancel := context.WithTimeout(context.Background(), lookupTime)
		defer cancel()
		_, err := s.Delete(ctx, masterPlace)
		_, claimErr := s.Delete(ctx, masterClaim)
		return errors.Join(err, claimErr)
	})
	if err := s.Set(ctx, masterPlace, []byte(own+","+word)); err != nil {
		return err
	}
	m.onMet(func(ctx context.Context) error { return m.Store.Set(ctx, masterFreeKey, nil) })
	return nil
}

// masterStore serves a TCPStore on the port and returns it. If another server already uses the port,
// masterStore returns a client of that TCPStore. The caller must call release, which closes the server or the
// client.
func (e *Env) masterStore(ctx context.Context, o MeetOptions, listen string,
	port int) (s store.Store, release func() error, err error) {
	h := store.NewHashStore(store.Limits{})
	server, err := c10d.Serve(net.JoinHostPort(listen, strconv.Itoa(port)), h, c10d.Config{Log: o.Log})
	if err == nil {
		watch, stop := context.WithCancel(context.WithoutCancel(ctx))
		var watching sync.WaitGroup
		watching.Go(func() {
			if h.Wait(watch, c10d.WorkersKey) == nil && o.Log != nil {
				o.Log.Error("PyTorch of another rank has connected to " + e.portName + " while rank 0 is in Init: all ranks must call init_process_group and Init in the same order")
			}
		})
		release = func() error {
			stop()
			watching.Wait()
			return errors.Join(server.Close(), h.Close())
		}
		// The prefix is empty, because the keys of a TCPStore begin with a slash.
		return store.NewPrefixStore("", h), release, nil
	}
	if err = errors.Join(err, h.Close()); !errors.Is(err, syscall.EADDRINUSE) {
		return nil, nil, err
	}
	client, err := c10d.Dial(ctx, net.JoinHostPort(cmp.Or(listen, loopback), strconv.Itoa(port)),
		c10d.Unknown)
	if err != nil {
		return nil, nil, fmt.Errorf(
			"%s is in use on this host, but not by a TCPStore of PyTorch: %w", e.portName, err)
	}
	return client, client.Close, nil
}
