package launch

import (
	"net/netip"
	"os"
	"strings"

	"github.com/gohvd/gohvd/internal/netif"
)

// IsThisHost reports whether a name in a list of hosts means this host. The launcher needs no command to
// start an agent on this host. The names of this host are localhost, every loopback address, every address of
// a network interface of this host, and its host name, with or without the domain.
func IsThisHost(name string) bool {
	if strings.EqualFold(name, "localhost") {
		return true
	}
	if addr, err := netip.ParseAddr(name); err == nil {
		own, err := netif.IsOwn(addr.Unmap())
		return own && err == nil
	}
	host, err := os.Hostname()
	if err != nil {
		return false
	}
	short, _, _ := strings.Cut(host, ".")
	return strings.EqualFold(name, host) || strings.EqualFold(name, short)
}

// IsOfHost reports whether an environment variable belongs to a host or to a login on a host. Such variables
// are not sent to other hosts. A rank there gets the values of its own host.
func IsOfHost(name string) bool {
	for _, prefix := range []string{"SSH_", "XDG_", "DBUS_"} {
		if strings.HasPrefix(name, prefix) {
			return true
		}
	}
	switch name {
	case "HOSTNAME", "HVD_HOSTID", "DISPLAY", "TMPDIR", "TMP", "TEMP", "HOME", "USER", "LOGNAME", "SHELL",
		"MAIL", "PWD", "OLDPWD", "SLURMD_NODENAME", "_":
		return true
	}
	// Each host decides which devices a process may use. Horovod does not send CUDA_VISIBLE_DEVICES either.
	return strings.HasSuffix(name, "_VISIBLE_DEVICES")
}
