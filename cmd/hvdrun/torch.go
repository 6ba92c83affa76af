package main

import (
	"fmt"
	"net/netip"

	"github.com/gohvd/gohvd/store"
	"github.com/gohvd/gohvd/store/c10d"
)

// torchStoreOff is the --torch-store that serves none.
const torchStoreOff = "off"

// serveTorch serves a TCPStore to torch.distributed of the ranks, if it is to. It has nothing to do with the store of the
// job, for it cannot keep anybody out: so it is never where other hosts can reach it unless that was asked for.
func (r *runner) serveTorch(several, asked bool) (addr netip.AddrPort, end func(), err error) {
	if r.torchStore == torchStoreOff || several && !asked {
		return netip.AddrPort{}, func() {}, nil
	}
	kv := store.NewHashStore(store.Limits{})
	server, err := c10d.Serve(r.torchStore, kv, c10d.Config{Log: r.logger()})
	if err != nil {
		kv.Close()
		return netip.AddrPort{}, nil, usagef("--torch-store: %v", err)
	}
	end = func() {
		server.Close()
		kv.Close()
	}
	if addr, err = netip.ParseAddrPort(server.Addr()); err != nil {
		end()
		return netip.AddrPort{}, nil, fmt.Errorf("address of the TCPStore: %w", err)
	}
	if several && (addr.Addr().IsLoopback() || addr.Addr().IsUnspecified()) {
		end()
		return netip.AddrPort{}, nil, usagef("--torch-store: got %q, want an address of this host by which other hosts can reach it", r.torchStore)
	}
	return addr, end, nil
}
