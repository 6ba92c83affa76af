package launch

import (
	"context"
	"net"
	"net/netip"
	"slices"
	"testing"
	"testing/synctest"
	"time"
)

// newElasticAgents returns the agents of an elastic job whose store has two addresses.
func newElasticAgents() *agents {
	o := &Options{Elastic: new(Elastic), StoreAddrs: []netip.AddrPort{
		netip.MustParseAddrPort("127.0.0.2:1"), netip.MustParseAddrPort("127.0.0.1:1")}}
	return &agents{spec: &spec{o: o, several: true}, inbox: &inbox{make(chan func()), make(chan struct{})}}
}

// The processes on this host reach the store at the address that is on the way to the other hosts of an
// elastic job, even if these are connected at another time.
func TestLocalHostOfElasticJob(t *testing.T) {
	a := newElasticAgents()
	a.hosts = []string{"localhost", "user@127.0.0.1"} // IsThisHost does not know the second one
	local := []*agentConn{a.to("localhost")}
	jobs, err := a.hostJobs(local, a.routes(t.Context(), local, a.hosts))
	if want := []string{"127.0.0.1:1", "127.0.0.2:1"}; err != nil || !slices.Equal(jobs[0].Stores, want) {
		t.Errorf("got %v and error %v, want %v", jobs[0].Stores, err, want)
	}
}

// The supervision does not wait for a name server.
func TestSlowNames(t *testing.T) {
	resolver := net.DefaultResolver
	defer func() { net.DefaultResolver = resolver }()
	net.DefaultResolver = &net.Resolver{PreferGo: true,
		Dial: func(ctx context.Context, _, _ string) (net.Conn, error) {
			<-ctx.Done()
			return nil, ctx.Err()
		}}
	// The first lookup makes a channel that later ones use too, so it must not be in the bubble.
	if _, err := net.DefaultResolver.LookupHost(t.Context(), "localhost"); err != nil {
		t.Fatal(err)
	}
	synctest.Test(t, func(t *testing.T) {
		a, start := newElasticAgents(), time.Now()
		a.to("host.invalid")
		a.connectAdded(t.Context())
		if waited := time.Since(start); waited > 0 {
			t.Errorf("waited %v", waited)
		}
		<-a.inbox.calls
		if waited := time.Since(start); waited > routeWait { // it is shorter if files of the host say so
			t.Errorf("the lookup ended after %v, want at most %v", waited, routeWait)
		}
		a.writers.Wait()
	})
}

// As many starts as there may be ranks can wait until the agent of a host reads them.
func TestOrdersOfElasticJob(t *testing.T) {
	a := newElasticAgents()
	c := a.to("localhost")
	c.pending = false
	for range MaxRanks {
		a.send(c, order{Start: new(int)})
	}
	if n := len(c.orders); n != MaxRanks {
		t.Errorf("%d orders wait, want %d", n, MaxRanks)
	}
}
