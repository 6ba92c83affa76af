package main

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/gohvd/gohvd/internal/config"
	"github.com/gohvd/gohvd/internal/doctor"
	"github.com/gohvd/gohvd/internal/testnet"
)

// agentScript creates an agent that does not run the command, but writes its arguments to a file. The result
// notes is the path of this file. The agent fails for a host with the name "bad" and succeeds for all other
// hosts.
func agentScript(t *testing.T) (agent, notes string) {
	t.Helper()
	dir := t.TempDir()
	agent, notes = filepath.Join(dir, "agent"), filepath.Join(dir, "notes")
	text := "#!/bin/sh\necho \"$*\" >>'" + notes +
		"'\nif [ \"$2\" = bad ]; then echo 'bad: Permission denied' >&2; exit 255; fi\n"
	testnet.WriteScript(t, agent, text)
	return agent, notes
}

// examined runs hvdrun doctor --json. It returns the lines of the output as a map from name to line, the
// number of failures and the exit status. The number of failures depends on the machine, so tests must not
// expect a certain number.
func examined(t *testing.T, args ...string) (lines map[string]doctor.Line, failed int, status int) {
	t.Helper()
	stdout, stderr, status := output(t, append([]string{"doctor", "--json"}, args...)...)
	var all []doctor.Line
	if err := json.Unmarshal([]byte(stdout), &all); err != nil || stderr != "" {
		t.Fatalf("%q: got %q and %q: %v", args, stdout, stderr, err)
	}
	lines = make(map[string]doctor.Line)
	for _, l := range all {
		lines[l.Name] = l
	}
	return lines, doctor.Count(all, doctor.Fail), status
}

func TestDoctor(t *testing.T) {
	t.Setenv("HVD_SECRET", "hush hush hush hush")
	t.Setenv("HOROVOD_RANK", "3")
	agent, notes := agentScript(t)
	lines, failed, status := examined(t, "--agent", agent+"  -q", "--hosts",
		"good:2,bad, fd00::7,[fd00::8]:2")
	for name, want := range map[string]doctor.Status{
		"host good": doctor.OK, "host bad": doctor.Fail, "host fd00::7": doctor.OK, "host fd00::8": doctor.OK,
		"agent": doctor.OK, "memfd": doctor.OK, "version": doctor.OK, "HOROVOD_RANK": doctor.OK,
	} {
		if lines[name].Status != want {
			t.Errorf("%s: got %+v, want %s", name, lines[name], want)
		}
	}
	if status != 1 || failed < 1 {
		t.Errorf("got exit status %d and %d failures, want 1 and some", status, failed)
	}
	if l := lines["host bad"]; l.Text != "exit status 255: bad: Permission denied" ||
		l.Fix != "install your public key on the host: ssh-copy-id bad" {
		t.Errorf("got %+v, want the agent's message and a fix", l)
	}
	if l := lines["tensor operations"]; l.Section != "build" || !strings.HasPrefix(l.Text, "Gloo") ||
		!strings.Contains(l.Text, "not built in: NCCL") {
		t.Errorf("got %+v, want what --check-build says", l)
	}
	if l := lines["cpu operations"]; !strings.Contains(l.Text, "shm") || !strings.Contains(l.Text, "tcp") {
		t.Errorf("got %+v, want the values of the setting", l)
	}
	if l := lines["version"]; l.Text != "gohvd "+config.VersionText() {
		t.Errorf("got %+v, want %s", l, config.VersionText())
	}
	if text := fmt.Sprint(lines); strings.Contains(text, "hush") || lines["HVD_SECRET"].Text == "" {
		t.Errorf("got %s, want that a secret is set, without its text", text)
	}
	asked := testnet.ReadFile(t, notes)
	got := strings.Split(strings.TrimSpace(string(asked)), "\n")
	slices.Sort(got)
	if want := []string{"-q bad true", "-q fd00::7 true", "-q fd00::8 true", "-q good true"}; !slices.Equal(
		got, want) {
		t.Errorf("the agent was run with %q, want %q", got, want)
	}
}

// TestDoctorReachesAsJobsDo checks that the doctor reaches a host with the same command as a job would.
func TestDoctorReachesAsJobsDo(t *testing.T) {
	lines, _, _ := examined(t, "--agent", "env AT={host}", "-H", "h1")
	if l := lines["host h1"]; l.Status != doctor.OK {
		t.Errorf("got %+v, want the host reached", l)
	}
	lines, _, _ = examined(t, "--agent", "false", "-H", "localhost,127.0.0.1:2")
	if l := lines["hosts"]; l.Status != doctor.OK {
		t.Errorf("got %+v, want no agent for this host", lines)
	}
	if lines, _, _ = examined(t, "--agent", "{host}"); lines["agent"].Status != doctor.Warn {
		t.Errorf("got %+v, want a warning", lines["agent"])
	}

	bin, notes := fakeSSH(t, 1)
	t.Setenv("PATH", bin+":"+os.Getenv("PATH"))
	lines, _, _ = examined(t, "-H", "me@h1", "-p", "2222", "-i", "key file")
	if l := lines["host me@h1"]; l.Status != doctor.OK || lines["agent"].Text != filepath.Join(bin, "ssh") {
		t.Errorf("got %+v and %+v, want the host reached by ssh", l, lines["agent"])
	}
	words := testnet.ReadFile(t, notes)
	want := (&hostFlags{sshPort: 2222, sshIdentity: "key file",
		sshOptions: []string{"-o", "ConnectTimeout=5"}}).reach("me@h1", []string{"true"})
	if got := strings.Split(strings.TrimSpace(string(words)), "\n"); !slices.Equal(got, want[1:]) {
		t.Errorf("got %q, want %q", got, want[1:])
	}
}

func TestDoctorAsText(t *testing.T) {
	lines, failed, status := examined(t)
	if want := min(failed, 1); status != want {
		t.Errorf("got exit status %d with %d failures, want %d", status, failed, want)
	}
	stdout, stderr, again := output(t, "doctor")
	text := strings.Split(strings.TrimSuffix(stdout, "\n"), "\n")
	if again != status || stderr != "" || text[0] != "build" {
		t.Errorf("got exit status %d, %q and %q, want %d and the section build first", again, stdout, stderr,
			status)
	}
	for _, want := range []string{"memfd", "GOMAXPROCS", "open files"} {
		if !slices.ContainsFunc(text, func(l string) bool {
			return strings.HasPrefix(l, "  "+string(lines[want].Status)+" ") &&
				strings.Contains(l, " "+want+" ") && strings.HasSuffix(l, lines[want].Text)
		}) {
			t.Errorf("got %q, want a line with %+v", stdout, lines[want])
		}
	}
	var numOK, numWarn, numFail int
	if _, err := fmt.Sscanf(text[len(text)-1], "%d ok, %d warn, %d fail", &numOK, &numWarn,
		&numFail); err != nil || numFail != failed {
		t.Errorf("got %q at the end, want the counts, %d failures", text[len(text)-1], failed)
	}
}

func TestDoctorWrongUsage(t *testing.T) {
	agent, notes := agentScript(t)
	for _, c := range []struct {
		args []string
		want string
	}{
		{[]string{"x"}, `doctor: got "x", want only flags`},
		{[]string{"--jsn"}, "unknown flag: --jsn; did you mean --json?"},
		{[]string{"--hosts"}, "needs an argument"},
		{[]string{"--hosts", "h1,,h2"}, `--hosts: got "" in "h1,,h2"`},
		{[]string{"--hosts", "-oProxyCommand=touch x"}, "want the name or the address of a host"},
		{[]string{"--hosts", "a b"}, `--hosts: got "a b", want commas between hosts, as in a,b`},
		{[]string{"--hosts", "h1:x"}, `--hosts: got "h1:x"`},
		{[]string{"--hosts", "h1:0"}, `--hosts: got "h1:0"`},
		{[]string{"--hosts", "[::1]22"}, `--hosts: got "[::1]22"`},
		{[]string{"--hosts", "[::1]:"}, `--hosts: got "[::1]:"`},
		{[]string{"--hosts", "h1:"}, `--hosts: got "h1:"`},
		{[]string{"--hosts", "[-v]"}, "want the name or the address of a host"},
		{[]string{"--hosts", "]"}, "want the name or the address of a host"},
		{[]string{"--hosts", "[]:2"}, "want the name or the address of a host"},
		{[]string{"--hosts", ":2"}, "want the name or the address of a host"},
		{[]string{"--agent", " "}, "--agent: got an empty value"},
		{[]string{"--hosts", "h1:2h2:1"}, "with commas between hosts"},
		{[]string{"--hosts", ""}, "--hosts: got an empty value"},
		{[]string{"-p", "22"}, "apply only to ssh, which --agent replaces"},
		{[]string{"-i", "key"}, "apply only to ssh, which --agent replaces"},
		{[]string{"--agent", "x", "-p", "0"}, "--ssh-port: got 0"},
	} {
		args := append([]string{"doctor"}, c.args...)
		if c.args[0] != "--agent" && c.args[0] != "--jsn" {
			args = slices.Insert(args, 1, "--agent", agent)
		}
		stdout, stderr, status := output(t, args...)
		if status != 2 || stdout != "" || !strings.HasPrefix(stderr, "hvdrun: ") ||
			!strings.Contains(stderr, c.want) {
			t.Errorf("%q: got exit status %d, %q and %q, want 2 and %q", c.args, status, stdout, stderr,
				c.want)
		}
	}
	if _, err := os.Stat(notes); err == nil {
		t.Error("the agent was run")
	}
}

// TestDoctorInterrupted checks that SIGINT, as from Ctrl-C, ends hvdrun doctor and its agents.
func TestDoctorInterrupted(t *testing.T) {
	agent := filepath.Join(t.TempDir(), "agent")
	if err := os.WriteFile(agent, []byte("#!/bin/sh\necho $$ >&2; kill -INT $PPID; exec sleep 100\n"),
		0o700); err != nil {
		t.Fatal(err)
	}
	stdout, stderr, status := output(t, "doctor", "--agent", agent, "-H", "h1")
	if status != 1 || stdout != "" || !strings.Contains(stderr, "hvdrun: doctor: interrupted\n") {
		t.Errorf("got exit status %d, %q and %q", status, stdout, stderr)
	}
}

func TestDoctorHelp(t *testing.T) {
	stdout, stderr, status := output(t, "doctor", "--help")
	if status != 0 || stderr != "" || !strings.HasPrefix(stdout, doctorLong) {
		t.Errorf("got exit status %d, %q and %q, want 0 and the description", status, stdout, stderr)
	}
	testnet.WantText(t, stdout, "\n  hvdrun doctor [flags]\n", "  -H, --hosts LIST", "--agent COMMAND",
		"-p, --ssh-port PORT", "-i, --ssh-identity-file FILE", "--json", "-h, --help")
	if stdout, _, _ := output(t, "--help"); !strings.Contains(stdout, "\n  hvdrun doctor [flags] ") {
		t.Error("hvdrun --help does not mention the command")
	}
	if stdout, _, status := output(t, "__complete", "doctor", "--h"); status != 0 ||
		!strings.Contains(stdout, "--hosts") {
		t.Errorf("got exit status %d and %q, want the flag", status, stdout)
	}
	// After flags, the word "doctor" is a command to launch, and there is no such command.
	if _, stderr, status := output(t, "-np", "1", "doctor"); status != 127 ||
		!strings.Contains(stderr, "doctor") {
		t.Errorf("got exit status %d and %q, want 127", status, stderr)
	}
}
