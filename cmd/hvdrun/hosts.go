package main

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/pflag"

	"github.com/gohvd/gohvd/internal/config"
	"github.com/gohvd/gohvd/internal/launch"
	"github.com/gohvd/gohvd/internal/netif"
)

// hostFlags holds the flags that choose the hosts of the ranks and say how to reach these hosts.
type hostFlags struct {
	list, file   string
	sshPort      int
	sshIdentity  string
	agent        string
	remoteHvdrun string
	gpus         map[string]int // with slurmAgent, the GPUs that srun asks for on each host

	// sshOptions holds further arguments for ssh. In addition, the method reach always passes some arguments
	// of its own.
	sshOptions []string
}

// hostPlace is the text in the value of --agent that is replaced by the name of the host.
const hostPlace = "{host}"

func (h *hostFlags) group() group {
	g := newGroup("Several hosts")
	f := g.flags
	f.StringVarP(&h.list, "hosts", "H", "",
		"`LIST` of hosts with the number of ranks for each, as in h1:2,h2:2. A host without a number gets 1 rank. The numbers "+
			"of a host that occurs more than once add up")
	f.StringVar(&h.file, "hostfile", "",
		"`FILE` with one host per line, as in h1 slots=2 or h1:2; also -hostfile")
	h.addReach(f)
	f.StringVar(&h.remoteHvdrun, "remote-hvdrun", "",
		"`PATH` of hvdrun on the other hosts (default: its path on this host)")
	return g
}

// addReach adds the flags that say how to reach hosts.
func (h *hostFlags) addReach(f *pflag.FlagSet) {
	f.IntVarP(&h.sshPort, "ssh-port", "p", 0,
		"`PORT` of sshd on the other hosts (default: from the configuration of ssh)")
	f.StringVarP(&h.sshIdentity, "ssh-identity-file", "i", "", "`FILE` with the private key for ssh")
	f.StringVar(&h.agent, "agent", "",
		"`COMMAND` that runs a command on another host, used instead of ssh. hvdrun replaces {host} in COMMAND by the name of "+
			"the host; if COMMAND does not contain {host}, hvdrun appends the name")
}

// hosts returns the hosts that the flags name. It returns an empty list if no flag names hosts.
func (h *hostFlags) hosts() (hosts []launch.Host, err error) {
	switch {
	case h.list != "" && h.file != "":
		return nil, usagef("--hosts and --hostfile cannot be used together")
	case h.list != "":
		if hosts, err = launch.ParseHosts(h.list); err != nil {
			return nil, usagef("--hosts: %w", err)
		}
	case h.file != "":
		if hosts, err = launch.ParseHostFile(h.file); err != nil {
			return nil, usagef("--hostfile: %w", err)
		}
	}
	return hosts, nil
}

// check returns an error if the value of a flag is empty or out of range, or if flags contradict each other.
// given holds the flags on the command line.
func (h *hostFlags) check(given *pflag.FlagSet) error {
	for _, f := range []struct {
		name  string
		empty bool
	}{
		{"hosts", h.list == ""}, {"hostfile", h.file == ""},
		{"remote-hvdrun", h.remoteHvdrun == ""}, {"agent", strings.TrimSpace(h.agent) == ""},
	} {
		if given.Changed(f.name) && f.empty {
			return usagef("--%s: got an empty value", f.name)
		}
	}
	if given.Changed("ssh-port") && (h.sshPort < 1 || h.sshPort > 65535) {
		return usagef("--ssh-port: got %d, want 1 to 65535", h.sshPort)
	}
	if h.agent != "" && (h.sshPort != 0 || h.sshIdentity != "") {
		return usagef("--ssh-port and --ssh-identity-file apply only to ssh, which --agent replaces: put such options into the command of --agent")
	}
	return nil
}

// splitList returns an error if a blank in the value of --hosts has made the shell take the rest of the value
// for the command to launch. word is the first word of that command.
func (h *hostFlags) splitList(word string) error {
	if _, err := launch.ParseHosts(word); err != nil || h.list == "" || !strings.Contains(word, ":") {
		return nil
	}
	return usagef("--hosts: got %q, which is followed by %q instead of a command: put commas and no blanks between "+
		"hosts, as in %s,%s", h.list, word, strings.TrimSuffix(h.list, ","), word)
}

// explain adds to the error that a command was not found that it may be a host, if the value of --hosts ends
// with a comma.
func (h *hostFlags) explain(err error) error {
	var start *launch.CommandError
	if errors.As(err, &start) && start.Status == statusNotFound && strings.HasSuffix(h.list, ",") {
		return fmt.Errorf("%w; if this is a host, put commas and no blanks between the hosts of --hosts", err)
	}
	return err
}

// unusedFlags returns warnings about flags that were given but have no effect. If all hosts are this host,
// flags for other hosts have no effect.
func (h *hostFlags) unusedFlags(given *pflag.FlagSet, hosts []launch.Host) (warnings []string) {
	if slices.ContainsFunc(hosts, func(host launch.Host) bool { return !launch.IsThisHost(host.Name) }) {
		return nil
	}
	for _, name := range []string{"ssh-port", "ssh-identity-file", "agent", "remote-hvdrun"} {
		if given.Changed(name) {
			warnings = append(warnings,
				fmt.Sprintf("--%s has no effect, because all ranks run on this host: name other hosts with --hosts or --hostfile", name))
		}
	}
	return warnings
}

// onSeveral reports whether at least one rank runs on another host.
func onSeveral(hosts []launch.Host) bool {
	return len(hosts) > 1 || len(hosts) == 1 && !launch.IsThisHost(hosts[0].Name)
}

// reach returns the command that runs a program on host. words[0] is the program, and the other words are its
// arguments.
func (h *hostFlags) reach(host string, words []string) []string {
	if h.agent != "" {
		// The words are not quoted for a shell, because not every agent runs a shell on the other host.
		argv := strings.Fields(strings.ReplaceAll(h.agent, hostPlace, host))
		if !strings.Contains(h.agent, hostPlace) {
			argv = append(argv, host)
		}
		if n, ok := h.gpus[host]; ok {
			argv = append(argv, fmt.Sprintf("--gpus=%d", n))
		}
		return append(argv, words...)
	}
	// BatchMode: ssh must not prompt for a password. -T: ssh must not allocate a terminal, which would alter
	// the bytes. ControlMaster: ssh must not open a connection for other ssh commands to share, because that
	// connection would outlive the job.
	argv := append([]string{"ssh", "-T", "-o", "BatchMode=yes", "-o", "ControlMaster=no"}, h.sshOptions...)
	if h.sshPort != 0 {
		argv = append(argv, "-p", strconv.Itoa(h.sshPort))
	}
	if h.sshIdentity != "" {
		argv = append(argv, "-i", h.sshIdentity)
	}
	argv = append(argv, host)
	for _, w := range words {
		argv = append(argv, shellWord(w))
	}
	return argv
}

// shellWord quotes word for the shell in which sshd runs the command.
func shellWord(word string) string {
	special := func(r rune) bool {
		return (r < 'a' || r > 'z') && (r < 'A' || r > 'Z') && (r < '0' || r > '9') &&
			!strings.ContainsRune("_-./:=@%+,", r)
	}
	if word != "" && !strings.ContainsFunc(word, special) {
		return word
	}
	return "'" + strings.ReplaceAll(word, "'", `'\''`) + "'"
}

// agentPath returns the path of hvdrun on the other hosts. It is the value of --remote-hvdrun or, without
// that flag, the path of this program.
func (h *hostFlags) agentPath() (string, error) {
	if h.remoteHvdrun != "" {
		return h.remoteHvdrun, nil
	}
	path, err := os.Executable()
	if err != nil {
		return "", fmt.Errorf("get the path of hvdrun: %w", err)
	}
	return path, nil
}

// storeAddresses returns addresses with the given port at which other hosts may reach this host. The address
// of the default route comes first. storeAddresses does not look up the routes to the hosts, because a host's
// name may be an alias that only ssh understands. If hosts has no other host than this one, which may have
// only loopback addresses, it returns one of them rather than none.
func storeAddresses(settings *config.Config, hosts []launch.Host, port uint16) ([]netip.AddrPort, error) {
	choice, err := netif.Parse(settings.NetworkInterfaces)
	if err != nil {
		return nil, usageError{err}
	}
	own, err := choice.Addresses()
	if err != nil {
		return nil, usageError{err}
	}
	other := func(h launch.Host) bool { return !launch.IsThisHost(h.Name) }
	if len(own) == 0 && slices.ContainsFunc(hosts, other) {
		return nil, errors.New("this host has no address that other hosts can reach")
	}
	first, err := choice.Any()
	if err != nil {
		return nil, usageError{err}
	}
	addrs := []netip.AddrPort{netip.AddrPortFrom(first, port)}
	for _, a := range own {
		if a != first {
			addrs = append(addrs, netip.AddrPortFrom(a, port))
		}
	}
	return addrs, nil
}
