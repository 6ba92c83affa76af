package main

import (
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/gohvd/gohvd/internal/config"
	"github.com/gohvd/gohvd/internal/launch"
	"github.com/gohvd/gohvd/internal/netif"
	"github.com/gohvd/gohvd/internal/testnet"
)

// fakeSSH creates a directory with a program named ssh. The program writes its arguments to a file, one per
// line, and the result notes is the path of this file. Then it runs its last numWords arguments in a shell as
// sshd does, but on this host.
func fakeSSH(t *testing.T, numWords int) (dir, notes string) {
	t.Helper()
	dir = t.TempDir()
	notes = filepath.Join(dir, "notes")
	script := `#!/bin/sh
printf '%s\n' "$@" >>'` + notes + `'
while [ $# -gt ` + strconv.Itoa(numWords) + ` ]; do shift; done
exec sh -c "$*"
`
	testnet.WriteScript(t, filepath.Join(dir, "ssh"), script)
	return dir, notes
}

// TestHostsBySSH checks that hvdrun starts its agent on each host by ssh, with the ssh arguments that the
// flags select. The ranks must get the variables that hvdrun sends.
func TestHostsBySSH(t *testing.T) {
	self := testnet.Self(t)
	// This path must be quoted, because a shell would split it.
	odd := filepath.Join(t.TempDir(), "it's hvdrun $HOME")
	if err := os.Symlink(self, odd); err != nil {
		t.Fatal(err)
	}
	bin, notes := fakeSSH(t, 3)
	cmd := hvdrun(t, "-np", "3", "-H", "h1:2,h2:2", "-p", "2222", "-i", "key file", "--remote-hvdrun", odd,
		"--network-interfaces", "lo",
		"-x", "TMPDIR", "sh", "-c",
		"echo $HOROVOD_HOSTNAME $HOROVOD_LOCAL_RANK $HOROVOD_GLOO_RENDEZVOUS_ADDR $TMPDIR $MASTER_ADDR")
	cmd.Env = append(slices.DeleteFunc(cmd.Env, func(v string) bool {
		return strings.HasPrefix(v, "TMPDIR=") || strings.HasPrefix(v, "MASTER_ADDR=")
	}),
		"PATH="+bin+":"+os.Getenv("PATH"), "TMPDIR=/mine")
	var stderr strings.Builder
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	lines := strings.Split(strings.TrimSpace(string(out)), "\n")
	slices.Sort(lines)
	want := []string{"[0]<stdout>:h1 0 127.0.0.1 /mine", "[1]<stdout>:h1 1 127.0.0.1 /mine",
		"[2]<stdout>:h2 0 127.0.0.1 /mine"}
	if err != nil || !slices.Equal(lines, want) || stderr.String() != "" {
		t.Errorf("got %q, error %v and %q, want %q", lines, err, stderr.String(), want)
	}
	words := testnet.ReadFile(t, notes)
	for _, host := range []string{"h1", "h2"} {
		want := strings.Join([]string{"-T", "-o", "BatchMode=yes", "-o", "ControlMaster=no",
			"-o", "ConnectionAttempts=29", "-p", "2222", "-i", "key file", host,
			"'" + strings.ReplaceAll(odd, "'", `'\''`) + "'", launch.AgentArg, "10s", ""}, "\n")
		if !strings.Contains(string(words), want) {
			t.Errorf("got %q, want %q", words, want)
		}
	}
}

// TestHostsByAgent checks that hvdrun uses the command in --agent. It must replace {host} in the command by
// the name of the host. If the command has no {host}, hvdrun must add the name at the end.
func TestHostsByAgent(t *testing.T) {
	dir := t.TempDir()
	file, script := filepath.Join(dir, "hosts"), filepath.Join(dir, "agent")
	testnet.WriteFile(t, file, "# two\nh1 slots=1\nlocalhost:1\n")
	if err := os.WriteFile(script, []byte("#!/bin/sh\nAT=$1; export AT; shift; exec \"$@\"\n"),
		0o700); err != nil {
		t.Fatal(err)
	}
	for _, agent := range []string{"env AT={host}", script} {
		stdout, stderr, status := output(t, "-hostfile", file, "--agent", agent, "--network-interfaces", "lo",
			"--verbose",
			"sh", "-c", "echo $HOROVOD_RANK $HOROVOD_SIZE $AT")
		lines := strings.Split(strings.TrimSpace(stdout), "\n")
		slices.Sort(lines)
		if want := []string{"[0]<stdout>:0 2 h1", "[1]<stdout>:1 2"}; status != 0 ||
			!slices.Equal(lines, want) {
			t.Errorf("%s: got exit status %d, %q and %q, want %q", agent, status, lines, stderr, want)
		}
		if !strings.Contains(stderr, "hvdrun: host h1: ready") {
			t.Errorf("got %q, want what hvdrun does", stderr)
		}
	}
}

// TestThisHostInTheList checks that hvdrun uses no agent for a host name that refers to this host. If all
// ranks are on this host, the store must listen on loopback.
func TestThisHostInTheList(t *testing.T) {
	stdout, stderr, status := output(t, "-H", "localhost:2", "--agent", "no-such-agent", "sh", "-c",
		"echo $HOROVOD_HOSTNAME $HOROVOD_GLOO_RENDEZVOUS_ADDR $MASTER_ADDR")
	if want := "<stdout>:localhost 127.0.0.1 127.0.0.1\n"; status != 0 || strings.Count(stdout, want) != 2 {
		t.Errorf("got exit status %d, %q and %q, want %q from both ranks", status, stdout, stderr, want)
	}
	if stdout, stderr, status = output(t, "-H", "localhost,127.0.0.1", "--network-interfaces", "lo", "sh",
		"-c", "echo $HOROVOD_HOSTNAME $HOROVOD_CROSS_RANK"); status != 0 ||
		!strings.Contains(stdout, "[0]<stdout>:localhost 0\n") ||
		!strings.Contains(stdout, "[1]<stdout>:127.0.0.1 1\n") {
		t.Errorf("got exit status %d, %q and %q, want both hosts", status, stdout, stderr)
	}
}

// TestHostsThatAddUp runs jobs on lists of hosts in which a host occurs twice, and on one that ends with a
// comma.
func TestHostsThatAddUp(t *testing.T) {
	file := filepath.Join(t.TempDir(), "hosts")
	testnet.WriteFile(t, file, "\ufefflocalhost slots = 2 max_slots = 4\nlocalhost\n")
	for _, flags := range [][]string{{"-H", "localhost:3,"}, {"-H", "localhost:1,localhost:2"},
		{"-hostfile", file}} {
		stdout, stderr, status := output(t, append(flags, "sh", "-c", "echo $HOROVOD_LOCAL_RANK of $HOROVOD_LOCAL_SIZE")...)
		lines := strings.Split(strings.TrimSpace(stdout), "\n")
		slices.Sort(lines)
		want := []string{"[0]<stdout>:0 of 3", "[1]<stdout>:1 of 3", "[2]<stdout>:2 of 3"}
		if status != 0 || !slices.Equal(lines, want) {
			t.Errorf("%q: got exit status %d, %q and %q, want %q", flags, status, lines, stderr, want)
		}
	}
	if _, stderr, _ := output(t, "-H", "localhost:2,", "h2"); !strings.Contains(stderr,
		"if this is a host, put commas and no blanks between the hosts of --hosts") {
		t.Errorf("got %q, want that h2 may be a host", stderr)
	}
}

// TestFlagsForOtherHostsAlone runs all ranks on this host and gives a flag for other hosts. hvdrun must warn
// that the flag has no effect.
func TestFlagsForOtherHostsAlone(t *testing.T) {
	for _, c := range []struct{ args, unused []string }{
		{[]string{"--agent", "y"}, []string{"--agent"}},
		{[]string{"-p", "22", "-i", "key", "--remote-hvdrun", "h"},
			[]string{"--ssh-port", "--ssh-identity-file", "--remote-hvdrun"}},
		{[]string{"--agent", "y", "-H", "localhost,127.0.0.1", "--network-interfaces", "lo"},
			[]string{"--agent"}},
		{nil, nil},
		{[]string{"--agent", "y", "--host-discovery-script", "echo localhost:2", "--network-interfaces", "lo"}, nil},
		{[]string{"--agent", "env X={host}", "-H", "localhost,h1", "--network-interfaces", "lo"}, nil},
	} {
		_, stderr, status := output(t, append(append([]string{"-np", "2"}, c.args...), "true")...)
		// The store may log that a process was killed, because the job was over, before it had connected.
		if status != 0 || strings.Count(stderr, "hvdrun: warning: ") != len(c.unused) {
			t.Errorf("%q: got exit status %d and %q, want 0 and %d warnings", c.args, status, stderr,
				len(c.unused))
		}
		for _, name := range c.unused {
			if want := "hvdrun: warning: " + name +
				" has no effect, because all ranks run on this host"; !strings.Contains(stderr, want) {
				t.Errorf("%q: got %q, want %q", c.args, stderr, want)
			}
		}
	}
}

func TestHostThatCannotBeUsed(t *testing.T) {
	for _, c := range []struct {
		args []string
		want int
		says string
	}{
		{[]string{"--agent", "sh -c no-such-shell", "true"}, 1, "hvdrun: host h1: found no hvdrun at "},
		{[]string{"--agent", "false", "true"}, 1, "hvdrun: host h1: false: exit status 1"},
		{[]string{"--agent", "no-such-agent", "true"}, 1,
			"hvdrun: host h1: no-such-agent: executable file not found in $PATH"},
		{[]string{"--agent", "env X={host}", "no-such-program"}, 127,
			`command "no-such-program" on host h1: executable file not found in $PATH`},
		{[]string{"--agent", "env X={host}", "--remote-hvdrun", "/no/hvdrun", "true"}, 1,
			"hvdrun: host h1: found no hvdrun at /no/hvdrun on that host: give its path with --remote-hvdrun"},
		{[]string{"--agent", "sleep 1000 #{host}", "--start-timeout", "0.3", "true"}, 1, "hvdrun: host h1: "},
	} {
		if _, stderr, status := output(t, append([]string{"-H", "h1", "--network-interfaces", "lo"},
			c.args...)...); status != c.want || !strings.Contains(stderr, c.says) {
			t.Errorf("%q: got exit status %d and %q, want %d and %q", c.args, status, stderr, c.want, c.says)
		}
	}
}

// TestStoreAddresses checks that the address of the default route is the first address of the store, because
// other hosts most likely reach this host there.
func TestStoreAddresses(t *testing.T) {
	for _, list := range [][]string{nil, {"lo"}} {
		settings := config.Config{NetworkInterfaces: list}
		choice, err := netif.Parse(list)
		if err != nil {
			t.Fatal(err)
		}
		own, err := choice.Addresses()
		if err != nil {
			t.Fatal(err)
		}
		first, err := choice.Any()
		if err != nil {
			t.Fatal(err)
		}
		got, err := storeAddresses(&settings, []launch.Host{{Name: "h1"}}, 7)
		if len(own) == 0 {
			if err == nil {
				t.Errorf("got %v without an address", got)
			}
			continue
		}
		if err != nil || len(got) != len(own) || got[0] != netip.AddrPortFrom(first, 7) {
			t.Errorf("%v: got %v and error %v, want %v with %v first", list, got, err, own, first)
		}
		for _, a := range own {
			if !slices.Contains(got, netip.AddrPortFrom(a, 7)) {
				t.Errorf("%v: got %v without %v", list, got, a)
			}
		}
	}
}

// TestNoNetwork runs jobs without other hosts on a host that has only loopback addresses.
func TestNoNetwork(t *testing.T) {
	if err := exec.Command("unshare", "-n", "true").Run(); err != nil {
		t.Skipf("cannot make a network namespace: %v", err)
	}
	for _, args := range [][]string{{"-H", "localhost,127.0.0.1"},
		{"-np", "1", "--host-discovery-script", "echo localhost"}} {
		cmd := hvdrun(t, append(args, "true")...)
		cmd.Args = append([]string{"unshare", "-n", "sh", "-c", `ip link set lo up && exec "$@"`, "sh", cmd.Path},
			cmd.Args[1:]...)
		cmd.Path, cmd.Err = exec.LookPath("unshare")
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Errorf("%v: got %v\n%s", args, err, out)
		}
	}
}

// TestProcessesHere checks how many processes of a job hvdrun expects on its own host.
func TestProcessesHere(t *testing.T) {
	several := []launch.Host{{Name: "h1", Slots: 2}, {Name: "localhost", Slots: 4}, {Name: "h2", Slots: 8}}
	for name, c := range map[string]struct {
		job  job
		want int
	}{
		"without hosts":       {job{np: 5}, 5},
		"few":                 {job{np: 2, several: true, hosts: several}, 0},
		"some":                {job{np: 5, several: true, hosts: several}, 3},
		"all slots":           {job{np: 9, several: true, hosts: several}, 4},
		"hosts from a script": {job{np: 9, several: true}, 0},
		"nodes":               {job{np: 9, several: true, hosts: several, nodes: &launch.Nodes{}}, 0},
	} {
		if got := c.job.here(); got != c.want {
			t.Errorf("%s: got %d, want %d", name, got, c.want)
		}
	}
}
