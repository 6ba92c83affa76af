package main

import (
	"fmt"
	"net/netip"

	"github.com/gohvd/gohvd/store"
	"github.com/gohvd/gohvd/store/c10d"
)

// torchStoreOff is the value of --torch-store that turns off the TCPStore.
const torchStoreOff = "off"

// serveTorch serves a TCPStore through which torch.distributed in the ranks can connect. It serves none if
// --torch-store is off, or if the job has several hosts and the flag was not given. The TCPStore is separate
// from the store of the job, because the protocol of the TCPStore has no secret. For the same reason other
// hosts can reach it only if the user asked for that with the flag. The function end closes the TCPStore.
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
		return netip.AddrPort{}, nil, fmt.Errorf("parse the address of the TCPStore: %w", err)
	}
	if several && (addr.Addr().IsLoopback() || addr.Addr().IsUnspecified()) {
		end()
		return netip.AddrPort{}, nil,
			usagef("--torch-store: got %q, want an address at which other hosts can reach this host",
				r.torchStore)
	}
	return addr, end, nil
}
