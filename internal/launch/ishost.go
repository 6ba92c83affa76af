package launch

import (
	"net/netip"
	"os"
	"strings"

	"github.com/gohvd/gohvd/internal/netif"
)

// IsThisHost reports whether a name in a list of hosts is that of this one, which is reached without an agent's command: it is
// localhost, a loopback address, an address of an own interface, or the host's name, with or without its domain.
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

// IsOfHost reports whether an environment variable belongs to a host or a login there, so that ranks on another one keep
// what that has.
func IsOfHost(name string) bool {
	for _, prefix := range []string{"SSH_", "XDG_", "DBUS_"} {
		if strings.HasPrefix(name, prefix) {
			return true
		}
	}
	switch name {
	case "HOSTNAME", "HVD_HOSTID", "DISPLAY", "TMPDIR", "TMP", "TEMP", "HOME", "USER", "LOGNAME", "SHELL", "MAIL", "PWD", "OLDPWD", "_":
		return true
	}
	// Which devices a process may use is for its host to say; Horovod leaves CUDA's out too.
	return strings.HasSuffix(name, "_VISIBLE_DEVICES")
}
